# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Metrics: KVCR's and the tier's, declared before they are emitted."""

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from kvcr import (
    DURATION_METRIC,
    STATE_METRIC,
    TRANSFER_BLOCKS_METRIC,
    TRANSFER_BYTES_METRIC,
)
from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
)
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.values import MultiProcessValue

from tests.v1.kv_offload.tiering.kvcr.builders import key, request
from tests.v1.kv_offload.tiering.kvcr.rig import StandinRig, samples
from tests.v1.kv_offload.tiering.kvcr.standin import KeepingStandin
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
    OffloadPromMetrics,
)
from vllm.v1.kv_offload.base import (
    OffloadingCounterMetadata,
    OffloadingGaugeMetadata,
    OffloadingHistogramMetadata,
    ScheduleEndContext,
)
from vllm.v1.kv_offload.tiering.kvcr.manager import KVCRSecondaryTierManager
from vllm.v1.kv_offload.tiering.kvcr.reports.losses import Lost
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

TELEMETRY = {"type": "kvcr", "secondary_g2_slots": 64, "enable_telemetry": True}
DEFINITIONS = KVCRSecondaryTierManager.build_metric_definitions(TELEMETRY)
LABELS = {"engine": "0", "reason": "load_failed"}
FAILED_LOADS = ("vllm:kvcr_tier_lost_blocks_total", LABELS)


def telemetry_rig(**options: Any) -> StandinRig:
    return StandinRig(enable_telemetry=True, **options)


def test_kvcrs_metrics_keep_their_names_behind_vllms_prefix() -> None:
    assert all(name.startswith("vllm:kvcr_") for name in DEFINITIONS)
    for name, kind, labels in (
        (DURATION_METRIC, OffloadingHistogramMetadata, ("scope", "result")),
        (TRANSFER_BYTES_METRIC, OffloadingCounterMetadata, ("operation",)),
        (TRANSFER_BLOCKS_METRIC, OffloadingCounterMetadata, ("operation",)),
        (STATE_METRIC, OffloadingGaugeMetadata, ("resource",)),
    ):
        declared = DEFINITIONS[f"vllm:{name}"]
        assert (type(declared), declared.labelnames) == (kind, labels)


def test_without_telemetry_nothing_is_declared() -> None:
    for options in ({"enable_telemetry": "off"}, {"type": "kvcr"}):
        assert KVCRSecondaryTierManager.build_metric_definitions(options) == {}


def test_without_telemetry_there_are_no_stats() -> None:
    rig = StandinRig()
    assert rig.kvcr.bindings.stats_factory is None
    rig.lookup(key(1))
    assert rig.tier.get_stats() is None
    assert rig.kvcr.calls == ["query"]


def test_kvcrs_stats_are_handed_on_as_they_are() -> None:
    rig = telemetry_rig()
    stats = rig.tier.get_stats()
    assert stats is rig.kvcr.stats_given[-1]
    assert samples(stats) == {}


def test_what_kvcr_records_gets_the_prefix_at_the_border() -> None:
    factory = telemetry_rig().kvcr.bindings.stats_factory
    stats = factory()
    stats.observe_histogram(DURATION_METRIC, 0.5, ("local_fill", "success"))
    stats.increase_counter(TRANSFER_BYTES_METRIC, 4096, ("local_fill",))
    stats.increase_counter(TRANSFER_BLOCKS_METRIC, 1, ("local_fill",))
    stats.set_gauge(STATE_METRIC, 3, ("block_records",))
    assert samples(stats) == {
        f"vllm:{DURATION_METRIC}": {("local_fill", "success"): [0.5]},
        f"vllm:{TRANSFER_BYTES_METRIC}": {("local_fill",): 4096},
        f"vllm:{TRANSFER_BLOCKS_METRIC}": {("local_fill",): 1},
        f"vllm:{STATE_METRIC}": {("block_records",): 3},
    }
    assert not stats.is_empty()
    assert stats.reduce()
    assert factory().is_empty(), "each is one of its own"


def test_a_kvcr_without_stats_still_reports_losses_once() -> None:
    rig = telemetry_rig()
    rig.kvcr.bindings = SimpleNamespace(stats_factory=None, poll_pin_results=lambda: ())
    rig.kvcr.stats = None
    assert rig.tier.get_stats() is None
    rig.lookup(key(1))
    assert rig.losses() == {"not_resident": 1}
    assert rig.losses() == {}


