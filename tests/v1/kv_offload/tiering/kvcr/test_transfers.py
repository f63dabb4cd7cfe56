# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Jobs: cut into operations, summed up again, and reported once."""

import gc
import time
from collections import Counter
from typing import Any

import numpy as np
import pytest
from kvcr.types import OpEntryResult

from tests.v1.kv_offload.tiering.kvcr.builders import key, keys
from tests.v1.kv_offload.tiering.kvcr.rig import ROW_BYTES, StandinRig
from tests.v1.kv_offload.tiering.kvcr.standin import (
    DROPPED,
    FAILED,
    HIT,
    ON_DISK,
    SUCCESS,
)
from vllm.v1.kv_offload.base import ReqContext
from vllm.v1.kv_offload.tiering.base import JobResult, TransferJob
from vllm.v1.kv_offload.tiering.kvcr.compat import shims
from vllm.v1.kv_offload.tiering.kvcr.compat.vocabulary import ENTRIES, Entry


def refs(rig: StandinRig, chunk: int) -> Any:
    """How KVCR is told of a chunk."""
    return shims.block_refs_factory(
        rig.kvcr.config.nixl_agent_name, rig.memory.ctypes.data, ROW_BYTES
    )(chunk)


def transferred(result: JobResult) -> int | None:
    return getattr(result, "transfer_bytes", None)


# --- one operation for each job --------------------------------------------------


def test_a_store_is_one_deposit_that_starts_at_once() -> None:
    rig = StandinRig()
    rig.store([key(1), key(2)], [5, 3])
    assert rig.kvcr.calls == ["deposit"]
    assert rig.kvcr.last.blocks == {key(1): refs(rig, 5), key(2): refs(rig, 3)}


def test_a_load_is_one_delivery_for_its_request() -> None:
    rig = StandinRig()
    rig.load([key(1), key(2)], [5, 3], "request 7")
    assert rig.kvcr.calls == ["deliver"]
    assert rig.kvcr.last.blocks == {key(1): refs(rig, 5), key(2): refs(rig, 3)}
    assert rig.kvcr.last.request_id == "request 7"


@pytest.mark.parametrize("is_load", [True, False])
def test_results_in_pieces_are_one_result(is_load: bool) -> None:
    rig = StandinRig()
    job = (rig.load if is_load else rig.store)(keys(3), range(3))
    for number in range(3):
        assert rig.poll() == []
        rig.kvcr.complete(1, {key(number): SUCCESS})
    (result,) = rig.poll()
    assert (result.job_id, result.success) == (job, True)
    assert result.successful_keys is None
    assert rig.poll() == []


def test_a_failed_load_names_what_did_arrive() -> None:
    rig = StandinRig()
    rig.load(keys(4), range(4))
    rig.kvcr.complete(1, {key(0): SUCCESS, key(1): FAILED})
    assert rig.poll() == []
    rig.kvcr.complete(1, {key(3): DROPPED, key(2): SUCCESS})
    (result,) = rig.poll()
    assert result.success is False
    assert result.successful_keys == {key(0), key(2)}


def test_a_load_of_which_nothing_arrived_names_nothing() -> None:
    rig = StandinRig()
    rig.load(keys(2), range(2))
    rig.kvcr.complete_all(FAILED)
    (result,) = rig.poll()
    assert result.success is False
    assert result.successful_keys == set()


def test_a_store_that_the_policy_declined_is_no_failure() -> None:
    rig = StandinRig(enable_telemetry=True)
    rig.store(keys(3), range(3))
    rig.kvcr.complete(1, {key(0): DROPPED, key(1): SUCCESS, key(2): DROPPED})
    (result,) = rig.poll()
    assert result.success is True
    assert rig.losses() == {"dropped": 2}


