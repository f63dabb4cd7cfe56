# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Metric names and definitions, and the adapter's own counters.

KVCR's metrics keep their names behind ``vllm:``; the adapter's begin with
``vllm:kvcr_tier_``. All exist only with ``enable_telemetry``.
"""

import time
from collections import Counter
from enum import Enum
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
from vllm.logger import init_logger
from vllm.v1.kv_offload.base import (
    OffloadingCounterMetadata,
    OffloadingGaugeMetadata,
    OffloadingHistogramMetadata,
    OffloadingMetricMetadata,
)

logger = init_logger(__name__)

PREFIX = "vllm:"
LOST_BLOCKS = "vllm:kvcr_tier_lost_blocks"
IGNORED_HINTS = "vllm:kvcr_tier_ignored_hints"
TIER_STATE = "vllm:kvcr_tier_state"

_LOG_INTERVAL_S = 60.0
_DURATION_BUCKETS = (
    0.0001,
    0.0005,
    0.001,
    0.005,
    0.01,
    0.05,
    0.1,
    0.5,
    1.0,
    5.0,
    10.0,
)


class Lost(Enum):
    """How a block was not reused, with what an operator can do about it.

    The first entry of each pair is the metric's label ``reason``.
    """

    NOT_RESIDENT = ("not_resident", "")
    NOT_HINTED = ("not_hinted", "")
    PULL_LIMIT = (
        "pull_limit",
        "a request was hinted more blocks than it may pull; see max_pull_blocks",
    )
    PEER_DOWN = (
        "peer_down",
        "a hinted peer did not answer lately and is left alone for a while; check "
        "that it runs and that its control port can be reached from here",
    )
    INTRODUCING = (
        "introducing",
        "a hinted peer was contacted for the first time; requests are served from it "
        "once it has answered",
    )
    DISK_STALLED = (
        "disk_stalled",
        "the g3 files did not answer lately and are left alone for a while; check "
        "their disk",
    )
    INCOMPATIBLE_PEER = (
        "incompatible_peer",
        "a hinted peer runs other releases of kvcr or nixl; both engines need the same",
    )
    LANDING_FULL = (
        "landing_full",
        "peers that died still own KVCR's memory; restart this engine",
    )
    BACKING_OFF = (
        "backing_off",
        "a block that could not be loaded is not tried again for a while",
    )
    GONE = ("gone", "")
    UNAWAITED = ("unawaited", "")
    TIMED_OUT = (
        "timed_out",
        "a peer did not deliver within pull_timeout_ms, or a file within "
        "operation_timeout_ms; check the peer or the disk, or raise the option",
    )
    LOAD_FAILED = (
        "load_failed",
        "blocks could not be loaded: the peer no longer had them, or KVCR could not "
        "read or copy them",
    )
    CORRUPT = (
        "corrupt",
        "blocks did not hold what was stored and were recomputed; check the g3 files' "
        "disk and that no other process writes to them",
    )
    UNVERIFIED = (
        "unverified",
        "blocks of a peer went to a g3 file before their checksum was known, so that "
        "nobody could tell whether they are right, and were recomputed",
    )
    DISK_FAILED = ("disk_failed", "")
    STORE_FAILED = (
        "store_failed",
        "blocks could not be stored in operation_timeout_ms or found no room; raise "
        "secondary_g2_slots, the service's pool, or the g3 files' speed or size",
    )
    DROPPED = ("dropped", "the placement policy declined blocks")
    NOT_PINNED = (
        "not_pinned",
        "peers asked for blocks that this engine no longer has in host memory; the "
        "router's view is behind, or cpu_bytes_to_use is small for this load",
    )
    FOREIGN = (
        "foreign",
        "peers asked for blocks of another namespace: they run another model, dtype, "
        "layout or hash seed, or set the option namespace differently",
    )
    PIN_FAILED = ("pin_failed", "blocks could not be pinned for a peer")
    BACKEND_FAILED = ("backend_failed", "KVCR is gone; see the error logged then")
    QUARANTINED = (
        "quarantined",
        "a peer may still write into a load's slots, so they are held back; "
        "remote_landing=pool avoids it",
    )
    ABORTED = ("aborted", "")

    def __init__(self, label: str, advice: str) -> None:
        self.label = label
        self.advice = advice


class Losses:
    """Counts what was lost and says so now and then.

    ``add`` is for the hot path: it only counts. ``log`` runs once a step.
    """

    def __init__(self) -> None:
        self._counts: Counter[Lost] = Counter()
        self._hints: Counter[str] = Counter()
        self._unlogged: dict[str, tuple[int, str]] = {}
        self._logged_at: dict[str, float] = {}

    def add(self, reason: Lost, blocks: int = 1, detail: str = "") -> None:
        self._counts[reason] += blocks
        if reason.advice:
            total = self._unlogged.get(reason.label, (0, ""))[0] + blocks
            text = f"{reason.advice} ({detail})" if detail else reason.advice
            self._unlogged[reason.label] = (total, text)

    def add_misses(self, lookups: int, hinted: int) -> None:
        """Count lookups that missed, ``hinted`` of them of hinted requests."""
        if hinted:
            self._counts[Lost.NOT_HINTED] += hinted
        if lookups > hinted:
            self._counts[Lost.NOT_RESIDENT] += lookups - hinted

    def ignore_hint(self, reason: str, detail: object) -> None:
        """Count a hint that was not used; ``reason`` comes from a bounded set."""
        self._hints[reason] += 1
        label = f"hint {reason}"
        total = self._unlogged.get(label, (0, ""))[0] + 1
        self._unlogged[label] = (total, f"served without it: {detail}")

    def log(self) -> None:
        """Log each reason's losses, each at most once a minute."""
        if not self._unlogged:
            return
        now = time.monotonic()
        for label, (count, text) in list(self._unlogged.items()):
            if now - self._logged_at.get(label, -_LOG_INTERVAL_S) < _LOG_INTERVAL_S:
                continue
            self._logged_at[label] = now
            del self._unlogged[label]
            logger.warning("kvcr tier: %s x%d: %s", label, count, text)

    @property
    def pending(self) -> bool:
        """Whether anything was counted since the last ``take``."""
        return bool(self._counts or self._hints)

    def take(self) -> tuple[dict[str, int], dict[str, int]]:
        """Counts since the last call: blocks by reason, hints by reason."""
        if not self.pending:
            return {}, {}
        lost = {reason.label: count for reason, count in self._counts.items()}
        hints = dict(self._hints)
        self._counts.clear()
        self._hints.clear()
        return lost, hints


