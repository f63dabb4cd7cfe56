# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Blocks from peers: introductions, timeouts, and room for them in KVCR's pool."""

import time
from typing import Any

import pytest

from tests.v1.kv_offload.tiering.kvcr.builders import hint, key, keys, request
from tests.v1.kv_offload.tiering.kvcr.busy import transfer_error
from tests.v1.kv_offload.tiering.kvcr.rig import ROW_BYTES, samples
from tests.v1.kv_offload.tiering.kvcr.staging_rigs import (
    FILES,
    OTHER_PEER,
    PEER,
    answer,
    begin_introduction,
    fetches,
    peer_rig,
    stop_the_clock,
    timed_peer_rig,
)
from tests.v1.kv_offload.tiering.kvcr.standin import (
    AT_PEER,
    FAILED,
    FETCHING,
    HIT,
    ON_DISK,
)
from vllm.v1.kv_offload.base import LookupResult, ReqContext
from vllm.v1.kv_offload.tiering.kvcr.peers.liveness import (
    FIRST_COOLDOWN_S,
    FIRST_PAUSE_S,
    Standing,
)


def test_first_contact_is_beside_all_requests() -> None:
    rig = peer_rig(introduced=False)
    assert rig.hits(keys(8)) == [], "as if it had no hint"
    assert rig.tier.has_pending_work(), "or nobody would poll for the answer"
    rig.poll()
    (introduction,) = fetches(rig)
    assert list(introduction.blocks) == [key(0)]
    assert introduction.request_id == "r"
    assert rig.hits(keys(8)) == []
    assert fetches(rig) == [introduction], "one at a time"
    answer(rig, introduction)
    assert rig.kvcr.released == rig.kvcr.claims
    assert not rig.tier._staging.introducing
    assert rig.hits(keys(8)) == keys(8)
    assert rig.losses() == {"introducing": 16}


def test_an_introduction_starts_before_its_request_can_end() -> None:
    rig = peer_rig(introduced=False)
    rig.hits(keys(1))
    rig.tier.on_schedule_end(None)  # type: ignore[arg-type]
    rig.tier.on_request_finished(ReqContext("r"))
    rig.poll()
    answer(rig, fetches(rig)[0])
    assert rig.tier._staging._liveness.standing(PEER) is Standing.USABLE


def test_nobody_waits_for_a_block_that_comes_for_no_job() -> None:
    """KVCR says that it is being fetched, and goes on saying so for seconds."""
    rig = peer_rig(introduced=False)
    introduction = begin_introduction(rig)
    rig.kvcr.statuses[key(0)] = FETCHING
    assert rig.lookup(key(0), "another") is LookupResult.MISS
    answer(rig, introduction)
    clock = stop_the_clock(rig)
    rig.kvcr.statuses[key(0)] = AT_PEER
    rig.load([key(0)], [0], "r")
    rig.kvcr.statuses[key(0)] = FETCHING
    assert rig.lookup(key(0), "another") is LookupResult.RETRY, "it may come in time"
    clock.now += 60
    rig.poll()
    assert rig.lookup(key(0), "another") is LookupResult.MISS
    answer(rig, fetches(rig)[-1])
    assert rig.tier._staging.unawaited == set()


def test_a_store_does_not_wait_for_a_block_that_is_being_fetched() -> None:
    """KVCR would end it with the fetch, however long a peer hangs."""
    rig, clock = timed_peer_rig(secondary_g2_slots=64, pull_timeout_ms=1000)
    rig.load([key(1)], [0], "r")
    clock.now += 1
    rig.poll()
    rig.kvcr.operations.clear()
    both = rig.store([key(1), key(9)], [1, 2])
    alone = rig.store([key(1)], [1])
    rig.poll()
    assert rig.finished[alone].success
    assert list(rig.kvcr.last.blocks) == [key(9)]
    answer(rig, rig.kvcr.last)
    assert rig.finished[both].success
    assert getattr(rig.finished[both], "transfer_bytes", ROW_BYTES) == ROW_BYTES
    assert rig.losses()["unawaited"] == 2