def test_a_failed_store_is_a_failed_job() -> None:
    rig = StandinRig(enable_telemetry=True)
    rig.store(keys(3), range(3))
    rig.kvcr.complete(1, {key(0): SUCCESS, key(1): FAILED, key(2): SUCCESS})
    (result,) = rig.poll()
    assert result.success is False
    assert result.successful_keys is None
    assert rig.losses() == {"store_failed": 1}


@pytest.mark.parametrize("is_load", [True, False])
def test_an_empty_job_succeeds_at_once(is_load: bool) -> None:
    rig = StandinRig()
    (rig.load if is_load else rig.store)([], [])
    (result,) = rig.poll()
    assert result.success is True
    assert rig.kvcr.operations == {}


def test_a_job_of_which_keys_and_chunks_do_not_match_fails_at_once() -> None:
    rig = StandinRig()
    rig.load(keys(3), range(2))
    (result,) = rig.poll()
    assert result.success is False
    assert rig.kvcr.operations == {}


@pytest.mark.parametrize("is_load", [True, False])
def test_a_job_that_names_a_block_twice_fails_at_once(is_load: bool) -> None:
    """One of its slots would stay unwritten, and count as loaded."""
    rig = StandinRig()
    (rig.load if is_load else rig.store)([key(1), key(2), key(1)], range(3))
    (result,) = rig.poll()
    assert result.success is False
    assert rig.kvcr.operations == {}


def test_a_large_job_that_fails_costs_no_more_for_each_block() -> None:
    def seconds(blocks: int) -> float:
        rig = StandinRig(
            rows=blocks, max_inflight_bytes=ROW_BYTES, secondary_g2_slots=8
        )
        rig.load(keys(blocks), range(blocks))
        # A collection over all that other tests left is no cost of a block.
        gc.disable()
        started = time.thread_time()
        while not rig.finished:
            operation = rig.kvcr.last
            rig.kvcr.complete(operation.handle, dict.fromkeys(operation.blocks, FAILED))
            rig.poll()
        ended = time.thread_time()
        gc.enable()
        return ended - started

    # Quadratic, it is some 100 times the time for 10 times the blocks.
    many, few = (min(seconds(blocks) for _ in range(3)) for blocks in (5000, 500))
    assert many < 40 * few


def test_every_entry_status_means_something() -> None:
    assert Counter(ENTRIES.values()) == Counter(Entry)


def test_jobs_are_read_by_attribute() -> None:
    """Releases to come keep a job's fields behind properties."""

    class Job:
        job_id = 7
        keys = (key(1),)
        chunk_ids = np.array([2], dtype=np.int64)
        is_promotion = True
        req_context = ReqContext("r")

    rig = StandinRig()
    rig.tier.submit_load(Job())  # type: ignore[arg-type]
    rig.kvcr.complete_all()
    assert [result.job_id for result in rig.poll()] == [7]


# --- times and sizes -------------------------------------------------------------


def test_with_telemetry_results_carry_time_and_bytes() -> None:
    rig = StandinRig(enable_telemetry=True)
    rig.load(keys(4), range(4))
    rig.kvcr.complete(
        1, {key(0): SUCCESS, key(1): FAILED, key(2): SUCCESS, key(3): FAILED}
    )
    (result,) = rig.poll()
    assert result.transfer_time is not None
    assert 0 < result.transfer_time < 60
    if hasattr(result, "transfer_bytes"):
        assert transferred(result) == 2 * ROW_BYTES


def test_what_the_policy_declined_was_not_transferred() -> None:
    rig = StandinRig(enable_telemetry=True)
    rig.store(keys(2), range(2))
    rig.kvcr.complete(1, {key(0): SUCCESS, key(1): DROPPED})
    (result,) = rig.poll()
    assert transferred(result) in (None, ROW_BYTES)


def test_without_telemetry_results_carry_neither() -> None:
    rig = StandinRig()
    rig.load(keys(2), range(2))
    rig.kvcr.complete_all()
    (result,) = rig.poll()
    assert result.transfer_time is None
    assert transferred(result) is None


# --- completions that are not ours -----------------------------------------------


