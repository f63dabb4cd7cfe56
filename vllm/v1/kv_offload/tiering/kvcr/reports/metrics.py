# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Metric names and definitions, and what KVCR records into.

KVCR's metrics keep their names behind ``vllm:``; the tier's own begin with
``vllm:kvcr_tier_``. Prometheus' client appends ``_total`` to counters. All exist only
with ``enable_telemetry``.
"""

from typing import Any

from kvcr import (
    DURATION_METRIC,
    STATE_METRIC,
    TRANSFER_BLOCKS_METRIC,
    TRANSFER_BYTES_METRIC,
)

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
    OffloadingConnectorStats,
)
from vllm.v1.kv_offload.base import (
    OffloadingCounterMetadata,
    OffloadingGaugeMetadata,
    OffloadingHistogramMetadata,
    OffloadingMetricMetadata,
)

PREFIX = "vllm:"
KVCR_STATE = PREFIX + STATE_METRIC

LOOKUPS = "vllm:kvcr_tier_lookups"
HITS = "vllm:kvcr_tier_hits"
REQUESTED_BLOCKS = "vllm:kvcr_tier_requested_blocks"
MOVED_BLOCKS = "vllm:kvcr_tier_moved_blocks"
MOVED_BYTES = "vllm:kvcr_tier_moved_bytes"
LOAD_DURATION = "vllm:kvcr_tier_load_duration_seconds"
LOST_BLOCKS = "vllm:kvcr_tier_lost_blocks"
IGNORED_HINTS = "vllm:kvcr_tier_ignored_hints"
TIER_STATE = "vllm:kvcr_tier_state"
CAPACITY = "vllm:kvcr_tier_capacity_bytes"
USED = "vllm:kvcr_tier_used_bytes"
QUARANTINED_SLOTS = "vllm:kvcr_tier_quarantined_slots"
PINS = "vllm:kvcr_tier_pins"
OLDEST_PIN_AGE = "vllm:kvcr_tier_oldest_pin_age_seconds"
PEERS = "vllm:kvcr_tier_peers"

_DURATION_BUCKETS = (0.0001, 0.0005, 0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0)


class KvcrStats(OffloadingConnectorStats):
    """What KVCR records into: its names get vLLM's prefix here, at the border."""

    def increase_counter(self, counter_name: str, *value: Any, **labels: Any) -> None:
        super().increase_counter(_prefixed(counter_name), *value, **labels)

    def set_gauge(self, gauge_name: str, *value: Any, **labels: Any) -> None:
        super().set_gauge(_prefixed(gauge_name), *value, **labels)

    def observe_histogram(
        self, histogram_name: str, *value: Any, **labels: Any
    ) -> None:
        super().observe_histogram(_prefixed(histogram_name), *value, **labels)


def _prefixed(name: str) -> str:
    return name if name.startswith(PREFIX) else PREFIX + name


def _counter(documentation: str, *labels: str) -> OffloadingCounterMetadata:
    return OffloadingCounterMetadata(documentation=documentation, labelnames=labels)


def _gauge(documentation: str, *labels: str) -> OffloadingGaugeMetadata:
    return OffloadingGaugeMetadata(documentation=documentation, labelnames=labels)


def _histogram(documentation: str, *labels: str) -> OffloadingHistogramMetadata:
    return OffloadingHistogramMetadata(
        documentation=documentation, labelnames=labels, buckets=_DURATION_BUCKETS
    )


def definitions() -> dict[str, OffloadingMetricMetadata]:
    """Every metric of the tier; the same for each tier of an engine.

    vLLM adds up the counters and histograms of an engine's tiers. Of gauges it keeps
    the last tier's, so these carry the label ``tier``.
    """
    return {
        PREFIX + DURATION_METRIC: _histogram(
            "Duration of KVCR operations, in seconds.", "scope", "result"
        ),
        PREFIX + TRANSFER_BYTES_METRIC: _counter("Bytes that KVCR moved.", "operation"),
        PREFIX + TRANSFER_BLOCKS_METRIC: _counter(
            "Blocks that KVCR moved.", "operation"
        ),
        KVCR_STATE: _gauge("Resources that KVCR holds.", "resource"),
        LOOKUPS: _counter("Lookups of a block in the kvcr tier."),
        HITS: _counter(
            "Lookups that found the block, by where it was: dram, disk or peer.",
            "place",
        ),
        REQUESTED_BLOCKS: _counter(
            "Blocks that vLLM asked the kvcr tier to load or to store.", "direction"
        ),
        MOVED_BLOCKS: _counter(
            "Blocks that were loaded from a place into vLLM's primary tier, or stored "
            "in one.",
            "direction",
            "place",
        ),
        MOVED_BYTES: _counter(
            "Bytes that were loaded from a place into vLLM's primary tier, or stored "
            "in one.",
            "direction",
            "place",
        ),
        LOAD_DURATION: _histogram(
            "Seconds from vLLM's request for a load until blocks of it are in vLLM's "
            "primary tier, by where they came from.",
            "place",
        ),
        LOST_BLOCKS: _counter("Blocks that could not be reused, by reason.", "reason"),
        IGNORED_HINTS: _counter(
            "Routing hints that could not be used, by reason.", "reason"
        ),
        TIER_STATE: _gauge(
            "1 for the kvcr tier's current state and its reason, 0 for earlier ones.",
            "tier",
            "state",
            "reason",
        ),
        CAPACITY: _gauge(
            "Size of KVCR's pool (dram) and of its files (disk).", "tier", "place"
        ),
        USED: _gauge(
            "Bytes of KVCR's pool (dram) and of its files (disk) that hold blocks.",
            "tier",
            "place",
        ),
        QUARANTINED_SLOTS: _gauge(
            "Slots of KVCR's pool and of vLLM's primary tier that are not reused yet, "
            "because a peer may still write to them.",
            "tier",
            "memory",
        ),
        PINS: _gauge("Pins of blocks that peers are pulling from here.", "tier"),
        OLDEST_PIN_AGE: _gauge("Age of the oldest of these pins.", "tier"),
        PEERS: _gauge(
            "Peers that this engine was hinted at, by standing: usable, cooling (left "
            "alone after a silence) or unknown (not introduced yet).",
            "tier",
            "standing",
        ),
    }
