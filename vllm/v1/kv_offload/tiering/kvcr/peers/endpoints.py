# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Parses control endpoints, and decides from which of them blocks may be pulled.

An endpoint can be spelled in many ways. All accepted spellings have the same canonical
form, so that they count as one endpoint. Nothing here asks a name server.
"""

import re
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network

_ENDPOINT = re.compile(r"tcp://(\[[^\]]{0,64}\]|[^\[\]:]{1,254}):([0-9]{1,5})", re.A)
_LABEL = re.compile(r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?", re.A)
# Matches everything that inet_aton() accepts as part of an address.
_NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*", re.A)
_MAX_NAME = 253
_ALL = IPv4Address("255.255.255.255")


class Unusable(ValueError):
    """An endpoint, or a hint, of no use; ``reason`` is a metric's label."""

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(text)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Endpoint:
    host: str  # an IPv4 address, or a name in lower case without a trailing dot
    port: int
    address: IPv4Address | None  # the host, if it is an address

    def __str__(self) -> str:
        return f"tcp://{self.host}:{self.port}"


def parse_endpoint(text: str) -> Endpoint:
    """Parse ``tcp://host:port``; raise ``Unusable`` if nobody can listen there."""
    match = _ENDPOINT.fullmatch(text)
    if match is None or not 0 < int(match[2]) < 1 << 16:
        raise Unusable("bad_endpoint", f"{text[:80]!r} is not tcp://host:port")
    written, port = match[1], int(match[2])
    if written.startswith("["):
        detail = f"{text[:80]!r} is an IPv6 endpoint, but KVCR listens on IPv4 only"
        raise Unusable("ipv6", detail)
    host = _host(written)
    if host is None:
        detail = f"{written[:80]!r} is neither a host name nor an address"
        raise Unusable("bad_endpoint", detail)
    return Endpoint(str(host), port, host if isinstance(host, IPv4Address) else None)


def _host(written: str) -> str | IPv4Address | None:
    """The canonical form of a host; ``None`` if no peer can be reached by it."""
    name = written.lower().removesuffix(".")
    labels = name.split(".")
    if _NUMBER.fullmatch(labels[-1]):
        with suppress(ValueError):
            address = IPv4Address(name)
            if not (address.is_unspecified or address.is_multicast or address == _ALL):
                return address
        return None
    fits = len(name) <= _MAX_NAME and all(map(_LABEL.fullmatch, labels))
    return name if fits else None


def peer_pattern(value: str) -> str:
    """The canonical form of an entry of ``allowed_peers``; ``ValueError`` if bad."""
    text = value.strip()
    if "/" in text:
        try:
            return str(IPv4Network(text))
        except ValueError as error:
            detail = f"is not an IPv4 network such as 10.0.0.0/8: {error}"
            raise ValueError(detail) from error
    host = _host(text)
    if host is None:
        raise ValueError(
            "give a host name, an IPv4 address or an IPv4 network, without scheme or "
            "port; names are compared with what hints say, without being resolved"
        )
    return str(host)


class AllowedPeers:
    """The hosts to pull from, as ``peer_pattern`` returned them; ``None`` for all."""

    def __init__(self, patterns: Iterable[str] | None) -> None:
        self._any = patterns is None
        self._patterns = frozenset(patterns or ())
        self._networks = [IPv4Network(each) for each in self._patterns if "/" in each]

    def admit(self, endpoint: Endpoint) -> bool:
        if self._any or endpoint.host in self._patterns:
            return True
        address = endpoint.address
        return address is not None and any(address in each for each in self._networks)
