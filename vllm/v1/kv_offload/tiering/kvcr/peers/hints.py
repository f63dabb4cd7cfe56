# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""From a request's routing metadata to KVCR's hints.

Hints come from outside: from routers, and from anyone who may send a request. Failure
model: a hint that cannot be used is counted, and the request is served as if it had
none; what raises is that KVCR is gone. Runs on the thread that drives the tier.
"""

import socket
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from vllm.v1.kv_offload.base import ReqContext
from vllm.v1.kv_offload.tiering.kvcr.compat import shims
from vllm.v1.kv_offload.tiering.kvcr.compat.vocabulary import Fault, fault_of
from vllm.v1.kv_offload.tiering.kvcr.peers.endpoints import (
    AllowedPeers,
    EndpointError,
    parse_endpoint,
)
from vllm.v1.kv_offload.tiering.kvcr.peers.liveness import Liveness
from vllm.v1.kv_offload.tiering.kvcr.reports.losses import Losses, Lost

MAX_HASHES = 1 << 17
"""KVCR reads hashes one by one on the engine's thread: this many take about 15 ms."""

MAX_HINTED_PEERS = 64
"""Peers that the requests under way may be hinted at; half of the connections."""

_FETCH = "kv.fetch"


class HintSink(Protocol):
    """The part of KVCR that takes hints."""

    def submit_hint(self, hints: Mapping[str, object], request_id: str) -> None: ...

    def discard_hint(self, request_id: str) -> None: ...


@dataclass(slots=True)
class _RequestHint:
    endpoint: str | None
    pulled: set[bytes] = field(default_factory=set)
    """Blocks that were found at the peer: ``max_pull_blocks`` at most."""


class _Unusable(Exception):
    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


class Hints:
    """The hints of the requests that are under way.

    Args:
        own_endpoints: This engine's own control endpoints; ``None`` without peers.
        max_pull_blocks: Most blocks that one request may pull from a peer.
        allowed: The peers that may be pulled from.
        is_incompatible: Whether a peer said that it runs other releases.
    """

    def __init__(
        self,
        sink: HintSink,
        peers: Liveness,
        losses: Losses,
        *,
        own_endpoints: Collection[str] | None,
        max_pull_blocks: int,
        allowed: AllowedPeers,
        is_incompatible: Callable[[str], bool],
    ) -> None:
        self._sink = sink
        self._peers = peers
        self._losses = losses
        self._own_endpoints = own_endpoints
        self._max_pull_blocks = max_pull_blocks
        self._allowed = allowed
        self._is_incompatible = is_incompatible
        self._hinted_at: Counter[str] = Counter()
        self.requests: dict[str, _RequestHint] = {}
        """By request id; read on the hot path, written only here."""

    def accept(self, req_context: ReqContext) -> None:
        """Take a request's hint, replacing an earlier one of the same request."""
        request_id = req_context.req_id
        if request_id in self.requests:
            self.finish(request_id)
        hints = shims.request_hints(req_context)
        if hints is None:
            return
        try:
            plain = _plain(hints)
            endpoint = self._usable_endpoint(plain)
        except _Unusable as unusable:
            self._losses.ignore_hint(unusable.reason, unusable)
            return
        try:
            self._sink.submit_hint(request_id=request_id, hints=plain)
        except Exception as error:
            if fault_of(error) is Fault.HINT:
                self._losses.ignore_hint(_why_rejected(plain), error)
                return
            raise
        self.requests[request_id] = _RequestHint(endpoint)
        if endpoint is not None:
            self._hinted_at[endpoint] += 1

    def finish(self, request_id: str) -> None:
        """Discard a request's hint."""
        hint = self.requests.pop(request_id, None)
        if hint is None:
            return
        if hint.endpoint is not None:
            self._hinted_at[hint.endpoint] -= 1
            if not self._hinted_at[hint.endpoint]:
                del self._hinted_at[hint.endpoint]
        self._sink.discard_hint(request_id)

    def endpoint(self, request_id: str) -> str | None:
        """The peer that a request was hinted at."""
        hint = self.requests.get(request_id)
        return hint.endpoint if hint is not None else None

    def why_not(self, request_id: str) -> Lost | None:
        """Why a request shall not pull from that peer now, if there is a reason."""
        endpoint = self.endpoint(request_id)
        if endpoint is None:
            return None
        if self._is_incompatible(endpoint):
            return Lost.INCOMPATIBLE_PEER
        return Lost.PEER_DOWN if self._peers.is_down(endpoint) else None

    def claim_pull(self, request_id: str, key: bytes) -> bool:
        """Count a block among those a request pulls, unless it may pull no more."""
        hint = self.requests.get(request_id)
        if hint is None or key in hint.pulled:
            return True
        if len(hint.pulled) >= self._max_pull_blocks:
            return False
        hint.pulled.add(key)
        return True

    def _usable_endpoint(self, hints: dict[str, Any]) -> str | None:
        """The peer named by a hint that nothing speaks against.

        What KVCR understands is KVCR's to say; this only stops what it would accept
        although it can do harm.
        """
        if self._own_endpoints is None:
            raise _Unusable("no_peers", "control_ports is not set")
        payload = _fetch_payload(hints)
        hashes = payload.get("block_hashes")
        if isinstance(hashes, list) and len(hashes) > MAX_HASHES:
            raise _Unusable("too_large", f"{len(hashes)} hashes, {MAX_HASHES} allowed")
        endpoint = payload.get("source_control_endpoint")
        if not isinstance(endpoint, str):
            return None
        try:
            parsed = parse_endpoint(endpoint)
        except EndpointError as error:
            raise _Unusable(error.reason, str(error)) from error
        # One spelling, so that KVCR keeps one connection and one record of it.
        payload["source_control_endpoint"] = endpoint = str(parsed)
        if endpoint in self._own_endpoints:
            raise _Unusable("own_endpoint", "it names this engine itself")
        if not self._allowed.admit(parsed):
            raise _Unusable(
                "not_allowed", f"{endpoint[:80]} is not among allowed_peers"
            )
        if self._is_incompatible(endpoint):
            raise _Unusable(
                "incompatible_peer",
                f"{endpoint[:80]} runs other releases of kvcr or nixl",
            )
        if self._peers.is_down(endpoint):
            raise _Unusable("peer_down", f"{endpoint[:80]} did not answer lately")
        if len(self._hinted_at) >= MAX_HINTED_PEERS and endpoint not in self._hinted_at:
            raise _Unusable(
                "too_many_peers",
                f"requests under way are hinted at {MAX_HINTED_PEERS} peers already",
            )
        return endpoint


