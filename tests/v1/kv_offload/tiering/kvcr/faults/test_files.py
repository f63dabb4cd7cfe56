# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""G3 files that are old, overwritten or cut, under a running engine and before it."""

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.v1.kv_offload.tiering.kvcr.builders import (
    free_port,
    make_spec,
    peer_options,
    request,
)
from tests.v1.kv_offload.tiering.kvcr.faults.harness.blocks import make_keys
from tests.v1.kv_offload.tiering.kvcr.faults.harness.engine import MIB, Engine
from tests.v1.kv_offload.tiering.kvcr.faults.harness.files import (
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
        "g3": {
            "paths": folder / "g3",
            "capacity_bytes_per_file": FILE_SLOTS * MIB,
            "backend": "POSIX",
        },
    }


def store_into_file(engine: Engine, keys: Sequence[OffloadKey]) -> None:
    """Store blocks, and have KVCR move them from its pool to the file."""
    for part in (keys, FILLERS):
        job = engine.store(part, range(len(part)))
        engine.finish(job)
        assert job.result is not None
        assert job.result.success


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


def test_garbage_in_a_file_is_a_miss_and_counted(
    engines: Any, tmp_path: Path, tier_log: Any
) -> None:
    engine: Engine = engines(options(tmp_path))
    store_into_file(engine, KEYS)
    with open(tmp_path / "g3", "r+b") as file:
        # One byte in each of the first slots, and all of another.
        for slot in range(4):
            file.seek(slot * MIB + 1000 * slot)
            old = file.read(1)
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([old[0] ^ 1]))
        file.seek(8 * MIB)
        file.write(os.urandom(MIB))
        os.fsync(file.fileno())

    first = request("first")
    job = engine.load(KEYS, range(len(KEYS)), first)
    engine.finish(job)
    assert len(job.arrived) == len(KEYS) - 5
    assert not engine.wrong
    assert engine.probe.lost()["corrupt"] == 5
    assert len([line for line in tier_log.texts() if "corrupt" in line]) == 1
    lost = [key for key in KEYS if key not in job.arrived]
    for context in (first, request("second")):
        assert set(engine.lookup_all(lost, context)) == {LookupResult.MISS}
    assert set(engine.lookup_all(job.arrived, first)) == {LookupResult.HIT}


def test_storing_a_corrupt_block_again_does_not_call_it_good(
    engines: Any, tmp_path: Path
) -> None:
    """KVCR keeps the copy it has, and answers that it holds the block already."""
    engine: Engine = engines(options(tmp_path))
    store_into_file(engine, KEYS)
    os.truncate(tmp_path / "g3", 0)
    key = KEYS[0]
    job = engine.load([key], [0])
    engine.finish(job)
    assert not job.arrived
    again = engine.store([key], [0])
    engine.finish(again)
    assert engine.lookup_all([key], request("next")) == [LookupResult.MISS]


def test_an_engine_with_corrupt_blocks_warns_of_itself(
    engines: Any, tmp_path: Path, tier_log: Any
) -> None:
    """KVCR serves peers from its pool by itself, and they cannot tell."""
    engine: Engine = engines(options(tmp_path) | peer_options(free_port()))
    store_into_file(engine, KEYS)
    cut(tmp_path / "g3")
    job = engine.load(KEYS[:4], range(4))
    engine.finish(job)
    assert not job.arrived
    engine.step()
    assert (engine.probe.state, engine.probe.reason) == ("degraded", "corrupt_blocks")
    lines = [line for line in tier_log.texts() if "corrupt_blocks" in line]
    assert len(lines) == 1
    assert "Peers" in lines[0]


def cut(path: Path) -> None:
    # Reads of what is gone succeed, and read nothing.
    os.truncate(path, 0)


@pytest.mark.parametrize("spoil", [cut, make_unreadable])
def test_a_spoilt_file_costs_a_request_one_failed_load(
    managed: Any, tmp_path: Path, spoil: Callable[[Path], None]
) -> None:
    """KVCR answers FETCHABLE however often reading fails, and vLLM promotes that."""
    engine: ManagedEngine = managed(options(tmp_path), rows=8)
    key = KEYS[0]
    engine.run("stored", [key])
    for index, filler in enumerate(FILLERS):
        engine.run(f"filler-{index}", [filler])
        engine.settle()
    assert engine.resident([key]) == 0
    spoil(tmp_path / "g3")

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


def test_the_pause_grows_and_a_success_ends_it(engines: Any, tmp_path: Path) -> None:
    engine: Engine = engines(options(tmp_path))
    store_into_file(engine, KEYS)
    make_unreadable(tmp_path / "g3")
    key = KEYS[0]

    def pause_after_a_failure(name: str) -> float:
        job = engine.load([key], [0], request(name))
        engine.finish(job)
        assert not job.arrived
        failed_at = time.monotonic()
        engine.run_until(
            lambda: (
                engine.lookup_all([key], request(name + "-other")) == [LookupResult.HIT]
            ),
            10,
            "the pause",
        )
        return time.monotonic() - failed_at

    first = pause_after_a_failure("first")
    second = pause_after_a_failure("second")
    assert second > 1.5 * first
    assert engine.probe.lost()["load_failed"] == 2

    make_usable(tmp_path / "g3")
    job = engine.load([key], [0], request("third"))
    engine.finish(job)
    assert job.arrived == [key]
    for name in ("first", "second", "third"):
        engine.end(request(name))
    assert not engine.tier._backoff.active
