# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What stands in for the kvcr tier's neighbours in unit tests.

Each offers only what the tier may call on it. ``KvcrStandin`` does nothing by itself:
it records calls and hands back what a test scripted. ``KeepingStandin`` is the same
with a pool behind it, for the contract suite.
"""

import itertools
import mmap
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
from kvcr import (
    DURATION_METRIC,
    STATE_METRIC,
    TRANSFER_BLOCKS_METRIC,
    TRANSFER_BYTES_METRIC,
)
from kvcr.types import (
    BlockKey,
    BlockMeta,
    CacheTier,
    InventoryEvent,
    OpEntryResult,
    OpEntryStatus,
    PlacementAction,
    QueryStatus,
)

from vllm.v1.kv_offload.base import (
    LookupResult,
    OffloadKey,
    ReqContext,
    RequestOffloadingContext,
)
from vllm.v1.kv_offload.tiering.base import ParentManager, TransferJob
from vllm.v1.kv_offload.tiering.kvcr.compat import shims

Blocks = Mapping[bytes, Any]
Status = tuple[QueryStatus, CacheTier | None]

SUCCESS = OpEntryStatus.SUCCESS
FAILED = OpEntryStatus.FAILED
DROPPED = OpEntryStatus.DROPPED

MISS = (QueryStatus.MISS, None)
HIT = (QueryStatus.HIT, CacheTier.LOCAL_G2)
FETCHING = (QueryStatus.FETCHING, CacheTier.LOCAL_G2)
ON_DISK = (QueryStatus.FETCHABLE, CacheTier.G3)
AT_PEER = (QueryStatus.FETCHABLE, CacheTier.REMOTE_G2)
ANSWERS = (HIT, MISS, ON_DISK, AT_PEER, FETCHING)


class Operation(NamedTuple):
    """One deliver or deposit that was asked for."""

    handle: int
    kind: str
    blocks: dict[bytes, Any]
    request_id: str | None


class KvcrStandin:
    """Takes KVCR's place: records calls, answers what a test says.

    ``raises`` maps a method's name to what it raises from then on.
    """

    def __init__(
        self, config: Any, bindings: Any, backend_configs: Any, guard_config: Any = None
    ) -> None:
        self.config = config
        self.bindings = bindings
        self.backend_configs = backend_configs
        self.guard_config = guard_config
        self.calls: list[str] = []
        self.raises: dict[str, BaseException] = {}
        self.statuses: dict[bytes, Status] = {}
        self.operations: dict[int, Operation] = {}
        self.hints: list[tuple[str, Any]] = []
        self.discarded: list[str] = []
        self.stats = self._new_stats()
        self.stats_given: list[Any] = []
        self.closed = 0
        self._handles = itertools.count(1)
        self._pieces: list[tuple[int, dict[bytes, OpEntryResult]]] = []
        self._wanted: list[tuple[bytes, ...]] = []
        self._unpinned: list[str] = []
        self.pin_answers: dict[int, Any] = {}
        self.releases: list[tuple[str, bool]] = []

    # --- what the tier calls -----------------------------------------------------

    def query(
        self, keys: Collection[bytes], request_id: str | None = None
    ) -> list[Status]:
        self._called("query")
        return [self.status_of(key) for key in keys]

    def deliver(self, blocks: Blocks, request_id: str | None = None) -> int:
        return self._start("deliver", blocks, request_id)

    def deposit(self, blocks: Blocks) -> int:
        return self._start("deposit", blocks, None)

    def submit_hint(self, *, request_id: str, hints: Any) -> None:
        self._called("submit_hint")
        self.hints.append((request_id, hints))

    def discard_hint(self, request_id: str) -> None:
        self._called("discard_hint")
        self.discarded.append(request_id)

    def poll_completed(self) -> Iterable[tuple[int, dict[bytes, OpEntryResult]]]:
        self._called("poll_completed")
        for keys in self._taken(self._wanted):
            self.bindings.request_pin(keys)
        self.pin_answers.update(self.bindings.poll_pin_results())
        for handle in self._taken(self._unpinned):
            self.releases.append((handle, self.bindings.release_pin(handle)))
        return self._taken(self._pieces)

    def get_stats(self) -> Any:
        self._called("get_stats")
        # What was recorded so far; from now on into another one.
        stats, self.stats = self.stats, self._new_stats()
        self.stats_given.append(stats)
        return stats

    def _new_stats(self) -> Any:
        return self.bindings.stats_factory() if self.bindings.stats_factory else None

    def close(self) -> None:
        self.closed += 1
        self._called("close")

    # --- what a test calls -------------------------------------------------------

    def status_of(self, key: bytes) -> Status:
        return self.statuses.get(key, MISS)

    def of_kind(self, kind: str) -> list[Operation]:
        return [op for op in self.operations.values() if op.kind == kind]

    @property
    def last(self) -> Operation:
        return next(reversed(self.operations.values()))

    def complete(self, handle: int, statuses: Mapping[bytes, OpEntryStatus]) -> None:
        """Have the next poll yield one piece of an operation's outcome."""
        self._pieces.append(
            (handle, {key: OpEntryResult(status) for key, status in statuses.items()})
        )

    def complete_all(self, status: OpEntryStatus = SUCCESS) -> None:
        """Have the next poll yield the whole outcome of every known operation."""
        for operation in self.operations.values():
            self.complete(operation.handle, dict.fromkeys(operation.blocks, status))

    def publish(
        self, key: bytes, tier: CacheTier = CacheTier.LOCAL_G2, *, removed: bool = False
    ) -> None:
        """Report that a block came, or went, where somebody listens."""
        if self.bindings.inventory_sink is not None:
            event = InventoryEvent((BlockKey(key),), tier, removed)
            self.bindings.inventory_sink(event)

    def want(self, *keys: bytes) -> None:
        """Have a peer ask for blocks of the primary tier, at the next poll."""
        self._wanted.append(keys)

    def unpin(self, handle: str) -> None:
        """Have KVCR let go of a pin, at the next poll."""
        self._unpinned.append(handle)

    # --- inside ------------------------------------------------------------------

    def _called(self, name: str) -> None:
        self.calls.append(name)
        if name in self.raises:
            raise self.raises[name]

    def _start(self, kind: str, blocks: Blocks, request_id: str | None) -> int:
        self._called(kind)
        handle = next(self._handles)
        self.operations[handle] = Operation(handle, kind, dict(blocks), request_id)
        return handle

    @staticmethod
    def _taken(queue: list[Any]) -> list[Any]:
        # One by one: a test may append meanwhile, from a thread of its own.
        taken = []
        while queue:
            taken.append(queue.pop(0))
        return taken


