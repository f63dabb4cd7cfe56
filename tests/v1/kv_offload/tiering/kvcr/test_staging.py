# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Blocks from peers and files: into KVCR's pool first, and only then to vLLM."""

import time
from typing import Any

import pytest

from tests.v1.kv_offload.tiering.kvcr.busy import transfer_error
from tests.v1.kv_offload.tiering.kvcr.rig import (
    ROW_BYTES,
    StandinRig,
    hint,
    hinted_request,
    key,
    keys,
    samples,
)
from tests.v1.kv_offload.tiering.kvcr.standin import (
    AT_PEER,
    FAILED,
    HIT,
    ON_DISK,
    SUCCESS,
    FetchingStandin,
    Operation,
)
from vllm.v1.kv_offload.base import LookupResult, ReqContext
from vllm.v1.kv_offload.tiering.kvcr.peers.liveness import (
    FIRST_COOLDOWN_S,
    LONGEST_COOLDOWN_S,
    Admission,
    Peers,
)

FILES = {
    "secondary_g2_slots": 16,
    "g3": {"paths": "g3.data", "capacity_bytes_per_file": 64 * ROW_BYTES},
    "verify_blocks": False,
}
PEER = "tcp://10.9.9.9:7001"
OTHER_PEER = "tcp://10.9.9.8:7001"


def file_rig(**options: Any) -> StandinRig:
    return StandinRig(kvcr=FetchingStandin, enable_telemetry=True, **FILES | options)


def peer_rig(**options: Any) -> StandinRig:
    """A rig whose peer has blocks 0 to 7, with a request that is hinted at it."""
    # So that none but the silent peer is taken for one.
    options = {"operation_timeout_ms": 60_000} | options
    rig = StandinRig(
        kvcr=FetchingStandin, control_ports=[7001], enable_telemetry=True, **options
    )
    for each in keys(8):
        rig.kvcr.statuses[each] = AT_PEER
    rig.tier.on_new_request(hinted_request("r", hint(keys(8), PEER)))
    return rig


def fetches(rig: StandinRig) -> list[Operation]:
    return rig.kvcr.of_kind("fetch")


def answer(rig: StandinRig, operation: Operation, status: Any = SUCCESS) -> None:
    rig.kvcr.complete(operation.handle, dict.fromkeys(operation.blocks, status))
    rig.poll()


def test_a_block_from_a_file_lands_and_is_then_delivered_from_the_pool() -> None:
    rig = file_rig()
    rig.kvcr.statuses[key(1)] = ON_DISK
    rig.load([key(1)], [5])
    assert [op.kind for op in rig.kvcr.operations.values()] == ["fetch"]
    answer(rig, rig.kvcr.last)
    delivery = rig.kvcr.last
    # Without a request there is no hint, so that it cannot come from a peer.
    assert (delivery.kind, delivery.request_id) == ("deliver", None)
    assert rig.kvcr.released == []
    answer(rig, delivery)
    assert [result.success for result in rig.finished.values()] == [True]
    assert rig.kvcr.released == rig.kvcr.claims


def test_what_the_pool_holds_does_not_wait_for_what_has_to_land() -> None:
    rig = file_rig()
    rig.kvcr.statuses.update({key(1): ON_DISK, key(2): HIT})
    rig.load([key(1), key(2)], [5, 6])
    kinds = {op.kind: list(op.blocks) for op in rig.kvcr.operations.values()}
    assert kinds == {"fetch": [key(1)], "deliver": [key(2)]}


def test_what_did_not_land_is_never_delivered() -> None:
    rig = file_rig()
    for each in keys(2):
        rig.kvcr.statuses[each] = ON_DISK
    rig.load(keys(2), range(2))
    (fetch,) = fetches(rig)
    rig.kvcr.complete(fetch.handle, {key(0): FAILED, key(1): SUCCESS})
    rig.poll()
    assert list(rig.kvcr.last.blocks) == [key(1)]
    answer(rig, rig.kvcr.last)
    (result,) = rig.finished.values()
    assert list(result.successful_keys or ()) == [key(1)]
    assert rig.kvcr.released == rig.kvcr.claims
    assert rig.losses() == {"load_failed": 1}


