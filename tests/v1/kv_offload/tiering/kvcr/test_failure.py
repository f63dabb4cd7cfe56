# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A KVCR that is gone, and memory that it cannot vouch for: the engine goes on."""

import threading
from typing import Any

import pytest

from tests.v1.kv_offload.tiering.kvcr.builders import hint, key, keys, request
from tests.v1.kv_offload.tiering.kvcr.busy import (
    busy_rig,
    in_thread,
    transfer_error,
    use_everything,
)
from tests.v1.kv_offload.tiering.kvcr.rig import StandinRig, samples, wait_until
from tests.v1.kv_offload.tiering.kvcr.standin import (
    FAILED,
    HIT,
    SUCCESS,
    KvcrStandin,
    RecordingParent,
)
from vllm.v1.kv_offload.base import LookupResult, ReqContext
from vllm.v1.kv_offload.tiering.kvcr.backend import start
from vllm.v1.kv_offload.tiering.kvcr.compat import shims

DEAD = RuntimeError("progress thread died")
INTO_PRIMARY = {
    "op_handle": 1,
    "destination_regions": [object()],
    "destination_owner": "framework",
}

# --- a KVCR that is gone ---------------------------------------------------------


def test_when_polling_raises_every_job_comes_back_once(tier_log: Any) -> None:
    rig, _ = busy_rig()
    rig.kvcr.statuses[key(1)] = HIT
    rig.kvcr.raises["poll_completed"] = DEAD
    rig.poll()
    assert rig.lookup(key(1)) is LookupResult.MISS
    late = [rig.load([key(1)], [0]), rig.store([key(1)], [0])]
    rig.poll()
    assert [rig.finished[job].success for job in late] == [False, False]
    assert len(rig.kvcr.operations) == 3
    rig.tier.drain_jobs()
    for _ in range(3):
        rig.poll()
        rig.tier.on_schedule_end(None)  # type: ignore[arg-type]
    assert sorted(rig.finished) == sorted(rig.given)
    loads = [rig.finished[job] for job in rig.given[:2]]
    assert [result.success for result in loads] == [False, False]
    assert [result.successful_keys for result in loads] == [set(), set()]
    (error,) = tier_log.texts(level=40)
    assert "progress thread died" in error
    assert not rig.tier.has_pending_work()
    rig.tier.shutdown()
    # KVCR may have been writing for the loads until its close.
    assert rig.kvcr.closed == 1


def test_loads_under_way_stay_reserved_until_native_code_has_stopped() -> None:
    closing = threading.Event()

    class SlowClose(KvcrStandin):
        def close(self) -> None:
            closing.wait(10)
            super().close()

    rig, _ = busy_rig(kvcr=SlowClose)
    rig.kvcr.raises["poll_completed"] = DEAD
    rig.poll()
    rig.poll()
    loads, store = rig.given[:2], rig.given[2]
    assert store in rig.finished, "nobody reads what a store wrote"
    assert not set(loads) & rig.finished.keys()
    drain = in_thread(rig.tier.drain_jobs)
    drain.join(0.05)
    assert drain.is_alive()
    closing.set()
    drain.join(10)
    assert not drain.is_alive()
    rig.poll()
    assert sorted(rig.finished) == sorted(rig.given)


@pytest.mark.parametrize(
    ("broken", "use"),
    [
        ("query", lambda rig: rig.lookup(key(1))),
        ("poll_completed", lambda rig: rig.poll()),
        ("deliver", lambda rig: rig.load([key(1)], [0])),
        ("deposit", lambda rig: rig.store([key(1)], [0])),
        ("get_stats", lambda rig: rig.tier.get_stats()),
        ("submit_hint", lambda rig: rig.tier.on_new_request(request("x", hint()))),
        (
            "discard_hint",
            lambda rig: (
                rig.tier.on_new_request(request("x", hint())),
                rig.tier.on_request_finished(ReqContext("x")),
            ),
        ),
    ],
)
@pytest.mark.parametrize(
    "error", [DEAD, OSError("no device")], ids=lambda error: type(error).__name__
)
def test_whatever_raises_first_the_tier_fails_and_the_engine_goes_on(
    broken: str, use: Any, error: Exception, tier_log: Any
) -> None:
    rig, _ = busy_rig(enable_telemetry=True)
    rig.kvcr.raises[broken] = error
    use(rig)
    use_everything(rig)
    assert sorted(rig.finished) == sorted(rig.given)
    assert len(tier_log.texts(level=40)) == 1
    state = samples(rig.tier.get_stats()).get("vllm:kvcr_tier_state")
    assert state is None or state[("1", "failed", "backend_failed")] == 1


