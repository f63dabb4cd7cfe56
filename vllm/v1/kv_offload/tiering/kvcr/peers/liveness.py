# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Which peers answer, so that one that does not costs one wait and not one a request.

A peer starts unproven: one small pull goes first and the rest waits for its result.
A peer that stays silent for a whole operation timeout is left alone for a while that
doubles each time; the first pull afterwards is again a small one.
"""

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto

FIRST_COOLDOWN_S = 10.0
LONGEST_COOLDOWN_S = 600.0
PROBE_BLOCKS = 1
"""Blocks of the first pull. KVCR keeps the memory of a pull that a dead peer never
finished, so the less goes into the unknown, the less is lost."""

_MAX_PEERS = 1024


class Admission(Enum):
    ALL = auto()
    PROBE = auto()
    """At most ``PROBE_BLOCKS`` now; the rest waits for the answer."""
    WAIT = auto()
    """A probe is on its way."""
    REFUSED = auto()
    """Cooling down."""


@dataclass(slots=True)
class _Peer:
    proven: bool = False
    probing: bool = False
    failures: int = 0
    failed_at: float = 0.0
    cooling_until: float = 0.0


class Peers:
    """The peers that this engine has pulled from. Bounded; no thread of its own."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._peers: OrderedDict[str, _Peer] = OrderedDict()

    def is_down(self, endpoint: str) -> bool:
        """Whether a request should miss at once instead of waiting for this peer."""
        peer = self._peers.get(endpoint)
        if peer is None or not peer.failures:
            return False
        return peer.probing or self._clock() < peer.cooling_until

    def admit(self, endpoint: str) -> Admission:
        """Ask to pull now. ``PROBE`` reserves the probe."""
        peer = self._peer(endpoint)
        if peer.proven:
            return Admission.ALL
        if peer.failures and self._clock() < peer.cooling_until:
            return Admission.REFUSED
        if peer.probing:
            return Admission.WAIT
        peer.probing = True
        return Admission.PROBE

    def answered(self, endpoint: str) -> None:
        """A pull came back in time, with or without blocks."""
        peer = self._peer(endpoint)
        peer.proven = True
        peer.probing = False
        peer.failures = 0

    def silent(self, endpoint: str, started_at: float) -> None:
        """A pull that began at ``started_at`` was not answered in time."""
        peer = self._peer(endpoint)
        peer.proven = False
        peer.probing = False
        # Pulls that were already on their way say nothing new.
        if peer.failures and started_at < peer.failed_at:
            return
        cooldown = FIRST_COOLDOWN_S * 2.0 ** min(peer.failures, 16)
        peer.failures += 1
        peer.failed_at = self._clock()
        peer.cooling_until = peer.failed_at + min(cooldown, LONGEST_COOLDOWN_S)

    def _peer(self, endpoint: str) -> _Peer:
        peer = self._peers.get(endpoint)
        if peer is None:
            while len(self._peers) >= _MAX_PEERS:
                self._peers.popitem(last=False)
            peer = self._peers[endpoint] = _Peer()
        else:
            self._peers.move_to_end(endpoint)
        return peer
