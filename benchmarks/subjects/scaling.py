# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What calls cost with a large pool, and what each unit of a large call costs.

The first is measured on the real KVCR. Storing millions of blocks would take minutes,
so its pool is filled as KVCR fills it when it takes over one that outlived an engine.
The second is measured over a stand-in for KVCR, so that only the tier counts.
"""

import gc
import importlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from kvcr import core, local_dram, policy_runtime
from kvcr.types import CacheTier, InventoryEvent, OpEntryResult, OpEntryStatus

from benchmarks.harness.contenders import PATIENT, ours
from benchmarks.subjects.flat import NoChannel, StillKvcr
from benchmarks.subjects.memory import Keys, Primary, key_of
from benchmarks.subjects.movers import TierMover
from benchmarks.subjects.requests import Parent, hinted_request
from benchmarks.subjects.spec import KVCR_TIER_MODULE, make_tier
from vllm.v1.kv_offload.base import OffloadKey, ReqContext, ScheduleEndContext
from vllm.v1.kv_offload.tiering.base import TransferJob

ROW_BYTES = 64
ROWS = 1024
LONG_PREFIX = 4096
_FIRST_FILLER = 1 << 40
_MOST_RECORDS = 200_000
_ENDPOINT = "tcp://127.0.0.1:9"
_STEP_S = 0.001
_DEADLINE_S = 30.0


class LargePool:
    """A tier over the real KVCR whose pool of ``slots`` is nearly full."""

    def __init__(self, slots: int, policy: str | None) -> None:
        options = ours(**PATIENT, secondary_g2_slots=slots, enable_telemetry=True)
        if policy is not None:
            options["policy"] = policy
        self._primary = Primary(ROWS, ROW_BYTES)
        self._mover = TierMover(self._primary, options)
        self._tier: Any = self._mover.tier
        self._kvcr = self._tier._kvcr
        gc.disable()
        self._fill(slots - ROWS)
        self._resident = Keys().fresh(ROWS)
        # Twice, since half as many blocks are reported as were stored.
        self._run(self._resident, load=False)
        self._run(self._resident, load=False)
        self._turn = 0
        gc.freeze()
        gc.enable()

    def touches(self, repetitions: int) -> list[float]:
        """Seconds of one call with a long prefix, each time of another request."""
        found = []
        for _ in range(repetitions):
            first = self._turn * 128 % ROWS
            self._turn += 1
            own = self._resident[first:] + self._resident[:first]
            prefix = own + [key_of(-n % (1 << 40)) for n in range(1, LONG_PREFIX)]
            used = prefix[:LONG_PREFIX]
            context = ReqContext("request")
            started = time.thread_time()
            self._tier.touch(used, context)
            found.append(time.thread_time() - started)
        return found

    def unbounded(self, repetitions: int) -> list[float]:
        """The same if each of the resident keys were passed on to KVCR."""
        prefix = self._tier._prefix
        found = []
        for _ in range(repetitions):
            started = time.thread_time()
            self._kvcr.align_sequence([prefix + key for key in self._resident], True)
            found.append(time.thread_time() - started)
        return found

    def calls(self, repetitions: int) -> dict[str, list[float]]:
        """Seconds by what was called."""
        tier, context = self._tier, ReqContext("request")
        absent = [key_of((1 << 39) + n) for n in range(ROWS)]
        idle = ScheduleEndContext(new_req_ids=(), preempted_req_ids=())

        def look_up(keys: Sequence[OffloadKey]) -> None:
            for key in keys:
                tier.lookup(key, context)

        def step() -> None:
            list(tier.get_finished_jobs())
            tier.serve_external_requests(None)
            tier.on_schedule_end(idle)
            list(tier.take_events())
            tier.has_pending_work()

        kinds: dict[str, tuple[int, Callable[[], object]]] = {
            "lookup, hit": (ROWS, lambda: look_up(self._resident)),
            "lookup, miss": (ROWS, lambda: look_up(absent)),
            "an idle step": (1, step),
            "get_stats": (1, tier.get_stats),
            "a block of a load": (ROWS, lambda: self._run(self._resident, load=True)),
        }
        found: dict[str, list[float]] = {name: [] for name in kinds}
        for _ in range(repetitions):
            for name, (units, call) in kinds.items():
                started = time.thread_time()
                call()
                found[name].append((time.thread_time() - started) / units)
        return found

    def close(self) -> None:
        self._mover.close()

    def _run(self, keys: Sequence[OffloadKey], *, load: bool) -> None:
        self._mover.submit(self._mover.prepare(keys, range(ROWS), load))
        deadline = time.monotonic() + _DEADLINE_S
        while not self._mover.poll():
            if time.monotonic() > deadline:
                raise TimeoutError("a job did not end")
            time.sleep(_STEP_S)

    def _fill(self, blocks: int) -> None:
        inside = self._kvcr._core
        records = {}
        for slot in range(blocks if blocks <= _MOST_RECORDS else 0):
            residency = local_dram._LocalDramResidency(
                slots=[("", slot)], state=local_dram._LocalDramState.READY
            )
            key = b"%d" % (_FIRST_FILLER + slot)
            records[key] = core._BlockRecord(local_dram=residency)
        inside.adopt_recovery_records(records)
        # A record takes more memory than this needs: of the largest pool only the
        # queue in which KVCR orders what to evict, which is what grows.
        queue = inside._local_dram._evictable
        for number in range(len(records), blocks):
            key = b"%d" % (_FIRST_FILLER + number)
            sequence = queue._next_sequence
            queue._next_sequence += 1
            queue._live[key] = policy_runtime._Entry(0.0, sequence)
            queue._heap.append((0.0, sequence, key))


class _Still(StillKvcr):
    def get_stats(self) -> None: ...

    def end_all(self, status: OpEntryStatus) -> None:
        while self.under_way:
            handle, keys = self.under_way.popleft()
            result = OpEntryResult(status=status)
            self.ended.append((handle, dict.fromkeys(keys, result)))


class LargeCalls:
    """A tier over a stand-in for KVCR, and calls of any size."""

    def __init__(self) -> None:
        manager: Any = importlib.import_module(KVCR_TIER_MODULE)
        manager.KVCR = _Still
        manager.ZmqPeerControlChannel = NoChannel
        self._primary = Primary(ROWS, ROW_BYTES)

    def measure(self, kind: str, units: int, repetitions: int) -> list[float]:
        """Seconds for each of the units of one call."""
        found = []
        for _ in range(repetitions):
            tier: Any = make_tier(
                self._primary.view,
                {
                    "type": "kvcr",
                    "secondary_g2_slots": ROWS,
                    "control_ports": 9,
                    "control_advertise_host": "127.0.0.1",
                    "enable_telemetry": True,
                },
            )
            call = getattr(self, f"_{kind}")(tier, StillKvcr.made.pop(), units)
            gc.collect()
            started = time.thread_time()
            call()
            found.append((time.thread_time() - started) / units)
        return found

    def close(self) -> None:
        return

    def _jobs(self, tier: Any, kvcr: Any, units: int, load: bool, failing: bool) -> Any:
        keys = [key_of(number) for number in range(units)]
        chunks = np.arange(units, dtype=np.int32) % ROWS
        job = TransferJob(1, keys, chunks, load, ReqContext("request"))
        status = OpEntryStatus.FAILED if failing else OpEntryStatus.SUCCESS

        def call() -> None:
            (tier.submit_load if load else tier.submit_store)(job)
            results: list[Any] = []
            while not results:
                kvcr.end_all(status)
                results = list(tier.get_finished_jobs())
            if results[0].success is failing:
                raise AssertionError(f"unexpected: {results[0].success}")

        return call

    def _store(self, tier: Any, kvcr: Any, units: int) -> Any:
        return self._jobs(tier, kvcr, units, load=False, failing=False)

    def _load(self, tier: Any, kvcr: Any, units: int) -> Any:
        return self._jobs(tier, kvcr, units, load=True, failing=False)

    def _failing_load(self, tier: Any, kvcr: Any, units: int) -> Any:
        return self._jobs(tier, kvcr, units, load=True, failing=True)

    def _hint(self, tier: Any, kvcr: Any, units: int) -> Any:
        keys = [key_of(number) for number in range(units)]
        context = hinted_request("request", _ENDPOINT, keys)

        def call() -> None:
            tier.on_new_request(context)
            tier.on_request_finished(context)

        return call

    def _requests(self, tier: Any, kvcr: Any, units: int) -> Any:
        contexts = [
            hinted_request(f"request-{n}", _ENDPOINT, [key_of(n)]) for n in range(units)
        ]

        def call() -> None:
            for context in contexts:
                tier.on_new_request(context)
            for context in contexts:
                tier.on_request_finished(context)

        return call

    def _events(self, tier: Any, kvcr: Any, units: int) -> Any:
        prefix = tier._prefix
        events = [
            InventoryEvent((prefix + key_of(n),), CacheTier.LOCAL_G2, False)
            for n in range(units)
        ]

        def call() -> None:
            for event in events:
                tier._inventory.report(event)
            if len(list(tier.take_events())) != units:
                raise AssertionError("an event is missing")

        return call

    def _pins(self, tier: Any, kvcr: Any, units: int) -> Any:
        parent, prefix = Parent(ROWS), tier._prefix

        def call() -> None:
            for number in range(units):
                kvcr.bindings.request_pin([prefix + key_of(number)])
            while len(kvcr.pinned) < units:
                tier.serve_external_requests(parent)
            while kvcr.pinned:
                kvcr.bindings.release_pin(kvcr.pinned.popleft())
            if len(list(tier.get_finished_jobs())) != units:
                raise AssertionError("a pin's job did not end")

        return call

    def _step(self, tier: Any, kvcr: Any, units: int) -> Any:
        """A step's other calls, with so many jobs and pins outstanding."""
        parent, context = Parent(ROWS), ReqContext("request")
        idle = ScheduleEndContext(new_req_ids=(), preempted_req_ids=())
        for number in range(units):
            job = TransferJob(number, [key_of(number)], np.zeros(1, int), True, context)
            tier.submit_load(job)
            kvcr.bindings.request_pin([tier._prefix + key_of(number)])
        while len(kvcr.pinned) < units:
            tier.serve_external_requests(parent)

        def call() -> None:
            for _ in range(units):
                tier.has_pending_work()
                list(tier.get_finished_jobs())
                tier.serve_external_requests(parent)
                tier.on_schedule_end(idle)
                list(tier.take_events())
                tier.get_stats()

        return call