def test_a_failure_is_told_to_no_peer_that_waits() -> None:
    rig = StandinRig(control_ports=[7001])
    parent = RecordingParent({key(1): 0})
    rig.kvcr.want(key(1))
    rig.poll()
    rig.kvcr.raises["poll_completed"] = DEAD
    rig.poll()
    rig.tier.serve_external_requests(parent)
    assert parent.calls == []
    wait_until(lambda: not rig.tier.has_pending_work() or rig.poll(), "idleness")


def test_a_reset_ends_when_native_code_lets_go_late(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """KVCR failed in the middle of a load, and could not stop what it had begun."""
    monkeypatch.setattr(start, "_RECHECK_INTERVAL_S", 0.01)
    free = threading.Event()
    monkeypatch.setattr(shims, "is_quiescent", lambda kvcr: free.is_set())
    rig = StandinRig()
    rig.kvcr.raises["close"] = RuntimeError("transfers are still active")
    rig.kvcr.raises["deliver"] = DEAD
    job = rig.load([key(1)], [0])
    drain = in_thread(rig.tier.drain_jobs)
    drain.join(0.2)
    assert drain.is_alive(), "its slot may still be written to"
    free.set()
    drain.join(10)
    assert not drain.is_alive()
    assert [(result.job_id, result.success) for result in rig.poll()] == [(job, False)]


# --- memory that a failed transfer may still touch -------------------------------


@pytest.mark.parametrize("outcome", [FAILED, SUCCESS])
def test_a_load_into_uncertain_memory_is_held_until_quiesced(outcome: Any) -> None:
    rig = StandinRig(control_ports=[7001], remote_landing="primary")
    tell = rig.kvcr.bindings.on_resilience_event
    rig.load(keys(2), range(2))
    tell(transfer_error("uncertain", **INTO_PRIMARY))
    rig.kvcr.complete_all(outcome)
    rig.kvcr.complete_all(FAILED)
    assert rig.poll() == []
    drain = in_thread(rig.tier.drain_jobs)
    drain.join(0.05)
    assert drain.is_alive()
    tell(transfer_error("quiesced", **INTO_PRIMARY))
    drain.join(10)
    assert not drain.is_alive()
    assert [result.success for result in rig.poll()] == [outcome is SUCCESS]


def test_a_pin_whose_memory_is_uncertain_is_held_until_it_is_quiesced() -> None:
    rig, parent = busy_rig()
    rig.kvcr.complete_all()
    rig.poll()
    tell = rig.kvcr.bindings.on_resilience_event
    fields = {
        "op_handle": 5,
        "source_blocks": {key(90): [object()]},
        "source_owners": {key(90): "framework"},
    }
    handle = f"kvcr-job-{parent.jobs[0].job_id}"
    tell(transfer_error("uncertain", **fields))
    rig.kvcr.unpin(handle)
    assert rig.poll() == []
    assert rig.kvcr.releases == [(handle, False)]
    tell(transfer_error("quiesced", **fields))
    rig.kvcr.unpin(handle)
    assert [result.success for result in rig.poll()] == [True]


def test_a_stalled_source_is_degraded_once_and_shown(tier_log: Any) -> None:
    rig = StandinRig(control_ports=[7001], enable_telemetry=True)
    for _ in range(3):
        rig.kvcr.bindings.on_resilience_event(RuntimeError("source progress stalled"))
    assert len([t for t in tier_log.texts() if "stalled" in t]) == 1
    state = samples(rig.tier.get_stats())["vllm:kvcr_tier_state"]
    assert state[("1", "degraded", "source_stalled")] == 1
    rig.kvcr.statuses[key(1)] = HIT
    assert rig.lookup(key(1)) is LookupResult.HIT
