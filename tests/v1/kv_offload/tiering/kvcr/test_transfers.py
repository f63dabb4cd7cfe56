# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Jobs: cut into operations, summed up again, and reported once."""

import gc
import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.v1.kv_offload.tiering.kvcr.builders import key, keys
from tests.v1.kv_offload.tiering.kvcr.rig import ROW_BYTES, Clock, StandinRig
from tests.v1.kv_offload.tiering.kvcr.standin import (
    DROPPED,
    FAILED,
    HIT,
    ON_DISK,
    SUCCESS,
)
from vllm.v1.kv_offload.base import ReqContext
from vllm.v1.kv_offload.tiering.base import JobResult
from vllm.v1.kv_offload.tiering.kvcr.compat import shims


def submit(rig: StandinRig, is_load: bool) -> Callable[..., int]:
    return rig.load if is_load else rig.store


def transferred(result: JobResult) -> int | None:
    return getattr(result, "transfer_bytes", None)


@pytest.mark.parametrize(
    ("is_load", "kind", "request_id"),
    [(False, "deposit", None), (True, "deliver", "request 7")],
)
def test_a_job_is_one_operation_that_starts_at_once(
    is_load: bool, kind: str, request_id: str | None
) -> None:
    rig = StandinRig()
    submit(rig, is_load)([key(1), key(2)], [5, 3], "request 7")
    assert rig.kvcr.calls == [kind]
    refs = shims.block_refs_factory(
        rig.kvcr.config.nixl_agent_name, rig.memory.ctypes.data, ROW_BYTES
    )
    assert rig.kvcr.last.blocks == {key(1): refs(5), key(2): refs(3)}
    assert rig.kvcr.last.request_id == request_id


@pytest.mark.parametrize("is_load", [True, False])
def test_results_in_pieces_are_one_result(is_load: bool) -> None:
    rig = StandinRig()
    job = submit(rig, is_load)(keys(3), range(3))
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
    rig.load(keys(2, first=10), range(4, 6))
    rig.load([key(20)], [6])
    rig.kvcr.complete(1, {key(0): SUCCESS, key(1): FAILED})
    assert rig.poll() == []
    rig.kvcr.complete(1, {key(3): DROPPED, key(2): SUCCESS})
    rig.kvcr.complete(2, dict.fromkeys(keys(2, first=10), FAILED))
    rig.kvcr.complete(3, {key(20): SUCCESS})
    some, none, other = rig.poll()
    assert other.success, "it has nothing to do with those"
    assert (some.success, some.successful_keys) == (False, {key(0), key(2)})
    assert (none.success, none.successful_keys) == (False, set())


@pytest.mark.parametrize(
    ("status", "success", "loss"),
    [(DROPPED, True, "dropped"), (FAILED, False, "store_failed")],
)
def test_a_store_fails_by_failures_and_not_by_what_the_policy_declined(
    status: Any, success: bool, loss: str
) -> None:
    rig = StandinRig(enable_telemetry=True)
    rig.store(keys(3), range(3))
    rig.kvcr.complete(1, {key(0): status, key(1): SUCCESS, key(2): status})
    (result,) = rig.poll()
    assert (result.success, result.successful_keys) == (success, None)
    assert transferred(result) in (None, ROW_BYTES)
    assert rig.losses() == {loss: 2}


@pytest.mark.parametrize("is_load", [True, False])
@pytest.mark.parametrize(
    ("chosen", "rows", "success"),
    [
        ([], 0, True),
        (keys(3), 2, False),
        # One of its slots would stay unwritten, and count as loaded.
        ([key(1), key(2), key(1)], 3, False),
    ],
    ids=["empty", "lopsided", "twice"],
)
def test_a_job_without_an_operation_ends_at_once(
    chosen: list[Any], rows: int, success: bool, is_load: bool
) -> None:
    rig = StandinRig()
    submit(rig, is_load)(chosen, range(rows))
    (result,) = rig.poll()
    assert result.success is success
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


@pytest.mark.parametrize("telemetry", [True, False])
def test_with_telemetry_results_carry_time_and_bytes(telemetry: bool) -> None:
    rig = StandinRig(enable_telemetry=telemetry)
    rig.load(keys(4), range(4))
    statuses = dict(zip(keys(4), [SUCCESS, FAILED, SUCCESS, FAILED], strict=True))
    rig.kvcr.complete(1, statuses)
    (result,) = rig.poll()
    if telemetry:
        assert 0 < (result.transfer_time or 0) < 60
        assert getattr(result, "transfer_bytes", 2 * ROW_BYTES) == 2 * ROW_BYTES
    else:
        assert (result.transfer_time, transferred(result)) == (None, None)


