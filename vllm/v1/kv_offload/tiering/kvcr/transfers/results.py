# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Collects what became of each job's blocks, and makes one result of it.

A job ends exactly once, with the last of its blocks. Runs on the thread that drives the
tier; only ``take`` may meet the closing thread.
"""

import time
from collections import deque
from collections.abc import Sequence

from vllm.v1.kv_offload.base import OffloadKey
from vllm.v1.kv_offload.tiering.base import JobId, JobResult, TransferJob
from vllm.v1.kv_offload.tiering.kvcr.compat import shims
from vllm.v1.kv_offload.tiering.kvcr.peers.liveness import FILES
from vllm.v1.kv_offload.tiering.kvcr.reports.losses import Losses, Lost
from vllm.v1.kv_offload.tiering.kvcr.reports.traffic import DRAM, LOAD, STORE, Traffic
from vllm.v1.kv_offload.tiering.kvcr.transfers.backoff import Backoff
from vllm.v1.kv_offload.tiering.kvcr.transfers.jobs import Job

_BLAMED = frozenset({Lost.LOAD_FAILED, Lost.CORRUPT, Lost.UNVERIFIED})
"""Losses that are the block's own fault, unless a peer was to deliver it."""


class Results:
    """The jobs without a result, and the results that vLLM has not taken.

    Args:
        prefix: The part of a block key that comes before the offload key.
        block_bytes: Bytes of one block, if results are to carry times and sizes.
    """

    def __init__(
        self,
        *,
        prefix: bytes,
        backoff: Backoff,
        losses: Losses,
        traffic: Traffic,
        block_bytes: int | None,
    ) -> None:
        self._prefix = prefix
        self._backoff = backoff
        self._losses = losses
        self._traffic = traffic
        self._block_bytes = block_bytes
        self._jobs: dict[JobId, Job] = {}
        self._results: deque[JobResult] = deque()

    def __bool__(self) -> bool:
        """Whether there are results to take."""
        return bool(self._results)

    @property
    def outstanding(self) -> int:
        """Jobs without a result."""
        return len(self._jobs)

    @property
    def jobs(self) -> list[Job]:
        """The jobs without a result."""
        return list(self._jobs.values())

    def knows(self, job_id: JobId) -> bool:
        """Whether a job has, or will get, its one result."""
        return job_id in self._jobs or any(
            result.job_id == job_id for result in self._results
        )

    def take(self) -> Sequence[JobResult]:
        if not self._results:
            return ()
        # One at a time, because the closing thread may add to them.
        return [self._results.popleft() for _ in range(len(self._results))]

    # --- one job ---------------------------------------------------------------------

    def open(self, job: Job) -> None:
        """Expect ``job.unsettled`` blocks of a job."""
        self._jobs[job.job_id] = job
        self._traffic.requested[LOAD if job.is_load else STORE] += len(job.keys)

    def answer(self, job_metadata: TransferJob, *, success: bool) -> None:
        """End a job that was never opened."""
        failed_load = job_metadata.is_promotion and not success
        self._results.append(
            shims.job_result(
                job_metadata.job_id,
                success,
                successful_keys=set() if failed_load else None,
                transfer_bytes=0,
            )
        )

    def lost(
        self, job: Job, keys: list[bytes], reason: Lost, source: str | None
    ) -> None:
        """Note blocks that failed, for this request or, if it is their fault, for all.

        It is not a block's fault if it was evicted, or if its source does not answer.
        """
        job.failed.update(keys)
        self._losses.add(reason, len(keys))
        everyone = reason in _BLAMED and source in (None, FILES)
        skip = len(self._prefix)
        self._backoff.failed(
            [OffloadKey(key[skip:]) for key in keys], job.request_id, everyone=everyone
        )

    def missed(
        self, job: Job, keys: list[bytes], reason: Lost, source: str | None
    ) -> None:
        """Note blocks of a load that will not arrive."""
        self.lost(job, keys, reason, source)
        self.settle(job, len(keys))

    def settle(self, job: Job, blocks: int) -> None:
        """Note that nothing more will happen to some blocks; the last end the job."""
        job.unsettled -= blocks
        if job.unsettled <= 0:
            self.finish(job)

    def finish(self, job: Job) -> None:
        if self._jobs.pop(job.job_id, None) is None:
            return
        failed = job.failed
        arrived: set[OffloadKey] | None = None
        if failed and job.is_load:
            arrived = {key for key in job.keys if self._prefix + key not in failed}
        if job.dropped:
            self._losses.add(Lost.DROPPED, job.dropped)
        # Not for stores: KVCR keeps the copy that it has, even a damaged one.
        if job.is_load and self._backoff.active:
            self._backoff.forget(job.keys if arrived is None else arrived)
        seconds: float | None = None
        moved: int | None = None
        blocks = len(job.keys) - len(failed) - job.dropped - job.skipped
        if blocks and not job.is_load:
            self._traffic.moved[STORE, DRAM] += blocks
        if self._block_bytes is not None:
            seconds = time.monotonic() - job.started_at
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

    def fail(self, job: Job) -> None:
        """End a job as failed, even if some of its blocks are still in progress."""
        if self._jobs.pop(job.job_id, None) is None:
            return
        self._losses.add(Lost.BACKEND_FAILED, len(job.keys))
        self._results.append(
            shims.job_result(
                job.job_id, False, successful_keys=set() if job.is_load else None
            )
        )