def test_an_introduction_that_tells_nothing_is_repeated_after_a_pause() -> None:
    """The block may be gone there, or KVCR may not have found room for it here."""
    rig, clock = timed_peer_rig(introduced=False)
    answer(rig, begin_introduction(rig), FAILED)
    rig.hits(keys(1))
    rig.poll()
    assert len(fetches(rig)) == 1
    assert rig.lookup(key(5)) is LookupResult.MISS, "it has not answered yet"
    clock.now += FIRST_PAUSE_S
    rig.introduce(key(1))


def test_first_contact_has_an_allowance_of_its_own() -> None:
    rig, clock = timed_peer_rig(introduced=False, pull_timeout_ms=1000)
    introduction = begin_introduction(rig)
    clock.now += 10
    rig.poll()
    answer(rig, introduction)
    assert rig.hits(keys(8)) == keys(8)
    assert rig.ignored_hints() == {}


def test_who_does_not_answer_in_that_time_is_left_alone() -> None:
    rig, clock = timed_peer_rig(introduced=False)
    introduction = begin_introduction(rig)
    clock.now += 20
    rig.poll()
    assert not rig.tier._staging.introducing
    rig.tier.on_new_request(request("s", hint(keys(8), PEER)))
    assert rig.ignored_hints() == {"peer_down": 1}
    # Slow it was, and not dead: no other introduction is needed.
    answer(rig, introduction)
    assert rig.kvcr.released == rig.kvcr.claims
    clock.now += FIRST_COOLDOWN_S
    assert rig.lookup(key(1)) is LookupResult.HIT


def test_kvcr_is_given_the_time_for_it() -> None:
    def told(**options: Any) -> tuple[int, int]:
        config = peer_rig(**{"operation_timeout_ms": None} | options).kvcr.config
        return config.operation_timeout_ms, config.abandon_timeout_ms

    assert told() == (15_000, 30_000)
    assert told(introduction_timeout_ms=9000) == (9000, 18_000)
    # What an operator gave for KVCR itself is what KVCR is given.
    assert told(abandon_timeout_ms=6000) == (3000, 6000)
    assert told(operation_timeout_ms=700)[0] == 700


def test_a_silent_peer_costs_one_wait_and_is_then_left_alone() -> None:
    rig, clock = timed_peer_rig(pull_timeout_ms=1000)
    rig.load(keys(4), range(4), "r")
    clock.now += 1
    rig.poll()
    assert [result.success for result in rig.finished.values()] == [False]
    assert rig.lookup(key(5), "r") is LookupResult.MISS
    assert rig.losses() == {"timed_out": 4, "peer_down": 1}
    rig.tier.on_new_request(request("s", hint(keys(8), PEER)))
    assert rig.ignored_hints() == {"peer_down": 1}
    # Another peer is another matter.
    rig.tier.on_new_request(request("t", hint(keys(8), OTHER_PEER)))
    rig.introduce(key(5), "t")


def test_a_busy_peer_has_ten_seconds_by_default() -> None:
    rig, clock = timed_peer_rig(operation_timeout_ms=None)
    job = rig.load([key(1)], [1], "r")
    clock.now += 9.9
    rig.poll()
    assert job not in rig.finished
    clock.now += 0.1
    rig.poll()
    assert rig.finished[job].success is False


def test_nobody_waits_for_a_peer_whose_connection_is_lost() -> None:
    rig, clock = timed_peer_rig(pull_timeout_ms=60_000)
    lost: set[str] = set()
    rig.tier._staging._is_lost = lost.__contains__
    job = rig.load(keys(2), range(2), "r")
    lost.add(OTHER_PEER)
    clock.now += 10
    rig.poll()
    assert job not in rig.finished, "it is another peer's"
    lost.add(PEER)
    clock.now += 10
    rig.poll()
    assert rig.finished[job].success is False
    assert rig.losses() == {"peer_down": 2}
    assert rig.tier._staging._liveness.standing(PEER) is Standing.COOLING
    # It may be back: a connection that is not dialled again yet is no reason.
    clock.now += FIRST_COOLDOWN_S
    rig.introduce(key(5))


