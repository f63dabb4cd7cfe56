# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""``python -m benchmarks``: everything, side by side, in a few minutes."""

import argparse
import importlib.util
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from benchmarks.drivers import control, data, idle, peers, scaling
from benchmarks.harness import machine, remote
from benchmarks.harness.plan import QUICK, Plan
from benchmarks.report import tables
from benchmarks.report.result import Curve, Section

_PREFIX = "vllm-kvcr-bench-"
PARTS = (
    "control",
    "flat",
    "scaling",
    "peers",
    "data",
    "files",
    "sweep",
    "sizes",
    "idle",
)


def run(
    plan: Plan, parts: set[str], folder: Path, tell: Callable[[str], None]
) -> tuple[list[Section], list[Curve]]:
    """Measure.

    Args:
        folder: On the disk to measure; left as it was.
    """
    sections: list[Section] = []
    curves: list[Curve] = []
    with (
        tempfile.TemporaryDirectory(prefix=_PREFIX, dir="/dev/shm") as shared,
        tempfile.TemporaryDirectory(prefix=_PREFIX, dir=folder) as scratch,
    ):
        memory, disk = Path(shared), Path(scratch)
        log = disk / "log"
        log.touch()
        remote.prepare(log)
        if "idle" in parts:
            sections.append(idle.idle_tiers(plan, disk, log, tell))
            if plan.engines:
                sections.append(idle.idle_engines(plan, disk, log, tell))
        if "peers" in parts:
            sections.append(peers.peers(plan, log, tell))
            if plan.landing_pulls:
                sections.append(peers.landing(plan, log, tell))
        if "control" in parts:
            sections.append(control.control(plan, log, tell))
        if "flat" in parts:
            sections.append(control.flatness(plan, log, tell))
        if "scaling" in parts:
            sections.append(scaling.pools(plan, log, tell))
            sections.append(scaling.calls(plan, log, tell))
        if "data" in parts:
            sections.append(data.memory(plan, memory, log, tell))
        if "files" in parts and plan.disk_passes:
            sections.append(data.files(plan, disk, log, tell))
        if "sweep" in parts and plan.sweep_passes:
            sections.append(data.sweep(plan, log, tell))
        if "sizes" in parts and plan.size_passes:
            curves += data.sizes(plan, memory, log, tell)
    return sections, curves


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a smoke test")
    parser.add_argument(
        "--only", default=",".join(PARTS), help=f"of {', '.join(PARTS)}"
    )
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path("/var/tmp"),
        help="on the disk to measure (default: %(default)s)",
    )
    parser.add_argument(
        "--docs",
        type=Path,
        help="where to write benchmarks.md and the plot (default: docs, "
        "nowhere for a part or a quick run)",
    )
    parser.add_argument("--json", type=Path, help="where to write all ratios")
    options = parser.parse_args(arguments)
    parts = set(options.only.split(","))
    if unknown := parts - set(PARTS):
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    docs = options.docs
    if docs is None and not options.quick and parts == set(PARTS):
        docs = Path(__file__).resolve().parent.parent / "docs"

    if docs is not None and importlib.util.find_spec("matplotlib") is None:
        parser.error("the plot needs matplotlib: pip install -e .[bench]")

    # So that what was started is ended then, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    console = Console(width=None if sys.stdout.isatty() else 160)
    started = time.monotonic()
    about = machine.describe(options.folder)
    with Console(stderr=True).status("") as status:
        sections, curves = run(
            QUICK if options.quick else Plan(), parts, options.folder, status.update
        )
    seconds = time.monotonic() - started
    tables.print_table(console, sections, about)
    console.print(f"[bold]took[/bold] {seconds:.0f} s", highlight=False)
    if options.json is not None:
        options.json.write_text(tables.as_json(sections))
    if docs is not None:
        for file in tables.write(docs, sections, curves, about, seconds):
            console.print(f"wrote {os.path.relpath(file)}", highlight=False)


if __name__ == "__main__":
    main()
