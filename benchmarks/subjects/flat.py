# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Whether what a call costs depends on how much is outstanding.

For pins, waiting jobs and requests KVCR is replaced by a stand-in that answers at once
and keeps what it was given until told to let go, so that only the tier is measured. A
burst of jobs is measured on the real KVCR too, where jobs pile up in both.
"""

import gc
import importlib
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np
from kvcr.types import OpEntryResult, OpEntryStatus, QueryStatus

from benchmarks.subjects.memory import Primary, key_of
from benchmarks.subjects.movers import BareKvcr, Mover, TierMover
from benchmarks.subjects.requests import Parent, hinted_request
from benchmarks.subjects.spec import KVCR_TIER_MODULE, make_tier
from vllm.v1.kv_offload.base import LookupResult, ReqContext
from vllm.v1.kv_offload.tiering.base import TransferJob

ROW_BYTES = 4096
ROWS = 256
_CYCLES = 200
_FIRST_OWN_KEY = 10_000_000
_ENDPOINT = "tcp://127.0.0.1:9"


class StillKvcr:
    """Takes every operation and ends none until it is told to."""

    made: ClassVar[list["StillKvcr"]] = []

    def __init__(self, config: Any, bindings: Any, backends: Any, guard: Any) -> None:
        self.bindings = bindings
        self.under_way: deque[tuple[int, list[bytes]]] = deque()
        self.ended: list[tuple[int, dict[bytes, OpEntryResult]]] = []
        self.pinned: deque[str] = deque()
        self._handles = 0
        StillKvcr.made.append(self)

    def query(self, keys: Any, request_id: str | None = None) -> list[Any]:
        return [(QueryStatus.MISS, None) for _ in keys]

    def deliver(self, blocks: Any, request_id: str | None = None) -> int:
        self._handles += 1
        self.under_way.append((self._handles, list(blocks)))
        return self._handles

    deposit = deliver

    def end_oldest(self) -> None:
        handle, keys = self.under_way.popleft()
        result = OpEntryResult(status=OpEntryStatus.SUCCESS)
        self.ended.append((handle, dict.fromkeys(keys, result)))

    def poll_completed(self) -> list[Any]:
        for _, answer in self.bindings.poll_pin_results():
            if answer is not None:
                self.pinned.append(answer[0])
        ended, self.ended = self.ended, []
        return ended

    def submit_hint(self, hints: Any, request_id: str | None = None) -> None: ...

    def discard_hint(self, request_id: str) -> None: ...

    def close(self) -> None: ...


class NoChannel:
    """Peers' control channel, for nobody."""

    def __init__(self, host: str, port: int, advertised: str) -> None: ...

    def close(self) -> None: ...