class FetchingStandin(KvcrStandin):
    """A stand-in that blocks can land in first, as files' and peers' do."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.claims: list[int] = []
        self.released: list[int] = []

    def fetch(self, keys: Collection[bytes], request_id: str | None = None) -> int:
        return self._start("fetch", dict.fromkeys(keys), request_id)

    def release(self, handles: Collection[int]) -> list[tuple[int, bool]]:
        self._called("release")
        self.released.extend(handles)
        return [(handle, True) for handle in handles]

    def complete(self, handle: int, statuses: Mapping[bytes, OpEntryStatus]) -> None:
        operation = self.operations.get(handle)
        if operation is None or operation.kind != "fetch":
            super().complete(handle, statuses)
            return
        piece = {}
        for key, status in statuses.items():
            claim = len(self.claims) if status is SUCCESS else None
            if claim is not None:
                self.claims.append(claim)
            piece[key] = OpEntryResult(status, None, claim)  # type: ignore[arg-type]
        self._pieces.append((handle, piece))


class KeepingStandin(KvcrStandin):
    """A stand-in with a first-in-first-out pool that moves real bytes.

    Each operation is done at the next two polls, one half of its blocks at a time.
    ``keep`` gives it the primary tier's memory, which it cannot know by itself.
    """

    def keep(self, memory: np.ndarray) -> None:
        rows, row_bytes = memory.shape
        refs = shims.block_refs_factory(
            self.config.nixl_agent_name, memory.ctypes.data, row_bytes
        )
        self._rows = {repr(refs(index)): memory[index] for index in range(rows)}
        pools = self.backend_configs.local_dram.pools
        self._slots = sum(size for _, _, size in pools) // row_bytes
        self._row_bytes = row_bytes
        self._pool: OrderedDict[bytes, bytes] = OrderedDict()
        self._under_way: list[tuple[Operation, list[bytes]]] = []
        self._moved: dict[str, int] = {}

    def read(self, refs: Any) -> bytes | None:
        """The bytes of a block of the primary tier, as a peer would get them."""
        return None if refs is None else self._rows[repr(refs)].tobytes()

    def status_of(self, key: bytes) -> Status:
        return HIT if key in self._pool else MISS

    def poll_completed(self) -> Iterable[tuple[int, dict[bytes, OpEntryResult]]]:
        under_way, self._under_way = self._under_way, []
        for operation, pending in under_way:
            half = (len(operation.blocks) + 1) // 2
            now, later = pending[:half], pending[half:]
            move = self._take_in if operation.kind == "deposit" else self._hand_out
            moved = {key: move(key, operation.blocks[key]) for key in now}
            self.complete(operation.handle, moved)
            if later:
                self._under_way.append((operation, later))
        return super().poll_completed()

    def get_stats(self) -> Any:
        stats = super().get_stats()
        if stats is None:
            return None
        for operation, blocks in self._moved.items():
            stats.observe_histogram(DURATION_METRIC, 0.001, (operation, "success"))
            stats.increase_counter(TRANSFER_BLOCKS_METRIC, blocks, (operation,))
            size = blocks * self._row_bytes
            stats.increase_counter(TRANSFER_BYTES_METRIC, size, (operation,))
        stats.set_gauge(STATE_METRIC, len(self._pool), ("block_records",))
        self._moved = {}
        return stats

    def _start(self, kind: str, blocks: Blocks, request_id: str | None) -> int:
        handle = super()._start(kind, blocks, request_id)
        self._under_way.append((self.operations[handle], list(blocks)))
        return handle

    def _take_in(self, key: bytes, refs: Any) -> OpEntryStatus:
        policy = self.bindings.policy
        if policy is not None:
            meta = BlockMeta(key, self._row_bytes, 0, None, frozenset())
            action, _ = policy.decide_ingest(meta, CacheTier.FW_G2, False)
            if action is PlacementAction.DROP:
                return DROPPED
        if key not in self._pool:
            while len(self._pool) >= self._slots:
                evicted, _ = self._pool.popitem(last=False)
                self.publish(evicted, removed=True)
            self._pool[key] = self._rows[repr(refs)].tobytes()
            self.publish(key)
            self._moved["fill"] = self._moved.get("fill", 0) + 1
        return SUCCESS

    def _hand_out(self, key: bytes, refs: Any) -> OpEntryStatus:
        if key not in self._pool:
            return FAILED
        self._rows[repr(refs)][:] = np.frombuffer(self._pool[key], np.uint8)
        self._moved["deliver"] = self._moved.get("deliver", 0) + 1
        return SUCCESS


class ChannelStandin:
    """Takes the control channel's place."""

    def __init__(self, bind_host: str, bind_port: int, advertise_host: str) -> None:
        self.arguments = (bind_host, bind_port, advertise_host)
        self.closed = 0

    def close(self) -> None:
        self.closed += 1


