# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Peers: how long an engine waits for another one's blocks."""

import itertools
import random
import threading
import time
from typing import Any

import numpy as np

from benchmarks.subjects.memory import Keys, Primary
from benchmarks.subjects.requests import Parent, chunk_of, hinted_request
from benchmarks.subjects.spec import make_tier
from vllm.v1.kv_offload.base import LookupResult, ScheduleEndContext
from vllm.v1.kv_offload.tiering.base import TransferJob

_POLL_S = 0.001
_AFTERWARDS_S = 0.02
_NOTHING = ScheduleEndContext((), ())


class Source:
    """An engine that has blocks, and whose steps take a certain time."""

    def __init__(self, options: dict[str, Any], rows: int, row_bytes: int) -> None:
        self._primary = Primary(rows, row_bytes)
        self._view = self._primary.view
        self._tier = make_tier(self._view, options)
        self._parent = Parent(rows)
        self._lock = threading.Lock()
        self._step_s = _POLL_S
        self._polled = False
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._step, name="engine"),
            threading.Thread(target=self._poll, name="tier-poll"),
        ]
        for thread in self._threads:
            thread.start()

    def behave(self, step_s: float, polled: bool) -> None:
        """Step so long from now on, with a poll thread beside it or without."""
        self._step_s = step_s
        self._polled = polled
        time.sleep(min(step_s, 0.1))

    def close(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()
        self._tier.shutdown()
        self._view.release()

    def _step(self) -> None:
        started = time.monotonic()
        while not self._stop.wait(_POLL_S):
            if time.monotonic() - started < self._step_s:
                continue
            started = time.monotonic()
            with self._lock:
                self._work()
                self._tier.on_schedule_end(_NOTHING)

    def _poll(self) -> None:
        # What vLLM's manager does from 0.33 on, under its lock.
        while not self._stop.wait(_POLL_S):
            if self._polled:
                with self._lock:
                    self._work()

    def _work(self) -> None:
        list(self._tier.get_finished_jobs())
        self._tier.serve_external_requests(self._parent)


class Sink:
    """An engine that pulls blocks, stepping every millisecond."""

    def __init__(
        self, options: dict[str, Any], rows: int, row_bytes: int, endpoint: str
    ) -> None:
        self._primary = Primary(rows, row_bytes)
        self._view = self._primary.view
        self._tier = make_tier(self._view, options)
        self._endpoint = endpoint
        self._keys = Keys()
        self._numbers = itertools.count(1)
        self._random = random.Random(0)

    def pull(self, blocks: int, source_step_s: float) -> tuple[str, float]:
        """Pull at a random moment of the source's step.

        Returns:
            The outcome and the seconds: ``pulled``, ``failed``, or ``declined`` where
            the tier did not even try.
        """
        rows = self._primary.rows
        keys = self._keys.fresh(blocks)
        self._step(self._random.uniform(0, source_step_s))
        number = next(self._numbers)
        context = hinted_request(f"request-{number}", self._endpoint, keys)
        self._tier.on_new_request(context)
        started = time.perf_counter()
        if any(self._tier.lookup(key, context) is not LookupResult.HIT for key in keys):
            declined_after = time.perf_counter() - started
            # The request is computed instead; meanwhile its peer may be introduced.
            self._step(_AFTERWARDS_S)
            self._tier.on_request_finished(context)
            return "declined", declined_after
        chunks = np.arange(number * blocks, (number + 1) * blocks) % len(rows)
        rows[chunks, -1] = 0
        self._tier.submit_load(
            TransferJob(number, keys, chunks.astype(np.int32), True, context)
        )
        results: list[Any] = []
        while not results:
            results = list(self._tier.get_finished_jobs())
            if not results:
                time.sleep(_POLL_S)
        seconds = time.perf_counter() - started
        self._tier.on_request_finished(context)
        if results[0].success:
            expected = [chunk_of(key, len(rows)) % 251 + 1 for key in keys]
            if rows[chunks, -1].tolist() != expected:
                raise AssertionError("other bytes were pulled than the source has")
        self._step(_AFTERWARDS_S)
        return ("pulled" if results[0].success else "failed"), seconds

    def close(self) -> None:
        self._tier.shutdown()
        self._view.release()

    def _step(self, seconds: float) -> None:
        """What an engine does meanwhile."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            list(self._tier.get_finished_jobs())
            self._tier.on_schedule_end(_NOTHING)
            time.sleep(_POLL_S)
