# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Pins: peers' requests for blocks of the primary tier, asked, answered, released."""

import sys
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvcr.types import BlockKey

from tests.v1.kv_offload.tiering.kvcr.builders import key, keys
from tests.v1.kv_offload.tiering.kvcr.busy import in_thread, transfer_error
from tests.v1.kv_offload.tiering.kvcr.rig import ROW_BYTES, StandinRig
from tests.v1.kv_offload.tiering.kvcr.standin import RecordingParent
from vllm.v1.kv_offload.base import LookupResult
from vllm.v1.kv_offload.tiering.kvcr.compat import shims
from vllm.v1.kv_offload.tiering.kvcr.peers.pins import MAX_KEYS_PER_SERVE

FOUR_CALLS = ["on_new_request", "lookup", "create_store_job", "on_request_finished"]


def pin_rig(*chunks: int, **options: Any) -> tuple[StandinRig, RecordingParent]:
    """A tier that serves peers, and a parent that has blocks 1, 2 and so on there."""
    rig = StandinRig(control_ports=[7001], enable_telemetry=True, **options)
    return rig, RecordingParent(dict(zip(keys(8, first=1), chunks, strict=False)))


def ask(rig: StandinRig, parent: RecordingParent, *wanted: bytes) -> Any:
    """Have a peer ask, serve it, and return what KVCR was answered."""
    rig.kvcr.want(*wanted)
    rig.poll()
    rig.tier.serve_external_requests(parent)
    return list(rig.kvcr.pin_answers.values())[-1] if rig.kvcr.pin_answers else "none"


def refs(rig: StandinRig, chunk: int) -> Any:
    return shims.block_refs_factory(
        rig.kvcr.config.nixl_agent_name, rig.memory.ctypes.data, ROW_BYTES
    )(chunk)


def test_a_request_is_answered_in_the_parents_order_of_calls() -> None:
    rig, parent = pin_rig(7, 4)
    handle, blocks = ask(rig, parent, key(1), key(2))
    assert parent.call_names == ["on_new_request", "lookup", *FOUR_CALLS[1:]]
    assert handle == f"kvcr-job-{parent.jobs[0].job_id}"
    assert blocks == {key(1): refs(rig, 7), key(2): refs(rig, 4)}


def test_the_answer_reaches_kvcr_in_the_same_step() -> None:
    rig, parent = pin_rig(7)
    rig.kvcr.want(key(1))
    assert rig.poll() == []
    assert rig.kvcr.pin_answers == {}
    polls = rig.kvcr.calls.count("poll_completed")
    rig.tier.serve_external_requests(parent)
    assert rig.kvcr.calls.count("poll_completed") == polls + 1
    assert len(rig.kvcr.pin_answers) == 1


def test_without_requests_serving_does_nothing() -> None:
    rig, parent = pin_rig()
    rig.tier.serve_external_requests(parent)
    assert (rig.kvcr.calls, parent.calls) == ([], [])


def test_a_missing_key_is_described_as_none_and_nothing_there_is_no_job() -> None:
    rig, parent = pin_rig(7)
    _, blocks = ask(rig, parent, key(1), key(2))
    assert blocks == {key(1): refs(rig, 7), key(2): None}
    assert [job.keys for job in parent.jobs] == [[key(1)]]
    assert rig.losses() == {"not_pinned": 1}
    assert ask(rig, parent, key(2), key(3)) is None
    assert len(parent.jobs) == 1
    assert parent.call_names[-1] == "on_request_finished"
    assert rig.losses() == {"not_pinned": 2}


@pytest.mark.parametrize("answer", [LookupResult.HIT_PENDING, LookupResult.RETRY])
def test_a_block_on_its_way_is_answered_once_it_is_there(answer: LookupResult) -> None:
    rig, parent = pin_rig(7, 4)
    parent.answers[key(2)] = answer
    assert ask(rig, parent, key(1), key(2)) == "none"
    assert parent.jobs == []
    assert parent.call_names[-1] == "on_request_finished"
    del parent.answers[key(2)]
    rig.tier.serve_external_requests(parent)
    (answered,) = rig.kvcr.pin_answers.values()
    assert answered[1] == {key(1): refs(rig, 7), key(2): refs(rig, 4)}


