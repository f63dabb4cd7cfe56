# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What happens while the engine sleeps reaches vLLM's metrics all the same.

vLLM asks a tier for its metrics in steps only, and peers pull from an engine that takes
none. So an engine that sleeps is woken for one step when there is news, at most once a
second. Without news it sleeps on.
"""

import math
import time

from vllm.v1.kv_offload.tiering.kvcr.compat.waking import wake_engine
from vllm.v1.kv_offload.tiering.kvcr.reports.metrics import KvcrStats
from vllm.v1.kv_offload.tiering.kvcr.reports.report import Report

_INTERVAL_S = 1.0


class IdleReports:
    """Driven by whoever drives the tier, so under vLLM's lock.

    Args:
        enabled: Metrics are reported at all.
    """

    def __init__(self, report: Report, enabled: bool) -> None:
        self.due = False
        """Whether a step is wanted; only where the engine was woken for it."""
        self._report = report
        self._stats = KvcrStats()
        self._stepped = False
        self._next_look = 0.0 if enabled else math.inf

    def new_stats(self) -> KvcrStats:
        """What KVCR records into from now on: it asks for one whenever one is taken."""
        self._stats = KvcrStats()
        return self._stats

    def step(self) -> None:
        """The engine takes a step, at whose end vLLM asks for metrics."""
        self.due = False
        self._stepped = True
        self._report.step()

    def poll(self) -> None:
        """Wake the engine if it sleeps and there is news."""
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
