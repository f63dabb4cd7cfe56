# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The dashboard and the alerts ask for what the tier tells, and for nothing else.

``make dashboards`` runs them on a real Prometheus.
"""

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from scripts import dashboard
from tests.docs.test_docs import table_after
from vllm.v1.kv_offload.base import (
    OffloadingCounterMetadata,
    OffloadingHistogramMetadata,
)
from vllm.v1.kv_offload.tiering.kvcr.reports.health import Reason, State
from vllm.v1.kv_offload.tiering.kvcr.reports.losses import Lost
from vllm.v1.kv_offload.tiering.kvcr.reports.metrics import definitions

FOLDER = dashboard.DASHBOARD.parent
DASHBOARD = json.loads(dashboard.DASHBOARD.read_text())
ALERTS = yaml.safe_load((FOLDER / "alerts.yml").read_text())
TESTS = yaml.safe_load((FOLDER / "alerts_test.yml").read_text())
RULES = [rule for group in ALERTS["groups"] for rule in group["rules"]]

DEFINITIONS = definitions()
# What vLLM itself tells of the same blocks.
VLLMS = {"vllm:prompt_tokens_cached_by_source_total": {"source"}}
OF_PROMETHEUS = {"instance", "pid", "le"}
REASONS = {
    "vllm:kvcr_tier_lost_blocks_total": {reason.label for reason in Lost},
    "vllm:kvcr_tier_state": {reason.label for reason in Reason},
    "vllm:kvcr_tier_ignored_hints_total": {
        row[0] for row in table_after("vllm:kvcr_tier_ignored_hints_total{reason}` c")
    },
}
SELECTOR = re.compile(r"(vllm:\w+)(?:\{([^}]*)\})?")
MATCHER = re.compile(r'(\w+)\s*(?:=~|!~|!=|=)\s*"([^"]*)"')


def exported() -> dict[str, set[str]]:
    """Every name that Prometheus sees of the tier, with its labels."""
    names = dict(VLLMS)
    for name, definition in DEFINITIONS.items():
        suffixes = [""]
        if isinstance(definition, OffloadingCounterMetadata):
            suffixes = ["_total"]
        elif isinstance(definition, OffloadingHistogramMetadata):
            suffixes = ["_bucket", "_sum", "_count"]
        for suffix in suffixes:
            names[name + suffix] = set(definition.labelnames)
    return names


def expressions() -> Iterator[tuple[str, str]]:
    for panel in DASHBOARD["panels"]:
        for target in panel["targets"]:
            yield panel["title"], target["expr"]
    for rule in RULES:
        yield rule["alert"], rule["expr"]
    for test in TESTS["tests"]:
        for series in test["input_series"]:
            yield test["name"], series["series"]


@pytest.mark.parametrize(("where", "expression"), list(expressions()))
def test_what_is_asked_for_is_told(where: str, expression: str) -> None:
    known = exported()
    selectors = SELECTOR.findall(expression)
    assert selectors
    for name, matchers in selectors:
        assert name in known, f"{where}: {name}"
        for label, value in MATCHER.findall(matchers):
            assert label in known[name] | OF_PROMETHEUS, f"{where}: {name} {label}"
            if label == "reason":
                assert set(value.split("|")) <= REASONS[name], f"{where}: {value}"
            if label == "state":
                assert value in {state.value for state in State}


def test_the_dashboard_is_what_its_panels_say() -> None:
    stale = "run python -m scripts.dashboard"
    assert dashboard.DASHBOARD.read_text() == dashboard.dashboard(), stale


def test_every_metric_of_the_tier_is_shown() -> None:
    shown = " ".join(expression for _, expression in expressions())
    for name in DEFINITIONS:
        # KVCR's own are told in its words and not explained here.
        if name.startswith("vllm:kvcr_tier_"):
            assert name in shown, name


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_every_alert_is_tested(rule: dict[str, Any]) -> None:
    name = rule["alert"]
    cases = [case for test in TESTS["tests"] for case in test["alert_rule_test"]]
    tested = [case for case in cases if case["alertname"] == name]
    assert any(case.get("exp_alerts") for case in tested), "never seen to fire"
    assert any(not case.get("exp_alerts") for case in tested), "never seen to wait"
    assert rule["labels"]["severity"] in ("warning", "critical")


def test_the_guide_lists_every_metric_and_its_labels() -> None:
    listed = {}
    for name, *_ in table_after("## Metrics"):
        found = re.fullmatch(r"(\w+:\w+)(?:\{([\w, ]+)\})?", name)
        assert found is not None, name
        listed[found[1]] = set(re.findall(r"\w+", found[2] or ""))
    known = {}
    for name, definition in DEFINITIONS.items():
        counter = isinstance(definition, OffloadingCounterMetadata)
        known[name + ("_total" if counter else "")] = set(definition.labelnames)
    assert listed == known


def test_the_guide_explains_every_alert_and_no_other() -> None:
    alerts = {rule["alert"] for rule in RULES}
    assert {row[0] for row in table_after("## Alerts")} == alerts
