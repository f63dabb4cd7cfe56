# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The tier's side of vLLM's protocol: lookups, recency, events, pending work."""

from typing import Any

import pytest
from kvcr.types import CacheTier, QueryStatus

from tests.v1.kv_offload.tiering.kvcr.builders import (
    hint,
    key,
    keys,
    make_spec,
    request,
)
from tests.v1.kv_offload.tiering.kvcr.rig import StandinRig
from tests.v1.kv_offload.tiering.kvcr.staging_rigs import FILES
from tests.v1.kv_offload.tiering.kvcr.standin import (
    AT_PEER,
    FETCHING,
    HIT,
    MISS,
    ON_DISK,
    RecordingParent,
)
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadPolicy,
    ReqContext,
)
from vllm.v1.kv_offload.tiering.kvcr import manager
from vllm.v1.kv_offload.tiering.kvcr.compat import shims


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


def test_a_request_may_pull_no_more_than_it_is_allowed() -> None:
    rig = StandinRig(control_ports=[7001], max_pull_blocks=2, enable_telemetry=True)
    rig.tier.on_new_request(request("r", hint()))
    rig.kvcr.statuses.update(dict.fromkeys(keys(4), AT_PEER))
    assert rig.hits(keys(4)) == keys(2)
    assert rig.losses() == {"pull_limit": 2}


def test_requests_are_offloaded_chunk_by_chunk() -> None:
    tier = StandinRig().tier
    context = ReqContext("r")
    assert tier.on_new_request(context).policy is OffloadPolicy.CHUNK_LEVEL
    assert tier.on_request_finished(context) is None


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
    rig.kvcr.publish(key(1), tier, removed=removed)
    assert rig.tier.has_pending_work()
    (event,) = rig.tier.take_events()
    assert event.keys == [key(1)]
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
    rig.kvcr.publish(key(1), tier)
    assert list(rig.tier.take_events()) == []


def test_events_keep_their_order() -> None:
    rig = publishing_rig()
    for number in range(5):
        rig.kvcr.publish(key(number % 2), removed=number % 2 == 1)
    events = [(event.keys, event.removed) for event in rig.tier.take_events()]
    assert events == [([key(n % 2)], n % 2 == 1) for n in range(5)]


def test_a_job_pends_until_its_result_is_taken() -> None:
    rig = StandinRig()
    for chosen in ([key(1)], []):
        rig.store(chosen, range(len(chosen)))
        assert rig.tier.has_pending_work()
        rig.kvcr.complete_all()
        assert rig.tier.has_pending_work()
        assert len(rig.poll()) == 1
        assert not rig.tier.has_pending_work()


def test_a_pin_pends_until_its_result_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_an_engine_that_nothing_wakes_stays_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shims, "HAS_TIER_POLL_THREAD", False)
    assert StandinRig(control_ports=[7001]).tier.has_pending_work()
    assert not StandinRig(secondary_g2_slots=4).tier.has_pending_work()


@pytest.mark.parametrize(
    ("options", "useful"),
    [
        ({"secondary_g2_slots": 4}, False),
        ({"control_ports": [7001]}, True),
        (FILES, True),
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
    for number in range(20):
        rig.store([key(number)], [number % 16])
    results = rig.poll()
    assert [result.success for result in results] == [True] * 20
    assert {getattr(result, "transfer_bytes", 0) for result in results} == {0}
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
