# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Splits vLLM's jobs into KVCR operations.

Operations have a bounded size, and a bounded number of blocks is in flight, loads
before stores. So no job can hold up KVCR's only thread or ask for more than its pool
holds. What becomes of each block goes to ``Results``.

After a failed load vLLM reuses the slots at once, so nothing may write to them later.
Blocks in KVCR's pool are copied into the slots locally. Blocks from a peer or a file
are staged in the pool first. With ``remote_landing: primary`` a peer writes directly
into the slots: while KVCR reports the memory of such an operation as uncertain, its job
does not end.

Failure model: KVCR's exceptions pass through and leave the tables as they were before
the call; ``abandon`` then ends whatever can be ended. Completions that are unknown,
repeated or too large are ignored. Runs on the thread that drives the tier.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Mapping

from kvcr.types import CacheTier, OpEntryResult, OpEntryStatus, QueryStatus

from vllm.v1.kv_offload.tiering.base import TransferJob
from vllm.v1.kv_offload.tiering.kvcr.backend.protocol import KvcrApi
from vllm.v1.kv_offload.tiering.kvcr.compat import shims
from vllm.v1.kv_offload.tiering.kvcr.compat.vocabulary import ENTRIES, Entry
from vllm.v1.kv_offload.tiering.kvcr.peers.hints import Hints
from vllm.v1.kv_offload.tiering.kvcr.peers.liveness import FILES, SILENT_SHARE, Liveness
from vllm.v1.kv_offload.tiering.kvcr.reports.losses import Losses, Lost
from vllm.v1.kv_offload.tiering.kvcr.reports.quarantine import Quarantine
from vllm.v1.kv_offload.tiering.kvcr.reports.traffic import DISK, DRAM, PEER, Traffic
from vllm.v1.kv_offload.tiering.kvcr.transfers.checksums import BlockSums
from vllm.v1.kv_offload.tiering.kvcr.transfers.jobs import (
    Blocks,
    Job,
    Limits,
    Operation,
    chunks_of,
    next_part_fits,
)
from vllm.v1.kv_offload.tiering.kvcr.transfers.results import Results
from vllm.v1.kv_offload.tiering.kvcr.transfers.staging import Missed, Outcome, Staging

# Bound to a name here, since accessing an enum's member costs more than comparing it.
_SUCCESS = OpEntryStatus.SUCCESS
# Small at first, since nobody knows yet how fast KVCR moves blocks to files.
_FIRST_FILED_STORES = 8


