# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What happens while the engine sleeps: it is woken once for it, and sleeps on."""

import queue
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from kvcr import TRANSFER_BYTES_METRIC

from tests.v1.kv_offload.tiering.kvcr.builders import key
from tests.v1.kv_offload.tiering.kvcr.rig import StandinRig, samples
from tests.v1.kv_offload.tiering.kvcr.standin import RecordingParent
from vllm.v1.engine import EngineCoreRequestType
from vllm.v1.engine.core import EngineCoreProc
from vllm.v1.kv_offload.base import ScheduleEndContext
from vllm.v1.kv_offload.tiering.kvcr.compat import shims
from vllm.v1.kv_offload.tiering.kvcr.compat.waking import wake_engine
from vllm.v1.kv_offload.tiering.kvcr.reports import idle
from vllm.v1.kv_offload.tiering.kvcr.reports.metrics import TIER_STATE


class Sleeper:
    """A tier under a thread that polls it, and an engine core that can be woken."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
        self.woken = 0
        self.awake = True
        monkeypatch.setattr(shims, "HAS_TIER_POLL_THREAD", True)
        self.now = 1000.0
        monkeypatch.setattr(idle, "time", SimpleNamespace(monotonic=lambda: self.now))
        monkeypatch.setattr(idle, "wake_engine", self._wake)
        options = {"control_ports": [7001], "enable_telemetry": True} | options
        self.rig = StandinRig(**options)
        self.tier = self.rig.tier

    def _wake(self) -> bool:
        self.woken += 1
        return self.awake

    def step(self) -> Any:
        """What vLLM calls in a step, in this order; what it is told."""
        self.rig.poll()
        self.tier.on_schedule_end(ScheduleEndContext([], []))
        return self.tier.get_stats()

    def sleep(self, seconds: float = 5.0) -> None:
        """Rounds of the thread that polls."""
        for _ in range(round(seconds / 0.01)):
            self.now += 0.01
            self.rig.poll()

    def moves(self) -> None:
        stats = self.rig.kvcr.stats
        stats.increase_counter(TRANSFER_BYTES_METRIC, 4096, ("source_write",))

    def loses(self) -> None:
        self.rig.kvcr.want(key(1))
        self.rig.poll()
        self.tier.serve_external_requests(RecordingParent())

    def fails(self) -> None:
        self.rig.kvcr.raises["poll_completed"] = RuntimeError("thread died")


@pytest.fixture
def sleeper(monkeypatch: pytest.MonkeyPatch) -> Sleeper:
    """One that has taken a step."""
    sleeper = Sleeper(monkeypatch)
    sleeper.step()
    sleeper.woken = 0
    return sleeper


def test_a_new_engine_steps_to_tell_its_state(monkeypatch: pytest.MonkeyPatch) -> None:
    sleeper = Sleeper(monkeypatch)
    sleeper.sleep(1.01)
    assert sleeper.woken >= 1
    assert sleeper.tier.has_pending_work()
    assert samples(sleeper.step())[TIER_STATE] == {("1", "healthy", "none"): 1}
    sleeper.woken = 0
    sleeper.sleep()
    assert sleeper.woken == 0


@pytest.mark.parametrize("news", [Sleeper.moves, Sleeper.loses, Sleeper.fails])
def test_for_news_the_engine_takes_one_step(sleeper: Sleeper, news: Any) -> None:
    sleeper.sleep()
    assert sleeper.woken == 0
    assert not sleeper.tier.has_pending_work()
    news(sleeper)
    sleeper.sleep(1.01)
    assert sleeper.woken == 1
    assert sleeper.tier.has_pending_work()
    sleeper.step()
    sleeper.sleep()
    assert sleeper.woken == 1
    assert not sleeper.tier.has_pending_work()


def test_an_engine_that_steps_is_not_woken(sleeper: Sleeper) -> None:
    for _ in range(20):
        sleeper.moves()
        sleeper.sleep(0.5)
        sleeper.step()
    assert sleeper.woken == 0


def test_an_engine_is_woken_at_most_once_a_second(sleeper: Sleeper) -> None:
    for _ in range(100):
        sleeper.moves()
        sleeper.sleep(0.1)
        if sleeper.tier.has_pending_work():
            sleeper.step()
    assert 4 <= sleeper.woken <= 10


def test_where_nothing_can_be_woken_nothing_is_pending(sleeper: Sleeper) -> None:
    sleeper.awake = False
    sleeper.sleep()
    sleeper.moves()
    sleeper.sleep()
    assert sleeper.woken > 0
    assert not sleeper.tier.has_pending_work()


def test_without_telemetry_the_engine_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    sleeper = Sleeper(monkeypatch, enable_telemetry=False)
    sleeper.step()
    sleeper.sleep()
    sleeper.loses()
    sleeper.sleep()
    assert sleeper.woken == 0


class Core(EngineCoreProc):
    """vLLM's engine core, without an engine: its queue and the thread that fills it."""

    def __init__(self) -> None:
        self.input_queue = queue.Queue()
        self.stop = threading.Event()

    def process_input_sockets(self, *_: object) -> None:
        self.stop.wait()


def test_the_engine_core_is_found_by_the_thread_that_fills_its_queue() -> None:
    assert not wake_engine()
    core = Core()
    thread = threading.Thread(target=core.process_input_sockets)
    thread.start()
    try:
        assert wake_engine()
        kind, _ = core.input_queue.get_nowait()
        assert kind is EngineCoreRequestType.WAKEUP
        assert core.input_queue.empty()
    finally:
        core.stop.set()
        thread.join()
    assert not wake_engine()