@pytest.mark.parametrize("is_load", [True, False])
@pytest.mark.parametrize(
    ("handle", "entries"),
    [
        (999, {key(1): FAILED}),
        (-1, {key(1): FAILED}),
        (1, {}),
        (1, {key(0): FAILED}),
        (1, {key(5): SUCCESS, key(50): FAILED}),
    ],
    ids=["foreign", "nobody's", "empty", "repeated", "too much"],
)
def test_a_completion_that_is_not_waited_for_changes_nothing(
    handle: int, entries: dict[bytes, Any], is_load: bool
) -> None:
    rig = StandinRig(enable_telemetry=True)
    submit(rig, is_load)(keys(2), range(2))
    rig.kvcr.complete(1, {key(0): SUCCESS})
    rig.kvcr.complete(handle, entries)
    assert rig.poll() == []
    rig.kvcr.complete(1, {key(1): SUCCESS})
    rig.kvcr.complete(handle, entries)
    (result,) = rig.poll()
    assert result.success is True
    assert transferred(result) in (None, 2 * ROW_BYTES)
    rig.kvcr.complete_all(FAILED)
    assert rig.poll() == []
    assert rig.losses() == {}


def small_operations() -> StandinRig:
    """Two blocks an operation, four under way."""
    return StandinRig(
        max_operation_bytes=2 * ROW_BYTES, max_inflight_bytes=4 * ROW_BYTES
    )


@pytest.mark.parametrize("is_load", [True, False])
def test_a_large_job_is_cut_in_order_and_reported_once(is_load: bool) -> None:
    rig = small_operations()
    submit(rig, is_load)(keys(7), range(7))
    done: list[JobResult] = []
    seen: list[bytes] = []
    while not done:
        new = [
            op for op in rig.kvcr.operations.values() if not set(op.blocks) & {*seen}
        ]
        assert new, "the job stands still"
        assert all(len(op.blocks) <= 2 for op in new)
        assert sum(len(op.blocks) for op in new) <= 4
        for op in new:
            seen.extend(op.blocks)
            rig.kvcr.complete(op.handle, dict.fromkeys(op.blocks, SUCCESS))
        done = rig.poll()
    assert seen == keys(7)
    assert [result.success for result in done] == [True]


def test_a_large_load_names_what_arrived_of_all_its_parts() -> None:
    rig = small_operations()
    job = rig.load(keys(6), range(6))
    bad = {key(1), key(4)}
    for _ in range(5):
        for op in rig.kvcr.operations.values():
            statuses = {k: FAILED if k in bad else SUCCESS for k in op.blocks}
            rig.kvcr.complete(op.handle, statuses)
        rig.poll()
    assert rig.finished[job].success is False
    assert rig.finished[job].successful_keys == {*keys(6)} - bad


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
    for _ in range(6):
        rig.kvcr.complete_all()
        rig.poll()
    assert [result.success for result in rig.finished.values()] == [True]


def test_a_block_that_failed_is_a_miss_for_its_request_and_soon_for_others() -> None:
    rig = StandinRig()
    rig.kvcr.statuses[key(1)] = rig.kvcr.statuses[key(2)] = ON_DISK
    rig.load(keys(2, first=1), range(2), "r")
    rig.kvcr.complete(1, {key(1): FAILED, key(2): SUCCESS})
    rig.poll()
    assert rig.hits(keys(2, first=1), "r") == [key(2)]
    assert rig.hits(keys(2, first=1), "other") == [key(2)]
    # A store does not make it good again.
    rig.kvcr.statuses[key(1)] = HIT
    rig.store([key(1)], [0])
    rig.kvcr.complete(2, {key(1): SUCCESS})
    rig.poll()
    assert rig.hits([key(1)], "other") == []


def test_a_failed_block_is_tried_again_later_and_later_until_it_loads() -> None:
    rig = StandinRig()
    rig.tier._backoff._clock = clock = Clock(0.0)
    rig.kvcr.statuses[key(1)] = ON_DISK

    def load(request_id: str, status: Any) -> None:
        rig.load([key(1)], [0], request_id)
        rig.kvcr.complete(rig.kvcr.last.handle, {key(1): status})
        rig.poll()

    delays = []
    for number in range(4):
        load(f"r{number}", FAILED)
        rig.tier.on_request_finished(ReqContext(f"r{number}"))
        failed_at = clock.now
        while not rig.hits([key(1)], "other"):
            clock.now += 0.5
        delays.append(clock.now - failed_at)
    assert delays == sorted(set(delays)), "does not grow"
    load("good", SUCCESS)
    load("bad", FAILED)
    clock.now += delays[0]
    assert rig.hits([key(1)], "other") == [key(1)], "was not forgotten"
