# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Runs the measurements of large pools and large calls."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from benchmarks.harness.contenders import OURS
from benchmarks.harness.plan import Plan
from benchmarks.harness.remote import Fleet
from benchmarks.harness.stats import ratio
from benchmarks.report.result import MICROSECONDS, MILLISECONDS, Row, Section, compare

POOL = "benchmarks.subjects.scaling:LargePool"
CALLS = "benchmarks.subjects.scaling:LargeCalls"
ALL_RECORDS = 200_000

LARGE = {
    "store": "a block of a store job",
    "load": "a block of a load job",
    "failing_load": "a block of a load job whose blocks all fail",
    "hint": "a hash of a request's hint",
    "requests": "a hinted request, from its begin to its end",
    "events": "a KV event",
    "pins": "a pin asked for, answered and released",
    "step": "a step's other calls, jobs and pins being outstanding",
}

# Of what takes long to set up, or to end.
_FEWER = 20_000

Tell = Callable[[str], None]


def pools(plan: Plan, log: Path, tell: Tell) -> Section:
    """CPU time with large pools, against the smallest."""
    rows: list[Row] = []
    for policy in plan.pool_policies:
        touches: dict[int, list[float]] = {}
        unbounded: dict[int, list[float]] = {}
        calls: dict[str, dict[int, list[float]]] = {}
        tell(f"scaling, pools, policy {policy}")
        with Fleet(log) as fleet:
            for slots in plan.pool_slots:
                fleet.start(f"{slots}", POOL, slots, policy)
            fleet.ready()
            for slots in plan.pool_slots:
                name = f"{slots}"
                touches[slots] = fleet.call_alone(name, "touches", plan.touches)
                unbounded[slots] = fleet.call_alone(name, "unbounded", plan.touches)
                # Of a larger pool not all blocks are there to be looked up.
                if policy is None and slots <= ALL_RECORDS:
                    found = fleet.call_alone(name, "calls", plan.scaling_repetitions)
                    for what, samples in found.items():
                        calls.setdefault(what, {})[slots] = samples
        fewest, *more = plan.pool_slots
        base = f"{fewest:,} slots:"
        said = f", policy {policy}" if policy else ""
        for slots in more:
            row = compare(
                f"touch, 4,096 keys, {slots:,} slots{said}",
                {base: touches[fewest], OURS: touches[slots]},
                base,
                MILLISECONDS,
            )
            direct = ratio(unbounded[slots], unbounded[fewest])
            worst = MILLISECONDS.show(max(touches[slots]))
            all_worst = MILLISECONDS.show(max(unbounded[slots]))
            rows.append(
                replace(
                    row,
                    others=f"longest {worst}; 1,024 keys unbounded {direct}, "
                    f"longest {all_worst}",
                )
            )
        for name, by_slots in calls.items():
            most = max(by_slots)
            by_name = {base: by_slots[fewest], OURS: by_slots[most]}
            label = f"{name}, {most:,} slots"
            rows.append(compare(label, by_name, base, MICROSECONDS))
    return Section(
        "Large pools: CPU time of one call, against a small pool",
        rows,
        (
            "The real KVCR with 64-byte blocks. *Touch* tells which blocks a request "
            "uses (vLLM 0.30 only); *unbounded* is what KVCR takes for 1,024 resident "
            "blocks at once. Memory that no longer fits the processor's caches is part "
            "of each figure.",
        ),
    )


def calls(plan: Plan, log: Path, tell: Tell) -> Section:
    """CPU time per unit of large calls, against small ones."""
    few, many = plan.call_units
    rows = []
    with Fleet(log) as fleet:
        fleet.start(OURS, CALLS)
        fleet.ready()
        for kind, what in LARGE.items():
            tell(f"scaling, {what}")
            most = min(many, _FEWER) if kind in ("failing_load", "step") else many
            repetitions = plan.scaling_repetitions
            samples = {
                f"{few:,}:": fleet[OURS].call("measure", kind, few, 5 * repetitions),
                OURS: fleet[OURS].call("measure", kind, most, repetitions),
            }
            rows.append(
                compare(f"{what}, {most:,}", samples, f"{few:,}:", MICROSECONDS)
            )
    return Section(
        "Large calls: CPU time of each unit, against a call with few",
        rows,
        ("Over a stand-in for KVCR, so that only the tier is measured.",),
    )
