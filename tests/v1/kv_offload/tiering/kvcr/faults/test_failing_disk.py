# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A disk that fails or hangs under a running engine, and one that is only busy."""

import threading
from pathlib import Path
from typing import Any

import pytest
from kvcr import local_disk

from tests.v1.kv_offload.tiering.kvcr.builders import request
from tests.v1.kv_offload.tiering.kvcr.faults.harness.blocks import make_keys
from tests.v1.kv_offload.tiering.kvcr.faults.harness.engine import Engine
from tests.v1.kv_offload.tiering.kvcr.faults.harness.files import (
    g3,
    make_unwritable,
    make_usable,
)
from vllm.v1.kv_offload.base import LookupResult
from vllm.v1.kv_offload.tiering.kvcr.peers import liveness
from vllm.v1.kv_offload.tiering.kvcr.reports import disk

ROW = 64 << 10
POOL = 16
KEYS = make_keys(160)
OPERATION_S = 1.0
# On a busy machine.
SOON_S = 4.0


def start(engines: Any, paths: list[Path], slots: int, **options: Any) -> Engine:
    options = {"secondary_g2_slots": POOL, "g3": g3(paths, slots, ROW)} | options
    engine: Engine = engines(options, rows=8, row_bytes=ROW)
    return engine


def store(engine: Engine, first: int, last: int) -> None:
    for number in range(first, last, 2):
        engine.finish(engine.store(KEYS[number : number + 2], range(2)))
    engine.run_for(0.05)


def test_it_is_said_once_with_the_path_and_ends_when_writing_works(
    engines: Any, tmp_path: Path, tier_log: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "_QUIET_S", 0.2)
    path = tmp_path / "g3"
    engine = start(engines, [path], 64)
    store(engine, 0, 32)
    assert engine.probe.state == "healthy"

    make_unwritable(path)
    store(engine, 32, 96)
    assert (engine.probe.state, engine.probe.reason) == ("degraded", "disk_failing")
    (line,) = [text for text in tier_log.texts() if "disk" in text]
    assert "disk_failing" in line
    assert str(path) in line
    # What was neither in the pool nor in the file by then is gone, and counted.
    context = engine.begin("lookups")
    answers = engine.lookup_all(KEYS[:96], context)
    engine.end(context)
    assert engine.probe.lost()["disk_failed"] == answers.count(LookupResult.MISS) > 0

    make_usable(path)
    engine.run_for(0.3)
    store(engine, 96, 160)
    assert engine.probe.state == "healthy"
    assert any("disk_failing is over" in text for text in tier_log.texts(level=20))
    assert len([text for text in tier_log.texts() if "disk" in text]) == 1


def test_one_of_two_files_is_enough(
    engines: Any, tmp_path: Path, tier_log: Any
) -> None:
    paths = [tmp_path / "sound", tmp_path / "failing"]
    engine = start(engines, paths, 64)
    make_unwritable(paths[1])
    store(engine, 0, 160)
    assert engine.probe.reason == "disk_failing"
    lost = engine.probe.lost()["disk_failed"]
    assert 0 < lost < 160 - POOL, "some were written"
    (line,) = [text for text in tier_log.texts(level=20) if "disk_failing" in text]
    assert all(str(path) in line for path in paths)


@pytest.mark.parametrize(("policy", "verify"), [(None, True), ("g3_fifo", False)])
def test_a_full_file_is_no_failing_disk(
    engines: Any, tmp_path: Path, tier_log: Any, policy: str | None, verify: bool
) -> None:
    """Evicted from the pool, from the file, or never moved there: all in order."""
    options = {"verify_blocks": verify} | ({"policy": policy} if policy else {})
    engine = start(engines, [tmp_path / "g3"], 8, **options)
    for _ in range(2):
        store(engine, 0, 160)
        context = engine.begin("loads")
        answers = engine.lookup_all(KEYS, context)
        held = [k for k, a in zip(KEYS, answers, strict=True) if a is LookupResult.HIT]
        for key in held:
            engine.finish(engine.load([key], [4], context))
        engine.end(context)
    assert "disk_failed" not in engine.probe.lost()
    assert engine.probe.state == "healthy"
    assert not any("disk_failing" in text for text in tier_log.texts())


def test_one_that_hangs_costs_one_wait_and_says_so(
    engines: Any, tmp_path: Path, tier_log: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """KVCR gives it up after a minute: cancelling an operation can kill the process."""
    hangs = threading.Event()
    progress = local_disk._G3TransferOp.progress

    def stuck(operation: Any, *arguments: Any) -> tuple[bool, bool]:
        return (False, False) if hangs.is_set() else progress(operation, *arguments)

    monkeypatch.setattr(local_disk._G3TransferOp, "progress", stuck)
    monkeypatch.setattr(liveness, "FIRST_COOLDOWN_S", 1.0)
    engine = start(engines, [tmp_path / "g3"], 64)
    for number in range(0, 36, 4):
        store(engine, number, number + 4)

    # The first blocks are in the file only.
    hangs.set()
    first = engine.load(KEYS[:2], range(2))
    behind = engine.load(KEYS[2:4], range(2, 4))
    waited = engine.finish(first, behind, timeout_s=SOON_S)
    assert waited >= 0.9 * OPERATION_S
    assert not first.arrived + behind.arrived
    assert (engine.probe.state, engine.probe.reason) == ("degraded", "disk_stalled")
    (line,) = (text for text in tier_log.texts() if "(disk_stalled)" in text)
    assert str(tmp_path / "g3") in line

    # The next request does not wait at all, and the pool serves as before.
    answers = engine.lookup_all(KEYS[:4], request("next"))
    assert set(answers) == {LookupResult.MISS}
    local = engine.load(KEYS[34:36], range(4, 6))
    engine.finish(local, timeout_s=SOON_S)
    assert local.arrived == KEYS[34:36]
    engine.drain()

    hangs.clear()
    engine.run_for(1.2)
    engine.lookup_all(KEYS[:1], request("again"))
    later = KEYS[4:6]

    def read() -> bool:
        hits = engine.lookup_all(later, request("later"))
        return set(hits) == {LookupResult.HIT}

    engine.run_until(read, 10, "reading files again")
    job = engine.load(later, range(6, 8))
    engine.finish(job)
    assert job.arrived == later
    assert engine.probe.state == "healthy"
