# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The tier's side of vLLM's protocol: lookups, recency, events, pending work."""

from typing import Any

import pytest
from kvcr.types import CacheTier, InventoryEvent, QueryStatus

from tests.v1.kv_offload.tiering.kvcr.builders import hint, key, make_spec, request
from tests.v1.kv_offload.tiering.kvcr.rig import StandinRig
from tests.v1.kv_offload.tiering.kvcr.standin import (
    AT_PEER,
    FETCHING,
    HIT,
    MISS,
    ON_DISK,
    KvcrStandin,
    RecordingParent,
)
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadPolicy,
    ReqContext,
    ScheduleEndContext,
)
from vllm.v1.kv_offload.tiering.base import SecondaryTierManager
from vllm.v1.kv_offload.tiering.kvcr import manager
from vllm.v1.kv_offload.tiering.kvcr.compat import shims
from vllm.v1.kv_offload.tiering.kvcr.compat.vocabulary import LOOKUPS

ENDED = ScheduleEndContext([], [])


def test_the_names_that_others_build_on() -> None:
    assert issubclass(manager.KVCRSecondaryTierManager, SecondaryTierManager)
    for name in ("KVCR", "ZmqPeerControlChannel", "mmap"):
        assert hasattr(manager, name)
    assert isinstance(manager._RETAINED_NATIVE_BUFFERS, list)


def test_the_tier_says_what_it_was_called() -> None:
    assert StandinRig().tier.tier_type == "kvcr"


# --- lookups ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "result"),
    [
        (HIT, LookupResult.HIT),
        (ON_DISK, LookupResult.HIT),
        (FETCHING, LookupResult.RETRY),
        (MISS, LookupResult.MISS),
        ((QueryStatus.HIT, None), LookupResult.HIT),
        ((QueryStatus.FETCHABLE, None), LookupResult.HIT),
        ((QueryStatus.FETCHING, None), LookupResult.RETRY),
    ],
)
def test_lookups_are_kvcrs_answers(status: Any, result: LookupResult) -> None:
    rig = StandinRig()
    rig.kvcr.statuses[key(1)] = status
    assert rig.lookup(key(1)) is result
    assert rig.lookup(key(2)) is LookupResult.MISS


def test_a_hinted_peers_block_is_a_hit() -> None:
    rig = StandinRig(control_ports=[7001])
    rig.tier.on_new_request(request("r", hint([key(1)])))
    rig.kvcr.statuses[key(1)] = AT_PEER
    assert rig.lookup(key(1), "r") is LookupResult.HIT


def test_a_request_may_pull_no_more_than_it_is_allowed() -> None:
    rig = StandinRig(control_ports=[7001], max_pull_blocks=2, enable_telemetry=True)
    rig.tier.on_new_request(request("r", hint()))
    for number in range(4):
        rig.kvcr.statuses[key(number)] = AT_PEER
    assert rig.hits([key(number) for number in range(4)]) == [key(0), key(1)]
    assert rig.losses() == {"pull_limit": 2}


def test_every_query_status_has_a_lookup_result() -> None:
    assert set(LOOKUPS.values()) <= set(LookupResult)


def test_lookups_ask_with_the_requests_id() -> None:
    asked: list[Any] = []

    class Asked(KvcrStandin):
        def query(self, keys: Any, request_id: Any = None) -> Any:
            asked.append((list(keys), request_id))
            return super().query(keys, request_id)

    StandinRig(kvcr=Asked).lookup(key(1), "request 7")
    assert asked == [([key(1)], "request 7")]


# --- requests --------------------------------------------------------------------


def test_requests_are_offloaded_chunk_by_chunk() -> None:
    tier = StandinRig().tier
    context = ReqContext("r")
    assert tier.on_new_request(context).policy is OffloadPolicy.CHUNK_LEVEL
    assert tier.on_request_finished(context) is None


# --- events ----------------------------------------------------------------------


def publishing_rig(**options: Any) -> StandinRig:
    return StandinRig(spec=make_spec(events=True, described=True), **options)


@pytest.mark.parametrize(
    ("tier", "medium"),
    [(CacheTier.LOCAL_G2, Medium.CPU), (CacheTier.G3, Medium.STORAGE)],
)
@pytest.mark.parametrize("removed", [False, True])
def test_inventory_becomes_events_taken_once(
    tier: CacheTier, medium: Medium, removed: bool
) -> None:
    rig = publishing_rig(locality="LOCAL")
    rig.kvcr.bindings.inventory_sink(
        InventoryEvent((key(1), key(2)), tier, removed)  # type: ignore[arg-type]
    )
    assert rig.tier.has_pending_work()
    (event,) = rig.tier.take_events()
    assert event.keys == [key(1), key(2)]
    assert event.medium is medium
    assert event.removed is removed
    assert event.ownership == "kvcr"
    assert event.removal_expected is True
    assert event.locality is Locality.LOCAL
    assert list(rig.tier.take_events()) == []
    assert not rig.tier.has_pending_work()


