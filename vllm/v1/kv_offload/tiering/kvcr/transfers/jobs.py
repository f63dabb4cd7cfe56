# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A job of vLLM, and the KVCR operations that it is split into."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from kvcr.types import ReleaseHandle

from vllm.v1.kv_offload.base import OffloadKey
from vllm.v1.kv_offload.tiering.base import JobId
from vllm.v1.kv_offload.tiering.kvcr.compat.shims import BlockRefs
from vllm.v1.kv_offload.tiering.kvcr.transfers.residency import Copy, Sum

Blocks = dict[bytes, BlockRefs]
"""Block key -> the block's place in the primary tier."""


@dataclass(frozen=True)
class Limits:
    """Bounds in blocks; a window limits how many are in flight at a time."""

    load_operation: int
    load_window: int
    store_operation: int
    store_window: int
    file_operation: int
    """Smaller than ``load_operation``: a read reports nothing until all of its blocks
    have arrived, and a slow disk must not be taken for one that hangs."""
    file_window: int
    """Pool slots for blocks from files; 0 without files."""
    peer_window: int
    """Pool slots for blocks from peers; 0 without peers."""
    stages_peers: bool
    """If false, peers write into the primary tier, and only introductions are
    staged."""
    operation_timeout_s: float
    """How long KVCR works on one operation."""
    file_timeout_s: float
    """How long a load waits for files without getting a block."""
    pull_timeout_s: float
    """How long a load waits for a peer without getting a block."""
    introduction_timeout_s: float
    """How long the first contact with a peer may take."""


@dataclass(slots=True)
class Job:
    job_id: JobId
    is_load: bool
    keys: list[OffloadKey]
    chunks: list[int]
    request_id: str
    started_at: float
    unsettled: int
    """Blocks without a result yet; the job ends with the last one."""
    cursor: int = 0
    """Keys before it were given to KVCR or to the staging."""
    failed: set[bytes] = field(default_factory=set)
    dropped: int = 0
    skipped: int = 0
    """Blocks of a store that were not given to KVCR."""
    chunk_of: dict[bytes, int] | None = None
    """Each block key's chunk, where blocks are verified."""
    moved_at: float = 0.0
    """When it first asked for staged blocks or, later, when one of them last
    arrived."""
    exposed: bool = False
    """Whether KVCR raised when it was asked to write for this job, but may still
    write."""


@dataclass(slots=True)
class Operation:
    """One copy between KVCR and the primary tier."""

    job: Job
    blocks: Blocks
    started_at: float
    source: str | None = None
    """The peer or the files that a load's blocks came from; ``None`` for the pool."""
    claims: list[ReleaseHandle] | None = None
    """Keep staged blocks in the pool until they are copied."""
    pending: set[bytes] | None = None
    """Blocks without a result; ``None`` until some, but not all, have one."""
    done: bool = False
    unchecked: bool = False
    """Whether this is a store whose checksums are still being computed."""
    stored_sums: dict[bytes, Sum] | None = None
    """For ``BlockSums.stored``, once a store is over."""
    expected_copies: dict[bytes, Copy] | None = None
    """For ``BlockSums.verify``, once a load is over."""

    def settle(self, keys: Mapping[bytes, object]) -> Collection[bytes]:
        """Note that ``keys`` have a result; return those that had none before."""
        if self.done:
            return ()
        if self.pending is None:
            if keys.keys() == self.blocks.keys():
                self.done = True
                return keys.keys()
            self.pending = set(self.blocks)
        fresh = self.pending.intersection(keys)
        self.pending -= fresh
        self.done = not self.pending
        return fresh


def chunks_of(job: Job, keys: Iterable[bytes]) -> list[tuple[bytes, int]]:
    """Each block key's chunk, for its checksum."""
    chunk_of = job.chunk_of or {}
    return [(key, chunk_of[key]) for key in keys]


def next_part_fits(job: Job, under_way: int, size: int, window: int) -> bool:
    """Whether the window has room for the job's next part.

    A part always fits in an empty window.
    """
    part = min(size, len(job.keys) - job.cursor)
    return not under_way or under_way + part <= window
