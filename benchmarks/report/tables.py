# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""One table on the screen, and the same in Markdown with a plot."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.harness.contenders import OURS, SHIPPED
from benchmarks.report.result import Curve, Row, Section

_COLUMNS = ("what", "reference", OURS, SHIPPED, "others", "target")
_SHARES = (12, 6, 6, 6, 10, 5)
_ABOUT = """# Benchmarks

Written by `make bench`. All contenders ran in this one run, in processes of their own
and in turns; those not being measured were stopped. Figures are medians; a multiple is
a ratio of medians with its bootstrapped 90 % interval. Only multiples say something
about other machines. *{shipped}* is the one that the installed vLLM ships, used as it
is.
"""


def print_table(
    console: Console, sections: Sequence[Section], machine: Mapping[str, str]
) -> None:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False)
    for name, share in zip(_COLUMNS, _SHARES, strict=True):
        table.add_column(name, ratio=share, overflow="fold")
    for section in sections:
        table.add_section()
        table.add_row(f"[bold]{section.title}[/bold]")
        for row in section.rows:
            table.add_row(*_cells(row))
    console.print(table)
    for name, value in machine.items():
        console.print(f"[bold]{name}[/bold] {value}", highlight=False)


def write(
    folder: Path,
    sections: Sequence[Section],
    curves: Sequence[Curve],
    machine: Mapping[str, str],
    seconds: float,
) -> list[Path]:
    """Write ``benchmarks.md`` and, where there are curves, ``benchmarks.svg``."""
    folder.mkdir(exist_ok=True)
    document = folder / "benchmarks.md"
    lines = [_ABOUT.format(shipped=SHIPPED)]
    lines += [f"- {name}: {value}" for name, value in machine.items()]
    lines += [f"- the run took {seconds:.0f} s", ""]
    for section in sections:
        lines += [f"## {section.title}", ""]
        lines += [f"| {' | '.join(_COLUMNS)} |"]
        lines += ["|" + "---|" * len(_COLUMNS)]
        for row in section.rows:
            lines.append(f"| {' | '.join(_cells(row))} |")
        lines += ["", *section.notes]
        if section.notes:
            lines.append("")
    written = [document]
    if curves:
        plot = folder / "benchmarks.svg"
        draw(plot, curves)
        written.append(plot)
        lines += [
            "## Block size and batch",
            "",
            f"![Throughput and latency]({plot.name})",
            "",
        ]
    document.write_text("\n".join(lines))
    return written


def as_json(sections: Sequence[Section]) -> str:
    """The ratios, for programs: by section, row and contender."""
    found = {
        section.title: {
            row.what: {"met": row.met}
            | {name: ratio.value for name, ratio in row.ratios.items()}
            for row in section.rows
        }
        for section in sections
    }
    return json.dumps(found, indent=1)


def draw(file: Path, curves: Sequence[Curve]) -> None:
    """One panel for each kind of curve."""
    import matplotlib

    matplotlib.use("svg")
    # The same figures give the same file.
    matplotlib.rcParams["svg.hashsalt"] = "benchmarks"
    from matplotlib import pyplot

    panels = list(dict.fromkeys(curve.panel for curve in curves))
    figure, axes = pyplot.subplots(
        (len(panels) + 1) // 2, 2, figsize=(10, 7), squeeze=False
    )
    for panel, axis in zip(panels, axes.flat, strict=False):
        what, _, quantities = panel.partition(": ")
        y_name, _, x_name = quantities.partition(" against ")
        axis.set(title=what, xlabel=x_name, ylabel=y_name, xscale="log", yscale="log")
        drawn = [curve for curve in curves if curve.panel == panel]
        for curve in drawn:
            axis.plot(curve.x, curve.y, marker="o", label=curve.contender)
        axis.set_xticks(drawn[0].x, [f"{x:g}" for x in drawn[0].x])
        axis.minorticks_off()
        axis.yaxis.set_major_formatter("{x:g}")
        axis.grid(alpha=0.3)
    axes[0][0].legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(file, metadata={"Date": None})
    pyplot.close(figure)


def _cells(row: Row) -> tuple[str, ...]:
    target = row.target
    if row.met is not None:
        target += ": met" if row.met else ": missed"
    return row.what, row.reference, row.ours, row.shipped, row.others, target