class MmapStandin:
    """Takes the place of the module ``mmap``."""

    def __init__(self) -> None:
        self.made: list[mmap.mmap] = []

    def mmap(self, fileno: int, length: int) -> mmap.mmap:
        self.made.append(mmap.mmap(fileno, length))
        return self.made[-1]


class RecordingParent(ParentManager):
    """A primary tier as tiers see it: records calls, answers what a test says.

    ``resident`` maps a key to its chunk; ``answers`` overrides single lookups.
    """

    job_ids = itertools.count(10_000)

    def __init__(self, resident: Mapping[OffloadKey, int] | None = None) -> None:
        self.resident = dict(resident or {})
        self.answers: dict[OffloadKey, LookupResult] = {}
        self.raises: dict[str, Exception] = {}
        self.calls: list[tuple[str, Any]] = []
        self.jobs: list[TransferJob] = []

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        self._called("on_new_request", req_context.req_id)
        return RequestOffloadingContext()

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        self._called("lookup", key)
        there = LookupResult.HIT if key in self.resident else LookupResult.MISS
        return self.answers.get(key, there)

    def create_store_job(
        self, keys: Collection[OffloadKey], req_context: ReqContext
    ) -> TransferJob:
        self._called("create_store_job", list(keys))
        chunks = np.array([self.resident[key] for key in keys], dtype=np.int32)
        job = TransferJob(next(self.job_ids), keys, chunks, False, req_context)
        self.jobs.append(job)
        return job

    def on_request_finished(self, req_context: ReqContext) -> None:
        self._called("on_request_finished", req_context.req_id)

    @property
    def call_names(self) -> list[str]:
        return [name for name, _ in self.calls]

    def _called(self, name: str, argument: Any) -> None:
        self.calls.append((name, argument))
        if name in self.raises:
            raise self.raises[name]
