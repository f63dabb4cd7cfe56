# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Runs the measurements of pulls from a peer."""

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.harness.contenders import (
    OURS,
    SHIPPED,
    adapters,
    ours,
    peering,
    shipped,
)
from benchmarks.harness.plan import MIB, Plan
from benchmarks.harness.remote import Fleet, Remote
from benchmarks.harness.stats import median
from benchmarks.report.result import MILLISECONDS, Row, Section, compare
from vllm_kvcr.ports import LOCALHOST, free_ports

Tell = Callable[[str], None]

SOURCE = "benchmarks.subjects.peers:Source"
SINK = "benchmarks.subjects.peers:Sink"
ROWS = 64
_FAST_S, _USUAL_S, _SLOW_S = 0.001, 0.030, 0.900
_REFERENCE = "1 ms:"
_POLLED = "polled"
_WARM_UP = 5
_INTRODUCTION_S = 60.0


def peers(plan: Plan, log: Path, tell: Tell) -> Section:
    pulls: dict[tuple[str, float], list[tuple[str, float]]] = {}
    with Fleet(log) as fleet:
        for who in adapters():
            source, sink = free_ports(2)
            make = shipped if who == SHIPPED else _ours
            kind = who == OURS
            endpoint = f"tcp://{LOCALHOST}:{source}"
            arguments = (make(source), ROWS, MIB)
            fleet.start(f"{who} source", SOURCE, *arguments, ours=kind)
            arguments = (make(sink), ROWS, MIB)
            fleet.start(f"{who} sink", SINK, *arguments, endpoint, ours=kind)
        fleet.ready()
        for who in adapters():
            tell(f"peers, {who} gets to know its peer")
            _warm_up(fleet[f"{who} sink"], 1)

        def pull(who: str, step_s: float, polled: bool) -> None:
            source = fleet[f"{who} source"]
            source.call("behave", step_s, polled)
            name = f"{who} {_POLLED}" if polled else who
            found = fleet[f"{who} sink"].call("pull", 1, step_s)
            pulls.setdefault((name, step_s), []).append(found)
            source.call("behave", _FAST_S, False)

        ways = [(OURS, True), *((who, False) for who in adapters())]
        tell(f"peers, {plan.pulls} pulls each")
        for _ in range(plan.pulls):
            for step_s in (_FAST_S, _USUAL_S):
                for who, polled in ways:
                    pull(who, step_s, polled)
        tell(f"peers, {plan.slow_pulls} pulls each from a slow source")
        for _ in range(plan.slow_pulls):
            for who, polled in ways:
                pull(who, _SLOW_S, polled)
    rows = _latencies(pulls)
    if plan.slow_pulls:
        rows += _slow(pulls)
    return Section(
        "Peers: a 1 MiB block pulled from another engine, which is stepping",
        rows,
        (
            "The pulling engine polls every millisecond. *Polled*: a thread beside the "
            "source's steps polls its tier every millisecond, as vLLM's manager does "
            "from 0.33 on.",
        ),
    )


def landing(plan: Plan, log: Path, tell: Tell) -> Section:
    """Blocks land in KVCR's pool first, or straight in the primary tier."""
    pulls: dict[str, list[float]] = {"primary": [], "pool": []}
    with Fleet(log) as fleet:
        port = free_ports(1)[0]
        endpoint = f"tcp://{LOCALHOST}:{port}"
        fleet.start("source", SOURCE, _ours(port), ROWS, MIB)
        for where in pulls:
            options = _ours(free_ports(1)[0], remote_landing=where)
            fleet.start(where, SINK, options, ROWS, MIB, endpoint)
        fleet.ready()
        tell("peers, where pulled blocks land")
        for where in pulls:
            _warm_up(fleet[where], plan.landing_blocks)
        for _ in range(plan.landing_pulls):
            for where, found in pulls.items():
                outcome, seconds = fleet[where].call(
                    "pull", plan.landing_blocks, _FAST_S
                )
                if outcome == "pulled":
                    found.append(seconds)
    row = compare(
        f"{plan.landing_blocks} x 1 MiB",
        {"remote_landing=primary": pulls["primary"], OURS: pulls["pool"]},
        "remote_landing=primary",
        MILLISECONDS,
    )
    return Section("Peers: landing in KVCR's pool (the default)", [row])


def _warm_up(sink: Remote, blocks: int) -> None:
    """Pull until the peer has been introduced, and then some more."""
    deadline = time.monotonic() + _INTRODUCTION_S
    while sink.call("pull", blocks, _FAST_S)[0] != "pulled":
        if time.monotonic() > deadline:
            raise TimeoutError(f"no block came from the peer in {_INTRODUCTION_S:g} s")
    for _ in range(_WARM_UP):
        sink.call("pull", blocks, _FAST_S)


def _ours(port: int, **options: Any) -> dict[str, Any]:
    return ours(**peering(port), **options)


def _latencies(pulls: dict[tuple[str, float], list[tuple[str, float]]]) -> list[Row]:
    seconds = {
        key: [passed for outcome, passed in found if outcome == "pulled"]
        for key, found in pulls.items()
    }
    polled = f"{OURS} {_POLLED}"
    reference = seconds[OURS, _FAST_S]
    rows = [
        compare(
            f"source steps every {step_s * 1000:.0f} ms",
            {
                _REFERENCE: reference,
                OURS: seconds[OURS, step_s],
                SHIPPED: seconds.get((SHIPPED, step_s), []),
            },
            _REFERENCE,
            MILLISECONDS,
        )
        for step_s in (_FAST_S, _USUAL_S)
    ]
    more = median(seconds[OURS, _USUAL_S]) - median(reference)
    rows[1] = replace(rows[1], target="<= a step more", met=more <= _USUAL_S)
    for step_s in (_FAST_S, _USUAL_S, _SLOW_S):
        if seconds.get((polled, step_s)):
            rows.append(
                compare(
                    f"source steps every {step_s * 1000:.0f} ms, polled",
                    {_REFERENCE: reference, OURS: seconds[polled, step_s]},
                    _REFERENCE,
                    MILLISECONDS,
                    at_most=1.25,
                )
            )
    return rows


def _slow(pulls: dict[tuple[str, float], list[tuple[str, float]]]) -> list[Row]:
    """Which share of pulls came at all."""
    rows = []
    for how in ("", f" {_POLLED}"):
        came = {}
        complete = True
        for who in (OURS, SHIPPED):
            found = pulls.get((who + how, _SLOW_S), [])
            counts = Counter(outcome for outcome, _ in found)
            if found:
                came[who] = f"{counts['pulled']} of {len(found)} came"
            if who == OURS:
                complete = counts["pulled"] == len(found)
        rows.append(
            Row(
                "source steps every 900 ms" + (", polled" if how else ""),
                ours=came.get(OURS, ""),
                shipped=came.get(SHIPPED, ""),
                target="all come" if how else "",
                met=complete if how else None,
            )
        )
    return rows