def test_a_claim_is_released_when_its_delivery_failed() -> None:
    rig = file_rig()
    rig.kvcr.statuses[key(1)] = ON_DISK
    rig.load([key(1)], [5])
    answer(rig, rig.kvcr.last)
    answer(rig, rig.kvcr.last, FAILED)
    assert [result.success for result in rig.finished.values()] == [False]
    assert rig.kvcr.released == rig.kvcr.claims


def test_what_vanished_between_lookup_and_load_is_not_asked_for() -> None:
    rig = file_rig()
    rig.load([key(1)], [5])
    assert [result.success for result in rig.poll()] == [False]
    assert rig.kvcr.operations == {}


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


# --- peers -----------------------------------------------------------------------


def test_an_unproven_peer_is_asked_for_one_block_first() -> None:
    rig = peer_rig()
    rig.load(keys(4), range(4), "r")
    (probe,) = fetches(rig)
    assert len(probe.blocks) == 1
    assert probe.request_id == "r"
    answer(rig, probe)
    rest = [op for op in fetches(rig) if op is not probe]
    assert sum(len(op.blocks) for op in rest) == 3
    for operation in rest:
        answer(rig, operation)
    for operation in rig.kvcr.of_kind("deliver"):
        answer(rig, operation)
    assert [result.success for result in rig.finished.values()] == [True]


def test_a_silent_peer_costs_one_wait_and_is_then_left_alone() -> None:
    rig = peer_rig(operation_timeout_ms=20)
    rig.load(keys(4), range(4), "r")
    (probe,) = fetches(rig)
    time.sleep(0.02)
    answer(rig, probe, FAILED)
    assert fetches(rig) == [probe]
    assert [result.success for result in rig.finished.values()] == [False]
    assert rig.lookup(key(5), "r") is LookupResult.MISS
    rig.tier.on_new_request(hinted_request("s", hint(keys(8), PEER)))
    assert rig.ignored_hints() == {"peer_down": 1}
    # Another peer is another matter.
    rig.tier.on_new_request(hinted_request("t", hint(keys(8), OTHER_PEER)))
    assert rig.lookup(key(5), "t") is LookupResult.HIT


def test_a_pull_is_given_up_before_kvcr_does_and_what_lands_late_is_let_go() -> None:
    rig = peer_rig(pull_timeout_ms=1)
    job = rig.load([key(0)], [0], "r")
    (pull,) = fetches(rig)
    time.sleep(0.002)
    rig.poll()
    assert rig.finished[job].success is False
    assert rig.hits([key(0)]) == []
    answer(rig, pull)
    assert rig.kvcr.of_kind("deliver") == []
    assert rig.kvcr.released == rig.kvcr.claims
    assert len(rig.kvcr.released) == 1


def test_a_peer_that_answers_without_the_block_is_no_silent_one() -> None:
    rig = peer_rig()
    rig.load([key(1)], [0], "r")
    answer(rig, rig.kvcr.last, FAILED)
    assert [result.success for result in rig.finished.values()] == [False]
    assert rig.lookup(key(2), "r") is LookupResult.HIT
    # The block is not there for this request; whoever else is hinted may try.
    assert rig.lookup(key(1), "r") is LookupResult.MISS
    rig.tier.on_new_request(hinted_request("s", hint(keys(8), PEER)))
    assert rig.lookup(key(1), "s") is LookupResult.HIT


def test_what_waits_for_a_probe_is_dropped_when_its_request_is_gone() -> None:
    rig = peer_rig()
    rig.load(keys(4), range(4), "r")
    (probe,) = fetches(rig)
    rig.tier.on_request_finished(ReqContext("r"))
    answer(rig, probe)
    assert fetches(rig) == [probe]
    answer(rig, rig.kvcr.last)
    (result,) = rig.finished.values()
    assert len(list(result.successful_keys or ())) == 1


