# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Draws a dashboard's panels from what a Prometheus answers; needs matplotlib."""

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib
from matplotlib.figure import Figure

from scripts.dashboard import DASHBOARD

if TYPE_CHECKING:
    from scripts.dashboard_check import Run

_COLUMNS = 3
_UNITS = {
    "ops": "blocks/s",
    "Bps": "MB/s",
    "s": "ms",
    "percentunit": "%",
}
_FACTORS = {"Bps": 1e-6, "s": 1e3, "percentunit": 100.0}


def draw(run: "Run", picture: Path) -> None:
    """Write an SVG; the same data give the same file."""
    matplotlib.rcParams["svg.hashsalt"] = "vllm-kvcr"
    panels = json.loads(DASHBOARD.read_text())["panels"]
    rows = -(-len(panels) // _COLUMNS)
    figure = Figure(figsize=(5 * _COLUMNS, 2.6 * rows), layout="constrained")
    axes = list(figure.subplots(rows, _COLUMNS).flat)
    for axis, panel in zip(axes, panels, strict=False):
        axis.set_title(panel["title"], fontsize=9)
        axis.tick_params(labelsize=7)
        _draw_panel(axis, panel, run)
    for axis in axes[len(panels) :]:
        axis.set_axis_off()
    figure.savefig(picture, format="svg", metadata={"Date": None})


def _draw_panel(axis: Any, panel: dict[str, Any], run: "Run") -> None:
    shown = [
        (_legend(target["legendFormat"], series["labels"]), series["points"])
        for target in panel["targets"]
        for series in run.series(target)
        if series["points"]
    ]
    if panel["type"] == "stat":
        axis.set_axis_off()
        text = "\n".join(legend for legend, _ in shown)
        axis.text(0.5, 0.5, text, ha="center", va="center", fontsize=13)
        return
    if panel["type"] == "bargauge":
        names = [legend for legend, _ in shown]
        values = [points[-1][1] for _, points in shown]
        bars = axis.barh(names[::-1], values[::-1])
        axis.bar_label(bars, fmt="%.0f", fontsize=7)
        return
    defaults = panel["fieldConfig"]["defaults"]
    unit = defaults["unit"]
    factor = _FACTORS.get(unit, 1.0)
    axis.set_ylabel(_UNITS.get(unit, ""), fontsize=7)
    lines = [
        ([at - run.started for at, _ in points], [factor * v for _, v in points], name)
        for name, points in shown
    ]
    if defaults["custom"]["stacking"]["mode"] == "normal":
        times = sorted({at for each, _, _ in lines for at in each})
        heights = []
        for each, values, _ in lines:
            known = dict(zip(each, values, strict=True))
            heights.append([known.get(at, 0.0) for at in times])
        names = [name for _, _, name in lines]
        axis.stackplot(times, heights, labels=names, alpha=0.8)
    else:
        for each, values, name in lines:
            axis.plot(each, values, label=name, linewidth=1.2)
        axis.set_ylim(bottom=0)
    if lines:
        axis.legend(fontsize=6, loc="upper left")


def _legend(pattern: str, labels: dict[str, str]) -> str:
    return re.sub(r"{{(\w+)}}", lambda found: labels.get(found[1], ""), pattern)
