# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""G3 files that are old or overwritten, and such that cannot be read, or too late."""

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.v1.kv_offload.tiering.kvcr.builders import make_spec, peer_options, request
from tests.v1.kv_offload.tiering.kvcr.faults.harness.blocks import make_keys
from tests.v1.kv_offload.tiering.kvcr.faults.harness.engine import MIB, Engine
from tests.v1.kv_offload.tiering.kvcr.faults.harness.files import (
    flip_bit,
    g3,
    make_unreadable,
    make_usable,
)
from tests.v1.kv_offload.tiering.kvcr.faults.harness.managed import ManagedEngine
from vllm.v1.kv_offload.base import LookupResult, OffloadKey

POOL = 16
FILE_SLOTS = 64
KEYS = make_keys(32)
FILLERS = make_keys(POOL, "filler")


def options(folder: Path) -> dict[str, Any]:
    return {
        "secondary_g2_slots": POOL,
        "operation_timeout_ms": 20_000,
        "g3": g3(folder / "g3", FILE_SLOTS),
    }


def store_into_file(engine: Engine, keys: Sequence[OffloadKey]) -> None:
    """Store blocks, and have KVCR move them from its pool to the file."""
    for part in (keys, FILLERS):
        job = engine.store(part, range(len(part)))
        engine.finish(job)
        assert job.succeeded


def test_a_restart_over_old_files_finds_nothing(engines: Any, tmp_path: Path) -> None:
    """KVCR keeps no index on disk: what an earlier process wrote is no block."""
    spec = make_spec("a model")
    before: Engine = engines(options(tmp_path), spec=spec, writer="before")
    store_into_file(before, KEYS)
    before.close()
    assert any((tmp_path / "g3").read_bytes()), "the blocks shall be in the file"

    engine: Engine = engines(options(tmp_path), spec=spec, writer="now")
    answers = engine.lookup_all(KEYS, request("early"))
    assert set(answers) == {LookupResult.MISS}
    store_into_file(engine, KEYS)
    job = engine.load(KEYS, range(len(KEYS)))
    engine.finish(job)
    assert job.arrived == KEYS


def test_garbage_in_a_file_is_told(engines: Any, tmp_path: Path, tier_log: Any) -> None:
    engine: Engine = engines(peer_options(**options(tmp_path)))
    store_into_file(engine, KEYS)
    # One bit in each of the first slots, and all of another.
    for slot in range(4):
        flip_bit(tmp_path / "g3", slot * MIB + 1000 * slot)
    with open(tmp_path / "g3", "r+b") as file:
        file.seek(8 * MIB)
        file.write(os.urandom(MIB))
        os.fsync(file.fileno())

    first = request("first")
    job = engine.load(KEYS, range(len(KEYS)), first)
    engine.finish(job)
    assert len(job.arrived) == len(KEYS) - 5
    assert not engine.wrong
    lost = [key for key in KEYS if key not in job.arrived]
    assert engine.probe.lost()["corrupt"] == 5
    for context in (first, request("second")):
        assert set(engine.lookup_all(lost, context)) == {LookupResult.MISS}
    assert set(engine.lookup_all(job.arrived, first)) == {LookupResult.HIT}

    # KVCR serves peers from its pool by itself, and they cannot tell.
    engine.step()
    assert (engine.probe.state, engine.probe.reason) == ("degraded", "corrupt_blocks")
    lines = [line for line in tier_log.texts() if "corrupt" in line]
    (warning,) = [line for line in lines if "corrupt_blocks" in line]
    assert "Peers" in warning
    assert len(lines) == 2, "one for the engine, one for the blocks"


def test_storing_a_corrupt_block_again_is_no_cure(engines: Any, tmp_path: Path) -> None:
    """KVCR keeps the copy it has, and answers that it holds the block already."""
    engine: Engine = engines(options(tmp_path))
    store_into_file(engine, KEYS)
    flip_bit(tmp_path / "g3", 1000)
    job = engine.load(KEYS[:1], [0])
    engine.finish(job)
    assert not job.arrived
    engine.finish(engine.store(KEYS[:1], [0]))
    assert engine.lookup_all(KEYS[:1], request("next")) == [LookupResult.MISS]


def test_an_unreadable_file_costs_one_failed_load(managed: Any, tmp_path: Path) -> None:
    """KVCR answers FETCHABLE however often reading fails, and vLLM promotes that."""
    engine: ManagedEngine = managed(options(tmp_path), rows=8)
    key = KEYS[0]
    engine.run("stored", [key])
    for index, filler in enumerate(FILLERS):
        engine.run(f"filler-{index}", [filler])
        engine.settle()
    assert engine.resident([key]) == 0
    make_unreadable(tmp_path / "g3")

    patient = engine.begin("patient", [key])
    answered = 0
    for _ in range(1000):
        patient.hits = None
        engine.step(patient)
        answered += patient.hits is not None
        time.sleep(0.0005)
    assert engine.load_jobs["patient"] == 1
    assert patient.hits == 0
    assert answered > 500, "most lookups shall be a miss at once"
    engine.manager.on_request_finished(patient.context)

    def reads_again() -> bool:
        later = engine.begin("later", [key])
        engine.wait_for(later)
        engine.manager.on_request_finished(later.context)
        return later.hits == 1

    make_usable(tmp_path / "g3")
    engine.run_until(reads_again, what="the pause")


def test_reads_that_end_too_late_harm_nobody(engines: Any, tmp_path: Path) -> None:
    """KVCR gives them up, which does not stop what the kernel has begun.

    The data arrives later, wherever the memory belongs by then, and NIXL's POSIX plugin
    completes into memory that it has freed, which killed 8 processes of 9. The timeout
    is so short that any disk is too slow.
    """
    keys, slots = make_keys(384, "many"), range(384)
    short = {
        "secondary_g2_slots": 128,
        "max_operation_bytes": 32 * MIB,
        "operation_timeout_ms": 10,
        "abandon_timeout_ms": 20,
        "g3": g3(tmp_path / "g3", len(keys)),
    }
    engine: Engine = engines(short, rows=len(keys))
    for _ in range(3):
        engine.finish(engine.store(keys, slots))
        engine.memory.fill(1)
        job = engine.load(keys, slots)
        engine.finish(job)
        # What was given up belongs to others at once.
        failed = job.failed_chunks
        others = make_keys(len(failed), "somebody else's prompt")
        engine.write(others, failed, writer="somebody else")
        engine.run_for(0.3)
        assert engine.wrong_blocks(others, failed, writer="somebody else") == []