class Flatness:
    """The tier over the stand-in, with any number of things outstanding."""

    def __init__(self) -> None:
        manager: Any = importlib.import_module(KVCR_TIER_MODULE)
        manager.KVCR = StillKvcr
        manager.ZmqPeerControlChannel = NoChannel
        self._primary = Primary(ROWS, ROW_BYTES)

    def measure(
        self, kind: str, outstanding: Sequence[int], repetitions: int
    ) -> list[list[float]]:
        """Seconds of this thread for one more of ``kind``, for each ``outstanding``.

        Measured in turns: a processor changes its speed within seconds.
        """
        cycles = [self._cycle(kind, count) for count in outstanding]
        gc.collect()
        gc.freeze()
        samples: list[list[float]] = [[] for _ in outstanding]
        for repetition in range(repetitions):
            first = _FIRST_OWN_KEY + repetition * _CYCLES
            for cycle, found in zip(cycles, samples, strict=True):
                started = time.thread_time()
                for number in range(first, first + _CYCLES):
                    cycle(number)
                found.append((time.thread_time() - started) / _CYCLES)
        gc.unfreeze()
        return samples

    def _cycle(self, kind: str, outstanding: int) -> Callable[[int], None]:
        """A new tier with so much outstanding, and what to do with it."""
        tier: Any = make_tier(
            self._primary.view,
            {
                "type": "kvcr",
                "secondary_g2_slots": ROWS,
                "control_ports": 9,
                "control_advertise_host": "127.0.0.1",
            },
        )
        cycle: Callable[[int], None] = getattr(self, f"_{kind}")(
            tier, StillKvcr.made.pop(), outstanding
        )
        return cycle

    def close(self) -> None:
        return

    def _jobs(self, tier: Any, kvcr: StillKvcr, outstanding: int) -> Any:
        """A job in, a job out."""
        context = ReqContext("request")
        chunk = np.zeros(1, dtype=np.int32)

        def submit(number: int) -> None:
            tier.submit_load(
                TransferJob(number, [key_of(number)], chunk, True, context)
            )

        def cycle(number: int) -> None:
            submit(number)
            kvcr.end_oldest()
            if len(list(tier.get_finished_jobs())) != 1 or not tier.has_pending_work():
                raise AssertionError("one job should have ended, and others not")

        for number in range(outstanding):
            submit(number)
        return cycle

    def _lookups(self, tier: Any, kvcr: StillKvcr, outstanding: int) -> Any:
        """A lookup and an idle poll while jobs are outstanding."""
        self._jobs(tier, kvcr, outstanding)
        context = ReqContext("other")
        key = key_of(_FIRST_OWN_KEY)

        def cycle(number: int) -> None:
            tier.lookup(key, context)
            if list(tier.get_finished_jobs()):
                raise AssertionError("no job should have ended")

        return cycle

    def _pins(self, tier: Any, kvcr: StillKvcr, outstanding: int) -> Any:
        """A pin asked for, answered, and the oldest one released."""
        parent = Parent(ROWS)
        prefix = tier._prefix

        def ask(number: int) -> None:
            kvcr.bindings.request_pin([prefix + key_of(number)])
            tier.serve_external_requests(parent)

        def cycle(number: int) -> None:
            ask(number)
            if not kvcr.bindings.release_pin(kvcr.pinned.popleft()):
                raise AssertionError("a pin should be released when asked to")
            if len(list(tier.get_finished_jobs())) != 1:
                raise AssertionError("its job should have ended")

        for number in range(outstanding):
            ask(number)
        return cycle

    def _waiting_pins(self, tier: Any, kvcr: StillKvcr, outstanding: int) -> Any:
        """A step while peers wait for chunks that are on their way."""
        parent = Parent(ROWS, LookupResult.RETRY)
        for number in range(outstanding):
            kvcr.bindings.request_pin([tier._prefix + key_of(number)])

        def cycle(number: int) -> None:
            tier.serve_external_requests(parent)

        return cycle

    def _finished_requests(self, tier: Any, kvcr: StillKvcr, outstanding: int) -> Any:
        """A request with a hint, from its lookup to its end, after many others."""
        key = key_of(_FIRST_OWN_KEY)

        def cycle(number: int) -> None:
            context = hinted_request(f"request-{number}", _ENDPOINT, [key])
            tier.on_new_request(context)
            tier.lookup(key, context)
            tier.on_request_finished(context)

        for number in range(outstanding):
            cycle(number)
        return cycle

    def _live_requests(self, tier: Any, kvcr: StillKvcr, outstanding: int) -> Any:
        """The same while many others are under way."""
        key = key_of(_FIRST_OWN_KEY)
        for number in range(outstanding):
            context = hinted_request(f"request-{number}", _ENDPOINT, [key])
            tier.on_new_request(context)
        return self._finished_requests(tier, kvcr, 0)


class Burst:
    """One-block loads of the real KVCR, all submitted before the first poll."""

    def __init__(self, options: dict[str, Any] | None) -> None:
        self._primary = Primary(ROWS, ROW_BYTES)
        self._mover = self._make(options)
        self._keys = [key_of(number) for number in range(ROWS)]
        stored = self._mover.prepare(self._keys, range(ROWS), False)
        self._mover.submit(stored)
        while not self._mover.poll():
            time.sleep(0.001)

    def run(self, jobs: int) -> float:
        """CPU seconds of this thread for each of ``jobs`` jobs."""
        mover = self._mover
        prepared = [
            mover.prepare([self._keys[n % ROWS]], [n % ROWS], True) for n in range(jobs)
        ]
        started = time.thread_time()
        for job in prepared:
            mover.submit(job)
        ended = 0
        deadline = time.monotonic() + 60
        while ended < jobs:
            time.sleep(0.001)
            ended += mover.poll()
            if time.monotonic() > deadline:
                raise TimeoutError(f"{ended} of {jobs} jobs ended")
        return (time.thread_time() - started) / jobs

    def close(self) -> None:
        self._mover.close()

    def _make(self, options: dict[str, Any] | None) -> Mover:
        if options is None:
            return BareKvcr(self._primary, ROWS)
        return TierMover(self._primary, {**options, "secondary_g2_slots": ROWS})
