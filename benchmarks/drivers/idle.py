# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Runs the measurements of idle tiers and idle engines."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.harness.contenders import (
    BARE,
    OURS,
    SHIPPED,
    adapters,
    ours,
    peering,
    shipped,
)
from benchmarks.harness.plan import IDLE_ROWS, Plan
from benchmarks.harness.remote import Fleet
from benchmarks.harness.threads import ThreadLoad
from benchmarks.report.result import PERCENT, Row, Section
from benchmarks.subjects.idle_engine import IdleEngine
from vllm_kvcr.ports import free_ports

Tell = Callable[[str], None]

BACKEND = "KVCR and NIXL"
_TARGET = 0.02
_SHOWN = 0.0005

_NO_PEERS = "no peers"
_PEERS = "serving peers"
_POLLED = "polled by a thread"
_NO_TIER = "no tier"


def idle_tiers(plan: Plan, folder: Path, log: Path, tell: Tell) -> Section:
    """A process with one tier, driven as an engine would drive it."""
    ports = free_ports(3)
    slots = {"secondary_g2_slots": IDLE_ROWS}
    members: dict[str, tuple[str, str, dict[str, Any] | None]] = {
        "ours": (OURS, _NO_PEERS, ours(**slots)),
        "bare polled": (_NO_TIER, _POLLED, None),
        "ours polled": (OURS, _POLLED, ours(**slots, **peering(ports[0]))),
        "ours peers": (OURS, _PEERS, ours(**slots, **peering(ports[1]))),
        "shipped": (SHIPPED, _PEERS, shipped(ports[2], **slots)),
        "bare": (BARE, "", None),
        "fs": ("vLLM's fs tier", "", {"type": "fs", "root_dir": str(folder / "idle")}),
    }
    if SHIPPED not in adapters():
        del members["shipped"]
    rows = []
    base = 0.0
    with Fleet(log) as fleet:
        for name, (who, _, options) in members.items():
            fleet.start(
                name, "benchmarks.subjects.idle:IdleTier", options, ours=who != SHIPPED
            )
        fleet.ready()
        for name, (who, how, _) in members.items():
            tell(f"idle cost of a tier, {who} {how}")
            loads, steps = fleet.call_alone(
                name, "measure", plan.idle_seconds, how == _POLLED
            )
            if who == _NO_TIER:
                base = _own(loads)
            limited = who == OURS and how != _PEERS
            rate = f"{steps / plan.idle_seconds:,.0f} steps/s"
            polled = base if how == _POLLED else 0.0
            rows.append(_row(who, how, loads, limited, rate, polled))
    return Section(
        "Idle: a process with one tier that has nothing to do",
        rows,
        (
            "The process steps while the tier says that it has pending work, as vLLM's "
            "engine core does, and sleeps otherwise. Before vLLM 0.33 nothing wakes a "
            "sleeping engine for a peer, so that there an engine that serves peers has "
            "to step. From 0.33 on a thread of vLLM's manager polls instead, here "
            "every millisecond; what a thread costs that polls nothing is not the "
            "tier's. Each process with a KVCR has NIXL's progress thread, which never "
            "sleeps by itself; this adapter has it wait for data.",
        ),
    )


def idle_engines(plan: Plan, folder: Path, log: Path, tell: Tell) -> Section:
    """Real engines on vLLM's CPU backend, all their processes together."""
    slots = {"secondary_g2_slots": IDLE_ROWS}
    engines: dict[str, tuple[str, list[dict[str, Any]]]] = {
        "none": (_NO_TIER, []),
        "ours": (OURS, [ours(**slots)]),
        "shipped": (SHIPPED, [shipped(free_ports(1)[0], **slots)]),
    }
    if SHIPPED not in adapters():
        del engines["shipped"]
    rows = []
    base = 0.0
    with ExitStack() as stack:
        for name, (who, tiers) in engines.items():
            tell(f"idle cost of an engine, {who}: starting")
            engine = IdleEngine(
                folder / f"engine-{name}", tiers, ours=name == "ours", log=log
            )
            stack.callback(engine.close)
            engine.wait_until_idle()
            tell(f"idle cost of an engine, {who}")
            loads = engine.measure(plan.idle_seconds)
            # Gone long before the next one has started.
            engine.end()
            if name == "none":
                base = _own(loads)
            rows.append(_row(who, "", loads, name == "ours", "", base))
    return Section(
        "Idle: a real engine that has served a request and has nothing to do",
        rows,
        ("All processes of the engine; the target is what the tier adds.",),
    )


def _row(
    who: str,
    how: str,
    loads: Sequence[ThreadLoad],
    limited: bool,
    more: str = "",
    base: float = 0.0,
) -> Row:
    own = _own(loads)
    backend = sum(load.share for load in loads if load.is_backend)
    threads: dict[str, float] = {}
    for load in loads:
        threads[load.name] = threads.get(load.name, 0.0) + load.share
    named = ", ".join(
        f"{name} {share * 100:.1f}" for name, share in threads.items() if share > _SHOWN
    )
    shown = PERCENT.show(own) + (f", {more}" if more else "")
    return Row(
        f"{who}, {how}" if how else who,
        ours=shown if who == OURS else "",
        shipped=shown if who == SHIPPED else "",
        others=f"{'' if who in (OURS, SHIPPED) else shown + '; '}"
        f"{BACKEND} {PERCENT.show(backend)}; by thread: {named or 'none ran'}",
        target=f"< {_TARGET * 100:.0f} %" if limited else "",
        met=own - base < _TARGET if limited else None,
    )


def _own(loads: Sequence[ThreadLoad]) -> float:
    """What is neither KVCR's nor NIXL's."""
    return sum(load.share for load in loads if not load.is_backend)
