# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Control endpoints as others write them, and which of them may be pulled from.

One peer can be written in many ways. Each way that is accepted has one canonical form,
so that spellings of one endpoint count once. Nothing here asks a name server.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network

_ENDPOINT = re.compile(r"tcp://(\[[^\]]{0,64}\]|[^\[\]:]{1,254}):([0-9]{1,5})", re.A)
_LABEL = re.compile(r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?", re.A)
# What inet_aton() takes for a part of an address, though nobody writes it so.
_NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*", re.A)
_MAX_NAME = 253


class EndpointError(ValueError):
    """An endpoint that cannot be dialled; ``reason`` is a label, the text explains."""

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(text)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Endpoint:
    host: str
    """An IPv4 address, or a name in lower case without a dot at its end."""
    port: int
    address: IPv4Address | None
    """The host, unless it is a name."""

    def __str__(self) -> str:
        return f"tcp://{self.host}:{self.port}"


def parse_endpoint(text: str) -> Endpoint:
    """Read ``tcp://host:port``.

    Raises:
        EndpointError: it is none, or nobody can listen there.
    """
    match = _ENDPOINT.fullmatch(text)
    if match is None or not 0 < int(match[2]) < 1 << 16:
        raise EndpointError("bad_endpoint", f"{text[:80]!r} is no tcp://host:port")
    written, port = match[1], int(match[2])
    if written.startswith("["):
        raise EndpointError(
            "ipv6", f"{text[:80]!r} is an IPv6 endpoint, and KVCR listens on IPv4 only"
        )
    host = _host(written)
    if host is None:
        raise EndpointError(
            "bad_endpoint", f"{written[:80]!r} is neither a host name nor an address"
        )
    return Endpoint(str(host), port, host if isinstance(host, IPv4Address) else None)


def _host(written: str) -> str | IPv4Address | None:
    """The canonical host; ``None`` for what no peer can be found by."""
    name = written.lower().removesuffix(".")
    labels = name.split(".")
    if _NUMBER.fullmatch(labels[-1]):
        try:
            address = IPv4Address(name)
        except ValueError:
            return None
        usable = not (address.is_unspecified or address.is_multicast)
        return address if usable and int(address) != 0xFFFFFFFF else None
    if len(name) > _MAX_NAME or not all(map(_LABEL.fullmatch, labels)):
        return None
    return name


def peer_pattern(value: str) -> str:
    """The canonical form of an entry of ``allowed_peers``.

    Raises:
        ValueError: it is no host name, IPv4 address or IPv4 network.
    """
    text = value.strip()
    if "/" in text:
        try:
            return str(IPv4Network(text))
        except ValueError as error:
            raise ValueError(f"no IPv4 network such as 10.0.0.0/8: {error}") from error
    host = _host(text)
    if host is None:
        raise ValueError(
            "give a host name, an IPv4 address or an IPv4 network, without scheme or "
            "port; names are compared as they are written in hints, not resolved"
        )
    return str(host)


class AllowedPeers:
    """The hosts that may be pulled from.

    Args:
        patterns: As ``peer_pattern`` returns them; ``None`` allows every host.
    """

    def __init__(self, patterns: Iterable[str] | None) -> None:
        self._any = patterns is None
        self._networks: list[IPv4Network] = []
        self._names: set[str] = set()
        for pattern in patterns or ():
            try:
                self._networks.append(IPv4Network(pattern))
            except ValueError:
                self._names.add(pattern)

    def admit(self, endpoint: Endpoint) -> bool:
        if self._any:
            return True
        if endpoint.address is None:
            return endpoint.host in self._names
        return any(endpoint.address in network for network in self._networks)