@pytest.mark.parametrize("option", ["pull_timeout_ms", "operation_timeout_ms"])
def test_a_given_timeout_is_never_exceeded(option: str) -> None:
    rig, clock = timed_peer_rig(
        introduced=False, **{"operation_timeout_ms": None, option: 4000}
    )
    introduction = begin_introduction(rig)
    clock.now += 3.9
    answer(rig, introduction)
    for number in (1, 2):
        rig.tier.on_new_request(request(f"s{number}", hint(keys(8), PEER)))
        job = rig.load([key(number)], [number], f"s{number}")
        clock.now += 4.1
        rig.poll()
        assert rig.finished[job].success is False
        assert rig.tier._staging._liveness.standing(PEER) is Standing.COOLING
        clock.now += 2 * FIRST_COOLDOWN_S
        answer(rig, fetches(rig)[-1])


def test_a_pull_is_given_up_before_kvcr_does_and_what_lands_late_is_let_go() -> None:
    rig, clock = timed_peer_rig(pull_timeout_ms=1000)
    job = rig.load([key(0)], [0], "r")
    (pull,) = fetches(rig)
    clock.now += 1
    rig.poll()
    assert rig.finished[job].success is False
    assert rig.hits([key(0)]) == []
    released = len(rig.kvcr.released)
    answer(rig, pull)
    assert rig.kvcr.of_kind("deliver") == []
    assert rig.kvcr.released == rig.kvcr.claims
    assert len(rig.kvcr.released) == released + 1
    assert not any(rig.staging_tables().values())


def test_a_request_is_free_one_timeout_after_it_asked() -> None:
    """However long it stood in line: its time does not begin when its turn comes."""
    rig, clock = timed_peer_rig(pull_timeout_ms=1000, landing_slots=4)
    first = rig.load(keys(6), range(6), "r")
    rig.tier.on_new_request(request("s", hint(keys(8), PEER)))
    second = rig.load(keys(2, first=6), range(6, 8), "s")
    for _ in range(2):
        clock.now += 0.55
        answer(rig, fetches(rig)[-1])
    assert set(rig.finished) == {second}
    assert rig.losses() == {"timed_out": 2}
    assert rig.tier._staging._liveness.standing(PEER) is Standing.USABLE
    assert first not in rig.finished


def test_what_arrives_keeps_a_long_pull_going() -> None:
    rig, clock = timed_peer_rig(pull_timeout_ms=1000, landing_slots=4)
    job = rig.load(keys(6), range(6), "r")
    answered: set[int] = set()
    started = clock.now
    for _ in range(20):
        clock.now += 0.4
        for operation in list(rig.kvcr.operations.values()):
            if operation.handle not in answered:
                answered.add(operation.handle)
                answer(rig, operation)
    assert rig.finished[job].success
    assert clock.now - started > 3


def test_a_peer_that_answers_without_the_block_is_no_silent_one() -> None:
    rig = peer_rig()
    rig.load([key(1)], [0], "r")
    answer(rig, rig.kvcr.last, FAILED)
    assert [result.success for result in rig.finished.values()] == [False]
    assert rig.lookup(key(2), "r") is LookupResult.HIT
    # The block is not there for this request; whoever else is hinted may try.
    assert rig.lookup(key(1), "r") is LookupResult.MISS
    rig.tier.on_new_request(request("s", hint(keys(8), PEER)))
    assert rig.lookup(key(1), "s") is LookupResult.HIT


