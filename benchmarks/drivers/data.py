# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Runs the data-plane measurements."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.harness.contenders import (
    BARE,
    COPY,
    FS_DISK,
    FS_MEMORY,
    OURS,
    PATIENT,
    SHIPPED,
    Contender,
    adapters,
    ours,
    shipped,
)
from benchmarks.harness.plan import MIB, Plan
from benchmarks.harness.remote import Fleet
from benchmarks.harness.stats import median, ratio
from benchmarks.report.result import (
    GIGABYTES,
    MILLISECONDS,
    Curve,
    Row,
    Section,
    Unit,
    compare,
)
from vllm_kvcr.ports import free_ports

Tell = Callable[[str], None]
_ENGINE_STEP_S = 0.03
DATA_PLANE = "benchmarks.subjects.data:DataPlane"

Passes = dict[str, list[tuple[float, float]]]

_WARM_UP_PASSES = 2
_FILES_POOL_SHARE = 8
_NO_POPULATE = "unpopulated"
_NO_VERIFY = "unverified"


def memory(plan: Plan, shared_memory: Path, log: Path, tell: Tell) -> Section:
    """Host memory to host memory."""
    slots = 2 * plan.blocks
    contenders = _in_memory(slots, shared_memory)
    passes: Passes = {}
    for _ in range(plan.starts):
        found = _there_and_back(
            contenders, plan.blocks, plan.block_bytes, plan.passes, log, tell, "memory"
        )
        for name, more in found.items():
            passes.setdefault(name, []).extend(more)
    size = plan.blocks * plan.block_bytes
    rows = []
    for index, what in enumerate(("store", "load")):
        rates = _rates(passes, size, index)
        rows.append(compare(f"{what}, steady", rates, BARE, GIGABYTES, at_least=0.97))
    rows.append(_first_pass(plan, log, tell))
    return Section(f"Data plane: {_size(plan)} in one job, host memory", rows)


