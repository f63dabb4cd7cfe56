# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What is counted of a block's way, and what is told of the tier as it is now."""

from typing import Any

from kvcr.types import CacheTier

from tests.v1.kv_offload.tiering.kvcr.builders import (
    hint,
    key,
    keys,
    make_spec,
    request,
)
from tests.v1.kv_offload.tiering.kvcr.busy import transfer_error
from tests.v1.kv_offload.tiering.kvcr.rig import ROW_BYTES, Rig, StandinRig, samples
from tests.v1.kv_offload.tiering.kvcr.staging_rigs import FILES, PEER
from tests.v1.kv_offload.tiering.kvcr.standin import (
    AT_PEER,
    DROPPED,
    FAILED,
    FETCHING,
    HIT,
    ON_DISK,
    SUCCESS,
    FetchingStandin,
    RecordingParent,
)
from vllm.v1.kv_offload.base import LookupResult, ReqContext, ScheduleEndContext
from vllm.v1.kv_offload.tiering.kvcr.compat import shims
from vllm.v1.kv_offload.tiering.kvcr.reports import metrics
from vllm.v1.kv_offload.tiering.kvcr.reports.losses import Lost

NO_REQUESTS = ScheduleEndContext((), ())
EVERYWHERE = FILES | {
    "secondary_g2_slots": 64,
    "control_ports": [7001],
    "operation_timeout_ms": 60_000,
}


def rig_with_all_places() -> StandinRig:
    """Blocks 0 and 1 in the pool, 2 in a file, 3 to 5 at the peer of request "r"."""
    rig = StandinRig(kvcr=FetchingStandin, enable_telemetry=True, **EVERYWHERE)
    places = (HIT, HIT, ON_DISK, AT_PEER, AT_PEER, AT_PEER)
    rig.kvcr.statuses.update(zip(keys(6), places, strict=True))
    rig.know(PEER)
    rig.tier.on_new_request(request("r", hint(keys(6), PEER)))
    return rig


def taken(rig: Rig) -> dict[str, dict[tuple[str, ...], Any]]:
    """The tier's own samples that are not zero."""
    return {
        name: kept
        for name, values in samples(rig.tier.get_stats()).items()
        if (kept := {labels: value for labels, value in values.items() if value})
        and name.startswith("vllm:kvcr_tier_")
    }


def counts(rig: Rig) -> dict[str, dict[tuple[str, ...], Any]]:
    """The counters among them."""
    return {
        name: values
        for name, values in taken(rig).items()
        if name not in (metrics.LOAD_DURATION, metrics.TIER_STATE)
    }


def settle(rig: StandinRig, status: Any = SUCCESS) -> None:
    """Have KVCR answer whatever it is asked, until nothing is under way."""
    while rig.tier._results.outstanding:
        rig.kvcr.complete_all(status)
        rig.poll()


# --- lookups ---------------------------------------------------------------------


def test_each_lookup_counts_once_and_each_hit_in_its_place() -> None:
    rig = rig_with_all_places()
    for each in keys(6):
        assert rig.lookup(each) is LookupResult.HIT
    rig.lookup(key(9))
    rig.kvcr.statuses[key(8)] = FETCHING
    assert rig.lookup(key(8)) is LookupResult.RETRY
    assert counts(rig) == {
        metrics.LOOKUPS: {(): 8},
        metrics.HITS: {("dram",): 2, ("disk",): 1, ("peer",): 3},
        metrics.LOST_BLOCKS: {("not_hinted",): 1},
    }
    assert counts(rig) == {}


def test_what_was_found_and_refused_is_a_lookup_without_a_hit() -> None:
    rig = rig_with_all_places()
    rig.tier._staging._liveness.silent(PEER, rig.tier._staging._liveness._clock())
    assert rig.lookup(key(3)) is LookupResult.MISS
    job = rig.load([key(0)], [9])
    settle(rig, FAILED)
    assert not rig.finished[job].success
    assert rig.lookup(key(0)) is LookupResult.MISS
    found = counts(rig)
    assert found[metrics.LOOKUPS] == {(): 2}
    assert metrics.HITS not in found
    assert found[metrics.LOST_BLOCKS] == {
        ("peer_down",): 1,
        ("load_failed",): 1,
        ("backing_off",): 1,
    }


def test_vllm_learns_where_a_block_was_found() -> None:
    rig = rig_with_all_places()
    for number, place in ((0, 0), (2, 1), (3, 2), (1, 0), (4, 2), (2, 1)):
        rig.lookup(key(number))
        source = getattr(rig.tier, "cache_hit_source", None)
        assert source is shims.HIT_SOURCES[place]
        if number == 1:
            rig.tier.get_stats()


# --- jobs ------------------------------------------------------------------------


