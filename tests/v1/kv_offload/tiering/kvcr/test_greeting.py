# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What is added to KVCR's control messages, and believed of others'."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm.v1.kv_offload.tiering.kvcr.peers.greeting import (
    LEAST_SECRET_BYTES,
    Envelope,
    Versions,
    read,
    read_secret,
)

OURS = Versions("0.1.1", "1.5.0")
SECRET = b"s" * LEAST_SECRET_BYTES
PLAIN = Envelope(OURS)
SIGNED = Envelope(OURS, SECRET)

encode = msgspec.msgpack.encode
decode = msgspec.msgpack.decode

MESSAGES = st.dictionaries(
    st.text(max_size=8), st.integers(-5, 5) | st.binary(max_size=8), max_size=40
)


@given(message=MESSAGES)
@pytest.mark.parametrize("envelope", [PLAIN, SIGNED], ids=["plain", "signed"])
def test_a_sealed_message_is_the_message_and_more(
    envelope: Envelope, message: dict[str, Any]
) -> None:
    sealed = envelope.seal(encode(message))
    decoded = decode(sealed)
    assert {key: decoded[key] for key in message} == message
    assert decoded["vllm_kvcr"] == {"kvcr": "0.1.1", "nixl": "1.5.0"}
    assert envelope.is_authentic(sealed)


@given(message=MESSAGES, data=st.data())
def test_no_changed_message_is_authentic(message: dict[str, Any], data: Any) -> None:
    sealed = bytearray(SIGNED.seal(encode(message)))
    index = data.draw(st.integers(0, len(sealed) - 1))
    sealed[index] ^= data.draw(st.integers(1, 255))
    assert not SIGNED.is_authentic(bytes(sealed))


@given(message=MESSAGES)
def test_who_does_not_know_the_secret_is_not_authentic(message: dict[str, Any]) -> None:
    raw = encode(message)
    others = [PLAIN, Envelope(OURS, b"t" * LEAST_SECRET_BYTES)]
    assert not SIGNED.is_authentic(raw)
    assert not any(SIGNED.is_authentic(other.seal(raw)) for other in others)
    # One without a secret takes a signed message for what it says.
    assert PLAIN.is_authentic(SIGNED.seal(raw))


@given(junk=st.binary(max_size=200))
def test_junk_is_none_or_a_message(junk: bytes) -> None:
    read(junk)
    SIGNED.is_authentic(junk)


def test_what_would_be_too_deep_for_kvcr_is_found_first() -> None:
    start = b"\x82" + encode("type") + encode("x") + encode("a")
    refused = 0
    for depth in (*range(1, 1200), 200_000):
        nested = start + b"\x91" * depth + b"\xc0"
        if read(nested) is None:
            refused += 1
        else:
            decode(nested)
    assert refused > 1


@pytest.mark.parametrize(
    ("theirs", "fits"),
    [
        (Versions("0.1.1", "1.5.0"), True),
        (Versions("0.1.0", "1.3.2"), False),
        (Versions("0.1.1", "1.3.2"), False),
        (Versions("0.1.0", "1.5.0"), False),
        # What cannot be told speaks against nothing.
        (Versions("0.1.1", ""), True),
        (Versions(), True),
    ],
)
def test_only_the_same_releases_fit(theirs: Versions, fits: bool) -> None:
    assert OURS.fits(theirs) is fits
    assert theirs.fits(OURS) is fits


def test_a_secret_is_read_without_the_line_end(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_bytes(b"  " + SECRET + b"\n")
    assert read_secret(file) == SECRET


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (None, "cannot be read: No such file"),
        (b"", "holds 0 bytes"),
        (b" \n", "holds 0 bytes"),
        (b"short\n", "holds 5 bytes"),
    ],
)
def test_a_bad_secret_file(tmp_path: Path, content: bytes | None, told: str) -> None:
    file = tmp_path / "secret"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ValueError, match=told):
        read_secret(file)
