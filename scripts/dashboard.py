# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Grafana's dashboard for the kvcr tier, written as panels and their queries.

python -m scripts.dashboard     writes dashboards/kvcr.json
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DASHBOARD = Path(__file__).resolve().parent.parent / "dashboards" / "kvcr.json"

# With several API servers vLLM shows each gauge once for each of them.
_GAUGE = 'max without (pid) ({name}{{instance=~"$instance"{labels}}})'


@dataclass(frozen=True)
class Panel:
    """A graph, or with ``kind`` another picture, of some queries."""

    title: str
    queries: tuple[tuple[str, str], ...]
    """Legend and expression."""
    unit: str = "short"
    kind: str = "timeseries"
    stacked: bool = False
    about: str = ""
    width: int = 8


def rate(name: str, by: str = "", where: str = "") -> str:
    """A counter's increase a second, summed over what is not in ``by``."""
    selector = f'{{instance=~"$instance"{where}}}'
    grouping = f"by ({by}) " if by else ""
    return f"sum {grouping}(rate(vllm:{name}_total{selector}[$__rate_interval]))"


def increase(name: str, where: str = "") -> str:
    """A counter's increase over the time that is shown."""
    selector = f'{{instance=~"$instance"{where}}}'
    return f"sum(increase(vllm:{name}_total{selector}[$__range]))"


def gauge(name: str, labels: str = "") -> str:
    return _GAUGE.format(name=f"vllm:{name}", labels=labels)


def quantile(share: str) -> str:
    bucket = "vllm:kvcr_tier_load_duration_seconds_bucket"
    selector = '{instance=~"$instance"}[$__rate_interval]'
    return f"histogram_quantile({share}, sum by (le, place) (rate({bucket}{selector})))"


_LOADS = ', direction="load"'
_STORES = ', direction="store"'

PANELS = (
    Panel(
        "State",
        (("{{instance}} {{state}} {{reason}}", gauge("kvcr_tier_state") + " == 1"),),
        kind="stat",
        about="healthy, degraded or failed, and why; see docs/operations.md",
    ),
    Panel(
        "Where blocks go",
        (
            ("looked up", increase("kvcr_tier_lookups")),
            ("found", increase("kvcr_tier_hits")),
            (
                "to be loaded",
                increase("kvcr_tier_requested_blocks", _LOADS),
            ),
            ("loaded", increase("kvcr_tier_moved_blocks", _LOADS)),
            (
                "to be stored",
                increase("kvcr_tier_requested_blocks", _STORES),
            ),
            (
                "stored",
                increase("kvcr_tier_moved_blocks", _STORES + ', place="dram"'),
            ),
        ),
        kind="bargauge",
        about="Blocks, over the time that is shown.",
        width=16,
    ),
    Panel(
        "Hit rate by place",
        (
            (
                "{{place}}",
                f"{rate('kvcr_tier_hits', 'place')} / ignoring(place) group_left "
                f"{rate('kvcr_tier_lookups')}",
            ),
        ),
        unit="percentunit",
        stacked=True,
        about="Share of the lookups that found their block, by where it was.",
    ),
    Panel(
        "Blocks that were not reused, by reason",
        (("{{reason}}", rate("kvcr_tier_lost_blocks", "reason")),),
        unit="ops",
        stacked=True,
        about="What each reason means is in docs/operations.md.",
    ),
    Panel(
        "Cached tokens by source, as vLLM counts them",
        (("{{source}}", rate("prompt_tokens_cached_by_source", "source")),),
        stacked=True,
        about="Tokens a second; from vLLM 0.32 on.",
    ),
    Panel(
        "Loaded, by place",
        (("{{place}}", rate("kvcr_tier_moved_bytes", "place", _LOADS)),),
        unit="Bps",
        stacked=True,
    ),
    Panel(
        "Stored, by place",
        (("{{place}}", rate("kvcr_tier_moved_bytes", "place", _STORES)),),
        unit="Bps",
        stacked=True,
        about="disk: written to files out of the pool.",
    ),
    Panel(
        "Pulled from here by peers",
        (
            (
                "{{instance}}",
                rate("kvcr_transfer_bytes", "instance", ', operation="source_write"'),
            ),
        ),
        unit="Bps",
        about="As the engine that is pulled from counts it.",
    ),
    *(
        Panel(
            f"Time of a load, {name}",
            (("{{place}}", quantile(share)),),
            unit="s",
            about="From vLLM's request until blocks are in its primary tier.",
        )
        for name, share in (("median", "0.5"), ("95 %", "0.95"), ("99 %", "0.99"))
    ),
    Panel(
        "Pool and files in use",
        (
            (
                "{{instance}} {{place}}",
                f"{gauge('kvcr_tier_used_bytes')}"
                f" / {gauge('kvcr_tier_capacity_bytes')}",
            ),
        ),
        unit="percentunit",
        about="Both fill up and stay full: KVCR evicts only for something new.",
    ),
    Panel(
        "Peers",
        (("{{instance}} {{standing}}", gauge("kvcr_tier_peers")),),
        about="cooling: left alone after a silence.",
    ),
    Panel(
        "Hints that were not used, by reason",
        (("{{reason}}", rate("kvcr_tier_ignored_hints", "reason")),),
        unit="ops",
        stacked=True,
    ),
    Panel(
        "Pins held for peers",
        (("{{instance}}", gauge("kvcr_tier_pins")),),
    ),
    Panel(
        "Age of the oldest pin",
        (("{{instance}}", gauge("kvcr_tier_oldest_pin_age_seconds")),),
        unit="s",
    ),
    Panel(
        "Slots held back",
        (("{{instance}} {{memory}}", gauge("kvcr_tier_quarantined_slots")),),
        about="A peer may still write to them.",
    ),
)


