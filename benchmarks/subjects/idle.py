# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What a tier, or bare KVCR, costs a process that has nothing to do.

The tier is driven as vLLM's engine core drives it: while it says that it has pending
work the engine steps, else it sleeps until a request comes, and none does.
"""

import os
import threading
import time
from typing import Any

from benchmarks.harness import threads
from benchmarks.harness.plan import IDLE_ROW_BYTES as ROW_BYTES
from benchmarks.harness.plan import IDLE_ROWS as ROWS
from benchmarks.subjects.memory import Keys, Primary
from benchmarks.subjects.movers import BareKvcr, Mover, TierMover
from benchmarks.subjects.requests import Parent
from vllm.v1.kv_offload.base import ScheduleEndContext
from vllm.v1.kv_offload.tiering.base import SecondaryTierManager

_SETTLE_S = 0.5
_POLL_S = 0.001
_NOTHING = ScheduleEndContext((), ())


class IdleTier:
    """A process with one tier that was used once; without options, with bare KVCR."""

    def __init__(self, options: dict[str, Any] | None) -> None:
        self._before_tier = set(threads.cpu_seconds(os.getpid()))
        primary = Primary(ROWS, ROW_BYTES)
        self._mover = _mover(primary, options)
        self._tier: SecondaryTierManager | None = getattr(self._mover, "tier", None)
        keys = Keys().fresh(ROWS)
        job = self._mover.prepare(keys, range(ROWS), False)
        self._mover.submit(job)
        while not self._mover.poll():
            time.sleep(0.001)

    def measure(
        self, seconds: float, polled: bool
    ) -> tuple[list[threads.ThreadLoad], int]:
        """The load of each thread, and how often the engine stepped.

        Args:
            polled: Let a thread poll the tier, as vLLM's manager does from 0.33 on. The
                engine then sleeps although peers are served. Without a tier the
                thread polls nothing.
        """
        steps = 0
        tier = self._tier
        parent = Parent(ROWS)

        def step() -> None:
            if tier is None:
                return
            list(tier.get_finished_jobs())
            tier.serve_external_requests(parent)

        def engine() -> None:
            nonlocal steps
            while not idle.is_set():
                if tier is not None and tier.has_pending_work():
                    step()
                    tier.on_schedule_end(_NOTHING)
                    steps += 1
                else:
                    idle.wait()

        def poll() -> None:
            while not idle.wait(_POLL_S):
                step()

        idle = threading.Event()
        thread = threading.Thread(
            target=poll if polled else engine, name="tier-poll" if polled else "engine"
        )
        thread.start()
        time.sleep(_SETTLE_S)
        names = threads.python_names()
        pid = os.getpid()
        started, before = time.monotonic(), threads.cpu_seconds(pid)
        first = steps
        time.sleep(seconds)
        after = threads.cpu_seconds(pid)
        passed = time.monotonic() - started
        counted = steps - first
        idle.set()
        thread.join()
        found = threads.loads(pid, before, after, passed, names, self._before_tier)
        return found, counted

    def close(self) -> None:
        self._mover.close()


def _mover(primary: Primary, options: dict[str, Any] | None) -> Mover:
    if options is None:
        return BareKvcr(primary, ROWS)
    return TierMover(primary, options)