def test_memory_that_a_dead_peer_owns_is_not_used_and_told() -> None:
    rig = peer_rig(landing_slots=8)
    landings = rig.tier._transfers.landings
    assert landings is not None
    room = landings.room
    fields = {
        "op_handle": -1,
        "destination_regions": [object()] * room,
        "destination_owner": "kvcr",
    }
    rig.kvcr.bindings.on_resilience_event(transfer_error("uncertain", **fields))
    assert rig.lookup(key(1), "r") is LookupResult.MISS
    rig.load([key(2)], [0], "r")
    assert fetches(rig) == []
    assert [result.success for result in rig.poll()] == [False]
    stats = samples(rig.tier.get_stats())
    assert stats["vllm:kvcr_tier_state"][("degraded", "landing_full")] == 1
    assert stats["vllm:kvcr_tier_lost_blocks"] == {("landing_full",): 2}
    rig.kvcr.bindings.on_resilience_event(transfer_error("quiesced", **fields))
    assert landings.room == room
    assert rig.lookup(key(1), "r") is LookupResult.HIT
    state = samples(rig.tier.get_stats())["vllm:kvcr_tier_state"]
    assert state[("healthy", "none")] == 1


def test_by_option_a_peer_writes_straight_to_the_primary_tier() -> None:
    rig = peer_rig(remote_landing="primary")
    rig.load([key(1)], [5], "r")
    assert [op.kind for op in rig.kvcr.operations.values()] == ["deliver"]
    assert rig.kvcr.last.request_id == "r"


@pytest.mark.parametrize("broken", ["fetch", "release", "query"])
def test_a_kvcr_that_fails_while_blocks_land_ends_the_jobs(broken: str) -> None:
    rig = file_rig()
    rig.kvcr.statuses[key(1)] = rig.kvcr.statuses[key(2)] = ON_DISK
    if broken != "release":
        rig.kvcr.raises[broken] = RuntimeError("progress thread died")
    rig.load([key(1)], [5])
    rig.load([key(2)], [6])
    if broken == "release":
        rig.kvcr.raises[broken] = RuntimeError("progress thread died")
        for operation in fetches(rig):
            answer(rig, operation)
        answer(rig, rig.kvcr.last)
    rig.tier.drain_jobs()
    rig.poll()
    assert sorted(rig.finished) == rig.given
    assert rig.kvcr.closed == 1


# --- which peers answer ----------------------------------------------------------


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_a_cool_down_grows_and_ends_with_a_probe() -> None:
    clock = Clock()
    peers = Peers(clock)
    cooldowns = []
    for _ in range(10):
        assert peers.admit(PEER) is Admission.PROBE
        assert peers.admit(PEER) is Admission.WAIT
        peers.silent(PEER, clock.now)
        assert peers.is_down(PEER)
        assert peers.admit(PEER) is Admission.REFUSED
        silent_since = clock.now
        while peers.is_down(PEER):
            clock.now += FIRST_COOLDOWN_S / 4
        cooldowns.append(clock.now - silent_since)
    assert cooldowns == sorted(cooldowns)
    assert cooldowns[0] == FIRST_COOLDOWN_S
    assert cooldowns[-1] == LONGEST_COOLDOWN_S


def test_an_answer_ends_the_suspicion() -> None:
    clock = Clock()
    peers = Peers(clock)
    peers.admit(PEER)
    peers.silent(PEER, clock.now)
    clock.now += FIRST_COOLDOWN_S
    assert peers.admit(PEER) is Admission.PROBE
    assert peers.is_down(PEER), "while it is probed, nobody else waits"
    peers.answered(PEER)
    assert not peers.is_down(PEER)
    assert peers.admit(PEER) is Admission.ALL


def test_pulls_that_were_on_their_way_count_once() -> None:
    clock = Clock()
    peers = Peers(clock)
    peers.answered(PEER)
    started = clock.now
    clock.now += 1
    for _ in range(20):
        peers.silent(PEER, started)
    clock.now += FIRST_COOLDOWN_S
    assert not peers.is_down(PEER)


def test_peers_are_forgotten_rather_than_collected() -> None:
    peers = Peers(Clock())
    for number in range(5000):
        peers.answered(f"tcp://10.0.{number >> 8}.{number & 255}:7001")
    assert len(peers._peers) <= 1024