def dashboard() -> str:
    """The whole file."""
    datasource = {"type": "prometheus", "uid": "${datasource}"}
    content = {
        "uid": "vllm-kvcr",
        "title": "vLLM: the kvcr tier",
        "description": "Where KV blocks come from and go to, and how the tier is.",
        "tags": ["vllm", "kvcr"],
        "schemaVersion": 39,
        "editable": True,
        "time": {"from": "now-1h", "to": "now"},
        "refresh": "30s",
        "templating": {
            "list": [
                {"name": "datasource", "type": "datasource", "query": "prometheus"},
                {
                    "name": "instance",
                    "type": "query",
                    "datasource": datasource,
                    "query": "label_values(vllm:kvcr_tier_state, instance)",
                    "refresh": 2,
                    "multi": True,
                    "includeAll": True,
                    "allValue": ".*",
                    "current": {"text": "All", "value": "$__all"},
                },
            ]
        },
        "panels": list(_placed(datasource)),
    }
    return json.dumps(content, indent=1) + "\n"


def _placed(datasource: dict[str, str]) -> Iterator[dict[str, Any]]:
    x = y = 0
    for number, panel in enumerate(PANELS, 1):
        if x + panel.width > 24:
            x, y = 0, y + 8
        defaults: dict[str, Any] = {"unit": panel.unit, "min": 0}
        if panel.kind == "timeseries":
            stacking = {"mode": "normal" if panel.stacked else "none"}
            fill = 40 if panel.stacked else 5
            defaults["custom"] = {"stacking": stacking, "fillOpacity": fill}
        shown: dict[str, Any] = {
            "id": number,
            "title": panel.title,
            "description": panel.about,
            "type": panel.kind,
            "datasource": datasource,
            "gridPos": {"x": x, "y": y, "w": panel.width, "h": 8},
            "fieldConfig": {"defaults": defaults, "overrides": []},
            "targets": [
                {
                    "refId": chr(ord("A") + index),
                    "expr": expression,
                    "legendFormat": legend,
                    "instant": panel.kind != "timeseries",
                    "range": panel.kind == "timeseries",
                }
                for index, (legend, expression) in enumerate(panel.queries)
            ],
        }
        if panel.kind == "stat":
            shown["options"] = {"textMode": "name", "colorMode": "none"}
        yield shown
        x += panel.width


if __name__ == "__main__":
    DASHBOARD.write_text(dashboard())
