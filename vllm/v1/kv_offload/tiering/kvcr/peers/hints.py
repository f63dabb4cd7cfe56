# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Turns requests' routing metadata into hints for KVCR.

Hints come from outside: from routers, and from everyone who may send requests. Failure
model: a hint that cannot be used is counted, and its request is served without it; an
exception means that KVCR is gone. Runs on the thread that drives the tier.
"""

import socket
from collections import Counter
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import msgspec

from vllm.v1.kv_offload.base import ReqContext
from vllm.v1.kv_offload.tiering.kvcr.backend.protocol import KvcrApi
from vllm.v1.kv_offload.tiering.kvcr.compat import shims
from vllm.v1.kv_offload.tiering.kvcr.compat.vocabulary import UNREADABLE_HINT
from vllm.v1.kv_offload.tiering.kvcr.peers.endpoints import (
    AllowedPeers,
    Unusable,
    parse_endpoint,
)
from vllm.v1.kv_offload.tiering.kvcr.peers.liveness import Liveness
from vllm.v1.kv_offload.tiering.kvcr.reports.losses import Losses, Lost

MAX_HASHES = 1 << 17
"""KVCR reads hashes one by one on the engine's thread; this many take about 15 ms."""

MAX_HINTED_PEERS = 64
"""Peers that the requests in progress may be hinted at in total. Must be less than the
connections that an engine keeps, of which it is half."""


@dataclass(slots=True)
class _RequestHint:
    endpoint: str | None
    pulled: set[bytes] = field(default_factory=set)  # at most ``max_pull_blocks``


class Hints:
    """The hints of the requests in progress.

    Args:
        own_endpoints: This engine's control endpoints; ``None`` if it serves no peers.
        max_pull_blocks: The most blocks that one request may pull from a peer.
    """

    def __init__(
        self,
        kvcr: KvcrApi,
        peers: Liveness,
        losses: Losses,
        *,
        own_endpoints: Collection[str] | None,
        max_pull_blocks: int,
        allowed: AllowedPeers,
        is_incompatible: Callable[[str], bool],
    ) -> None:
        self._kvcr = kvcr
        self._peers = peers
        self._losses = losses
        self._own_endpoints = own_endpoints
        self._max_pull_blocks = max_pull_blocks
        self._allowed = allowed
        self._is_incompatible = is_incompatible
        self._hinted_at: Counter[str] = Counter()
        self.requests: dict[str, _RequestHint] = {}
        """By request id. Others read it on the hot path; only this class writes it."""

    def accept(self, req_context: ReqContext) -> None:
        """Take a request's hint, which replaces an earlier one of the same request."""
        request_id = req_context.req_id
        self.finish(request_id)
        hints = shims.request_hints(req_context)
        if hints is None:
            return
        try:
            plain = _plain(hints)
            endpoint = self._usable_endpoint(plain)
        except Unusable as unusable:
            self._losses.ignore_hint(unusable.reason, unusable)
            return
        try:
            self._kvcr.submit_hint(request_id=request_id, hints=plain)
        except UNREADABLE_HINT as error:
            self._losses.ignore_hint(_why_rejected(plain), error)
            return
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
        self._kvcr.discard_hint(request_id)

    def endpoint(self, request_id: str) -> str | None:
        """The peer that a request is hinted at."""
        hint = self.requests.get(request_id)
        return hint.endpoint if hint is not None else None

    def why_not(self, request_id: str) -> Lost | None:
        """Why a request should not pull from that peer now, if it should not."""
        endpoint = self.endpoint(request_id)
        if endpoint is None:
            return None
        if self._is_incompatible(endpoint):
            return Lost.INCOMPATIBLE_PEER
        return Lost.PEER_DOWN if self._peers.is_down(endpoint) else None

    def claim_pull(self, request_id: str, key: bytes) -> bool:
        """Count a block that a request pulls; false if it may pull no more blocks."""
        hint = self.requests.get(request_id)
        if hint is None or key in hint.pulled:
            return True
        if len(hint.pulled) >= self._max_pull_blocks:
            return False
        hint.pulled.add(key)
        return True

    def _usable_endpoint(self, hints: dict[str, Any]) -> str | None:
        """Return the peer that a hint names, or raise ``Unusable``.

        KVCR itself refuses hints that it does not understand. This only stops hints
        that KVCR would accept although they can do harm.
        """
        if self._own_endpoints is None:
            raise Unusable("no_peers", "control_ports is not set")
        payload = _fetch_payload(hints)
        hashes = payload.get("block_hashes")
        if isinstance(hashes, list) and len(hashes) > MAX_HASHES:
            raise Unusable("too_large", f"{len(hashes)} hashes, at most {MAX_HASHES}")
        endpoint = payload.get("source_control_endpoint")
        if not isinstance(endpoint, str):
            return None
        parsed = parse_endpoint(endpoint)
        # One spelling per peer, so that KVCR keeps one connection and one record of it.
        payload["source_control_endpoint"] = endpoint = str(parsed)
        if endpoint in self._own_endpoints:
            raise Unusable("own_endpoint", "the hint names this engine itself")
        peer = endpoint[:80]
        if not self._allowed.admit(parsed):
            raise Unusable("not_allowed", f"{peer} is not among allowed_peers")
        if self._is_incompatible(endpoint):
            detail = f"{peer} runs different releases of kvcr or nixl"
            raise Unusable("incompatible_peer", detail)
        if self._peers.is_down(endpoint):
            raise Unusable("peer_down", f"{peer} has not answered recently")
        if len(self._hinted_at) >= MAX_HINTED_PEERS and endpoint not in self._hinted_at:
            detail = f"the requests in progress already name {MAX_HINTED_PEERS} peers"
            raise Unusable("too_many_peers", detail)
        return endpoint