def test_stats_that_cannot_be_had_fail_the_tier_and_say_so() -> None:
    rig = telemetry_rig()
    rig.kvcr.raises["get_stats"] = RuntimeError("progress thread died")
    state = samples(rig.tier.get_stats())["vllm:kvcr_tier_state"]
    assert state[("1", "failed", "backend_failed")] == 1
    assert state[("1", "healthy", "none")] == 0
    rig.tier.get_stats()
    assert rig.kvcr.calls.count("get_stats") == 1


def exporter(*tiers: dict[str, Any]) -> tuple[OffloadPromMetrics, CollectorRegistry]:
    """vLLM's own exporter for an engine with these tiers; registering a name twice
    raises."""
    registry = CollectorRegistry()
    extra = {
        "spec_name": TieringOffloadingSpec.__name__,
        "cpu_bytes_to_use": 1 << 20,
        "secondary_tiers": list(tiers),
    }
    transfer = SimpleNamespace(kv_connector_extra_config=extra)
    config = SimpleNamespace(kv_transfer_config=transfer)
    kinds = {k: partial(k, registry=registry) for k in (Counter, Gauge, Histogram)}
    exporter = OffloadPromMetrics(config, kinds, ["engine"], {0: ["0"]})  # type: ignore[arg-type]
    return exporter, registry


def busy_stats() -> Any:
    """Stats of a tier on which something of everything happened."""
    rig = telemetry_rig(kvcr=KeepingStandin, secondary_g2_slots=8, control_ports=[7001])
    rig.kvcr.keep(rig.memory)
    rig.result_of(rig.store([key(1), key(2)], [0, 1]))
    rig.result_of(rig.load([key(1), key(3)], [2, 3]))
    rig.lookup(key(9))
    rig.tier.on_new_request(request("r", 7))
    rig.tier.on_schedule_end(ScheduleEndContext((), ()))
    return rig.tier.get_stats()


def test_two_tiers_of_one_engine_share_their_metrics() -> None:
    other = TELEMETRY | {"secondary_g2_slots": 8, "policy": "lru"}
    assert KVCRSecondaryTierManager.build_metric_definitions(other) == DEFINITIONS
    metrics, registry = exporter(TELEMETRY, other)
    both = busy_stats().aggregate(busy_stats())
    assert set(samples(both)) <= set(DEFINITIONS)
    metrics.observe(both.data, 0)
    assert registry.get_sample_value(*FAILED_LOADS) == 2


def test_the_text_that_prometheus_reads_says_what_was_declared() -> None:
    metrics, registry = exporter(TELEMETRY)
    metrics.observe(busy_stats().data, 0)
    text = generate_latest(registry).decode()
    families = {each.name: each for each in text_string_to_metric_families(text)}
    for name, definition in DEFINITIONS.items():
        family = families[name]
        assert family.type in type(definition).__name__.lower()
        assert family.documentation == definition.documentation
        for sample in family.samples:
            assert set(sample.labels) - {"le"} == {"engine", *definition.labelnames}


def test_several_api_servers_add_up_and_tell_their_gauges_apart(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """vLLM gives each report to one of them; all write into one folder."""
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    for process in (101, 102):
        value = MultiProcessValue(lambda process=process: process)
        monkeypatch.setattr("prometheus_client.values.ValueClass", value)
        metrics, _ = exporter(TELEMETRY)
        metrics.observe(busy_stats().data, 0)
    registry = CollectorRegistry()
    MultiProcessCollector(registry, str(tmp_path))
    assert registry.get_sample_value(*FAILED_LOADS) == 2
    place = {"engine": "0", "place": "dram"}
    loads = "vllm:kvcr_tier_load_duration_seconds_count"
    assert registry.get_sample_value(loads, place) == 2
    states = [
        (sample.labels.get("pid"), sample.value)
        for family in registry.collect()
        for sample in family.samples
        if sample.name == "vllm:kvcr_tier_state" and sample.labels["tier"] == "1"
    ]
    # From vLLM 0.33 on the last report counts, whichever server it was given to.
    latest = hasattr(OffloadingGaugeMetadata, "multiprocess_mode")
    assert states == ([(None, 1)] if latest else [("101", 1), ("102", 1)])


def test_labels_are_from_bounded_sets() -> None:
    assert len({reason.label for reason in Lost}) == len(Lost)
    rig = telemetry_rig(control_ports=[7001])
    for number in range(20):
        rig.tier.on_new_request(request(f"r{number}", {"x": [number]}))
        rig.tier.on_new_request(request(f"r{number}", number))
    assert len(rig.ignored_hints()) <= 2