def test_a_load_counts_where_its_blocks_came_from_and_how_long_it_took() -> None:
    rig = rig_with_all_places()
    rig.load(keys(6), range(6))
    settle(rig)
    found = taken(rig)
    assert found[metrics.REQUESTED_BLOCKS] == {("load",): 6}
    blocks = {("load", "dram"): 2, ("load", "disk"): 1, ("load", "peer"): 3}
    assert found[metrics.MOVED_BLOCKS] == blocks
    assert found[metrics.MOVED_BYTES] == {
        labels: count * ROW_BYTES for labels, count in blocks.items()
    }
    seconds = found[metrics.LOAD_DURATION]
    assert seconds.keys() == {("dram",), ("disk",), ("peer",)}
    assert all(len(values) == 1 and values[0] > 0 for values in seconds.values())


def test_what_did_not_arrive_was_requested_and_not_moved() -> None:
    rig = rig_with_all_places()
    rig.load([key(0), key(1), key(9)], range(3))
    rig.kvcr.complete(rig.kvcr.last.handle, {key(0): SUCCESS, key(1): FAILED})
    rig.poll()
    found = counts(rig)
    assert found[metrics.REQUESTED_BLOCKS] == {("load",): 3}
    assert found[metrics.MOVED_BLOCKS] == {("load", "dram"): 1}
    assert found[metrics.LOST_BLOCKS] == {("gone",): 1, ("load_failed",): 1}


def test_a_store_counts_what_was_kept() -> None:
    rig = StandinRig(enable_telemetry=True)
    rig.store(keys(4), range(4))
    answers = dict(zip(keys(4), (SUCCESS, SUCCESS, DROPPED, FAILED), strict=True))
    rig.kvcr.complete(rig.kvcr.last.handle, answers)
    rig.poll()
    assert counts(rig) == {
        metrics.REQUESTED_BLOCKS: {("store",): 4},
        metrics.MOVED_BLOCKS: {("store", "dram"): 2},
        metrics.MOVED_BYTES: {("store", "dram"): 2 * ROW_BYTES},
        metrics.LOST_BLOCKS: {("dropped",): 1, ("store_failed",): 1},
    }


def test_what_enters_a_file_is_stored_there() -> None:
    rig = rig_with_all_places()
    rig.kvcr.publish(key(1), CacheTier.G3)
    rig.kvcr.publish(key(1), CacheTier.LOCAL_G2, removed=True)
    rig.kvcr.publish(key(1), CacheTier.G3, removed=True)
    assert counts(rig)[metrics.MOVED_BLOCKS] == {("store", "disk"): 1}


def test_without_telemetry_nothing_piles_up() -> None:
    rig = StandinRig()
    rig.kvcr.statuses[key(1)] = HIT
    for _ in range(50):
        rig.load([key(1)], [1])
        settle(rig)
    assert rig.tier._traffic.load_seconds == []
    assert len(rig.tier._traffic.moved) <= 1


# --- the tier as it is now -------------------------------------------------------


def stepped(rig: Rig) -> dict[str, dict[tuple[str, ...], Any]]:
    """What a step tells, a second after the last one."""
    rig.tier._report._gauges._next_at = 0.0
    rig.tier.on_schedule_end(NO_REQUESTS)
    return samples(rig.tier.get_stats())


def test_the_state_is_told_from_the_first_step_on_and_repeated() -> None:
    rig = StandinRig(enable_telemetry=True)
    assert samples(rig.tier.get_stats()) == {}
    healthy = {("1", "healthy", "none"): 1}
    assert stepped(rig)[metrics.TIER_STATE] == healthy
    assert samples(rig.tier.get_stats()) == {}
    assert stepped(rig)[metrics.TIER_STATE] == healthy


def test_states_that_are_over_are_zero() -> None:
    rig = StandinRig(enable_telemetry=True, control_ports=[7001])
    rig.kvcr.bindings.on_resilience_event(RuntimeError("stalled"))
    rig.kvcr.raises["poll_completed"] = RuntimeError("died")
    stepped(rig)
    rig.poll()
    assert stepped(rig)[metrics.TIER_STATE] == {
        ("1", "healthy", "none"): 0,
        ("1", "degraded", "source_stalled"): 0,
        ("1", "failed", "backend_failed"): 1,
    }


def test_counters_begin_at_zero_in_the_first_step() -> None:
    rig = StandinRig(enable_telemetry=True)
    first = stepped(rig)
    assert first[metrics.LOST_BLOCKS] == {(reason.label,): 0 for reason in Lost}
    assert first[metrics.LOOKUPS] == {(): 0}
    assert first[metrics.HITS] == {("dram",): 0, ("disk",): 0, ("peer",): 0}
    assert set(first[metrics.MOVED_BYTES]) == set(first[metrics.MOVED_BLOCKS])
    assert metrics.LOST_BLOCKS not in stepped(rig)


