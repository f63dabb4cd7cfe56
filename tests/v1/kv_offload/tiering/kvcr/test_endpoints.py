# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Endpoints as people, routers and attackers write them."""

import socket
from contextlib import suppress
from ipaddress import IPv4Address

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from vllm.v1.kv_offload.tiering.kvcr.peers.endpoints import (
    AllowedPeers,
    Unusable,
    parse_endpoint,
    peer_pattern,
)

NOBODY = [
    *("", ".", "a..b", "*", "eth0;10.0.0.6", "a@b", "-a", "bücher", "a" * 64),
    ".".join(["a" * 60] * 5),
    "x" * 1_000_000,
    # All of these are 10.0.0.6, or nobody, to a resolver.
    *("167772166", "10.6", "10.0.0.06", "012.0.0.6", "0xa000006", "0xa.0.0.0x6"),
    *("0.0.0.0", "255.255.255.255", "224.0.0.1"),
]


@pytest.mark.parametrize(
    ("written", "canonical"),
    [
        ("tcp://10.0.0.6:24990", "tcp://10.0.0.6:24990"),
        ("tcp://10.0.0.6:0080", "tcp://10.0.0.6:80"),
        ("tcp://10.0.0.6.:80", "tcp://10.0.0.6:80"),
        ("tcp://Worker-1.Example.COM.:80", "tcp://worker-1.example.com:80"),
        ("tcp://worker_1:80", "tcp://worker_1:80"),
        ("tcp://7seas:80", "tcp://7seas:80"),
    ],
)
def test_spellings_of_one_endpoint_are_one(written: str, canonical: str) -> None:
    assert str(parse_endpoint(written)) == canonical


@pytest.mark.parametrize(
    "text",
    [
        "",
        "10.0.0.6:80",
        "TCP://10.0.0.6:80",
        "ipc:///tmp/x",
        "tcp://10.0.0.6",
        *(f"tcp://10.0.0.6:{port}" for port in ("0", "65536", "000080", "80\n")),
        "tcp://10.0.0.6:８０",  # noqa: RUF001
        *(f"tcp://{host}:80" for host in NOBODY),
    ],
)
def test_what_nobody_listens_on_is_none(text: str) -> None:
    with pytest.raises(Unusable) as caught:
        parse_endpoint(text)
    assert caught.value.reason == "bad_endpoint"
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("host", ["[::1]", "[fe80::1%eth0]", "[::ffff:10.0.0.6]"])
def test_ipv6_is_told_apart(host: str) -> None:
    with pytest.raises(Unusable) as caught:
        parse_endpoint(f"tcp://{host}:80")
    assert caught.value.reason == "ipv6"


HOSTS = (
    st.ip_addresses(v=4).map(str)
    | st.integers(0, 1 << 33).map(str)
    | st.from_regex(r"\A[0-9a-zA-Zx._-]{1,20}\Z")
    | st.text(max_size=20)
)


@given(host=HOSTS, port=st.integers(0, 99_999).map(str) | st.text(max_size=6))
@example("10.0.0.6", "00080")
def test_what_is_accepted_is_canonical_and_needs_no_interpretation(
    host: str, port: str
) -> None:
    try:
        parsed = parse_endpoint(f"tcp://{host}:{port}")
    except Unusable:
        return
    assert parse_endpoint(str(parsed)) == parsed
    assert 0 < parsed.port < 1 << 16
    assert len(str(parsed)) < 270
    if parsed.address is not None:
        assert IPv4Address(parsed.host) == parsed.address
        return
    # A name is nothing that a resolver reads as an address, so that one that is
    # compared literally cannot be an address in disguise.
    with pytest.raises(OSError, match="illegal IP address"):
        socket.inet_aton(parsed.host)


@given(text=st.text(max_size=40))
def test_no_text_fails_otherwise(text: str) -> None:
    with suppress(Unusable):
        parse_endpoint(text)


@pytest.mark.parametrize(
    ("patterns", "admitted", "kept_out"),
    [
        (None, ["10.0.0.6", "anybody.example"], []),
        (["10.0.0.6"], ["10.0.0.6"], ["10.0.0.7", "worker"]),
        (["10.0.0.0/8"], ["10.255.0.1"], ["11.0.0.1", "worker"]),
        (["Worker.Example."], ["worker.example", "WORKER.EXAMPLE."], ["worker"]),
        # Not resolved, though it could be.
        (["127.0.0.0/8"], ["127.0.0.2"], ["localhost"]),
        (["worker", "10.0.0.0/24"], ["worker", "10.0.0.9"], ["10.0.1.9"]),
    ],
)
def test_allowed_peers(
    patterns: list[str] | None, admitted: list[str], kept_out: list[str]
) -> None:
    given_patterns = None if patterns is None else map(peer_pattern, patterns)
    allowed = AllowedPeers(given_patterns)
    for host in admitted:
        assert allowed.admit(parse_endpoint(f"tcp://{host}:80")), host
    for host in kept_out:
        assert not allowed.admit(parse_endpoint(f"tcp://{host}:80")), host