def files(plan: Plan, disk: Path, log: Path, tell: Tell) -> Section:
    """Through files on one disk."""
    pool = max(4, plan.blocks // _FILES_POOL_SHARE)
    kvcr_files: dict[str, Any] = {"slots": pool, "file_blocks": 4 * plan.blocks}
    unverified = ours(**PATIENT, verify_blocks=False)
    contenders = {
        FS_DISK: Contender("tier", 0, {"type": "fs"}, disk / "fs"),
        OURS: Contender(
            "tier", options=ours(**PATIENT), folder=disk / "ours", **kvcr_files
        ),
        _NO_VERIFY: Contender(
            "tier", options=unverified, folder=disk / "unverified", **kvcr_files
        ),
        BARE: Contender("bare", folder=disk / "bare", **kvcr_files),
    }
    passes = _there_and_back(
        contenders, plan.blocks, plan.block_bytes, plan.disk_passes, log, tell, "disk"
    )
    size = plan.blocks * plan.block_bytes
    rows = []
    for index, what in enumerate(("store", "load")):
        rates = _rates(passes, size, index)
        rows.append(compare(what, rates, FS_DISK, GIGABYTES, at_least=1.0))
        cost = {name: rates[name] for name in (OURS, _NO_VERIFY)}
        rows.append(compare(f"{what}, with checksums", cost, _NO_VERIFY, GIGABYTES))
    return Section(
        f"Data plane: {_size(plan)} in one job, files on one disk",
        rows,
        (
            f"KVCR has a pool of {pool} blocks above its file, so that all others go "
            "through it. Both sides open their files with O_DIRECT, which leaves the "
            "page cache out, and neither syncs. Bare KVCR is given operations of half "
            "its pool and reads straight into the primary tier, where a read that is "
            "late can hit a block that no longer is the one it was started for; the "
            "adapter has it land in the pool. Storing is bound by KVCR, which empties "
            "a full pool one block at a time, between two polls.",
        ),
    )


def sweep(plan: Plan, log: Path, tell: Tell) -> Section:
    """What the bounds on operations cost, and what they are good for."""
    bounds = {f"{one} / {all_} MiB": (one, all_) for one, all_ in plan.sweep_mib}
    usual = next(iter(bounds))
    slots = 2 * plan.blocks
    contenders = {
        name: Contender(
            "tier",
            slots,
            ours(
                **PATIENT,
                max_operation_bytes=operation * MIB,
                max_inflight_bytes=inflight * MIB,
            ),
        )
        for name, (operation, inflight) in bounds.items()
    }
    size = plan.blocks * plan.block_bytes
    with Fleet(log) as fleet:
        _start(fleet, contenders, plan.blocks, plan.block_bytes)
        passes: Passes = {name: [] for name in contenders}
        waits: dict[str, list[float]] = {name: [] for name in contenders}
        for number in range(plan.sweep_passes + _WARM_UP_PASSES):
            tell(f"bounds on operations, pass {number + 1}")
            for name in contenders:
                found = fleet.call_alone(
                    name, "there_and_back", plan.blocks, _ENGINE_STEP_S
                )
                wait = fleet.call_alone(name, "load_beside_store", plan.blocks)
                if number >= _WARM_UP_PASSES:
                    passes[name].append(found)
                    waits[name].append(wait)
    store, load = (_rates(passes, size, index) for index in (0, 1))
    rows = [
        Row(
            f"{name} (1x below)" if name == usual else name,
            others=", ".join(
                f"{what} {_multiple(found, name, usual, unit)}"
                for what, found, unit in (
                    ("store", store, GIGABYTES),
                    ("load", load, GIGABYTES),
                    ("wait", waits, MILLISECONDS),
                )
            ),
        )
        for name in bounds
    ]
    return Section(
        f"Bounds on operations (max_operation_bytes / max_inflight_bytes), "
        f"{_size(plan)}",
        rows,
        (
            f"Stores and loads are polled for every {_ENGINE_STEP_S * 1000:.0f} ms, as "
            "by an engine, which starts what there is room for only then. "
            "*Wait*: how long one block's load takes that is submitted right after a "
            "store of all blocks, polled for without a pause.",
        ),
    )


def sizes(plan: Plan, shared_memory: Path, log: Path, tell: Tell) -> list[Curve]:
    """Throughput and latency against block size and batch."""
    curves = []
    most = plan.batches[-1]
    rates: dict[tuple[str, str], list[float]] = {}
    waits: dict[tuple[str, str], list[float]] = {}
    for block_bytes in plan.size_bytes:
        contenders = _in_memory(2 * most, shared_memory)
        with Fleet(log) as fleet:
            _start(fleet, contenders, most, block_bytes)
            found: dict[tuple[str, int], list[tuple[float, float]]] = {}
            for number in range(plan.size_passes + _WARM_UP_PASSES):
                tell(f"blocks of {block_bytes >> 10} KiB, pass {number + 1}")
                for name in contenders:
                    for batch in plan.batches:
                        passed = fleet.call_alone(name, "there_and_back", batch)
                        if number >= _WARM_UP_PASSES:
                            found.setdefault((name, batch), []).append(passed)
        for name in contenders:
            for index, what in enumerate(("store", "load")):
                seconds = median([p[index] for p in found[name, most]])
                rate = most * block_bytes / seconds / 1e9
                rates.setdefault((what, name), []).append(rate)
                if block_bytes == MIB:
                    waits[what, name] = [
                        median([p[index] for p in found[name, batch]]) * 1000
                        for batch in plan.batches
                    ]
    for (what, name), values in rates.items():
        panel = f"{what}, {most} blocks: GB/s against KiB a block"
        curves.append(Curve(panel, name, [b / 1024 for b in plan.size_bytes], values))
    for (what, name), values in waits.items():
        panel = f"{what}, 1 MiB blocks: ms against blocks a job"
        curves.append(Curve(panel, name, list(plan.batches), values))
    return curves


def _multiple(
    samples: Mapping[str, list[float]], name: str, usual: str, unit: Unit
) -> str:
    if name == usual:
        return unit.show(median(samples[usual]))
    return str(ratio(samples[name], samples[usual]))


def _in_memory(slots: int, shared_memory: Path) -> dict[str, Contender]:
    return {
        BARE: Contender("bare", slots),
        **_adapters(slots),
        COPY: Contender("copy", slots),
        FS_MEMORY: Contender("tier", 0, {"type": "fs"}, shared_memory / "fs"),
    }


def _adapters(slots: int) -> dict[str, Contender]:
    options = {OURS: ours(**PATIENT), SHIPPED: shipped(free_ports(1)[0], **PATIENT)}
    return {name: Contender("tier", slots, options[name]) for name in adapters()}


def _start(
    fleet: Fleet, contenders: Mapping[str, Contender], rows: int, row_bytes: int
) -> None:
    for name, contender in contenders.items():
        fleet.start(name, DATA_PLANE, contender, rows, row_bytes, ours=name != SHIPPED)
    fleet.ready()


def _there_and_back(
    contenders: Mapping[str, Contender],
    blocks: int,
    block_bytes: int,
    repetitions: int,
    log: Path,
    tell: Tell,
    what: str,
) -> Passes:
    passes: Passes = {name: [] for name in contenders}
    with Fleet(log) as fleet:
        _start(fleet, contenders, blocks, block_bytes)
        for number in range(repetitions + _WARM_UP_PASSES):
            tell(f"data plane, {what}, pass {number + 1}")
            for name in contenders:
                found = fleet.call_alone(name, "there_and_back", blocks)
                if number >= _WARM_UP_PASSES:
                    passes[name].append(found)
    return passes


def _first_pass(plan: Plan, log: Path, tell: Tell) -> Row:
    """The first store after a start, as a share of the next ones."""
    slots = plan.blocks
    contenders = {
        **_adapters(slots),
        _NO_POPULATE: Contender("tier", slots, ours(**PATIENT, populate_pool=False)),
        BARE: Contender("bare", slots, populate=False),
    }
    size = plan.blocks * plan.block_bytes
    first: dict[str, list[float]] = {name: [] for name in contenders}
    later: dict[str, list[float]] = {name: [] for name in contenders}
    with Fleet(log) as fleet:
        _start(fleet, contenders, plan.blocks, plan.block_bytes)
        for _ in range(plan.first_passes):
            for name in contenders:
                tell(f"data plane, first pass, {name}")
                seconds = fleet.call_alone(name, "first_stores")
                rates = [size / passed / 1e9 for passed in seconds]
                first[name].append(rates[0])
                later[name] += rates[1:]
    rows = {
        name: compare(
            "store, first pass after a start",
            {"the next ones": later[name], OURS: first[name]},
            "the next ones",
            GIGABYTES,
            at_least=0.8,
        )
        for name in contenders
    }
    return replace(
        rows[OURS],
        shipped=rows[SHIPPED].ours if SHIPPED in rows else "",
        others=", ".join(f"{name} {rows[name].ours}" for name in (_NO_POPULATE, BARE)),
        ratios={name: row.ratios[OURS] for name, row in rows.items()},
    )


def _rates(passes: Passes, size: int, index: int) -> dict[str, list[float]]:
    return {
        name: [size / both[index] / 1e9 for both in found]
        for name, found in passes.items()
    }


def _size(plan: Plan) -> str:
    size = plan.block_bytes
    text = f"{size // MIB} MiB" if size >= MIB else f"{size >> 10} KiB"
    return f"{plan.blocks} x {text}"
