# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Blocks on their way into KVCR's pool, from a peer or from a file.

A write that KVCR could not stop in time may still come: into the pool then, where KVCR
itself keeps the memory from being used, and never into a slot that vLLM has given to
another block. What has landed stays claimed, so that nothing evicts it, until its
owner has delivered it and gives the claims back.

Failure model as in ``transfers``. Runs on the thread that drives the tier.
"""

import time
from collections import deque
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from kvcr.types import OpEntryResult

from vllm.v1.kv_offload.tiering.kvcr.compat.shims import BlockRefs
from vllm.v1.kv_offload.tiering.kvcr.compat.vocabulary import ENTRIES, Entry
from vllm.v1.kv_offload.tiering.kvcr.peers.liveness import (
    PROBE_BLOCKS,
    Admission,
    Peers,
)
from vllm.v1.kv_offload.tiering.kvcr.reports.metrics import Lost

Blocks = dict[bytes, BlockRefs]
"""Block key -> where it lies, or shall lie, in the primary tier."""

_SILENT_SHARE = 0.9
"""A pull that failed after this share of its time was not answered."""


class LandingOwner(Protocol):
    """Whose blocks land: told of each part of a job that was opened and closed."""

    def part_opened(self, job: Any) -> None: ...

    def part_closed(self, job: Any) -> None: ...

    def landed(
        self, job: Any, blocks: Blocks, claims: list[Any], from_peer: bool
    ) -> None:
        """Deliver ``blocks``, then hand ``claims`` to ``Landings.release``."""

    def not_landed(
        self, job: Any, keys: list[bytes], reason: Lost, from_peer: bool
    ) -> None: ...


@dataclass(slots=True)
class _Part:
    job: Any
    request_id: str
    blocks: Blocks
    endpoint: str | None
    started_at: float = 0.0
    given_up: bool = False


class Landings:
    """The parts of loads that have to land first.

    Args:
        kvcr: KVCR, of which ``fetch`` and ``release`` are used.
        window: Most blocks in the pool, fetched or being fetched, at a time.
        part_size: Most blocks of one fetch.
        pull_timeout_s: When a pull is given up. KVCR's own deadline can be later; what
            still lands until then is let go of.
        hinted: The ids of the requests that have a hint.
        on_backend_error: Told of KVCR's exceptions.
    """

    def __init__(
        self,
        kvcr: Any,
        owner: LandingOwner,
        peers: Peers,
        window: int,
        part_size: int,
        pull_timeout_s: float,
        hinted: Container[str],
        on_backend_error: Callable[[Exception], None],
    ) -> None:
        self._kvcr = kvcr
        self._owner = owner
        self._peers = peers
        self._window = window
        self._part_size = max(1, min(part_size, window))
        self._pull_timeout_s = pull_timeout_s
        self._hinted = hinted
        self._on_backend_error = on_backend_error
        self._queue: deque[_Part] = deque()
        self._behind_probe: dict[str, deque[_Part]] = {}
        self._fetching: dict[int, tuple[_Part, set[bytes]]] = {}
        self._pulling: deque[int] = deque()
        self._in_pool = 0
        self._quarantined = 0

    @property
    def room(self) -> int:
        """Blocks of the window that no unstopped write owns."""
        return self._window - self._quarantined

    def queue(
        self, job: Any, request_id: str, blocks: Blocks, endpoint: str | None
    ) -> None:
        """Have ``blocks`` fetched: from the peer at ``endpoint``, or from files."""
        items = list(blocks.items())
        for first in range(0, len(items), self._part_size):
            part = dict(items[first : first + self._part_size])
            self._owner.part_opened(job)
            self._queue.append(_Part(job, request_id, part, endpoint))

    def pump(self) -> None:
        """Give up pulls that take too long; start what the window has room for."""
        if self._pulling:
            self._give_up_late_pulls()
        while self._queue and self._start_next():
            pass

    def complete(self, handle: int, entries: Mapping[Any, OpEntryResult]) -> bool:
        """Take one piece of a fetch's outcome; false if it is none of ours."""
        found = self._fetching.get(handle)
        if found is None:
            return False
        part, pending = found
        landed: Blocks = {}
        claims = []
        failed = []
        for key, entry in entries.items():
            if key not in pending:
                continue
            pending.discard(key)
            if ENTRIES[entry.status] is Entry.DONE:
                landed[key] = part.blocks[key]
                claims.append(entry.release_handle)
            else:
                failed.append(key)
        if part.endpoint is not None:
            self._judge(part, part.endpoint, bool(landed))
        self._in_pool -= len(failed)
        if part.given_up:
            if claims:
                self.release(claims)
            if not pending:
                del self._fetching[handle]
            return True
        if failed:
            self._owner.not_landed(
                part.job, failed, Lost.LOAD_FAILED, part.endpoint is not None
            )
        if landed:
            self._owner.landed(part.job, landed, claims, part.endpoint is not None)
        if not pending:
            del self._fetching[handle]
            self._owner.part_closed(part.job)
        return True

    def release(self, claims: list[Any]) -> None:
        """Let go of blocks that were delivered, or could not be."""
        self._in_pool -= len(claims)
        try:
            self._kvcr.release(claims)
        except Exception as error:
            self._on_backend_error(error)

    def uncertain(self, blocks: int) -> None:
        """A peer's write into the pool could not be stopped."""
        self._quarantined += blocks

    def quiesced(self, blocks: int) -> None:
        """That write can no longer happen."""
        self._quarantined = max(0, self._quarantined - blocks)

    def clear(self) -> None:
        """Forget everything; KVCR is gone."""
        self._queue.clear()
        self._behind_probe.clear()
        self._fetching.clear()
        self._pulling.clear()

    def _start_next(self) -> bool:
        part = self._queue[0]
        room = self.room
        if part.endpoint is not None and room <= 0:
            self._queue.popleft()
            self._refuse(part, Lost.LANDING_FULL)
            return True
        if self._in_pool and self._in_pool + len(part.blocks) > room:
            return False
        self._queue.popleft()
        if part.endpoint is None or self._admitted(part, part.endpoint):
            self._start(part)
        return True

    def _admitted(self, part: _Part, endpoint: str) -> bool:
        if part.request_id not in self._hinted:
            self._refuse(part, Lost.ABORTED)
            return False
        admission = self._peers.admit(endpoint)
        if admission is Admission.REFUSED:
            self._refuse(part, Lost.PEER_DOWN)
            return False
        if admission is Admission.WAIT:
            self._behind_probe.setdefault(endpoint, deque()).append(part)
            return False
        if admission is Admission.PROBE and len(part.blocks) > PROBE_BLOCKS:
            items = list(part.blocks.items())
            part.blocks = dict(items[:PROBE_BLOCKS])
            later = dict(items[PROBE_BLOCKS:])
            rest = _Part(part.job, part.request_id, later, endpoint)
            self._owner.part_opened(part.job)
            self._behind_probe.setdefault(endpoint, deque()).append(rest)
        return True

    def _start(self, part: _Part) -> None:
        self._in_pool += len(part.blocks)
        part.started_at = time.monotonic()
        try:
            handle = self._kvcr.fetch(list(part.blocks), request_id=part.request_id)
        except Exception as error:
            self._on_backend_error(error)
            return
        self._fetching[handle] = (part, set(part.blocks))
        if part.endpoint is not None:
            self._pulling.append(handle)

    def _give_up_late_pulls(self) -> None:
        """Oldest first; all have the same time."""
        late = time.monotonic() - self._pull_timeout_s
        while self._pulling:
            found = self._fetching.get(self._pulling[0])
            if found is not None and found[0].started_at > late:
                return
            self._pulling.popleft()
            if found is None:
                continue
            part, pending = found
            part.given_up = True
            self._judge(part, str(part.endpoint), False)
            self._owner.not_landed(part.job, list(pending), Lost.LOAD_FAILED, True)
            self._owner.part_closed(part.job)

    def _judge(self, part: _Part, endpoint: str, landed: bool) -> None:
        waited = time.monotonic() - part.started_at
        if landed or waited < _SILENT_SHARE * self._pull_timeout_s:
            self._peers.answered(endpoint)
        else:
            self._peers.silent(endpoint, part.started_at)
        waiting = self._behind_probe.pop(endpoint, None)
        if waiting:
            # In front, because they are older than what else is queued. The peer
            # admits or refuses them one by one as they come up.
            self._queue.extendleft(reversed(waiting))

    def _refuse(self, part: _Part, reason: Lost) -> None:
        self._owner.not_landed(part.job, list(part.blocks), reason, True)
        self._owner.part_closed(part.job)