def own_endpoints(
    bind_host: str, advertise_host: str, port: int | None
) -> frozenset[str] | None:
    """Every way in which a hint may name this engine's control endpoint, if any."""
    if port is None:
        return None
    hosts = {bind_host, advertise_host, socket.gethostname(), "localhost", "127.0.0.1"}
    endpoints = set()
    for host in hosts:
        # A wildcard address is not an endpoint, and no hint can name it either.
        with suppress(Unusable):
            endpoints.add(str(parse_endpoint(f"tcp://{host}:{port}")))
    return frozenset(endpoints)


def _check_size(hints: object) -> None:
    """Refuse a hint that is too large to be read on the engine's thread."""
    room = 2 * MAX_HASHES
    unread: list[Any] = [hints]
    while unread:
        value = unread.pop()
        if isinstance(value, msgspec.Struct):
            value = msgspec.structs.asdict(value)
        if isinstance(value, (str, bytes, dict, list, tuple)):
            room -= len(value)
        if room < 0:
            detail = f"more than {2 * MAX_HASHES} values or characters"
            raise Unusable("too_large", detail)
        if isinstance(value, dict):
            unread += (*value, *value.values())
        elif isinstance(value, (list, tuple)):
            unread += (each for each in value if type(each) is not int)


def _plain(hints: object) -> dict[str, Any]:
    _check_size(hints)
    try:
        plain = msgspec.to_builtins(hints)
    except (TypeError, ValueError, RecursionError) as error:
        raise Unusable("malformed", f"it is not plain data: {error}") from error
    if not isinstance(plain, dict):
        raise Unusable("malformed", f"it is a {type(plain).__name__}, not a mapping")
    return plain


def _fetch_payload(hints: dict[str, Any]) -> dict[str, Any]:
    """The payload of the first action that KVCR would act on, if there is one."""
    actions = hints.get("actions")
    for action in actions if isinstance(actions, list) else ():
        if isinstance(action, dict) and action.get("action_type") == "kv.fetch":
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