@pytest.mark.parametrize(
    "tier", [CacheTier.FW_G1, CacheTier.FW_G2, CacheTier.REMOTE_G2]
)
def test_what_kvcr_does_not_own_is_not_published(tier: CacheTier) -> None:
    rig = publishing_rig()
    rig.kvcr.bindings.inventory_sink(InventoryEvent((key(1),), tier, False))  # type: ignore[arg-type]
    assert list(rig.tier.take_events()) == []


def test_events_keep_their_order() -> None:
    rig = publishing_rig()
    for number in range(5):
        rig.kvcr.bindings.inventory_sink(
            InventoryEvent((key(number % 2),), CacheTier.LOCAL_G2, number % 2 == 1)  # type: ignore[arg-type]
        )
    events = [(event.keys, event.removed) for event in rig.tier.take_events()]
    assert events == [([key(n % 2)], n % 2 == 1) for n in range(5)]


# --- pending work: exactly what is outstanding -----------------------------------


def test_an_idle_tier_has_nothing_pending() -> None:
    assert not StandinRig().tier.has_pending_work()


def test_a_job_is_pending_until_its_result_was_taken() -> None:
    rig = StandinRig()
    rig.store([key(1)], [0])
    assert rig.tier.has_pending_work()
    rig.kvcr.complete_all()
    assert rig.tier.has_pending_work()
    assert len(rig.poll()) == 1
    assert not rig.tier.has_pending_work()


def test_a_job_that_ended_at_once_is_pending_until_taken() -> None:
    rig = StandinRig()
    rig.store([], [])
    assert rig.tier.has_pending_work()
    rig.poll()
    assert not rig.tier.has_pending_work()


def test_a_pin_is_pending_until_its_result_was_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # As where a manager's own thread polls for peers.
    monkeypatch.setattr(shims, "HAS_TIER_POLL_THREAD", True)
    rig = StandinRig(control_ports=[7001])
    parent = RecordingParent({key(1): 3})
    assert not rig.tier.has_pending_work()
    rig.kvcr.want(key(1))
    rig.poll()
    assert rig.tier.has_pending_work()
    rig.tier.serve_external_requests(parent)
    assert rig.tier.has_pending_work()
    rig.kvcr.unpin(f"kvcr-job-{parent.jobs[0].job_id}")
    (result,) = rig.poll()
    assert result.success
    assert not rig.tier.has_pending_work()


def test_an_engine_that_nothing_wakes_for_peers_stays_awake(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shims, "HAS_TIER_POLL_THREAD", False)
    assert StandinRig(control_ports=[7001]).tier.has_pending_work()
    assert not StandinRig(secondary_g2_slots=4).tier.has_pending_work()


# --- a tier with nothing to store into -------------------------------------------


@pytest.mark.parametrize(
    ("options", "useful"),
    [
        ({"secondary_g2_slots": 4}, False),
        ({"control_ports": [7001]}, True),
        (
            {
                "secondary_g2_slots": 4,
                "g3": {"paths": ["/f"], "capacity_bytes_per_file": 1 << 20},
            },
            True,
        ),
    ],
    ids=["pool", "peers", "files"],
)
def test_vllm_polls_between_steps_where_that_is_of_use(
    options: dict[str, Any], useful: bool
) -> None:
    rig = StandinRig(**options)
    assert rig.tier.tolerates_off_thread_polling is useful
    assert manager.KVCRSecondaryTierManager.tolerates_off_thread_polling is False


def test_stores_without_storage_end_at_once_and_copy_nothing() -> None:
    rig = StandinRig(control_ports=[7001], enable_telemetry=True)
    for number in range(100):
        rig.store([key(number)], [number % 16])
    assert all(result.success for result in rig.poll())
    assert len(rig.finished) == 100
    assert rig.kvcr.of_kind("deposit") == []
    assert rig.losses() == {}


@pytest.mark.parametrize("given", [None, object()], ids=["none", "one"])
@pytest.mark.parametrize("options", [{}, {"control_ports": [7001]}], ids=["pool", "no"])
def test_the_backpressure_detector_is_the_one_that_was_given(
    given: object, options: dict[str, Any]
) -> None:
    rig = StandinRig(detector=given, **options)
    rig.kvcr.raises["poll_completed"] = RuntimeError("dead")
    rig.poll()
    assert getattr(rig.tier, "bp_detector", given) is given  # vLLM 0.30 has none


def test_what_is_not_stored_counts_no_bytes() -> None:
    rig = StandinRig(control_ports=[7001])
    rig.store([key(1)], [0])
    (result,) = rig.poll()
    assert getattr(result, "transfer_bytes", 0) == 0


def test_losses_are_logged_at_the_end_of_a_step(tier_log: Any) -> None:
    rig = StandinRig(control_ports=[7001])
    rig.tier.on_new_request(request("r", "nonsense"))
    before = len(tier_log.texts())
    for _ in range(5):
        rig.tier.on_schedule_end(ENDED)
    assert len(tier_log.texts()) == before + 1