class Transfers:
    """The jobs in progress.

    Args:
        prefix: The part of a block key that comes before the offload key.
        block_refs: Describes a chunk of the primary tier to KVCR.
        staging: Where blocks from files and peers land first.
        sums: Checksums, if blocks are to be verified.
    """

    def __init__(
        self,
        kvcr: KvcrApi,
        *,
        prefix: bytes,
        block_refs: Callable[[int], shims.BlockRefs],
        limits: Limits,
        staging: Staging,
        hints: Hints,
        liveness: Liveness,
        quarantine: Quarantine,
        results: Results,
        losses: Losses,
        traffic: Traffic,
        sums: BlockSums | None = None,
    ) -> None:
        self._kvcr = kvcr
        self._prefix = prefix
        self._block_refs = block_refs
        self._refs: dict[int, shims.BlockRefs] = {}
        self._limits = limits
        self._staging = staging
        self._hints = hints
        self._liveness = liveness
        self._quarantine = quarantine
        self._results = results
        self._losses = losses
        self._traffic = traffic
        self._sums = sums
        self._has_files = limits.file_window > 0
        self._stages_peers = limits.stages_peers
        self._operations: dict[int, Operation] = {}
        self._uncertain: dict[int, Operation] = {}
        """Operations that are over, although a peer may still write for them."""
        self._loads: deque[Job] = deque()
        self._stores: deque[Job] = deque()
        self._loading = 0
        self._storing = 0
        # Halved when stores fail, which they do if KVCR makes room more slowly than
        # they need it, and grown when they succeed. With files KVCR frees one block a
        # poll.
        self._store_window = limits.store_window
        if self._has_files:
            self._store_window = min(limits.store_window, _FIRST_FILED_STORES)
        self._store_timed_out_at = -math.inf
        self.corrupt = 0
        """Blocks that were found damaged; the owner reads and resets it."""

    # --- vLLM's side -----------------------------------------------------------------

    def stores_time_out(self) -> bool:
        """Whether a store is past its deadline, or was a short while ago."""
        late = time.monotonic() - self._limits.operation_timeout_s
        return self._store_timed_out_at > late or any(
            not operation.job.is_load and operation.started_at <= late
            for operation in self._operations.values()
        )

    def submit_load(self, job_metadata: TransferJob) -> None:
        self._submit(job_metadata, self._loads, is_load=True)

    def submit_store(self, job_metadata: TransferJob) -> None:
        self._submit(job_metadata, self._stores, is_load=False)

    # --- KVCR's side -----------------------------------------------------------------

    def complete(self, handle: int, entries: Mapping[bytes, OpEntryResult]) -> None:
        """Take the results of some of an operation's blocks."""
        operation = self._operations.get(handle)
        if operation is None:
            for outcome in self._staging.complete(handle, entries):
                self._apply(outcome)
            return
        job = operation.job
        failed: list[bytes] = []
        for key in operation.settle(entries):
            status = entries[key].status
            if status is _SUCCESS:
                continue
            entry = ENTRIES[status]
            if entry is Entry.DROPPED and not job.is_load:
                job.dropped += 1
            elif entry is not Entry.DONE:
                failed.append(key)
        if failed:
            self._copy_failed(operation, failed)
        if not operation.done:
            return
        del self._operations[handle]
        if self._quarantine.may_write(handle):
            self._uncertain[handle] = operation
            self._losses.add(Lost.QUARANTINED, len(operation.blocks))
        else:
            self._close(operation)

    def pump(self) -> None:
        """Start whatever the windows have room for, loads first."""
        if self._sums is not None:
            for checked in self._sums.take_done():
                self._checked(*checked)
        if self._uncertain:
            self._close_quiesced()
        for outcome in self._staging.pump():
            self._apply(outcome)
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

    def abandon(self) -> None:
        """End every job for which native code can no longer write; KVCR is gone.

        A store only reads the primary tier, and nobody will read its copy. A load that
        is being delivered keeps its slots until ``native_stopped``.
        """
        self._loads.clear()
        self._stores.clear()
        self._staging.clear()
        open_operations = (*self._operations.values(), *self._uncertain.values())
        writing = {operation.job.job_id for operation in open_operations}
        for job in self._results.jobs:
            if not (job.is_load and (job.exposed or job.job_id in writing)):
                self._results.fail(job)

    def native_stopped(self) -> None:
        """End the jobs that ``abandon`` left: native code has let go of all buffers."""
        self._operations.clear()
        self._uncertain.clear()
        for job in self._results.jobs:
            self._results.fail(job)

    def close(self) -> None:
        """Stop comparing checksums."""
        if self._sums is not None:
            self._sums.close()

    # --- parts of jobs ---------------------------------------------------------------

    def _submit(
        self, job_metadata: TransferJob, queue: deque[Job], *, is_load: bool
    ) -> None:
        keys = list(job_metadata.keys)
        job = Job(
            job_metadata.job_id,
            is_load,
            keys,
            job_metadata.chunk_ids.tolist(),
            job_metadata.req_context.req_id,
            time.monotonic(),
            len(keys),
        )
        self._results.open(job)
        if not keys:
            self._results.finish(job)
        elif not len(keys) == len(job.chunks) == len(set(keys)):
            # If a key came twice, one of its slots would stay unwritten.
            self._results.fail(job)
        else:
            if self._sums is not None:
                blocks = (self._prefix + key for key in keys)
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
        elif self._has_files or job.request_id in self._hints.requests:
            self._start_sorted_load(job, blocks)
        else:
            self._deliver(Operation(job, blocks, time.monotonic()), job.request_id)

    def _start_store(self, job: Job, blocks: Blocks) -> None:
        fetching = self._staging.fetching
        if fetching and not fetching.isdisjoint(blocks):
            blocks = self._without(job, blocks, fetching)
            if not blocks:
                return
        operation = Operation(job, blocks, time.monotonic())
        self._storing += len(blocks)
        if self._sums is not None:
            operation.unchecked = True
            operation.stored_sums = self._sums.record(operation, chunks_of(job, blocks))
        self._operations[self._kvcr.deposit(blocks)] = operation

    def _without(self, job: Job, blocks: Blocks, fetching: set[bytes]) -> Blocks:
        """Leave out of a store the blocks that KVCR is fetching.

        KVCR would end the store only with the fetch, which can hang until its timeout.
        """
        skipped = fetching.intersection(blocks)
        job.skipped += len(skipped)
        lost = len(skipped & self._staging.unawaited)
        if lost:
            self._losses.add(Lost.UNAWAITED, lost)
        self._results.settle(job, len(skipped))
        return {key: ref for key, ref in blocks.items() if key not in skipped}

    def _start_sorted_load(self, job: Job, blocks: Blocks) -> None:
        """Deliver the blocks that are in the pool, and have the others staged there.

        Nothing is evicted between KVCR's answer and the delivery, so that a delivery
        that is meant to be local cannot become a remote one.
        """
        statuses = self._kvcr.query(list(blocks), request_id=job.request_id)
        local: Blocks = {}
        filed: Blocks = {}
        remote: Blocks = {}
        gone: list[bytes] = []
        for (key, ref), (status, tier) in zip(blocks.items(), statuses, strict=True):
            if status is QueryStatus.FETCHABLE:
                (remote if tier is CacheTier.REMOTE_G2 else filed)[key] = ref
            elif status is QueryStatus.HIT:
                local[key] = ref
            else:  # evicted, or being fetched again, for which a load does not wait
                gone.append(key)
        endpoint = self._hints.endpoint(job.request_id)
        now = time.monotonic()
        if filed:
            self._staging.stage(job, filed, FILES)
        if remote and endpoint is not None and self._stages_peers:
            self._staging.stage(job, remote, endpoint)
        elif remote:
            self._deliver(Operation(job, remote, now, endpoint), job.request_id)
        if local:
            self._deliver(Operation(job, local, now), job.request_id)
        if gone:
            self._results.missed(job, gone, Lost.GONE, None)
        if filed or remote:
            for outcome in self._staging.pump():
                self._apply(outcome)

    def _apply(self, outcome: Outcome) -> None:
        """Copy blocks that have landed to the primary tier; note those that did not."""
        job, source = outcome.job, outcome.source
        if isinstance(outcome, Missed):
            self._results.missed(job, outcome.keys, outcome.reason, source)
            return
        now = time.monotonic()
        # Without the request's id KVCR sees no hint, so it asks no peer.
        self._deliver(Operation(job, outcome.blocks, now, source, outcome.claims), None)

    # --- operations ------------------------------------------------------------------

    def _deliver(self, operation: Operation, request_id: str | None) -> None:
        job = operation.job
        if operation.claims is None:
            self._loading += len(operation.blocks)
        if self._sums is not None:
            operation.expected_copies = self._sums.expect(operation.blocks)
        already = job.exposed
        job.exposed = True
        handle = self._kvcr.deliver(operation.blocks, request_id=request_id)
        job.exposed = already
        self._operations[handle] = operation

    def _copy_failed(self, operation: Operation, failed: list[bytes]) -> None:
        job = operation.job
        if not job.is_load:
            job.failed.update(failed)
            self._losses.add(Lost.STORE_FAILED, len(failed))
            now = time.monotonic()
            if now - operation.started_at >= self._limits.operation_timeout_s:
                self._store_timed_out_at = now
            self._store_window = max(1, self._store_window // 2)
            return
        source = operation.source
        if source is not None and operation.claims is None:
            # A peer should have written directly into the primary tier.
            waited = time.monotonic() - operation.started_at
            if (
                len(failed) == len(operation.blocks)
                and waited >= SILENT_SHARE * self._limits.operation_timeout_s
            ):
                self._liveness.silent(source, operation.started_at)
        self._results.lost(job, failed, Lost.LOAD_FAILED, source)

    def _close_quiesced(self) -> None:
        for handle, operation in list(self._uncertain.items()):
            if not self._quarantine.may_write(handle):
                del self._uncertain[handle]
                self._close(operation)

    def _close(self, operation: Operation) -> None:
        """End an operation. A load's blocks are verified before they count."""
        job = operation.job
        if operation.claims is not None:
            self._staging.release(operation.source or FILES, operation.claims)
        elif job.is_load:
            self._loading -= len(operation.blocks)
            if operation.source is not None and not job.failed.issuperset(
                operation.blocks
            ):
                self._liveness.heard(operation.source)
        else:
            self._storing -= len(operation.blocks)
            if self._store_window < self._limits.store_window:
                self._store_window += 1
        if self._sums is None:
            self._close_checked(operation)
        elif not job.is_load:
            self._sums.stored(operation.stored_sums or {})
            self._close_store(operation)
        else:
            arrived = [key for key in operation.blocks if key not in job.failed]
            expected = operation.expected_copies or {}
            self._sums.verify(operation, expected, chunks_of(job, arrived))

    def _close_store(self, operation: Operation) -> None:
        """End a store; one with checksums ends at the second call."""
        if operation.unchecked:
            operation.unchecked = False
        else:
            self._results.settle(operation.job, len(operation.blocks))

    def _checked(
        self, operation: Operation, corrupt: list[bytes], unverified: list[bytes]
    ) -> None:
        job = operation.job
        if not job.is_load:
            self._close_store(operation)
            return
        if corrupt:
            self.corrupt += len(corrupt)
            self._results.lost(job, corrupt, Lost.CORRUPT, None)
        if unverified:
            self._results.lost(job, unverified, Lost.UNVERIFIED, None)
        self._close_checked(operation)

    def _close_checked(self, operation: Operation) -> None:
        job, blocks = operation.job, len(operation.blocks)
        if job.is_load:
            arrived = blocks
            if job.failed:
                arrived -= len(job.failed.intersection(operation.blocks))
            source = operation.source
            place = DRAM if source is None else DISK if source is FILES else PEER
            self._traffic.loaded(place, arrived, time.monotonic() - job.started_at)
        self._results.settle(job, blocks)