def test_each_request_has_an_id_of_its_own_that_no_request_of_vllms_has() -> None:
    (rig, parent), (other, _) = pin_rig(7), pin_rig()
    for each in (rig, rig, other):
        ask(each, parent, key(1))
    opened = [name for call, name in parent.calls if call == "on_new_request"]
    closed = [name for call, name in parent.calls if call == "on_request_finished"]
    assert opened == closed
    assert len(set(opened)) == 3


def test_a_release_ends_the_job_well_and_a_second_changes_nothing() -> None:
    rig, parent = pin_rig(7)
    handle, _ = ask(rig, parent, key(1))
    for _ in range(3):
        rig.kvcr.unpin(handle)
    (result,) = rig.poll()
    assert (result.job_id, result.success) == (parent.jobs[0].job_id, True)
    assert rig.kvcr.releases == [(handle, True)] * 3


def test_two_peers_pin_the_same_block_apart() -> None:
    rig, parent = pin_rig(7)
    one, _ = ask(rig, parent, key(1))
    other, _ = ask(rig, parent, key(1))
    assert one != other
    rig.kvcr.unpin(other)
    assert [result.job_id for result in rig.poll()] == [parent.jobs[1].job_id]
    rig.kvcr.unpin(one)
    assert [result.job_id for result in rig.poll()] == [parent.jobs[0].job_id]


def test_a_peers_slow_store_is_no_pressure_of_this_tiers() -> None:
    rig, parent = pin_rig(7, detector=object())
    handle, _ = ask(rig, parent, key(1))
    rig.kvcr.unpin(handle)
    (result,) = rig.poll()
    if shims.HAS_BACKPRESSURE:
        assert result.transfer_bytes == 0


def test_a_request_cancelled_before_it_was_answered_never_is() -> None:
    rig, parent = pin_rig(7)
    request = rig.kvcr.bindings.request_pin((key(1),))
    rig.kvcr.bindings.cancel_pin_request(request)
    rig.tier.serve_external_requests(parent)
    rig.poll()
    assert rig.kvcr.pin_answers == {}
    assert parent.jobs == []


@pytest.mark.parametrize("broken", FOUR_CALLS)
def test_a_parent_that_raises_loses_only_a_pin(broken: str, tier_log: Any) -> None:
    rig, parent = pin_rig(7)
    parent.raises[broken] = RuntimeError("parent")
    assert ask(rig, parent, key(1)) is None
    assert parent.call_names[-1] == "on_request_finished"
    # A job that was made is returned as failed, once.
    results = rig.poll()
    assert [(r.job_id, r.success) for r in results] == [
        (job.job_id, False) for job in parent.jobs
    ]
    assert len(parent.jobs) == (broken == "on_request_finished")
    assert rig.losses() == {"pin_failed": 1}
    rig.tier.on_schedule_end(None)  # type: ignore[arg-type]
    assert len([text for text in tier_log.texts() if "pin" in text]) == 1
    # The next request is served as if nothing had been.
    parent.raises.clear()
    _, blocks = ask(rig, parent, key(1))
    assert blocks == {key(1): refs(rig, 7)}


def test_a_job_that_does_not_match_is_returned_as_failed() -> None:
    class Short(RecordingParent):
        def create_store_job(self, keys: Any, req_context: Any) -> Any:
            job = super().create_store_job(keys, req_context)
            job.chunk_ids = job.chunk_ids[:-1]
            return job

    rig, _ = pin_rig()
    parent = Short({key(1): 7, key(2): 4})
    assert ask(rig, parent, key(1), key(2)) is None
    assert [(r.job_id, r.success) for r in rig.poll()] == [
        (parent.jobs[0].job_id, False)
    ]


