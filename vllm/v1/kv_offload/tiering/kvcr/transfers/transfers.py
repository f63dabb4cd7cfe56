# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Jobs of vLLM's, cut into operations of KVCR's, and back to one result each.

A job is cut into operations of bounded size, a bounded number of blocks at a time,
loads before stores, so that no job can hold up KVCR's one thread or ask for more than
its pool holds. Results are one per job, exactly once.

After a failed load vLLM reuses the slots at once, so nothing may write to them later.
What KVCR holds in its pool is delivered into them by a local copy; what comes from a
peer or a file lands in the pool first (``landing``). Without a pool a peer writes
straight into the slots: such an operation, once KVCR calls its memory uncertain, keeps
its job back until it is quiesced.

Failure model: an exception of KVCR's goes to ``on_backend_error``; nothing raises.
Completions that are unknown, repeated or too large are ignored. Everything runs on the
thread that drives the tier.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvcr.types import CacheTier, OpEntryResult, OpEntryStatus, QueryStatus

from vllm.v1.kv_offload.base import OffloadKey
from vllm.v1.kv_offload.tiering.base import JobId, JobResult, TransferJob
from vllm.v1.kv_offload.tiering.kvcr.compat import shims
from vllm.v1.kv_offload.tiering.kvcr.compat.vocabulary import ENTRIES, Entry
from vllm.v1.kv_offload.tiering.kvcr.peers.hints import Hints
from vllm.v1.kv_offload.tiering.kvcr.peers.liveness import Peers
from vllm.v1.kv_offload.tiering.kvcr.reports.metrics import Losses, Lost
from vllm.v1.kv_offload.tiering.kvcr.transfers.backoff import Backoff
from vllm.v1.kv_offload.tiering.kvcr.transfers.checksums import BlockSums
from vllm.v1.kv_offload.tiering.kvcr.transfers.jobs import (
    Job,
    Limits,
    Operation,
    chunks_of,
    next_part_fits,
)
from vllm.v1.kv_offload.tiering.kvcr.transfers.staging import Blocks, Landings

# Looking an enum's member up costs more than what is done with it.
_SUCCESS = OpEntryStatus.SUCCESS
_FIRST_FILED_STORES = 8