def own_endpoints(bind_host: str, advertise_host: str, port: int) -> frozenset[str]:
    """Every way in which a hint may name this engine's control endpoint."""
    hosts = {bind_host, advertise_host, socket.gethostname(), "localhost", "127.0.0.1"}
    endpoints = set()
    for host in hosts:
        # A wildcard is none, and cannot be hinted at either.
        with suppress(EndpointError):
            endpoints.add(str(parse_endpoint(f"tcp://{host}:{port}")))
    return frozenset(endpoints)


def _fits(hints: object) -> bool:
    """Whether a hint is small enough to be read at all on the engine's thread."""
    room = 2 * MAX_HASHES
    unread: list[Any] = [hints]
    while unread and room >= 0:
        value = unread.pop()
        if isinstance(value, msgspec.Struct):
            value = {name: getattr(value, name) for name in value.__struct_fields__}
        if isinstance(value, (str, bytes)):
            room -= len(value)
        elif isinstance(value, (dict, list, tuple)):
            room -= len(value)
            if room >= 0:
                inside = value.values() if isinstance(value, dict) else value
                unread.extend(each for each in inside if type(each) is not int)
                if isinstance(value, dict):
                    unread.extend(value)
    return room >= 0


def _plain(hints: object) -> dict[str, Any]:
    if not _fits(hints):
        raise _Unusable(
            "too_large", f"more than {2 * MAX_HASHES} values and characters"
        )
    try:
        plain = msgspec.to_builtins(hints)
    except (TypeError, ValueError, RecursionError) as error:
        raise _Unusable("malformed", f"not plain data: {error}") from error
    if not isinstance(plain, dict):
        raise _Unusable("malformed", f"a {type(plain).__name__}, not a mapping")
    return plain


def _fetch_payload(hints: dict[str, Any]) -> dict[str, Any]:
    """The payload of the first action that KVCR would act on, or nothing."""
    actions = hints.get("actions")
    for action in actions if isinstance(actions, list) else ():
        if isinstance(action, dict) and action.get("action_type") == _FETCH:
            payload = action.get("payload")
            return payload if isinstance(payload, dict) else {}
    return {}


def _why_rejected(hints: dict[str, Any]) -> str:
    payload = _fetch_payload(hints)
    if not payload:
        return "no_fetch"
    if "no_retain" in payload or payload.get("mode", "copy") != "copy":
        return "unsupported"
    if not payload.get("source_control_endpoint"):
        return "no_source"
    return "malformed"
