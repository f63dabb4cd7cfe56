# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Gets what happens while the engine sleeps into vLLM's metrics.

vLLM asks a tier for its metrics only in steps, but peers also pull from an engine that
sleeps. So a sleeping engine is woken for one step when there is something to report, at
most once a second.
"""

import math
import time

from vllm.v1.kv_offload.tiering.kvcr.compat.waking import wake_engine
from vllm.v1.kv_offload.tiering.kvcr.reports.metrics import KvcrStats
from vllm.v1.kv_offload.tiering.kvcr.reports.report import Report

_INTERVAL_S = 1.0


class IdleReports:
    """Wakes the engine for its metrics. Runs under vLLM's lock, like the whole tier.

    Args:
        enabled: Whether metrics are reported at all.
    """

    def __init__(self, report: Report, enabled: bool) -> None:
        self.due = False
        """Whether the engine was woken and has not taken its step yet."""
        self._report = report
        self._stats = KvcrStats()
        self._stepped = False
        self._next_look = 0.0 if enabled else math.inf

    def new_stats(self) -> KvcrStats:
        """Make the object that KVCR records into next, after the last one was taken."""
        self._stats = KvcrStats()
        return self._stats

    def step(self) -> None:
        """Note that the engine takes a step, at whose end vLLM asks for metrics."""
        self.due = False
        self._stepped = True
        self._report.step()

    def poll(self) -> None:
        """Wake the engine if it sleeps and there is something to report."""
        now = time.monotonic()
        if now < self._next_look:
            return
        self._next_look = now + _INTERVAL_S
        if self._stepped:
            self._stepped = False
        elif self._has_news():
            self.due = wake_engine()

    def _has_news(self) -> bool:
        return not self._stats.is_empty() or self._report.has_news