@pytest.mark.parametrize("is_load", [True, False])
def test_a_foreign_completion_is_ignored(is_load: bool) -> None:
    rig = StandinRig()
    (rig.load if is_load else rig.store)([key(1)], [0])
    rig.kvcr.complete(999, {key(1): FAILED})
    rig.kvcr.complete(-1, {key(1): FAILED})
    assert rig.poll() == []
    rig.kvcr.complete_all()
    assert [result.success for result in rig.poll()] == [True]


def test_a_repeated_completion_is_ignored() -> None:
    rig = StandinRig()
    rig.load(keys(2), range(2))
    rig.kvcr.complete(1, {key(0): SUCCESS})
    rig.kvcr.complete(1, {key(0): FAILED})
    assert rig.poll() == []
    rig.kvcr.complete(1, {key(1): SUCCESS})
    rig.kvcr.complete(1, {key(0): FAILED, key(1): FAILED})
    assert [result.success for result in rig.poll()] == [True]
    rig.kvcr.complete_all(FAILED)
    assert rig.poll() == []


def test_a_completion_with_more_keys_than_the_job_is_cut_to_it() -> None:
    rig = StandinRig(enable_telemetry=True)
    rig.load(keys(2), range(2))
    rig.kvcr.complete(1, dict.fromkeys(keys(9), SUCCESS) | {key(50): FAILED})
    (result,) = rig.poll()
    assert result.success is True
    assert transferred(result) in (None, 2 * ROW_BYTES)
    assert rig.losses() == {}


def test_an_empty_completion_changes_nothing() -> None:
    rig = StandinRig()
    rig.load([key(1)], [0])
    rig.kvcr.complete(1, {})
    assert rig.poll() == []
    rig.kvcr.complete_all()
    assert len(rig.poll()) == 1


# --- jobs that are larger than one operation -------------------------------------


def small_operations(**options: Any) -> StandinRig:
    """Two blocks an operation, four under way."""
    return StandinRig(
        max_operation_bytes=2 * ROW_BYTES, max_inflight_bytes=4 * ROW_BYTES, **options
    )


@pytest.mark.parametrize("is_load", [True, False])
def test_a_large_job_is_cut_in_order_and_reported_once(is_load: bool) -> None:
    rig = small_operations()
    (rig.load if is_load else rig.store)(keys(7), range(7))
    done: list[JobResult] = []
    seen: list[bytes] = []
    under_way = 0
    while not done:
        new = [
            op for op in rig.kvcr.operations.values() if not set(op.blocks) & {*seen}
        ]
        assert new, "the job stands still"
        assert all(len(op.blocks) <= 2 for op in new)
        under_way = sum(len(op.blocks) for op in new)
        assert under_way <= 4
        for op in new:
            seen.extend(op.blocks)
            rig.kvcr.complete(op.handle, dict.fromkeys(op.blocks, SUCCESS))
        done = rig.poll()
    assert seen == keys(7)
    assert [result.success for result in done] == [True]


def test_a_large_load_names_what_arrived_of_all_its_parts() -> None:
    rig = small_operations()
    rig.load(keys(6), range(6))
    results: list[JobResult] = []
    for _ in range(5):
        for op in rig.kvcr.operations.values():
            statuses = {
                k: FAILED if k in (key(1), key(4)) else SUCCESS for k in op.blocks
            }
            rig.kvcr.complete(op.handle, statuses)
        results += rig.poll()
    (result,) = results
    assert result.success is False
    assert result.successful_keys == {key(0), key(2), key(3), key(5)}


def test_loads_go_before_stores_that_wait() -> None:
    rig = small_operations()
    rig.store(keys(8), range(8))
    rig.load(keys(2, first=20), [8, 9])
    kinds = [op.kind for op in rig.kvcr.operations.values()]
    assert kinds == ["deposit", "deposit", "deliver"]


