# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A small engine around one real tier: what vLLM's manager does, and is strict about.

It owns the primary tier's memory, hands out slots and jobs, and holds the tier to its
contract at each call: a result belongs to a job that has none yet, a block that counts
as loaded has the right bytes, a pinned slot is left alone. Calls are timed, because an
engine stands still while a tier works on its thread.

Driven by one thread. Nothing here is KVCR's: the tier underneath is the real one.
"""

import mmap
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tests.v1.kv_offload.tiering.kvcr.builders import make_hint, make_spec, request
from tests.v1.kv_offload.tiering.kvcr.faults.harness import blocks
from tests.v1.kv_offload.tiering.kvcr.faults.harness.probe import Probe
from vllm.v1.kv_offload.base import (
    LookupResult,
    OffloadKey,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
)
from vllm.v1.kv_offload.tiering.base import JobResult, ParentManager, TransferJob
from vllm.v1.kv_offload.tiering.kvcr import manager as tier_module

Keys = Sequence[OffloadKey]
Slots = Sequence[int]

MIB = 1 << 20
STEP_S = 0.0005
NO_REQUESTS = ScheduleEndContext(new_req_ids=(), preempted_req_ids=())


@dataclass
class Job:
    """A job handed to the tier, and what became of it."""

    job_id: int
    keys: list[OffloadKey]
    chunks: list[int]
    is_load: bool
    result: JobResult | None = None

    @property
    def succeeded(self) -> bool:
        return self.result is not None and self.result.success

    @property
    def arrived(self) -> list[OffloadKey]:
        """The keys of a load that hold their blocks now."""
        if self.result is None:
            return []
        if self.result.success:
            return self.keys
        arrived = self.result.successful_keys or ()
        return [key for key in self.keys if key in arrived]

    def chunks_of(self, keys: Collection[OffloadKey]) -> list[int]:
        wanted = set(keys)
        return [c for k, c in zip(self.keys, self.chunks, strict=True) if k in wanted]

    @property
    def failed_chunks(self) -> list[int]:
        return self.chunks_of(set(self.keys).difference(self.arrived))


@dataclass
class SlowCall:
    """The slowest call of one of the tier's methods."""

    seconds: float = 0.0
    cpu_seconds: float = 0.0


class Steps:
    """What is run by steps of the scheduler."""

    def step(self) -> None:
        raise NotImplementedError

    def run_until(
        self, done: Callable[[], bool], timeout_s: float = 30.0, what: str = "it"
    ) -> float:
        """Step until ``done()``; seconds that took."""
        started = time.monotonic()
        while not done():
            waited = time.monotonic() - started
            assert waited < timeout_s, f"no end of {what} after {waited:.1f} s"
            self.step()
            time.sleep(STEP_S)
        return time.monotonic() - started

    def run_for(self, seconds: float) -> None:
        """Step for a while."""
        until = time.monotonic() + seconds
        self.run_until(lambda: time.monotonic() >= until, seconds + 60)


