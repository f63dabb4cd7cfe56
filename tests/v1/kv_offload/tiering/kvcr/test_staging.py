# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Blocks from peers and files: into KVCR's pool first, and only then to vLLM."""

from typing import Any

import pytest
from kvcr.types import CacheTier

from tests.v1.kv_offload.tiering.kvcr.builders import key, keys
from tests.v1.kv_offload.tiering.kvcr.rig import samples
from tests.v1.kv_offload.tiering.kvcr.staging_rigs import (
    answer,
    fetches,
    file_rig,
    stop_the_clock,
)
from tests.v1.kv_offload.tiering.kvcr.standin import FAILED, HIT, ON_DISK, SUCCESS
from vllm.v1.kv_offload.base import LookupResult
from vllm.v1.kv_offload.tiering.kvcr.peers.liveness import FILES as OWN_FILES
from vllm.v1.kv_offload.tiering.kvcr.peers.liveness import FIRST_COOLDOWN_S, Standing


@pytest.mark.parametrize("outcome", [SUCCESS, FAILED])
def test_a_files_block_lands_and_is_delivered_from_the_pool(outcome: Any) -> None:
    rig = file_rig()
    rig.kvcr.statuses[key(1)] = ON_DISK
    rig.load([key(1)], [5])
    assert [op.kind for op in rig.kvcr.operations.values()] == ["fetch"]
    answer(rig, rig.kvcr.last)
    delivery = rig.kvcr.last
    # Without a request there is no hint, so that it cannot come from a peer.
    assert (delivery.kind, delivery.request_id) == ("deliver", None)
    assert rig.kvcr.released == []
    answer(rig, delivery, outcome)
    assert [each.success for each in rig.finished.values()] == [outcome is SUCCESS]
    assert rig.kvcr.released == rig.kvcr.claims


def test_what_the_pool_holds_does_not_wait_for_what_has_to_land() -> None:
    rig = file_rig()
    rig.kvcr.statuses.update({key(1): ON_DISK, key(2): HIT})
    rig.load([key(1), key(2)], [5, 6])
    kinds = {op.kind: list(op.blocks) for op in rig.kvcr.operations.values()}
    assert kinds == {"fetch": [key(1)], "deliver": [key(2)]}


def test_what_did_not_land_is_never_delivered() -> None:
    rig = file_rig()
    rig.kvcr.statuses.update(dict.fromkeys(keys(2), ON_DISK))
    rig.load(keys(2), range(2))
    (fetch,) = fetches(rig)
    rig.kvcr.complete(fetch.handle, {key(0): FAILED, key(1): SUCCESS})
    rig.poll()
    assert list(rig.kvcr.last.blocks) == [key(1)]
    answer(rig, rig.kvcr.last)
    (result,) = rig.finished.values()
    assert result.successful_keys == {key(1)}
    assert rig.kvcr.released == rig.kvcr.claims
    assert rig.losses() == {"load_failed": 1}


def test_what_vanished_after_its_lookup_is_gone_for_that_request_only() -> None:
    rig = file_rig()
    rig.load([key(1)], [5], "first")
    assert [result.success for result in rig.poll()] == [False]
    assert rig.kvcr.operations == {}
    assert rig.losses() == {"gone": 1}
    rig.kvcr.statuses[key(1)] = HIT  # stored again
    assert rig.lookup(key(1), "first") is LookupResult.MISS
    assert rig.lookup(key(1), "second") is LookupResult.HIT


def test_bytes_that_are_not_what_was_stored_do_not_count() -> None:
    rig = file_rig(verify_blocks=True)
    rig.fill([0])
    job = rig.store([key(1)], [0])
    rig.kvcr.publish(key(1))
    rig.kvcr.complete_all()
    assert rig.result_of(job).success
    rig.kvcr.statuses[key(1)] = HIT
    # The stand-in moves no bytes: row 0 holds what was stored, row 1 does not.
    for row, right in ((1, False), (0, True)):
        job = rig.load([key(1)], [row], f"r{row}")
        rig.kvcr.complete(rig.kvcr.last.handle, {key(1): SUCCESS})
        assert rig.result_of(job).success is right
    assert rig.losses() == {"corrupt": 1}
    rig.tier.shutdown()


@pytest.mark.parametrize("broken", ["fetch", "release", "query"])
def test_a_kvcr_that_fails_while_blocks_land_ends_the_jobs(broken: str) -> None:
    rig = file_rig()
    rig.kvcr.statuses[key(1)] = rig.kvcr.statuses[key(2)] = ON_DISK
    rig.kvcr.raises[broken] = RuntimeError("progress thread died")
    rig.load([key(1)], [5])
    rig.load([key(2)], [6])
    if broken == "release":
        for operation in fetches(rig):
            answer(rig, operation)
        answer(rig, rig.kvcr.last)
    rig.tier.drain_jobs()
    rig.poll()
    assert sorted(rig.finished) == rig.given
    assert rig.kvcr.closed == 1


def test_a_disk_that_hangs_costs_one_wait_and_is_then_left_alone(tier_log: Any) -> None:
    rig = file_rig()
    clock = stop_the_clock(rig)
    rig.kvcr.statuses.update(dict.fromkeys(keys(12), ON_DISK))
    first = rig.load(keys(8), range(8), "first")
    behind = rig.load(keys(4, first=8), range(8, 12), "behind")
    clock.now += 1
    rig.poll()
    assert set(rig.finished) == {first, behind}, "nobody waits for KVCR's deadline"
    assert rig.lookup(key(20), "next") is LookupResult.MISS
    assert rig.hits(keys(2), "next") == []
    assert rig.losses() == {"timed_out": 12, "disk_stalled": 2, "not_resident": 1}
    (line,) = (text for text in tier_log.texts() if "degraded (disk_stalled)" in text)
    assert "g3.data" in line
    # What the pool holds goes on.
    rig.kvcr.statuses[key(30)] = HIT
    rig.load([key(30)], [15], "pool")
    assert rig.kvcr.last.kind == "deliver"

    clock.now += FIRST_COOLDOWN_S
    rig.introduce(key(1), "again")
    state = samples(rig.tier.get_stats())["vllm:kvcr_tier_state"]
    assert state[("1", "healthy", "none")] == 1


def test_a_disk_that_is_busy_writing_is_not_one_that_hangs() -> None:
    """In a full pool a read waits for room, which KVCR makes block by block."""
    rig = file_rig()
    clock = stop_the_clock(rig)
    rig.kvcr.statuses[key(1)] = ON_DISK
    job = rig.load([key(1)], [5])
    for _ in range(4):
        clock.now += 0.8
        rig.kvcr.publish(key(9), CacheTier.G3)
        assert rig.poll() == []
    answer(rig, fetches(rig)[0])
    answer(rig, rig.kvcr.last)
    assert rig.finished[job].success
    assert rig.tier._health.state.value == "healthy"


def test_a_read_that_fails_is_the_blocks_fault_and_not_the_disks() -> None:
    rig = file_rig()
    clock = stop_the_clock(rig)
    rig.kvcr.statuses[key(1)] = ON_DISK
    rig.load([key(1)], [5])
    clock.now += 0.95
    answer(rig, fetches(rig)[0], FAILED)
    assert rig.tier._staging._liveness.standing(OWN_FILES) is Standing.USABLE
    assert rig.tier._health.state.value == "healthy"
