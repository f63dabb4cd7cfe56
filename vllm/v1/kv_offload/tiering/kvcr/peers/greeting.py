# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Adds fields to KVCR's control messages, and reads them.

KVCR's messages are MessagePack maps, and KVCR ignores fields that it does not know. The
adapter adds a field that says which releases the sender runs and, with a shared secret,
a last field that authenticates the whole message. Peers without this adapter and the
KVCR service ignore both fields and send neither.
"""

import hmac
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import astuple

_DIGEST = "sha256"
_encode = msgspec.msgpack.encode
_MAC = "vllm_kvcr_mac"
_NO_MAC = bytes(32)
# The last field is its name, MessagePack's header for 32 bytes, and the 32 bytes.
_MAC_FIELD = _encode(_MAC) + b"\xc4\x20"
_SEALED_BYTES = len(_MAC_FIELD) + len(_NO_MAC)
LEAST_SECRET_BYTES = 16


class Versions(msgspec.Struct, frozen=True):
    """The releases that define the wire format; empty if they are not known."""

    kvcr: str = ""
    nixl: str = ""

    def fits(self, other: "Versions") -> bool:
        """Whether two engines can exchange blocks, as far as is known.

        Neither KVCR's messages nor NIXL's metadata are compatible between releases, and
        a write from another release has crashed the receiver.
        """
        pairs = zip(astuple(self), astuple(other), strict=True)
        return all(not ours or not theirs or ours == theirs for ours, theirs in pairs)

    def __str__(self) -> str:
        return f"kvcr {self.kvcr or '?'} with nixl {self.nixl or '?'}"


class Message(msgspec.Struct):
    """The fields of a control message that the adapter uses."""

    type: str = ""
    op_handle: int | None = None
    sender_control_endpoint: str | None = None
    source_control_endpoint: str | None = None
    vllm_kvcr: Versions | None = None


_MESSAGE = msgspec.msgpack.Decoder(Message)
# Values are copied as they are.
_FIELDS = msgspec.msgpack.Decoder(dict[str, msgspec.Raw])


def read(message: bytes) -> Message | None:
    """The fields of a message; ``None`` if KVCR should not see it.

    For example, decoding a message that is nested too deeply would end KVCR's thread.
    """
    try:
        return _MESSAGE.decode(message)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None


@dataclass(frozen=True, slots=True)
class Envelope:
    """Seals outgoing messages and authenticates incoming ones."""

    versions: Versions
    secret: bytes | None = None

    def seal(self, message: bytes) -> bytes:
        """Add the fields described above to ``message``, a map of KVCR."""
        fields: dict[str, Any] = {**_FIELDS.decode(message), "vllm_kvcr": self.versions}
        if self.secret is None:
            return _encode(fields)
        body = _encode(fields | {_MAC: _NO_MAC})[:-_SEALED_BYTES]
        return body + _MAC_FIELD + hmac.digest(self.secret, body, _DIGEST)

    def is_authentic(self, message: bytes) -> bool:
        """Whether the sender knows the secret; true if there is none."""
        if self.secret is None:
            return True
        body = message[:-_SEALED_BYTES]
        expected = _MAC_FIELD + hmac.digest(self.secret, body, _DIGEST)
        return hmac.compare_digest(message[len(body) :], expected)


def read_secret(file: Path) -> bytes:
    """Read the shared secret; raise ``ValueError`` if it is too short, or not there."""
    try:
        secret = file.read_bytes().strip()
    except OSError as error:
        raise ValueError(f"cannot be read: {error.strerror or error}") from error
    if len(secret) < LEAST_SECRET_BYTES:
        raise ValueError(
            f"holds {len(secret)} bytes, but at least {LEAST_SECRET_BYTES} are needed; "
            "make a secret with: openssl rand -hex 32"
        )
    return secret
