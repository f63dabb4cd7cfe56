# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What is under way: a job of vLLM's, and the operations of KVCR's it was cut into."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from vllm.v1.kv_offload.base import OffloadKey
from vllm.v1.kv_offload.tiering.base import JobId
from vllm.v1.kv_offload.tiering.kvcr.transfers.staging import Blocks


@dataclass(frozen=True)
class Limits:
    """Bounds, in blocks; windows are what may be under way at a time."""

    load_operation: int
    load_window: int
    store_operation: int
    store_window: int
    landing_window: int
    """0: nothing lands in the pool."""
    operation_timeout_s: float
    pull_timeout_s: float
    """How long a pull may take that lands in the pool."""


@dataclass(slots=True)
class Job:
    job_id: JobId
    is_load: bool
    keys: list[OffloadKey]
    chunks: list[int]
    request_id: str
    started_at: float
    cursor: int = 0
    """Keys before it were given to KVCR, or wait to land."""
    open_parts: int = 0
    failed: set[bytes] | tuple[()] = ()
    dropped: int = 0
    chunk_of: dict[bytes, int] | None = None
    """Each block key's chunk, where blocks are verified."""
    exposed: bool = False
    """KVCR raised when asked to write for it, and may write all the same."""


@dataclass(slots=True)
class Operation:
    job: Job
    blocks: Blocks
    started_at: float
    claims: list[Any] | None
    """What holds the blocks in the pool; ``None`` unless they landed there."""
    pending: set[bytes] | None = None
    """Blocks without an outcome; filled when the first piece is not all of them."""
    done: bool = False
    from_peer: bool = False
    uncertain: bool = False
    unchecked: bool = False
    """A store whose checksums are still being taken."""
    sums: Any = None
    """What ``BlockSums`` wants back when the operation is over."""

    def settle(self, keys: Mapping[Any, Any]) -> Collection[Any]:
        """Note that ``keys`` have an outcome; those that had none before."""
        if self.done:
            return ()
        if self.pending is None:
            if keys.keys() == self.blocks.keys():
                self.done = True
                return keys
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
    """Whether the job's next part has room in the window; alone, any has."""
    part = min(size, len(job.keys) - job.cursor)
    return not under_way or under_way + part <= window