class Transfers:
    """The jobs that are under way.

    Args:
        kvcr: KVCR, of which ``deposit``, ``deliver`` and ``query`` are used, and what
            ``Landings`` uses where it has that.
        block_refs: How KVCR is told of a chunk of the primary tier.
        prefix: What a block key has before the offload key.
        has_files: Whether KVCR keeps blocks in files.
        peers_land_in_pool: Whether a peer's blocks land in the pool, where there is
            one, or straight in the primary tier.
        sums: Checksums, where blocks are to be verified.
        block_bytes: Bytes of one block, where results are to carry times and sizes.
    """

    def __init__(
        self,
        kvcr: Any,
        block_refs: Callable[[int], shims.BlockRefs],
        prefix: bytes,
        limits: Limits,
        hints: Hints,
        peers: Peers,
        backoff: Backoff,
        losses: Losses,
        on_backend_error: Callable[[Exception], None],
        *,
        has_files: bool = False,
        peers_land_in_pool: bool = True,
        sums: BlockSums | None = None,
        block_bytes: int | None = None,
    ) -> None:
        self._kvcr = kvcr
        self._block_refs = block_refs
        self._refs: dict[int, shims.BlockRefs] = {}
        self._prefix = prefix
        self._limits = limits
        self._hints = hints
        self._peers = peers
        self._backoff = backoff
        self._losses = losses
        self._on_backend_error = on_backend_error
        self._has_files = has_files
        self._peers_land_in_pool = peers_land_in_pool
        self._sums = sums
        self._block_bytes = block_bytes
        self.landings: Landings | None = None
        if limits.landing_window and hasattr(kvcr, "fetch"):
            self.landings = Landings(
                kvcr,
                self,
                peers,
                limits.landing_window,
                limits.load_operation,
                limits.pull_timeout_s,
                hints.requests,
                on_backend_error,
            )
        self._jobs: dict[JobId, Job] = {}
        self._operations: dict[int, Operation] = {}
        self._loads: deque[Job] = deque()
        self._stores: deque[Job] = deque()
        self._loading = 0
        self._storing = 0
        # Halved when stores fail, which is when KVCR frees room more slowly than they
        # ask for it, and grown as they succeed. To files it frees one block a poll.
        self._store_window = limits.store_window
        if has_files:
            self._store_window = min(limits.store_window, _FIRST_FILED_STORES)
        self._store_timed_out_at = -math.inf
        self._results: list[JobResult] = []
        self.corrupt = 0
        """Blocks found damaged; for the owner to read and reset."""

    # --- vLLM's side -----------------------------------------------------------------

    @property
    def outstanding(self) -> int:
        """Jobs without a result."""
        return len(self._jobs)

    @property
    def has_results(self) -> bool:
        return bool(self._results)

    def stores_time_out(self) -> bool:
        """Whether a store's deadline has passed, now or not long ago."""
        late = time.monotonic() - self._limits.operation_timeout_s
        return self._store_timed_out_at > late or any(
            not operation.job.is_load and operation.started_at <= late
            for operation in self._operations.values()
        )

    def submit_load(self, job_metadata: TransferJob) -> None:
        self._submit(job_metadata, self._loads, is_load=True)

    def submit_store(self, job_metadata: TransferJob) -> None:
        self._submit(job_metadata, self._stores, is_load=False)

    def end_at_once(self, job_metadata: TransferJob, *, success: bool) -> None:
        """Answer a job without asking KVCR."""
        keys: list[OffloadKey] | None = [] if job_metadata.is_promotion else None
        self._results.append(
            shims.job_result(
                job_metadata.job_id,
                success,
                successful_keys=None if success else keys,
            )
        )

    def knows(self, job_id: JobId) -> bool:
        """Whether a job has, or will get, its one result."""
        return job_id in self._jobs or any(
            result.job_id == job_id for result in self._results
        )

    def take_results(self) -> Sequence[JobResult]:
        if not self._results:
            return ()
        results, self._results = self._results, []
        return results

    # --- KVCR's side -----------------------------------------------------------------

    def complete(self, handle: int, entries: Mapping[Any, OpEntryResult]) -> None:
        """Take one piece of an operation's outcome."""
        operation = self._operations.get(handle)
        if operation is None:
            if self.landings is not None:
                self.landings.complete(handle, entries)
            return
        failed: list[bytes] = []
        for key in operation.settle(entries):
            status = entries[key].status
            if status is _SUCCESS:
                continue
            outcome = ENTRIES[status]
            if outcome is Entry.DROPPED and not operation.job.is_load:
                operation.job.dropped += 1
            elif outcome is not Entry.DONE:
                failed.append(key)
        if failed:
            self._copy_failed(operation, failed)
        if operation.done and not operation.uncertain:
            self._close(handle, operation)

    def pump(self) -> None:
        """Start what the windows have room for: loads first."""
        if self._sums is not None:
            for checked in self._sums.take_done():
                self._checked(*checked)
        if self.landings is not None:
            self.landings.pump()
        if not self._loads and not self._stores:
            return
        limits = self._limits
        while self._loads and next_part_fits(
            self._loads[0], self._loading, limits.load_operation, limits.load_window
        ):
            self._start_part(self._loads, limits.load_operation)
        window = self._store_window
        size = min(limits.store_operation, window)
        while self._stores and next_part_fits(
            self._stores[0], self._storing, size, window
        ):
            self._start_part(self._stores, size)

    def uncertain(self, handle: int) -> None:
        """A peer's write into the slots of ``handle`` could not be stopped."""
        operation = self._operations.get(handle)
        if operation is not None:
            operation.uncertain = True
            self._losses.add(Lost.QUARANTINED, len(operation.blocks))

    def quiesced(self, handle: int) -> None:
        """That write can no longer happen."""
        operation = self._operations.get(handle)
        if operation is not None and operation.uncertain:
            operation.uncertain = False
            if operation.done:
                self._close(handle, operation)

    def abandon(self) -> None:
        """KVCR is gone: end every job that native code can no longer write for.

        A store only reads the primary tier, and nobody will read what it wrote. A load
        that was being delivered keeps its slots until ``native_stopped``.
        """
        self._loads.clear()
        self._stores.clear()
        if self.landings is not None:
            self.landings.clear()
        writing = {operation.job.job_id for operation in self._operations.values()}
        for job in list(self._jobs.values()):
            if not (job.is_load and (job.exposed or job.job_id in writing)):
                self._end_failed(job)

    def native_stopped(self) -> None:
        """Native code has let go of every buffer: end what ``abandon`` kept back."""
        self._operations.clear()
        for job in list(self._jobs.values()):
            self._end_failed(job)

    def close(self) -> None:
        """Stop comparing checksums."""
        if self._sums is not None:
            self._sums.close()

    # --- parts of jobs ---------------------------------------------------------------

    def _submit(
        self, job_metadata: TransferJob, queue: deque[Job], *, is_load: bool
    ) -> None:
        job = Job(
            job_metadata.job_id,
            is_load,
            list(job_metadata.keys),
            job_metadata.chunk_ids.tolist(),
            job_metadata.req_context.req_id,
            time.monotonic(),
        )
        self._jobs[job.job_id] = job
        if not job.keys:
            self._finish_if_done(job)
        elif len(job.keys) != len(job.chunks):
            self._end_failed(job)
        else:
            if self._sums is not None:
                blocks = (self._prefix + key for key in job.keys)
                job.chunk_of = dict(zip(blocks, job.chunks, strict=True))
            queue.append(job)
            self.pump()

    def _start_part(self, queue: deque[Job], size: int) -> None:
        """Cut the next part off the first job and start it."""
        job = queue[0]
        first, last = job.cursor, min(job.cursor + size, len(job.keys))
        job.cursor = last
        if last == len(job.keys):
            queue.popleft()
        refs, prefix = self._refs, self._prefix
        blocks: Blocks = {}
        for index in range(first, last):
            chunk = job.chunks[index]
            ref = refs.get(chunk)
            if ref is None:
                ref = refs[chunk] = self._block_refs(chunk)
            blocks[prefix + job.keys[index]] = ref
        if not job.is_load:
            self._start_store(job, blocks)
        elif self.landings is not None and (
            self._has_files or job.request_id in self._hints.requests
        ):
            self._start_sorted_load(job, blocks)
        else:
            self._deliver(job, blocks, job.request_id)

    def _start_store(self, job: Job, blocks: Blocks) -> None:
        operation = self._open(job, blocks)
        self._storing += len(blocks)
        if self._sums is not None:
            operation.unchecked = True
            operation.sums = self._sums.record(operation, chunks_of(job, blocks))
        try:
            handle = self._kvcr.deposit(blocks)
        except Exception as error:
            self._on_backend_error(error)
            return
        self._operations[handle] = operation

    def _start_sorted_load(self, job: Job, blocks: Blocks) -> None:
        """Deliver what the pool holds, and have the rest land there.

        KVCR's answer and the delivery belong together: nothing is evicted in between,
        so that a delivery meant to be local cannot become a remote one.
        """
        assert self.landings is not None
        try:
            statuses = self._kvcr.query(list(blocks), request_id=job.request_id)
        except Exception as error:
            self.part_opened(job)
            self._on_backend_error(error)
            return
        local: Blocks = {}
        filed: Blocks = {}
        remote: Blocks = {}
        absent: list[bytes] = []
        for (key, ref), (status, tier) in zip(blocks.items(), statuses, strict=True):
            if status is QueryStatus.FETCHABLE:
                (remote if tier is CacheTier.REMOTE_G2 else filed)[key] = ref
            elif status is QueryStatus.MISS:
                absent.append(key)
            else:
                local[key] = ref
        request_id = job.request_id
        self.part_opened(job)
        if filed:
            self.landings.queue(job, request_id, filed, None)
        if remote and self._peers_land_in_pool:
            endpoint = self._hints.endpoint(request_id)
            self.landings.queue(job, request_id, remote, endpoint)
        elif remote:
            self._deliver(job, remote, request_id)
        if absent:
            self.not_landed(job, absent, Lost.LOAD_FAILED, True)
        if local:
            self._deliver(job, local, request_id)
        self.landings.pump()
        self.part_closed(job)

    # What ``Landings`` calls.

    def part_opened(self, job: Job) -> None:
        job.open_parts += 1

    def part_closed(self, job: Job) -> None:
        job.open_parts -= 1
        self._finish_if_done(job)

    def landed(
        self, job: Job, blocks: Blocks, claims: list[Any], from_peer: bool
    ) -> None:
        # Without the request's id there is no hint, and so no way to a peer.
        self._deliver(job, blocks, None, claims, from_peer)

    def not_landed(
        self, job: Job, keys: list[bytes], reason: Lost, from_peer: bool
    ) -> None:
        """Blocks of a load did not arrive; a peer's absence is no block's fault."""
        job.failed = {*job.failed, *keys}
        self._losses.add(reason, len(keys))
        skip = len(self._prefix)
        for key in keys:
            self._backoff.failed(
                OffloadKey(key[skip:]), job.request_id, everyone=not from_peer
            )

    # --- operations ------------------------------------------------------------------

    def _deliver(
        self,
        job: Job,
        blocks: Blocks,
        request_id: str | None,
        claims: list[Any] | None = None,
        from_peer: bool = False,
    ) -> None:
        operation = self._open(job, blocks, claims, from_peer)
        if claims is None:
            self._loading += len(blocks)
        if self._sums is not None:
            operation.sums = self._sums.expect(blocks)
        try:
            handle = self._kvcr.deliver(blocks, request_id=request_id)
        except Exception as error:
            job.exposed = True
            self._on_backend_error(error)
            return
        self._operations[handle] = operation

    def _open(
        self,
        job: Job,
        blocks: Blocks,
        claims: list[Any] | None = None,
        from_peer: bool = False,
    ) -> Operation:
        job.open_parts += 1
        return Operation(job, blocks, time.monotonic(), claims, from_peer=from_peer)

    def _copy_failed(self, operation: Operation, failed: list[bytes]) -> None:
        job = operation.job
        if not job.is_load:
            job.failed = {*job.failed, *failed}
            self._losses.add(Lost.STORE_FAILED, len(failed))
            now = time.monotonic()
            if now - operation.started_at >= self._limits.operation_timeout_s:
                self._store_timed_out_at = now
            self._store_window = max(1, self._store_window // 2)
            return
        endpoint = self._hints.endpoint(job.request_id)
        lands = self.landings is not None and self._peers_land_in_pool
        direct = endpoint is not None and not lands
        if direct and len(failed) == len(operation.blocks):
            waited = time.monotonic() - operation.started_at
            if waited >= 0.9 * self._limits.operation_timeout_s:
                self._peers.silent(str(endpoint), operation.started_at)
        self.not_landed(job, failed, Lost.LOAD_FAILED, direct or operation.from_peer)

    def _close(self, handle: int, operation: Operation) -> None:
        """An operation is over; a load's blocks are verified before they count."""
        del self._operations[handle]
        job = operation.job
        if operation.claims is not None:
            if self.landings is not None:
                self.landings.release(operation.claims)
        elif job.is_load:
            self._loading -= len(operation.blocks)
        else:
            self._storing -= len(operation.blocks)
            if self._store_window < self._limits.store_window:
                self._store_window += 1
        if self._sums is None:
            self.part_closed(job)
        elif not job.is_load:
            self._sums.stored(operation.sums)
            self._close_store(operation)
        else:
            arrived = [k for k in operation.blocks if k not in job.failed]
            self._sums.verify(operation, operation.sums, chunks_of(job, arrived))

    def _close_store(self, operation: Operation) -> None:
        """Called twice for a store with checksums; the second call ends it."""
        if operation.unchecked:
            operation.unchecked = False
        else:
            self.part_closed(operation.job)

    def _checked(
        self, operation: Operation, corrupt: list[bytes], unverified: list[bytes]
    ) -> None:
        if not operation.job.is_load:
            self._close_store(operation)
            return
        if corrupt:
            self.corrupt += len(corrupt)
            self.not_landed(operation.job, corrupt, Lost.CORRUPT, False)
        if unverified:
            self.not_landed(operation.job, unverified, Lost.UNVERIFIED, False)
        self.part_closed(operation.job)

    # --- results ---------------------------------------------------------------------

    def _finish_if_done(self, job: Job) -> None:
        if job.open_parts or job.cursor < len(job.keys):
            return
        if self._jobs.pop(job.job_id, None) is None:
            return
        failed = job.failed
        arrived: list[OffloadKey] | None = None
        if failed and job.is_load:
            arrived = [key for key in job.keys if self._prefix + key not in failed]
        if job.dropped:
            self._losses.add(Lost.DROPPED, job.dropped)
        # Not for stores: KVCR does not store again what it holds, damaged or not.
        if job.is_load and self._backoff.active:
            self._backoff.succeeded(job.keys if arrived is None else arrived)
        seconds: float | None = None
        moved: int | None = None
        if self._block_bytes is not None:
            seconds = time.monotonic() - job.started_at
            blocks = len(job.keys) - len(failed) - job.dropped
            moved = blocks * self._block_bytes
        self._results.append(
            shims.job_result(
                job.job_id,
                not failed,
                successful_keys=arrived,
                transfer_time=seconds,
                transfer_bytes=moved,
            )
        )

    def _end_failed(self, job: Job) -> None:
        """End a job as failed, whatever is still open of it."""
        if self._jobs.pop(job.job_id, None) is None:
            return
        self._losses.add(Lost.BACKEND_FAILED, len(job.keys))
        self._results.append(
            shims.job_result(
                job.job_id, False, successful_keys=[] if job.is_load else None
            )
        )