def test_a_drain_waits_for_a_pin_but_not_for_ever_for_a_peer_that_died() -> None:
    """Its write may still read the blocks, and it takes nothing for valid any more."""
    rig, parent = pin_rig(7, operation_timeout_ms=10, abandon_timeout_ms=20)
    handle, _ = ask(rig, parent, key(1))
    assert rig.tier._drain(0.1) is False, "KVCR still holds it"
    fields = {"source_blocks": {key(1): refs(rig, 7)}}
    fields["source_owners"] = {key(1): "framework"}
    error = transfer_error("uncertain", op_handle=1, **fields)
    rig.kvcr.bindings.on_resilience_event(error)
    assert rig.kvcr.bindings.release_pin(handle) is False
    assert rig.poll() == []
    rig.tier.drain_jobs()
    (result,) = rig.tier.get_finished_jobs()
    assert result.job_id == parent.jobs[0].job_id
    # KVCR asks again, and is told that it is done.
    assert rig.kvcr.bindings.release_pin(handle) is True
    assert list(rig.tier.get_finished_jobs()) == []


def test_a_flood_of_requests_is_spread_over_steps() -> None:
    rig, parent = pin_rig(7)
    each = MAX_KEYS_PER_SERVE // 2
    for first in range(0, 5 * each, each):
        rig.kvcr.want(*keys(each, first=first + 100))
    rig.poll()
    answered = []
    for _ in range(4):
        rig.tier.serve_external_requests(parent)
        answered.append(len(rig.kvcr.pin_answers))
    assert answered == [2, 4, 5, 5]


CHOSEN = st.lists(st.integers(0, 7).map(key), min_size=1, max_size=5, unique=True)
STEPS = st.lists(
    st.tuples(st.just("ask"), CHOSEN)
    | st.tuples(st.just("move"), st.dictionaries(st.integers(0, 7), st.booleans()))
    | st.tuples(st.just("release"), st.integers(0, 10))
    | st.tuples(st.just("cancel"), st.integers(0, 12))
    | st.tuples(st.just("break"), st.sampled_from([*FOUR_CALLS, ""]))
    | st.tuples(st.just("serve"), st.none())
    | st.tuples(st.just("poll"), st.none()),
    max_size=40,
)


@given(steps=STEPS)
@settings(deadline=None)
def test_each_job_made_for_a_pin_comes_back_once(steps: list[tuple[str, Any]]) -> None:
    rig, parent = pin_rig()
    for action, what in steps:
        if action == "ask":
            rig.kvcr.want(*what)
        elif action == "move":
            for number, there in what.items():
                if there:
                    parent.resident[key(number)] = number
                else:
                    parent.resident.pop(key(number), None)
        elif action == "release" and parent.jobs:
            job = parent.jobs[what % len(parent.jobs)]
            rig.kvcr.unpin(f"kvcr-job-{job.job_id}")
        elif action == "cancel":
            rig.kvcr.bindings.cancel_pin_request(what)
        elif action == "break":
            parent.raises = {what: RuntimeError("parent")} if what else {}
        elif action == "serve":
            rig.tier.serve_external_requests(parent)
        rig.poll()
    opened = parent.call_names.count("on_new_request")
    assert parent.call_names.count("on_request_finished") == opened
    for job in parent.jobs:
        rig.kvcr.unpin(f"kvcr-job-{job.job_id}")
    rig.poll()
    assert sorted(rig.finished) == [job.job_id for job in parent.jobs]
    # What KVCR was given describes exactly what it asked for.
    for answer in rig.kvcr.pin_answers.values():
        if answer is not None:
            handle, blocks = answer
            (job,) = [j for j in parent.jobs if handle == f"kvcr-job-{j.job_id}"]
            assert {k for k, ref in blocks.items() if ref is not None} == set(job.keys)


def test_no_result_is_lost_while_another_thread_gives_pins_back() -> None:
    """KVCR, as it is closed, releases pins on the thread that closes it."""
    rig, _ = pin_rig()
    pins = rig.tier._pins
    count = 3000
    parent = RecordingParent({key(number): number % 16 for number in range(count)})
    for number in range(count):
        pins.request_pin([BlockKey(key(number))])
    while pins.serve(parent):
        if len(parent.jobs) == count:
            break
    handles = list(pins._held)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        closing = in_thread(lambda: [pins.release_pin(handle) for handle in handles])
        taken = []
        while closing.is_alive() or pins.has_results:
            taken += pins.take_results()
    finally:
        sys.setswitchinterval(interval)
    assert sorted(result.job_id for result in taken) == [j.job_id for j in parent.jobs]