def test_pins_and_the_age_of_the_oldest() -> None:
    rig = StandinRig(enable_telemetry=True, control_ports=[7001])
    now = 100.0
    rig.tier._pins._clock = lambda: now
    parent = RecordingParent({key(1): 7, key(2): 4})
    for each in (key(1), key(2)):
        rig.kvcr.want(each)
        rig.poll()
        rig.tier.serve_external_requests(parent)
        now += 10
    told = stepped(rig)
    assert told[metrics.PINS] == {("1",): 2}
    assert told[metrics.OLDEST_PIN_AGE] == {("1",): 20.0}
    rig.kvcr.unpin(f"kvcr-job-{parent.jobs[0].job_id}")
    rig.poll()
    told = stepped(rig)
    assert told[metrics.PINS] == {("1",): 1}
    assert told[metrics.OLDEST_PIN_AGE] == {("1",): 10.0}
    rig.kvcr.unpin(f"kvcr-job-{parent.jobs[1].job_id}")
    rig.poll()
    assert stepped(rig)[metrics.OLDEST_PIN_AGE] == {("1",): 0.0}


def test_slots_that_are_held_back() -> None:
    rig = rig_with_all_places()
    for state, primary, pool in (("uncertain", 3, 2), ("quiesced", 0, 0)):
        for handle, blocks, owner in ((1, 3, "framework"), (-2, 2, "kvcr")):
            error = transfer_error(
                state,
                op_handle=handle,
                destination_regions=[None] * blocks,
                destination_owner=owner,
            )
            rig.kvcr.bindings.on_resilience_event(error)
        told = stepped(rig)[metrics.QUARANTINED_SLOTS]
        assert told == {("1", "primary"): primary, ("1", "pool"): pool}


def test_peers_by_what_is_known_of_them() -> None:
    rig = rig_with_all_places()
    rig.tier._staging._liveness.begin_introduction("tcp://10.9.9.8:7001")
    assert stepped(rig)[metrics.PEERS] == {
        ("1", "usable"): 1,
        ("1", "unknown"): 1,
        ("1", "cooling"): 0,
    }
    rig.tier._staging._liveness.silent(PEER, rig.tier._staging._liveness._clock())
    assert rig.tier._report.has_news, "a sleeping engine has to tell"
    assert stepped(rig)[metrics.PEERS][("1", "cooling")] == 1
    assert not rig.tier._report.has_news


def test_two_tiers_of_an_engine_are_told_apart() -> None:
    spec = make_spec()
    first = StandinRig(enable_telemetry=True, spec=spec)
    second = StandinRig(enable_telemetry=True, spec=spec)
    second.kvcr.raises["poll_completed"] = RuntimeError("died")
    second.poll()
    both = first.tier.get_stats()
    for rig in (first, second):
        rig.tier.on_schedule_end(NO_REQUESTS)
        both.aggregate(rig.tier.get_stats())
    state = samples(both)[metrics.TIER_STATE]
    assert state[("1", "healthy", "none")] == 1
    assert state[("2", "failed", "backend_failed")] == 1
    assert {labels[0] for labels in samples(both)[metrics.PINS]} == {"1", "2"}


def test_pool_and_files_are_counted_and_measured(tmp_path: Any) -> None:
    slots, file_slots = 8, 32
    rig = Rig(
        rows=32,
        secondary_g2_slots=slots,
        g3={
            "paths": str(tmp_path / "g3.data"),
            "capacity_bytes_per_file": file_slots * ROW_BYTES,
        },
        operation_timeout_ms=20_000,
        enable_telemetry=True,
    )
    chosen, stored = keys(16), rig.fill(range(16))
    for number, each in enumerate(chosen):
        assert rig.result_of(rig.store([each], [number])).success
    found = rig.hits(chosen, "r")
    assert found == chosen
    job = rig.load(chosen, range(16, 32))
    assert rig.result_of(job).success
    assert (rig.memory[16:] == stored).all()

    told = stepped(rig)
    hits = told[metrics.HITS]
    assert hits[("disk",)] >= 16 - slots
    assert hits[("dram",)] + hits[("disk",)] == 16
    assert told[metrics.LOOKUPS] == {(): 16}
    moved = told[metrics.MOVED_BLOCKS]
    # Nothing moved between the lookups and the load.
    assert moved[("load", "dram")] == hits[("dram",)]
    assert moved[("load", "disk")] == hits[("disk",)]
    assert moved[("store", "dram")] == 16
    kvcr_wrote = told["vllm:kvcr_transfer_blocks"][("g3_store",)]
    assert moved[("store", "disk")] == kvcr_wrote >= 16 - slots
    state = told[metrics.KVCR_STATE]
    assert told[metrics.CAPACITY] == {
        ("1", "dram"): slots * ROW_BYTES,
        ("1", "disk"): file_slots * ROW_BYTES,
    }
    assert told[metrics.USED] == {
        ("1", "dram"): state[("local_g2_allocated_slots",)] * ROW_BYTES,
        ("1", "disk"): state[("g3_allocated_slots",)] * ROW_BYTES,
    }
    assert told[metrics.USED][("1", "dram")] > 0
    rig.tier.on_request_finished(ReqContext("r"))
    rig.close()
