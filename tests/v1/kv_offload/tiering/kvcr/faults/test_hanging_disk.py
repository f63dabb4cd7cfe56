# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A disk that hangs, below the real KVCR: its file operations do not end.

KVCR itself gives them up after a minute, since cancelling one can kill the process.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kvcr import local_disk

from tests.v1.kv_offload.tiering.kvcr.builders import request
from tests.v1.kv_offload.tiering.kvcr.faults.harness.blocks import make_keys
from tests.v1.kv_offload.tiering.kvcr.faults.harness.engine import MIB, Engine
from vllm.v1.kv_offload.base import LookupResult
from vllm.v1.kv_offload.tiering.kvcr.peers import liveness

POOL = 16
KEYS = make_keys(4, "filed")
FILLERS = make_keys(2 * POOL, "fillers")
OPERATION_S = 1.0
# On a busy machine.
SOON_S = 4.0


class Disk:
    """Whether it hangs."""

    hangs = False


@pytest.fixture
def hanging(monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    state = Disk()
    progress = local_disk._G3TransferOp.progress

    def stuck(operation: Any, *arguments: Any) -> tuple[bool, bool]:
        if state.hangs:
            return False, False
        return progress(operation, *arguments)

    monkeypatch.setattr(local_disk._G3TransferOp, "progress", stuck)
    yield state
    state.hangs = False


def filled(engines: Any, disk: Path) -> Engine:
    """An engine with ``KEYS`` in its file, and the last of ``FILLERS`` in its pool."""
    g3 = {
        "paths": str(disk / "g3"),
        "capacity_bytes_per_file": 64 * MIB,
        "backend": "POSIX",
    }
    engine: Engine = engines({"secondary_g2_slots": POOL, "g3": g3}, rows=32)
    engine.finish(engine.store(KEYS, range(4)))
    for first in range(0, len(FILLERS), 4):
        engine.finish(engine.store(FILLERS[first : first + 4], range(4)))
        engine.run_for(0.05)
    return engine


def test_it_costs_one_wait_and_says_so(
    engines: Any,
    disk: Path,
    hanging: Disk,
    tier_log: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(liveness, "FIRST_COOLDOWN_S", 1.0)
    engine = filled(engines, disk)
    hanging.hangs = True
    first = engine.load(KEYS[:2], range(2))
    behind = engine.load(KEYS[2:], range(2, 4))
    waited = engine.finish(first, behind, timeout_s=SOON_S)
    assert waited >= 0.9 * OPERATION_S
    assert not first.arrived
    assert not behind.arrived
    assert (engine.probe.state, engine.probe.reason) == ("degraded", "disk_stalled")
    (line,) = (text for text in tier_log.texts() if "(disk_stalled)" in text)
    assert str(disk / "g3") in line

    # The next request does not wait at all, and the pool serves as before.
    answers = engine.lookup_all(KEYS, request("next"))
    assert set(answers) == {LookupResult.MISS}
    local = engine.load(FILLERS[-2:], range(4, 6))
    engine.finish(local, timeout_s=SOON_S)
    assert local.arrived == FILLERS[-2:]
    engine.drain()

    hanging.hangs = False
    engine.run_for(1.5)
    engine.lookup_all(make_keys(1, "filed"), request("again"))
    later = FILLERS[:2]

    def read() -> bool:
        hits = engine.lookup_all(later, request("later"))
        return set(hits) == {LookupResult.HIT}

    engine.run_until(read, 10, "reading files again")
    job = engine.load(later, range(6, 8))
    engine.finish(job)
    assert job.arrived == later
    assert engine.probe.state == "healthy"


def test_a_disk_that_works_is_never_said_to_hang(
    engines: Any, disk: Path, hanging: Disk
) -> None:
    engine = filled(engines, disk)
    for number in range(30):
        keys = (KEYS, FILLERS[:4], FILLERS[8:12])[number % 3]
        engine.finish(engine.load(keys, range(8, 12)), timeout_s=SOON_S)
        engine.finish(engine.store(make_keys(4, str(number)), range(4)))
    assert engine.probe.state == "healthy"