class KvcrStats(OffloadingConnectorStats):
    """What KVCR records into: its names get vLLM's prefix here, at the border."""

    def increase_counter(
        self,
        counter_name: str,
        counter_increase_value: int | float = 1,
        labelvalues: tuple[str, ...] = (),
    ) -> None:
        super().increase_counter(
            _prefixed(counter_name), counter_increase_value, labelvalues
        )

    def set_gauge(
        self,
        gauge_name: str,
        gauge_value: int | float,
        labelvalues: tuple[str, ...] = (),
    ) -> None:
        super().set_gauge(_prefixed(gauge_name), gauge_value, labelvalues)

    def observe_histogram(
        self,
        histogram_name: str,
        histogram_value: int | float,
        labelvalues: tuple[str, ...] = (),
    ) -> None:
        super().observe_histogram(
            _prefixed(histogram_name), histogram_value, labelvalues
        )


def add_own(
    stats: Any | None, losses: Losses, states: list[tuple[str, str, int]]
) -> Any | None:
    """Add the adapter's own observations to KVCR's, if there are any.

    Args:
        stats: What KVCR returned; the same object is returned.
        states: Samples ``(state, reason, 0 or 1)``.
    """
    lost, hints = losses.take()
    if not (lost or hints or states):
        return stats
    if stats is None:
        stats = KvcrStats()
    for reason, count in lost.items():
        stats.increase_counter(LOST_BLOCKS, count, (reason,))
    for reason, count in hints.items():
        stats.increase_counter(IGNORED_HINTS, count, (reason,))
    for state, reason, value in states:
        stats.set_gauge(TIER_STATE, value, (state, reason))
    return stats


def _prefixed(name: str) -> str:
    return name if name.startswith(PREFIX) else PREFIX + name


def definitions() -> dict[str, OffloadingMetricMetadata]:
    """Every metric of the tier; the same for each tier of an engine."""
    return {
        PREFIX + DURATION_METRIC: OffloadingHistogramMetadata(
            documentation="Duration of KVCR operations, in seconds.",
            labelnames=("scope", "result"),
            buckets=_DURATION_BUCKETS,
        ),
        PREFIX + TRANSFER_BYTES_METRIC: OffloadingCounterMetadata(
            documentation="Bytes that KVCR moved.", labelnames=("operation",)
        ),
        PREFIX + TRANSFER_BLOCKS_METRIC: OffloadingCounterMetadata(
            documentation="Blocks that KVCR moved.", labelnames=("operation",)
        ),
        PREFIX + STATE_METRIC: OffloadingGaugeMetadata(
            documentation="Resources that KVCR holds.", labelnames=("resource",)
        ),
        LOST_BLOCKS: OffloadingCounterMetadata(
            documentation="Blocks that could not be reused, by reason.",
            labelnames=("reason",),
        ),
        IGNORED_HINTS: OffloadingCounterMetadata(
            documentation="Routing hints that could not be used, by reason.",
            labelnames=("reason",),
        ),
        TIER_STATE: OffloadingGaugeMetadata(
            documentation=(
                "1 for the kvcr tier's present state and its reason; no sample "
                "until it first leaves the state healthy."
            ),
            labelnames=("state", "reason"),
        ),
    }
