# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Drain and shutdown: nothing lost, nothing twice, no hang."""

import threading
import time
from typing import Any

import pytest

from tests.v1.kv_offload.tiering.kvcr.builders import key, keys
from tests.v1.kv_offload.tiering.kvcr.busy import (
    busy_rig,
    in_thread,
    use_everything,
)
from tests.v1.kv_offload.tiering.kvcr.rig import StandinRig, wait_until
from tests.v1.kv_offload.tiering.kvcr.standin import FAILED, KvcrStandin
from vllm.v1.kv_offload.tiering.kvcr import draining
from vllm.v1.kv_offload.tiering.kvcr.backend import start

DEAD = RuntimeError("progress thread died")
SOON = {"operation_timeout_ms": 20, "abandon_timeout_ms": 40}


# --- drain -----------------------------------------------------------------------


def test_draining_an_idle_tier_returns_at_once() -> None:
    rig = StandinRig()
    rig.tier.drain_jobs()
    assert rig.poll() == []


def test_drain_waits_for_jobs_and_pins_and_keeps_their_results() -> None:
    rig, parent = busy_rig()
    drain = in_thread(rig.tier.drain_jobs)
    drain.join(0.05)
    assert drain.is_alive()
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
    done = 0
    deadline = time.monotonic() + 10
    while drain.is_alive() and time.monotonic() < deadline:
        for operation in list(rig.kvcr.operations.values())[done:]:
            rig.kvcr.complete(operation.handle, dict.fromkeys(operation.blocks, FAILED))
            done += 1
        time.sleep(0.001)
    drain.join(1)
    assert not drain.is_alive()
    assert [result.success for result in rig.poll()] == [False]
    assert sum(len(op.blocks) for op in rig.kvcr.operations.values()) == 16


def test_a_drain_that_waits_says_what_for(
    tier_log: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert draining._WARNING_INTERVAL_S == 5.0
    monkeypatch.setattr(draining, "_WARNING_INTERVAL_S", 0.05)
    rig, parent = busy_rig()
    drain = in_thread(rig.tier.drain_jobs)
    wait_until(
        lambda: len([t for t in tier_log.texts() if "3 jobs and 1 pins" in t]) >= 2,
        "two warnings",
    )
    rig.kvcr.complete_all()
    rig.kvcr.unpin(f"kvcr-job-{parent.jobs[0].job_id}")
    drain.join(10)
    assert not drain.is_alive()


# --- shutdown --------------------------------------------------------------------


class WatchedClose(KvcrStandin):
    """Notes what had been given back when it was closed."""

    buffers: Any = ()
    freed_before_close: bool | None = None

    def close(self) -> None:
        self.freed_before_close = any(buffer.closed for buffer in self.buffers)
        super().close()


def test_shutdown_drains_then_closes_then_frees(retained: list[Any]) -> None:
    rig = StandinRig(kvcr=WatchedClose)
    rig.kvcr.buffers = rig.mmap.made
    rig.store([key(1)], [0])
    rig.kvcr.complete_all()
    rig.tier.shutdown()
    assert rig.kvcr.calls.index("poll_completed") < rig.kvcr.calls.index("close")
    assert rig.kvcr.freed_before_close is False
    assert [buffer.closed for buffer in rig.mmap.made] == [True]
    assert retained == []


def test_shutdown_twice_is_harmless(retained: list[Any]) -> None:
    rig = StandinRig()
    rig.tier.shutdown()
    rig.tier.shutdown()
    assert rig.kvcr.closed == 1
    assert retained == []


def test_a_shutdown_lets_go_of_the_primary_tier() -> None:
    rig = StandinRig(g3={"paths": "g3.data", "capacity_bytes_per_file": 1 << 20})
    rig.store([key(1)], [0])
    rig.kvcr.complete_all()
    rig.tier.shutdown()
    rig.view.release()  # raises while something still refers to it


def test_a_shutdown_does_not_wait_for_ever(retained: list[Any]) -> None:
    rig, _ = busy_rig(**SOON)
    started = time.monotonic()
    rig.tier.shutdown()
    assert time.monotonic() - started < 5
    assert rig.kvcr.closed == 1


def test_a_shutdown_in_the_middle_ends_every_job_once(retained: list[Any]) -> None:
    rig, _ = busy_rig(**SOON)
    rig.tier.shutdown()
    for _ in range(3):
        rig.poll()
    assert sorted(rig.finished) == sorted(rig.given)


def test_a_close_that_raises_keeps_the_buffers(
    retained: list[Any], tier_log: Any
) -> None:
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
