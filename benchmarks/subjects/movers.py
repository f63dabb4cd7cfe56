# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Contenders that move blocks out of a primary tier and back, behind one interface.

A mover raises where a block was not moved: a time that was measured is the time of
work that was done.
"""

import mmap
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from kvcr import KVCR, KVCRBindings
from kvcr.config import G3Options, KVCRBackendConfigs, KVCRConfig, LocalDramOptions
from kvcr.types import PinRequestId

from benchmarks.subjects.kvcr_words import block_ref_maker, region_keyword
from benchmarks.subjects.memory import Primary
from benchmarks.subjects.spec import make_tier
from vllm.v1.kv_offload.base import OffloadKey, ReqContext
from vllm.v1.kv_offload.tiering.base import TransferJob

Keys = Sequence[OffloadKey]
Chunks = Sequence[int]


class NotMoved(Exception):
    """A contender did not do what it was asked to."""


class Mover(Protocol):
    """Moves blocks between chunks of the primary tier and its own memory."""

    def prepare(self, keys: Keys, chunks: Chunks, load: bool) -> Any:
        """What vLLM would have ready before it asks."""

    def submit(self, job: Any) -> None: ...

    def poll(self) -> int:
        """How many jobs have ended since the last call."""

    def close(self) -> None: ...


class TierMover:
    """A secondary tier of vLLM's, made by vLLM's factory."""

    def __init__(self, primary: Primary, options: dict[str, Any]) -> None:
        self.view = primary.view
        self.tier = make_tier(self.view, options)
        self._jobs = 0
        self._context = ReqContext("request")

    def prepare(self, keys: Keys, chunks: Chunks, load: bool) -> TransferJob:
        self._jobs += 1
        ids = np.array(chunks, dtype=np.int32)
        return TransferJob(self._jobs, list(keys), ids, load, self._context)

    def submit(self, job: TransferJob) -> None:
        if job.is_promotion:
            self.tier.submit_load(job)
        else:
            self.tier.submit_store(job)

    def poll(self) -> int:
        ended = 0
        for result in self.tier.get_finished_jobs():
            if not result.success:
                raise NotMoved(f"job {result.job_id} failed: {result}")
            ended += 1
        return ended

    def close(self) -> None:
        self.tier.shutdown()
        self.view.release()


class BareKvcr:
    """KVCR itself, called as its interface says.

    A job is one operation, or several in a row where the pool could not hold it.
    """

    def __init__(
        self,
        primary: Primary,
        slots: int,
        *,
        populate: bool = True,
        file: Path | None = None,
        file_bytes: int = 0,
        timeout_ms: int = 20_000,
        operation_blocks: int | None = None,
    ) -> None:
        rows, row_bytes = primary.rows.shape
        agent = uuid.uuid4().hex
        self._pool = mmap.mmap(-1, slots * row_bytes)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._pool.madvise(mmap.MADV_HUGEPAGE)
        pool = np.frombuffer(self._pool, dtype=np.uint8)
        if populate:
            pool[:: mmap.PAGESIZE] = 1
        address = pool.ctypes.data
        start = primary.rows.ctypes.data
        g3 = None
        if file is not None:
            g3 = G3Options(
                paths=(file,), capacity_bytes_per_file=file_bytes, backend="POSIX"
            )
        self.kvcr = KVCR(
            KVCRConfig(
                nixl_agent_name=agent,
                pool_layouts=[("", row_bytes)],
                operation_timeout_ms=timeout_ms,
                abandon_timeout_ms=2 * timeout_ms,
                nixl_listen_port=0,
            ),
            KVCRBindings(
                request_pin=lambda keys: PinRequestId(0),
                poll_pin_results=lambda: (),
                release_pin=lambda handle: True,
            ),
            KVCRBackendConfigs(
                local_dram=LocalDramOptions(pools=[("", address, pool.nbytes)]),
                g3=g3,
                **region_keyword(start, row_bytes, rows),
            ),
            None,
        )
        self._ref = block_ref_maker(agent, start, row_bytes)
        self._operation_blocks = operation_blocks
        self._pending: dict[int, int] = {}
        self._rest: list[tuple[list[OffloadKey], np.ndarray, bool]] = []

    def prepare(
        self, keys: Keys, chunks: Chunks, load: bool
    ) -> tuple[list[OffloadKey], np.ndarray, bool]:
        return list(keys), np.array(chunks, dtype=np.int32), load

    def submit(self, job: tuple[list[OffloadKey], np.ndarray, bool]) -> None:
        keys, chunks, load = job
        most = self._operation_blocks
        if most is not None and len(keys) > most:
            self._rest.append((keys[most:], chunks[most:], load))
            keys, chunks = keys[:most], chunks[:most]
        ref = self._ref
        blocks: Any = {
            key: ref(chunk) for key, chunk in zip(keys, chunks.tolist(), strict=True)
        }
        if load:
            handle = self.kvcr.deliver(blocks, request_id="request")
        else:
            handle = self.kvcr.deposit(blocks)
        self._pending[handle] = len(blocks)

    def poll(self) -> int:
        ended = 0
        for handle, entries in self.kvcr.poll_completed():
            for entry in entries.values():
                if not entry.success:
                    raise NotMoved(f"operation {handle} failed: {entry}")
            self._pending[handle] -= len(entries)
            if not self._pending[handle]:
                del self._pending[handle]
                if self._rest:
                    self.submit(self._rest.pop())
                else:
                    ended += 1
        return ended

    def close(self) -> None:
        self.kvcr.close()


class PlainCopy:
    """What one thread copies from memory to memory, block by block."""

    def __init__(self, primary: Primary, slots: int) -> None:
        self._primary = primary.rows
        self._store = np.ones((slots, primary.rows.shape[1]), dtype=np.uint8)
        self._where: dict[OffloadKey, int] = {}
        self._next = 0
        self._ended = 0

    def prepare(
        self, keys: Keys, chunks: Chunks, load: bool
    ) -> tuple[Keys, Chunks, bool]:
        return keys, chunks, load

    def submit(self, job: tuple[Keys, Chunks, bool]) -> None:
        keys, chunks, load = job
        for key, chunk in zip(keys, chunks, strict=True):
            if load:
                self._primary[chunk] = self._store[self._where[key]]
            else:
                slot = self._where[key] = self._next
                self._next = (slot + 1) % len(self._store)
                self._store[slot] = self._primary[chunk]
        self._ended += 1

    def poll(self) -> int:
        ended, self._ended = self._ended, 0
        return ended

    def close(self) -> None:
        return
