# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Runs the control-plane measurements."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.harness.contenders import (
    BARE,
    OURS,
    PATIENT,
    SHIPPED,
    adapters,
    ours,
    shipped,
)
from benchmarks.harness.plan import Plan
from benchmarks.harness.remote import Fleet
from benchmarks.report.result import MICROSECONDS, Row, Section, compare
from vllm_kvcr.ports import free_ports

CONTROL_PLANE = "benchmarks.subjects.control:ControlPlane"
FLATNESS = "benchmarks.subjects.flat:Flatness"
BURST = "benchmarks.subjects.flat:Burst"

Tell = Callable[[str], None]

FLAT = {
    "jobs": "a job in, a job out",
    "lookups": "a lookup and an idle poll, jobs being outstanding",
    "pins": "a pin asked for, answered and released",
    "waiting_pins": "a step, pins waiting for chunks on their way",
    "finished_requests": "a hinted request, others having finished",
    "live_requests": "a hinted request, others being under way",
}
_ABOUT_FLAT = 2.0


def control(plan: Plan, log: Path, tell: Tell) -> Section:
    """Time in calls, against bare KVCR in the same process."""
    found: dict[str, dict[str, list[float]]] = {}
    bare: dict[str, dict[str, list[float]]] = {}
    with Fleet(log) as fleet:
        for name in adapters():
            fleet.start(name, CONTROL_PLANE, _options(name), ours=name == OURS)
        fleet.ready()
        for name in fleet:
            tell(f"control plane, {name}")
            measured = {"lookup": fleet.call_alone(name, "lookups", 2)}
            measured["lookup"] = fleet.call_alone(
                name, "lookups", plan.lookup_repetitions
            )
            for blocks in plan.job_sizes:
                for load in (False, True):
                    label = f"{'load' if load else 'store'} {blocks}"
                    repetitions = plan.control_repetitions
                    if blocks == 1:
                        repetitions *= 4
                    measured[label] = fleet.call_alone(
                        name, "jobs", blocks, load, repetitions
                    )
            for label, kinds in measured.items():
                for kind, samples in kinds.items():
                    key = f"{label} {kind}"
                    found.setdefault(key, {})[name] = samples.tier
                    bare.setdefault(key, {})[name] = samples.bare
    rows = []
    for key, contenders in found.items():
        rows.append(_paired(key, contenders, bare[key]))
    return Section(
        "Control plane: the engine's thread, against bare KVCR in the same process",
        rows,
        (
            "*cpu*: CPU time of the calling thread inside submit and every poll until "
            "the result; *calls*: the same on the clock, other threads' turns "
            "included; *whole*: from submission to the result. Jobs are of 4 KiB "
            "chunks, so that nothing is hidden by copying.",
        ),
    )


def _paired(
    key: str, contenders: dict[str, list[float]], bare: dict[str, list[float]]
) -> Row:
    label, kind = key.rsplit(" ", 1)
    what, target = f"{label} ({kind})", None
    if label == "lookup":
        what, target = f"lookup, {kind}", 1.5
    elif kind == "cpu":
        target = 1.05 if label.endswith("256") else 1.25
    # Each against the bare KVCR of its own process.
    rows = {
        name: compare(
            what, {BARE: bare[name], name: samples}, BARE, MICROSECONDS, at_most=target
        )
        for name, samples in contenders.items()
    }
    row = rows[OURS]
    if SHIPPED in rows:
        other = rows[SHIPPED]
        ratios = {**row.ratios, **other.ratios}
        row = replace(row, shipped=other.shipped, ratios=ratios)
    return row


def _options(name: str) -> dict[str, Any]:
    if name == OURS:
        return ours(**PATIENT)
    return shipped(free_ports(1)[0], **PATIENT)


def flatness(plan: Plan, log: Path, tell: Tell) -> Section:
    """Cost at the most outstanding things, as a multiple of that at the fewest."""
    rows = []
    least, most = plan.outstanding[0], plan.outstanding[-1]
    with Fleet(log) as fleet:
        fleet.start(OURS, FLATNESS)
        fleet.ready()
        for kind, what in FLAT.items():
            tell(f"flatness, {what}")
            found = fleet[OURS].call(
                "measure", kind, plan.outstanding, plan.flat_repetitions
            )
            names = [f"{count:,}:" for count in plan.outstanding]
            samples = dict(zip(names, found, strict=True))
            samples[OURS] = samples.pop(f"{most:,}:")
            row = compare(
                what, samples, f"{least:,}:", MICROSECONDS, at_most=_ABOUT_FLAT
            )
            rows.append(row)
    rows.append(_bursts(plan, log, tell))
    counts = " / ".join(f"{count:,}" for count in plan.outstanding)
    return Section(
        f"Flatness: CPU time of one more, {counts} being outstanding",
        rows,
        (
            "All but the last row run over a stand-in for KVCR, so that only the tier "
            "is measured. The target is *flat*, taken as at most twice.",
        ),
    )


def _bursts(plan: Plan, log: Path, tell: Tell) -> Row:
    least, most = plan.outstanding[0], plan.outstanding[-1]
    few = f"{least:,}:"
    rows = {}
    with Fleet(log) as fleet:
        fleet.start(BARE, BURST, None)
        for name in adapters():
            fleet.start(name, BURST, _options(name), ours=name == OURS)
        fleet.ready()
        for name in fleet:
            tell(f"flatness, bursts, {name}")
            fleet.call_alone(name, "run", 100)
            # A small burst is over in no time, and needs more of them.
            samples = {
                OURS: [
                    fleet.call_alone(name, "run", most)
                    for _ in range(plan.burst_repetitions)
                ],
                few: [
                    fleet.call_alone(name, "run", least)
                    for _ in range(10 * plan.burst_repetitions)
                ],
            }
            rows[name] = compare(
                f"{most:,} one-block loads of the real KVCR at once, each",
                samples,
                few,
                MICROSECONDS,
                at_most=_ABOUT_FLAT,
            )
    ratios = {name: row.ratios[OURS] for name, row in rows.items()}
    return replace(
        rows[OURS],
        shipped=rows[SHIPPED].ours if SHIPPED in rows else "",
        others=f"{BARE} {rows[BARE].ours}",
        ratios=ratios,
    )
