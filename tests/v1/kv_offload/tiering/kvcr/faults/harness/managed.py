# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A tier below vLLM's own offloading manager, and requests as its scheduler runs them.

``Engine`` is exact about slots and single calls. Here vLLM decides about both: what
is promoted and evicted, when a request waits, and what an exception would have killed.
"""

import time
import uuid
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tests.v1.kv_offload.tiering.kvcr.builders import make_spec, request
from tests.v1.kv_offload.tiering.kvcr.faults.harness import blocks
from tests.v1.kv_offload.tiering.kvcr.faults.harness.engine import (
    MIB,
    NO_REQUESTS,
    STEP_S,
    Keys,
    Steps,
)
from tests.v1.kv_offload.tiering.kvcr.faults.harness.probe import Probe
from vllm.v1.kv_offload.base import LookupResult, ReqContext
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.kvcr import manager as tier_module
from vllm.v1.kv_offload.tiering.manager import (
    CPUPrimaryTierOffloadingManager,
    TieringOffloadingManager,
)

WRITER = "model"
_PENDING = (LookupResult.HIT_PENDING, LookupResult.RETRY)


@dataclass
class Request:
    """A request under way: a prompt's blocks, in order."""

    context: ReqContext
    keys: Keys
    started_at: float = field(default_factory=time.monotonic)
    hits: int | None = None
    """Blocks that need not be computed, once that is known."""
    seconds: float = 0.0
    """From its arrival to knowing that."""
    steps: int = 0


class ManagedEngine(Steps):
    """See above; the arguments are those of ``Engine``."""

    def __init__(
        self, options: dict[str, Any], rows: int = 32, row_bytes: int = MIB
    ) -> None:
        self.options = options
        self.wrong: list[str] = []
        self.strangers = False
        self.load_jobs: Counter[str] = Counter()
        region = SharedOffloadRegion(
            engine_id=f"faults-{uuid.uuid4().hex}",
            num_chunks=rows,
            rank=None,
            kv_bytes_per_chunk=row_bytes,
            cpu_page_size=row_bytes,
            # The file in /dev/shm is unlinked at once, however this process ends.
            barrier=lambda: None,
        )
        self.primary = CPUPrimaryTierOffloadingManager(rows, region)
        view = self.primary.get_kv_memoryview()
        self.memory = np.asarray(view).view(np.uint8)
        self.tier = tier_module.KVCRSecondaryTierManager(
            make_spec(), view, "kvcr", None, **options
        )
        self.probe = Probe(self.tier)
        self.manager = TieringOffloadingManager(self.primary, [self.tier])
        self._count_loads()

    def begin(self, name: str, keys: Keys, hint: object | None = None) -> Request:
        context = request(name, hint)
        if not self.strangers:
            self.probe.know(hint)
        self.manager.on_new_request(context)
        return Request(context, keys)

    def step(self, *requests: Request) -> None:
        """One step of the scheduler, in which these requests wait to be scheduled."""
        for waiting in requests:
            if waiting.hits is None:
                self._look_up(waiting)
        self.manager.on_schedule_end(NO_REQUESTS)

    def wait_for(self, *requests: Request) -> None:
        """Step until it is known what these requests need not compute."""
        deadline = time.monotonic() + 30.0
        while any(waiting.hits is None for waiting in requests):
            assert time.monotonic() < deadline, "a request was never answered"
            self.step(*requests)
            time.sleep(STEP_S)

    def serve(self, *requests: Request) -> None:
        """Run requests to their end: load what is there, compute the rest."""
        self.wait_for(*requests)
        for served in requests:
            assert served.hits is not None
            self.compute(served.keys[served.hits :], served.context)
            self.manager.on_request_finished(served.context)

    def run(self, name: str, keys: Keys, hint: object | None = None) -> Request:
        """One request by itself."""
        served = self.begin(name, keys, hint)
        self.serve(served)
        return served

    def settle(self) -> None:
        """Step until nothing is under way between the tiers."""
        self.run_until(lambda: not self.manager._jobs, what="jobs")

    def read(self, keys: Keys, context: ReqContext) -> None:
        """Copy blocks to the GPU, so to say: look at every byte."""
        if not keys:
            return
        spec = self.manager.prepare_load(keys, context)
        for key, chunk in zip(keys, spec.chunk_ids.tolist(), strict=True):
            if blocks.wrong_words(self.memory[chunk], key, WRITER):
                self.wrong.append(f"{context.req_id}, slot {chunk}")
        self.manager.complete_load(keys, context)

    def compute(self, keys: Keys, context: ReqContext) -> None:
        """Have the model compute blocks, and offload what finds room."""
        if not keys:
            return
        output = self.manager.prepare_store(keys, context)
        if output is None or not output.keys_to_store:
            return
        chunks = output.store_spec.chunk_ids.tolist()
        for key, chunk in zip(output.keys_to_store, chunks, strict=True):
            blocks.fill(self.memory[chunk], key, WRITER)
        self.manager.complete_store(output.keys_to_store, context)

    def resident(self, keys: Keys) -> int:
        """How many of these the primary tier holds."""
        context = request("resident")
        answers = [self.primary.lookup(key, context) for key in keys]
        return answers.count(LookupResult.HIT)

    def close(self) -> None:
        self.memory = np.empty((0, 0), dtype=np.uint8)
        self.manager.shutdown()

    def _look_up(self, waiting: Request) -> None:
        waiting.steps += 1
        hits = 0
        pending = False
        for key in waiting.keys:
            result = self.manager.lookup(key, waiting.context)
            if result is LookupResult.MISS:
                break
            pending = pending or result in _PENDING
            hits += 1
        if not pending:
            # At once, as vLLM does: the next request's lookups may evict them.
            self.read(waiting.keys[:hits], waiting.context)
            waiting.hits = hits
            waiting.seconds = time.monotonic() - waiting.started_at

    def _count_loads(self) -> None:
        submit_load = self.tier.submit_load

        def counted(job: Any) -> None:
            self.load_jobs[job.req_context.req_id] += 1
            submit_load(job)

        self.tier.submit_load = counted  # type: ignore[method-assign]
