# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Control plane: what the engine's thread pays for each call, against bare KVCR.

Both are measured in one process, in turns. Chunks are small, so that copying them
takes no time that could hide a call's. What counts is the time inside calls: between
polls the engine does something else, and sleeps here.
"""

import gc
import time
from collections.abc import Callable
from typing import Any

from benchmarks.harness.stats import Samples
from benchmarks.subjects.memory import Keys, Primary
from benchmarks.subjects.movers import BareKvcr, Mover, TierMover
from vllm.v1.kv_offload.base import LookupResult, ReqContext

ROW_BYTES = 4096
ROWS = 256
_STEP_S = 0.001
_DEADLINE_S = 20.0
_POOL_SLOTS = 32_768


class ControlPlane:
    """One tier and one bare KVCR."""

    def __init__(self, options: dict[str, Any], slots: int = _POOL_SLOTS) -> None:
        self._primary = Primary(ROWS, ROW_BYTES)
        self._keys = Keys()
        self._tier = TierMover(self._primary, {**options, "secondary_g2_slots": slots})
        self._bare = BareKvcr(self._primary, slots)
        self._resident = self._keys.fresh(ROWS)
        self._absent = self._keys.fresh(ROWS)
        for mover in (self._tier, self._bare):
            _run(mover, mover.prepare(self._resident, range(ROWS), False))
        gc.collect()
        gc.freeze()

    def lookups(self, repetitions: int) -> dict[str, Samples]:
        """CPU seconds per key, asked one by one."""
        context = ReqContext("request")
        lookup = self._tier.tier.lookup
        query: Any = self._bare.kvcr.query
        found: dict[str, Samples] = {"hit": Samples(), "miss": Samples()}
        for name, keys in (("hit", self._resident), ("miss", self._absent)):
            expected = LookupResult.HIT if name == "hit" else LookupResult.MISS
            if any(lookup(key, context) is not expected for key in keys):
                raise AssertionError(f"the tier does not answer {expected}")
            if any(query([key])[0][0].name != expected.name for key in keys):
                raise AssertionError(f"KVCR does not answer {expected}")

        def ask_tier(keys: list[Any]) -> None:
            for key in keys:
                lookup(key, context)

        def ask_bare(keys: list[Any]) -> None:
            for key in keys:
                query([key], "request")[0]

        for _ in range(repetitions):
            for name, keys in (("hit", self._resident), ("miss", self._absent)):
                found[name].tier.append(_time(ask_tier, keys) / len(keys))
                found[name].bare.append(_time(ask_bare, keys) / len(keys))
        return found

    def jobs(self, blocks: int, load: bool, repetitions: int) -> dict[str, Samples]:
        """Seconds per job.

        ``cpu``: of the engine's thread inside calls; ``calls``: that pass inside them;
        ``whole``: from submission to the result, polled for without a pause.
        """
        cpu, calls, whole = Samples(), Samples(), Samples()
        for _ in range(repetitions):
            for mover, used, called, passed in (
                (self._tier, cpu.tier, calls.tier, whole.tier),
                (self._bare, cpu.bare, calls.bare, whole.bare),
            ):
                worked, inside = _run(mover, self._job(mover, blocks, load))
                used.append(worked)
                called.append(inside)
                passed.append(_follow(mover, self._job(mover, blocks, load)))
        return {"cpu": cpu, "calls": calls, "whole": whole}

    def close(self) -> None:
        self._tier.close()
        self._bare.close()

    def _job(self, mover: Mover, blocks: int, load: bool) -> Any:
        keys = self._resident[:blocks] if load else self._keys.fresh(blocks)
        return mover.prepare(keys, range(blocks), load)


def _time(function: Callable[[Any], None], argument: Any) -> float:
    started = time.thread_time()
    function(argument)
    return time.thread_time() - started


def _run(mover: Mover, job: Any) -> tuple[float, float]:
    """Run a job to its end; this thread's CPU time and the time inside calls."""
    worked, inside = _inside(lambda: mover.submit(job))[1:]
    deadline = time.perf_counter() + _DEADLINE_S
    ended = 0
    while not ended:
        time.sleep(_STEP_S)
        ended, more_work, longer = _inside(mover.poll)
        worked += more_work
        inside += longer
        if time.perf_counter() > deadline:
            raise TimeoutError("a job did not end")
    return worked, inside


def _inside(call: Callable[[], Any]) -> tuple[Any, float, float]:
    started, worked = time.perf_counter(), time.thread_time()
    result = call()
    return result, time.thread_time() - worked, time.perf_counter() - started


def _follow(mover: Mover, job: Any) -> float:
    """Run a job and poll for its end without a pause; the seconds it took."""
    started = time.perf_counter()
    mover.submit(job)
    while not mover.poll():
        if time.perf_counter() > started + _DEADLINE_S:
            raise TimeoutError("a job did not end")
        time.sleep(0)
    return time.perf_counter() - started
