# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Drain and shutdown: nothing lost, nothing twice, no hang."""

import threading
import time
from typing import Any

import pytest

from tests.v1.kv_offload.tiering.kvcr.builders import key, keys
from tests.v1.kv_offload.tiering.kvcr.busy import busy_rig, in_thread, use_everything
from tests.v1.kv_offload.tiering.kvcr.rig import StandinRig, wait_until
from tests.v1.kv_offload.tiering.kvcr.standin import FAILED, KvcrStandin
from vllm.v1.kv_offload.tiering.kvcr import draining
from vllm.v1.kv_offload.tiering.kvcr.backend import start

SOON = {"operation_timeout_ms": 20, "abandon_timeout_ms": 40}


def test_a_drain_waits_for_jobs_and_pins_says_so_and_keeps_their_results(
    tier_log: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draining, "_WARNING_INTERVAL_S", 0.05)
    rig, parent = busy_rig()
    drain = in_thread(rig.tier.drain_jobs)
    wait_until(
        lambda: len([t for t in tier_log.texts() if "3 jobs and 1 pins" in t]) >= 2,
        "two warnings",
    )
    rig.kvcr.complete_all()
    drain.join(0.05)
    assert drain.is_alive(), "did not wait for the pin"
    rig.kvcr.unpin(f"kvcr-job-{parent.jobs[0].job_id}")
    drain.join(10)
    assert not drain.is_alive()
    rig.poll()
    assert sorted(rig.finished) == sorted(rig.given)
    assert all(result.success for result in rig.finished.values())


def test_drain_waits_for_what_has_not_started_yet() -> None:
    rig = StandinRig(secondary_g2_slots=4)
    rig.store(keys(16), range(16))
    assert len(rig.kvcr.operations) < 16
    drain = in_thread(rig.tier.drain_jobs)

    def ended() -> bool:
        for operation in list(rig.kvcr.operations.values()):
            rig.kvcr.complete(operation.handle, dict.fromkeys(operation.blocks, FAILED))
        return not drain.is_alive()

    wait_until(ended, "the end of the drain")
    assert [result.success for result in rig.poll()] == [False]
    assert sum(len(op.blocks) for op in rig.kvcr.operations.values()) == 16


def test_shutdown_drains_then_closes_then_frees_once(retained: list[Any]) -> None:
    freed: list[bool] = []

    class Watched(KvcrStandin):
        def close(self) -> None:
            freed.extend(buffer.closed for buffer in rig.mmap.made)
            super().close()

    rig = StandinRig(kvcr=Watched)
    rig.store([key(1)], [0])
    rig.kvcr.complete_all()
    rig.tier.shutdown()
    rig.tier.shutdown()
    assert rig.kvcr.calls.index("poll_completed") < rig.kvcr.calls.index("close")
    assert freed == [False]
    assert [buffer.closed for buffer in rig.mmap.made] == [True]
    assert retained == []


def test_a_shutdown_in_the_middle_ends_in_time_and_once(retained: list[Any]) -> None:
    rig, _ = busy_rig(**SOON)
    started = time.monotonic()
    rig.tier.shutdown()
    assert time.monotonic() - started < 5
    assert rig.kvcr.closed == 1
    for _ in range(3):
        rig.poll()
    assert sorted(rig.finished) == sorted(rig.given)


def test_a_close_that_raises_keeps_buffers(retained: list[Any], tier_log: Any) -> None:
    rig = StandinRig()
    rig.kvcr.raises["close"] = RuntimeError("unresolved operations")
    rig.tier.shutdown()
    assert [buffer.closed for buffer in rig.mmap.made] == [False]
    assert any(kept is rig.memory for kept in retained)
    assert any(kept is rig.mmap.made[0] for kept in retained)
    assert any("unresolved operations" in text for text in tier_log.texts())
    rig.tier.shutdown()
    assert rig.kvcr.closed == 1


def test_a_close_that_never_returns_keeps_the_buffers(
    retained: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(start, "CLOSE_TIMEOUT_S", 0.05)
    done = threading.Event()

    class Hanging(KvcrStandin):
        def close(self) -> None:
            done.wait(10)

    rig = StandinRig(kvcr=Hanging)
    rig.tier.shutdown()
    assert [buffer.closed for buffer in rig.mmap.made] == [False]
    assert any(kept is rig.mmap.made[0] for kept in retained)
    done.set()


def test_everything_may_be_called_after_a_shutdown() -> None:
    rig = StandinRig(control_ports=[7001], enable_telemetry=True)
    rig.tier.shutdown()
    for name in ("query", "poll_completed", "get_stats", "submit_hint", "discard_hint"):
        rig.kvcr.raises[name] = RuntimeError("closed")
    use_everything(rig)
    assert [result.success for result in rig.finished.values()] == [False, False]
