# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Staging: fetches blocks from peers and files into KVCR's pool.

A write that KVCR could not stop in time may still arrive later. It then lands in the
pool, where KVCR keeps the memory out of use, and never in a slot that vLLM has given to
another block. A block that has landed is claimed, so that it cannot be evicted, until
it was copied to the primary tier and ``release`` returned the claim.

Each source has its own lane, so that a source that hangs blocks only itself.

Failure model: the fate of the blocks is returned, as ``Landed`` and ``Missed``. KVCR's
exceptions pass through. Runs on the thread that drives the tier.
"""

import time
from collections import deque
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from kvcr.types import OpEntryResult, ReleaseHandle

from vllm.v1.kv_offload.tiering.kvcr.backend.protocol import KvcrApi
from vllm.v1.kv_offload.tiering.kvcr.compat.vocabulary import ENTRIES, Entry
from vllm.v1.kv_offload.tiering.kvcr.peers.liveness import (
    FILES,
    SILENT_SHARE,
    Liveness,
    Standing,
)
from vllm.v1.kv_offload.tiering.kvcr.reports.disk import DiskWatch
from vllm.v1.kv_offload.tiering.kvcr.reports.health import Health, Reason
from vllm.v1.kv_offload.tiering.kvcr.reports.losses import Lost
from vllm.v1.kv_offload.tiering.kvcr.reports.quarantine import Quarantine
from vllm.v1.kv_offload.tiering.kvcr.transfers.jobs import Blocks, Job, Limits

_MOST_OF_FREE = 0.75
"""Share of the free slots for peers that one peer may take. Must be less than 1, so
that each peer that hangs leaves room for others."""
_CHECKS_PER_TIMEOUT = 16
"""How often per timeout to look for fetches that take too long."""


class Landed(NamedTuple):
    """Blocks of a load that are in the pool and claimed."""

    job: Job
    source: str
    blocks: Blocks
    claims: list[ReleaseHandle]


class Missed(NamedTuple):
    """Blocks of a load that will not arrive."""

    job: Job
    source: str
    keys: list[bytes]
    reason: Lost


Outcome = Landed | Missed


@dataclass(slots=True)
class _Pull:
    """Blocks that a job wants from one source."""

    job: Job
    items: list[tuple[bytes, list[object]]]
    cursor: int = 0


@dataclass(slots=True)
class _Fetch:
    lane: "_Lane"
    pull: _Pull | None
    """``None`` for an introduction, which belongs to no job."""
    blocks: Blocks
    pending: set[bytes]
    started_at: float
    timeout_s: float
    """How long its source may leave it without a block."""
    given_up: bool = False


@dataclass(slots=True)
class _Lane:
    source: str
    timeout_s: float
    """How long the source may leave a pull without a block."""
    moved_at: float
    """When a block last arrived or, for files, when one was last written."""
    waiting: deque[_Pull] = field(default_factory=deque)
    in_pool: int = 0
    """Slots in use by blocks that are being fetched, or have landed and are claimed."""

    def last_moved(self, moved_at: float) -> float:
        """When something last made progress that itself did so at ``moved_at``.

        A disk serves all pulls in turn, and has to write blocks before others can be
        read into a full pool, so any movement counts as progress. From a peer, only
        blocks for the same job count.
        """
        return max(moved_at, self.moved_at) if self.source is FILES else moved_at


class Staging:
    """The blocks that are being staged.

    Args:
        limits: Its ``file_window`` and ``peer_window`` bound the pool slots in use.
        hinted: The ids of the requests with a hint; the others cannot reach a peer.
        disk: Counts the blocks that move in and out of the files, if there are any.
        is_lost: Whether a peer has closed the connection; nobody waits for it then.
    """

    def __init__(
        self,
        kvcr: KvcrApi,
        liveness: Liveness,
        quarantine: Quarantine,
        limits: Limits,
        hinted: Container[str],
        health: Health,
        disk: DiskWatch | None,
        is_lost: Callable[[str], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._kvcr = kvcr
        self._liveness = liveness
        self._quarantine = quarantine
        self._limits = limits
        self._hinted = hinted
        self._health = health
        self._disk = disk
        self._is_lost = is_lost
        self._clock = clock
        self._lanes: dict[str, _Lane] = {}
        self._fetches: dict[int, _Fetch] = {}
        self._peers_in_pool = 0
        self._wanted: dict[str, tuple[bytes, str]] = {}
        self._introductions = 0
        self.fetching: set[bytes] = set()
        """Blocks that KVCR is fetching."""
        self.unawaited: set[bytes] = set()
        """The blocks among them that no request should wait for: those of
        introductions, and those that were given up, which KVCR may go on fetching for
        seconds."""
        shortest_timeout_s = min(
            limits.file_timeout_s, limits.pull_timeout_s, limits.introduction_timeout_s
        )
        self._check_interval_s = shortest_timeout_s / _CHECKS_PER_TIMEOUT
        self._next_check = 0.0
        self._file_events = 0
        self._quarantined = 0

    @property
    def peer_room(self) -> int:
        """Slots for peers that are not held by writes that could not be stopped."""
        return self._limits.peer_window - self._quarantine.pool_slots

    @property
    def has_wanted(self) -> bool:
        """Whether an introduction waits for the next ``pump``."""
        return bool(self._wanted)

    @property
    def introducing(self) -> bool:
        """Whether KVCR has to be polled because of an introduction."""
        return bool(self._wanted) or self._introductions > 0

    @property
    def busy(self) -> bool:
        """Whether KVCR is fetching, or has to be asked to."""
        return bool(self._wanted or self._fetches or self._lanes)

    def why_not(self, source: str, key: bytes, request_id: str) -> Lost | None:
        """Why a block cannot be staged from a source now, if it cannot.

        The block may then be used to introduce the source.
        """
        limits, files = self._limits, source is FILES
        if not (limits.file_window if files else limits.peer_window):
            return None  # KVCR is a stand-in that cannot fetch
        if self._liveness.standing(source) is not Standing.USABLE:
            self.introduce(source, key, request_id)
            return Lost.DISK_STALLED if files else Lost.INTRODUCING
        full = limits.stages_peers and not files and self.peer_room <= 0
        return Lost.LANDING_FULL if full else None

    def introduce(self, source: str, key: bytes, request_id: str) -> None:
        """Have the next ``pump`` fetch one block to learn whether a source answers.

        Does nothing unless an introduction is due.
        """
        if self._liveness.begin_introduction(source):
            self._wanted[source] = (key, request_id)

    def stage(self, job: Job, blocks: Blocks, source: str) -> None:
        """Have the next calls of ``pump`` fetch blocks of a load."""
        lane = self._lane(source)
        if not job.moved_at:
            job.moved_at = self._clock()
        lane.waiting.append(_Pull(job, list(blocks.items())))

    def pump(self) -> list[Outcome]:
        """Give up on fetches that take too long; start those that there is room for."""
        if self._quarantine.pool_slots != self._quarantined:
            self._note_quarantine()
        if not (self._lanes or self._wanted):
            return []
        outcomes: list[Outcome] = []
        now = self._clock()
        if self._disk is not None and self._disk.events != self._file_events:
            self._file_events = self._disk.events
            self._lane(FILES).moved_at = now
        if now >= self._next_check:
            self._next_check = now + self._check_interval_s
            outcomes.extend(self._given_up(now))
        if self._wanted:
            self._start_introductions(now)
        for lane in list(self._lanes.values()):
            while lane.waiting:
                refused = self._refusal(lane)
                if refused is not None:
                    outcomes.extend(self._refuse_next(lane, refused))
                elif not self._start_next(lane, now):
                    break
            if not lane.waiting and not lane.in_pool:
                del self._lanes[lane.source]
        return outcomes

    def complete(
        self, handle: int, entries: Mapping[bytes, OpEntryResult]
    ) -> list[Outcome]:
        """Take the results of some of a fetch's blocks; ignore unknown fetches."""
        fetch = self._fetches.get(handle)
        if fetch is None:
            return []
        landed: Blocks = {}
        claims: list[ReleaseHandle] = []
        failed: list[bytes] = []
        for key, entry in entries.items():
            if key not in fetch.pending:
                continue
            fetch.pending.discard(key)
            self.unawaited.discard(key)
            self.fetching.discard(key)
            if ENTRIES[entry.status] is Entry.DONE:
                landed[key] = fetch.blocks[key]
                if entry.release_handle is not None:
                    claims.append(entry.release_handle)
            else:
                failed.append(key)
        lane, pull = fetch.lane, fetch.pull
        if not fetch.pending:
            del self._fetches[handle]
            if pull is None and not fetch.given_up:
                self._introductions -= 1
        self._judge(fetch, bool(landed), bool(failed))
        self._leave_pool(lane, len(landed) + len(failed) - len(claims))
        if pull is None or fetch.given_up:
            if claims:
                self.release(lane.source, claims)
            return []
        outcomes: list[Outcome] = []
        if failed:
            outcomes.append(Missed(pull.job, lane.source, failed, Lost.LOAD_FAILED))
        if landed:
            pull.job.moved_at = lane.moved_at = self._clock()
            outcomes.append(Landed(pull.job, lane.source, landed, claims))
        return outcomes

    def release(self, source: str, claims: list[ReleaseHandle]) -> None:
        """Release blocks that were copied, or that could not be."""
        lane = self._lanes.get(source)
        if lane is not None:
            self._leave_pool(lane, len(claims))
        self._kvcr.release(claims)

    def clear(self) -> None:
        """Forget everything; KVCR is gone."""
        self._lanes.clear()
        self._fetches.clear()
        self._wanted.clear()
        self.unawaited.clear()
        self.fetching.clear()
        self._introductions = 0

    # --- lanes -----------------------------------------------------------------------

    def _lane(self, source: str) -> _Lane:
        lane = self._lanes.get(source)
        if lane is None:
            limits = self._limits
            files = source is FILES
            timeout_s = limits.file_timeout_s if files else limits.pull_timeout_s
            lane = self._lanes[source] = _Lane(source, timeout_s, self._clock())
        return lane

    def _room(self, lane: _Lane) -> int:
        """Slots that a lane may take at present."""
        if lane.source is FILES:
            return self._limits.file_window - lane.in_pool
        free = self.peer_room - (self._peers_in_pool - lane.in_pool)
        return max(1, int(free * _MOST_OF_FREE)) - lane.in_pool if free > 0 else 0

    def _leave_pool(self, lane: _Lane, blocks: int) -> None:
        lane.in_pool -= blocks
        if lane.source is not FILES:
            self._peers_in_pool -= blocks

    # --- starting --------------------------------------------------------------------

    def _refusal(self, lane: _Lane) -> Lost | None:
        """Why a lane's next blocks will not be fetched, if they will not."""
        standing = self._liveness.standing(lane.source)
        if lane.source is FILES:
            return None if standing is Standing.USABLE else Lost.DISK_STALLED
        if self.peer_room <= 0:
            return Lost.LANDING_FULL
        if lane.waiting[0].job.request_id not in self._hinted:
            return Lost.ABORTED
        if standing is Standing.COOLING:
            return Lost.PEER_DOWN
        return None if standing is Standing.USABLE else Lost.INTRODUCING

    def _refuse_next(self, lane: _Lane, reason: Lost) -> Iterator[Missed]:
        pull = lane.waiting.popleft()
        keys = [key for key, _ in pull.items[pull.cursor :]]
        if reason is Lost.INTRODUCING or reason is Lost.DISK_STALLED:
            self.introduce(lane.source, keys[0], pull.job.request_id)
        yield Missed(pull.job, lane.source, keys, reason)

    def _start_next(self, lane: _Lane, now: float) -> bool:
        """Fetch the next part of the lane's first pull, if the lane has room for it."""
        pull = lane.waiting[0]
        limits = self._limits
        files = lane.source is FILES
        most = limits.file_operation if files else limits.load_operation
        part = min(len(pull.items) - pull.cursor, most)
        room = self._room(lane)
        if room < 1 or (room < part and lane.in_pool):
            return False
        part = min(part, room)
        blocks: Blocks = dict(pull.items[pull.cursor : pull.cursor + part])
        pull.cursor += part
        if pull.cursor == len(pull.items):
            lane.waiting.popleft()
        self._fetch(lane, pull, blocks, pull.job.request_id, now)
        return True

    def _start_introductions(self, now: float) -> None:
        wanted, self._wanted = self._wanted, {}
        for source, (key, request_id) in wanted.items():
            if source is not FILES and (
                request_id not in self._hinted or self.peer_room <= 0
            ):
                self._liveness.inconclusive(source)
                continue
            lane = self._lane(source)
            self._introductions += 1
            self.unawaited.add(key)
            self._fetch(lane, None, {key: []}, request_id, now)

    def _fetch(
        self,
        lane: _Lane,
        pull: _Pull | None,
        blocks: Blocks,
        request_id: str,
        now: float,
    ) -> None:
        self._leave_pool(lane, -len(blocks))
        handle = self._kvcr.fetch(list(blocks), request_id=request_id)
        timeout_s = lane.timeout_s
        if pull is None and lane.source is not FILES:
            timeout_s = self._limits.introduction_timeout_s
        self._fetches[handle] = _Fetch(lane, pull, blocks, set(blocks), now, timeout_s)
        self.fetching.update(blocks)

    # --- giving up -------------------------------------------------------------------

    def _given_up(self, now: float) -> Iterator[Missed]:
        """Give up on pulls from dead peers, and on those without progress."""
        for fetch in self._fetches.values():
            if fetch.given_up:
                continue
            lane, pull = fetch.lane, fetch.pull
            since = fetch.started_at if pull is None else pull.job.moved_at
            # A new connection can be on its way to a peer that is introduced again.
            lost = pull is not None and self._is_lost(lane.source)
            if now - lane.last_moved(since) < fetch.timeout_s and not lost:
                continue
            fetch.given_up = True
            self.unawaited.update(fetch.pending)
            if pull is None:
                self._introductions -= 1
            # While a pull waits in its lane, the source is not silent.
            if lost or now - fetch.started_at >= SILENT_SHARE * fetch.timeout_s:
                self._silent(lane.source, fetch.started_at)
            if pull is not None:
                reason = Lost.PEER_DOWN if lost else Lost.TIMED_OUT
                yield Missed(pull.job, lane.source, list(fetch.pending), reason)
        for lane in self._lanes.values():
            for pull in list(lane.waiting):
                if now - lane.last_moved(pull.job.moved_at) >= lane.timeout_s:
                    lane.waiting.remove(pull)
                    keys = [key for key, _ in pull.items[pull.cursor :]]
                    yield Missed(pull.job, lane.source, keys, Lost.TIMED_OUT)

    def _judge(self, fetch: _Fetch, landed: bool, failed: bool) -> None:
        """Note what a fetch's results say about its source."""
        source = fetch.lane.source
        waited = self._clock() - fetch.started_at
        if landed and fetch.given_up:
            self._liveness.heard_late(source)
        elif landed:
            self._liveness.heard(source)
            if source is FILES:
                self._health.recover(Reason.DISK_STALLED)
        elif failed and not fetch.given_up:
            if source is not FILES and waited >= SILENT_SHARE * fetch.timeout_s:
                self._silent(source, fetch.started_at)
            elif fetch.pull is None:
                self._liveness.inconclusive(source)

    def _silent(self, source: str, asked_at: float) -> None:
        self._liveness.silent(source, asked_at)
        if source is FILES and self._liveness.standing(FILES) is not Standing.USABLE:
            waited = f"{self._limits.file_timeout_s:g} s"
            files = self._disk.files if self._disk is not None else "the g3 files"
            detail = f"no block arrived from {files} for {waited}"
            self._health.degrade(Reason.DISK_STALLED, detail)

    def _note_quarantine(self) -> None:
        self._quarantined = self._quarantine.pool_slots
        if self._limits.peer_window and self.peer_room <= 0:
            self._health.degrade(Reason.LANDING_FULL, "no landing slot is left")
        else:
            self._health.recover(Reason.LANDING_FULL)