def test_what_still_waits_is_dropped_when_its_request_is_gone() -> None:
    rig = peer_rig(landing_slots=4)
    rig.load(keys(4), range(4), "r")
    asked = fetches(rig)
    assert sum(len(operation.blocks) for operation in asked) < 4
    rig.tier.on_request_finished(ReqContext("r"))
    for operation in asked:
        answer(rig, operation)
    assert fetches(rig) == asked
    for operation in rig.kvcr.of_kind("deliver"):
        answer(rig, operation)
    (result,) = rig.finished.values()
    assert len(result.successful_keys or ()) == sum(len(op.blocks) for op in asked)
    # The request is over: nothing of it is remembered.
    assert not rig.tier._backoff.active
    assert not rig.tier._backoff._by_request


def test_a_peer_that_hangs_leaves_room_for_others() -> None:
    rig = peer_rig(secondary_g2_slots=512, g3=FILES["g3"], verify_blocks=False)
    rig.kvcr.statuses.update(dict.fromkeys(keys(200), AT_PEER))
    rig.kvcr.statuses[key(300)] = ON_DISK
    rig.load(keys(16), range(16), "r")
    rig.kvcr.operations.clear()
    for number in range(3):
        name, peer = f"other {number}", f"tcp://10.9.9.{number}:7001"
        rig.tier.on_new_request(request(name, hint(keys(200), peer)))
        rig.introduce(key(100 + number), name)
        rig.kvcr.operations.clear()
        rig.load(keys(16, first=20), range(16), name)
        assert fetches(rig), f"peer {number} has to wait for another"
        rig.kvcr.operations.clear()
    rig.load([key(300)], [0], "somebody")
    assert fetches(rig), "files have to wait for a peer"


def test_memory_that_a_dead_peer_owns_is_not_used_and_told() -> None:
    rig = peer_rig(landing_slots=8)
    staging = rig.tier._staging
    room = staging.peer_room
    fields = {"op_handle": -1, "destination_owner": "kvcr"}
    fields["destination_regions"] = [object()] * room
    rig.kvcr.bindings.on_resilience_event(transfer_error("uncertain", **fields))
    assert rig.lookup(key(1), "r") is LookupResult.MISS
    rig.load([key(2)], [0], "r")
    assert fetches(rig) == []
    assert [result.success for result in rig.poll()] == [False]
    stats = samples(rig.tier.get_stats())
    assert stats["vllm:kvcr_tier_state"][("1", "degraded", "landing_full")] == 1
    assert stats["vllm:kvcr_tier_lost_blocks"] == {("landing_full",): 2}
    # However much the second report counts: what was taken is given back.
    fields["destination_regions"] = [object()]
    rig.kvcr.bindings.on_resilience_event(transfer_error("quiesced", **fields))
    assert staging.peer_room == room
    rig.poll()
    assert rig.lookup(key(1), "r") is LookupResult.HIT
    state = samples(rig.tier.get_stats())["vllm:kvcr_tier_state"]
    assert state[("1", "healthy", "none")] == 1


def test_by_option_a_peer_writes_straight_to_the_primary_tier() -> None:
    rig = peer_rig(remote_landing="primary")
    sources = rig.tier._staging._liveness._sources
    job = rig.load([key(1)], [5], "r")
    assert [op.kind for op in rig.kvcr.operations.values()] == ["deliver"]
    assert rig.kvcr.last.request_id == "r"
    sources[PEER].silences = 3
    answer(rig, rig.kvcr.last)
    assert rig.finished[job].success
    assert sources[PEER].silences == 0, "that ends a suspicion"


def test_a_slow_local_copy_is_not_held_against_a_hinted_peer() -> None:
    hasty = {"operation_timeout_ms": 10, "introduction_timeout_ms": 10}
    rig = peer_rig(remote_landing="primary", secondary_g2_slots=16, **hasty)
    rig.kvcr.statuses[key(1)] = HIT
    rig.load([key(1)], [5], "r")
    time.sleep(0.02)
    answer(rig, rig.kvcr.last, FAILED)
    assert rig.tier._staging._liveness.standing(PEER) is Standing.USABLE
