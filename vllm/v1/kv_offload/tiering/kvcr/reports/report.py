# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The tier's own numbers, put into what vLLM takes."""

from collections.abc import Mapping
from itertools import product
from typing import Any

from vllm.v1.kv_offload.tiering.kvcr.reports import metrics
from vllm.v1.kv_offload.tiering.kvcr.reports.gauges import Gauges
from vllm.v1.kv_offload.tiering.kvcr.reports.losses import Losses, Lost
from vllm.v1.kv_offload.tiering.kvcr.reports.traffic import (
    DIRECTIONS,
    DRAM,
    PEER,
    PLACES,
    STORE,
    Traffic,
)


class Report:
    """What there is to tell since the last time."""

    def __init__(
        self, traffic: Traffic, losses: Losses, gauges: Gauges, block_bytes: int
    ) -> None:
        self._traffic = traffic
        self._losses = losses
        self._gauges = gauges
        self._block_bytes = block_bytes
        self._announced = False

    def step(self) -> None:
        """The engine takes a step, at whose end vLLM asks for metrics."""
        self._gauges.started = True

    @property
    def has_news(self) -> bool:
        """Whether vLLM's metrics would change if it asked now."""
        return self._traffic.pending or self._losses.pending or self._gauges.has_news

    def add_to(self, stats: Any | None) -> Any | None:
        """Add what there is to KVCR's stats, and return the same object.

        Args:
            stats: What KVCR returned; ``None``: nothing, and one is made if needed.
        """
        traffic = self._traffic
        self._losses.add_misses(traffic.misses, traffic.hinted_misses)
        samples = self._gauges.take(_kvcr_state(stats))
        if not (samples or traffic.pending or self._losses.pending):
            return stats
        if stats is None:
            stats = metrics.KvcrStats()
        for (name, labels), value in samples.items():
            stats.set_gauge(name, value, labels)
        if self._gauges.started and not self._announced:
            self._announced = True
            _announce(stats)
        if traffic.pending:
            self._add_traffic(stats)
        lost, hints = self._losses.take()
        for reason, count in lost.items():
            stats.increase_counter(metrics.LOST_BLOCKS, count, (reason,))
        for reason, count in hints.items():
            stats.increase_counter(metrics.IGNORED_HINTS, count, (reason,))
        return stats

    def _add_traffic(self, stats: Any) -> None:
        traffic = self._traffic
        hits = {DRAM: traffic.dram_hits, **traffic.other_hits}
        counts: dict[str, Mapping[tuple[str, ...], int]] = {
            metrics.LOOKUPS: {(): traffic.lookups},
            metrics.HITS: {(place,): count for place, count in hits.items()},
            metrics.REQUESTED_BLOCKS: {
                (direction,): blocks for direction, blocks in traffic.requested.items()
            },
            metrics.MOVED_BLOCKS: traffic.moved,
            metrics.MOVED_BYTES: {
                labels: blocks * self._block_bytes
                for labels, blocks in traffic.moved.items()
            },
        }
        for name, values in counts.items():
            for labels, value in values.items():
                if value:
                    stats.increase_counter(name, value, labels)
        for place, seconds in traffic.load_seconds:
            stats.observe_histogram(metrics.LOAD_DURATION, seconds, (place,))
        traffic.clear()


def _announce(stats: Any) -> None:
    """Have each counter begin at 0: Prometheus sees no increase in a first sample."""
    stats.increase_counter(metrics.LOOKUPS, 0)
    for place in PLACES:
        stats.increase_counter(metrics.HITS, 0, (place,))
    for direction in DIRECTIONS:
        stats.increase_counter(metrics.REQUESTED_BLOCKS, 0, (direction,))
    for labels in product(DIRECTIONS, PLACES):
        if labels != (STORE, PEER):
            stats.increase_counter(metrics.MOVED_BLOCKS, 0, labels)
            stats.increase_counter(metrics.MOVED_BYTES, 0, labels)
    for reason in Lost:
        stats.increase_counter(metrics.LOST_BLOCKS, 0, (reason.label,))


def _kvcr_state(stats: Any | None) -> dict[tuple[str, ...], float]:
    """What KVCR's own gauge says in its stats, if they are of the kind it was given."""
    if not isinstance(stats, metrics.KvcrStats):
        return {}
    return dict(stats.data["data"].get(metrics.KVCR_STATE, {}))