def test_no_operation_asks_for_more_than_the_pool_can_free() -> None:
    rig = StandinRig(secondary_g2_slots=8)
    rig.store(keys(16), range(16))
    rig.load(keys(16), range(16))
    for kind, share in (("deposit", 2), ("deliver", 4)):
        operations = rig.kvcr.of_kind(kind)
        assert 0 < sum(len(op.blocks) for op in operations) <= share


def test_a_tier_of_one_slot_still_works() -> None:
    rig = StandinRig(secondary_g2_slots=1)
    rig.store(keys(3), range(3))
    results: list[JobResult] = []
    for _ in range(6):
        rig.kvcr.complete_all()
        results += rig.poll()
    assert [result.success for result in results] == [True]


# --- after a failed load ---------------------------------------------------------


def test_a_block_that_failed_is_a_miss_for_its_request_and_soon_for_others() -> None:
    rig = StandinRig()
    rig.kvcr.statuses[key(1)] = rig.kvcr.statuses[key(2)] = ON_DISK
    rig.load(keys(2, first=1), range(2), "r")
    rig.kvcr.complete(1, {key(1): FAILED, key(2): SUCCESS})
    rig.poll()
    assert rig.hits(keys(2, first=1), "r") == [key(2)]
    assert rig.hits(keys(2, first=1), "other") == [key(2)]
    rig.tier.on_request_finished(ReqContext("r"))


def test_a_store_does_not_make_a_failed_block_good_again() -> None:
    rig = StandinRig()
    rig.kvcr.statuses[key(1)] = HIT
    rig.load([key(1)], [0], "r")
    rig.kvcr.complete_all(FAILED)
    rig.poll()
    assert rig.hits([key(1)], "other") == []
    rig.store([key(1)], [0])
    rig.kvcr.complete(2, {key(1): SUCCESS})
    rig.poll()
    assert rig.hits([key(1)], "other") == []


def test_a_failed_block_is_tried_again_later_and_later_until_it_loads() -> None:
    rig = StandinRig()
    now = [0.0]
    rig.tier._backoff._clock = lambda: now[0]
    rig.kvcr.statuses[key(1)] = ON_DISK
    delays = []
    for number in range(4):
        rig.load([key(1)], [0], f"r{number}")
        rig.kvcr.complete(rig.kvcr.last.handle, {key(1): FAILED})
        rig.poll()
        rig.tier.on_request_finished(ReqContext(f"r{number}"))
        failed_at = now[0]
        while not rig.hits([key(1)], "other"):
            now[0] += 0.5
        delays.append(now[0] - failed_at)
    assert delays == sorted(set(delays)), "does not grow"
    rig.load([key(1)], [0], "good")
    rig.kvcr.complete(rig.kvcr.last.handle, {key(1): SUCCESS})
    rig.poll()
    rig.load([key(1)], [0], "bad")
    rig.kvcr.complete(rig.kvcr.last.handle, {key(1): FAILED})
    rig.poll()
    now[0] += delays[0]
    assert rig.hits([key(1)], "other") == [key(1)], "was not forgotten"


def test_one_failure_does_not_touch_the_next_job() -> None:
    rig = StandinRig()
    rig.load([key(1)], [0])
    rig.load([key(2)], [1])
    rig.kvcr.complete(1, {key(1): FAILED})
    rig.kvcr.complete(2, {key(2): SUCCESS})
    assert [result.success for result in rig.poll()] == [False, True]


def test_an_entry_is_judged_by_its_status_alone() -> None:
    rig = StandinRig()
    rig.load([key(1)], [0])
    rig.kvcr._pieces.append((1, {key(1): OpEntryResult(SUCCESS, None, None)}))
    assert [result.success for result in rig.poll()] == [True]


def test_a_transfer_job_of_vllms_is_what_these_tests_use() -> None:
    job = TransferJob(1, [key(1)], np.array([0]), True, ReqContext("r"))
    assert (list(job.keys), job.chunk_ids.tolist()) == ([key(1)], [0])