@dataclass
class Engine(Steps, ParentManager):
    """See above.

    Args:
        options: The tier's options.
        rows: Slots of the primary tier.
        row_bytes: Bytes of a slot.
        spec: vLLM's spec; by default one without a model.
        writer: What this engine's model writes under a key.
    """

    options: dict[str, Any]
    rows: int = 64
    row_bytes: int = MIB
    spec: Any = None
    writer: str = "model"
    jobs: dict[int, Job] = field(default_factory=dict)
    primary: dict[OffloadKey, int] = field(default_factory=dict)
    """Blocks in the primary tier: what peers are served from."""
    pinned: Counter[int] = field(default_factory=Counter)
    slowest: dict[str, SlowCall] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    """Blocks that were reported as loaded and are not."""
    all_pending: bool = False
    """Say of each block in the primary tier that it is on its way there."""
    written_off: set[int] = field(default_factory=set)
    """Jobs whose slots can never be had again, as a test has found right."""
    strangers: bool = False
    """Peers have to be introduced first; else the first pull is like any other."""
    parent_faults: dict[str, Callable[[], None]] = field(default_factory=dict)
    """What goes wrong in calls of ``ParentManager``, by their names."""

    def __post_init__(self) -> None:
        # Pages, as vLLM's own: direct I/O to any other address is refused.
        pages = mmap.mmap(-1, self.rows * self.row_bytes)
        whole: np.ndarray = np.frombuffer(pages, dtype=np.uint8)
        self.memory = whole.reshape(self.rows, self.row_bytes)
        self.memory.fill(1)  # backed by real pages from the start
        self._view = memoryview(self.memory)
        self._next_job_id = 0
        self.tier = tier_module.KVCRSecondaryTierManager(
            self.spec or make_spec(), self._view, "kvcr", None, **self.options
        )
        self.probe = Probe(self.tier)

    # --- what vLLM does with a tier --------------------------------------------------

    def begin(self, request_id: str, hint: object | None = None) -> ReqContext:
        context = request(request_id, hint)
        if not self.strangers:
            self.probe.know(hint)
        self.call("on_new_request", context)
        return context

    def lookup_all(self, keys: Keys, context: ReqContext) -> list[LookupResult]:
        return [self.call("lookup", key, context) for key in keys]

    def end(self, context: ReqContext) -> None:
        self.call("on_request_finished", context)

    def store(self, keys: Keys, chunks: Slots, *, writer: str | None = None) -> Job:
        """Compute blocks into slots, and cascade them to the tier."""
        self.write(keys, chunks, writer=writer)
        job = self._new_job(keys, chunks, is_load=False)
        self.pinned.update(job.chunks)
        self.call("submit_store", self._describe(job, request("store")))
        return job

    def load(self, keys: Keys, chunks: Slots, context: ReqContext | None = None) -> Job:
        """Have blocks promoted into slots."""
        taken = set(self.primary.values()).intersection(chunks)
        assert not taken, f"slots {taken} hold blocks that peers are served from"
        assert not any(self.pinned[chunk] for chunk in chunks)
        job = self._new_job(keys, chunks, is_load=True)
        self.pinned.update(job.chunks)
        context = context or request(f"load-{job.job_id}")
        self.call("submit_load", self._describe(job, context))
        return job

    def pull(self, port: int, keys: Keys, chunks: Slots, name: str = "pull") -> Job:
        """Run a request that is hinted at the engine on ``port``, to its end."""
        job, context = self.begin_pull(port, keys, chunks, name)
        self.finish(job)
        self.end(context)
        return job

    def begin_pull(
        self, port: int, keys: Keys, chunks: Slots, name: str
    ) -> tuple[Job, ReqContext]:
        """As ``pull``, up to its load."""
        context = self.begin(name, make_hint(port, keys))
        assert set(self.lookup_all(keys, context)) == {LookupResult.HIT}
        return self.load(keys, chunks, context), context

    def step(self) -> None:
        """One step of the scheduler."""
        self._take_results()
        self.call("serve_external_requests", self)
        self.call("on_schedule_end", NO_REQUESTS)

    def finish(self, *jobs: Job, timeout_s: float = 30.0) -> float:
        """Step until ``jobs`` have their results; seconds that took."""
        return self.run_until(
            lambda: all(job.result is not None for job in jobs), timeout_s, "jobs"
        )

    def drain(self) -> None:
        self.call("drain_jobs")
        self._take_results()

    def close(self) -> None:
        """Shut the tier down, and check that no job was forgotten."""
        self.call("shutdown")
        self._take_results()

    @property
    def unanswered(self) -> list[int]:
        """Jobs that should have a result, and have none."""
        return [
            job.job_id
            for job in self.jobs.values()
            if job.result is None and job.job_id not in self.written_off
        ]

    # --- memory ----------------------------------------------------------------------

    def write(self, keys: Keys, chunks: Slots, *, writer: str | None = None) -> None:
        """Put blocks into slots, as the GPU does."""
        for key, chunk in zip(keys, chunks, strict=True):
            assert not self.pinned[chunk], f"slot {chunk} is in use by a job"
            blocks.fill(self.memory[chunk], key, writer or self.writer)

    def hold(self, keys: Keys, first_chunk: int = 0) -> None:
        """Have blocks in the primary tier, for peers."""
        chunks = range(first_chunk, first_chunk + len(keys))
        self.write(keys, list(chunks))
        self.primary.update(zip(keys, chunks, strict=True))

    def wrong_blocks(
        self, keys: Keys, chunks: Slots, *, writer: str | None = None
    ) -> list[int]:
        """The slots whose bytes are not those of the key."""
        writer = writer or self.writer
        return [
            chunk
            for key, chunk in zip(keys, chunks, strict=True)
            if blocks.wrong_words(self.memory[chunk], key, writer)
        ]

    # --- ParentManager: what peers are served from ----------------------------------

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        self._fault("on_new_request")
        return RequestOffloadingContext()

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        self._fault("lookup")
        if key not in self.primary:
            return LookupResult.MISS
        return LookupResult.HIT_PENDING if self.all_pending else LookupResult.HIT

    def create_store_job(
        self, keys: Collection[OffloadKey], req_context: ReqContext
    ) -> TransferJob:
        self._fault("create_store_job")
        chunks = [self.primary[key] for key in keys]
        job = self._new_job(list(keys), chunks, is_load=False)
        self.pinned.update(job.chunks)
        return self._describe(job, req_context)

    def on_request_finished(self, req_context: ReqContext) -> None:
        self._fault("on_request_finished")

    # --- inside ----------------------------------------------------------------------

    def call(self, method: str, *arguments: Any) -> Any:
        """Call the tier, timed. An exception out of it fails the test."""
        started, cpu = time.monotonic(), time.thread_time()
        result = getattr(self.tier, method)(*arguments)
        seconds = time.monotonic() - started
        slowest = self.slowest.setdefault(method, SlowCall())
        if seconds > slowest.seconds:
            slowest.seconds = seconds
            slowest.cpu_seconds = time.thread_time() - cpu
        return result

    def _fault(self, name: str) -> None:
        if name in self.parent_faults:
            self.parent_faults[name]()

    def _new_job(self, keys: Keys, chunks: Slots, *, is_load: bool) -> Job:
        self._next_job_id += 1
        job = Job(self._next_job_id, list(keys), list(chunks), is_load)
        self.jobs[job.job_id] = job
        return job

    def _describe(self, job: Job, context: ReqContext) -> TransferJob:
        return TransferJob(
            job_id=job.job_id,
            keys=job.keys,
            chunk_ids=np.array(job.chunks, dtype=np.int32),
            is_promotion=job.is_load,
            req_context=context,
        )

    def _take_results(self) -> None:
        for result in self.call("get_finished_jobs"):
            job = self.jobs.get(result.job_id)
            assert job is not None, f"result of unknown job {result.job_id}"
            assert job.result is None, f"second result of job {result.job_id}"
            job.result = result
            self.pinned.subtract(job.chunks)
            if job.is_load:
                arrived = job.arrived
                assert set(arrived) <= set(job.keys)
                for chunk in self.wrong_blocks(arrived, job.chunks_of(arrived)):
                    self.wrong.append(f"job {job.job_id}, slot {chunk}")
