# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The tier polls KVCR rarely while there is nothing to do."""

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from tests.v1.kv_offload.tiering.kvcr.builders import hint, key, request
from tests.v1.kv_offload.tiering.kvcr.rig import StandinRig
from tests.v1.kv_offload.tiering.kvcr.staging_rigs import PEER
from tests.v1.kv_offload.tiering.kvcr.standin import (
    AT_PEER,
    ChannelStandin,
    FetchingStandin,
    RecordingParent,
)
from vllm.v1.kv_offload.base import ScheduleEndContext
from vllm.v1.kv_offload.tiering.kvcr import manager
from vllm.v1.kv_offload.tiering.kvcr.manager import _ATTENTIVE_S, _REST_S
from vllm.v1.kv_offload.tiering.kvcr.peers import channel

MESSAGE = msgspec.msgpack.encode({"type": "start_write", "op_handle": 1})


class ListeningStandin(ChannelStandin):
    """A channel that messages come in through."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.messages: list[bytes] = []

    def send(self, endpoint: str, message: bytes) -> bool:
        raise AssertionError("nothing is sent")

    def recv(self) -> list[bytes]:
        messages, self.messages = self.messages, []
        return messages


class Resting:
    """A tier that has been polled once, and a clock for it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
        self.now = 100.0
        clock = SimpleNamespace(monotonic=lambda: self.now)
        for module in (manager, channel):
            monkeypatch.setattr(module, "time", clock)
        self.rig = StandinRig(kvcr=FetchingStandin, channel=ListeningStandin, **options)
        self.rig.poll()

    def polls(self, seconds: float = 0.0) -> int:
        """Ask for results ten times within that time; how often KVCR was polled."""
        before = self.rig.kvcr.calls.count("poll_completed")
        for _ in range(10):
            self.now += seconds / 10
            self.rig.poll()
        return self.rig.kvcr.calls.count("poll_completed") - before


@pytest.fixture
def resting(monkeypatch: pytest.MonkeyPatch) -> Resting:
    return Resting(monkeypatch, secondary_g2_slots=8, control_ports=[7001])


def test_kvcr_is_polled_now_and_then(resting: Resting) -> None:
    assert resting.polls() == 0
    assert resting.polls(10.5 * _REST_S) == 10
    assert resting.polls(1.5 * _REST_S) == 1


def test_a_tier_without_peers_rests_too(monkeypatch: pytest.MonkeyPatch) -> None:
    resting = Resting(monkeypatch, secondary_g2_slots=8)
    assert resting.polls() == 0
    assert resting.polls(1.5 * _REST_S) == 1


def test_there_is_no_rest_where_nobody_can_tell_of_messages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(ListeningStandin, "recv")
    peers = {"control_ports": [7001]}
    assert Resting(monkeypatch, secondary_g2_slots=8, **peers).polls() == 10


def test_there_is_no_rest_after_a_message(resting: Resting) -> None:
    resting.rig.channels[0].messages.append(MESSAGE)
    # As on KVCR's thread.
    assert resting.rig.tier._channel.recv()
    assert resting.polls(0.9 * _ATTENTIVE_S) == 10
    resting.polls(0.2 * _ATTENTIVE_S)
    assert resting.polls() == 0


@pytest.mark.parametrize("kind", ["load", "store"])
def test_there_is_no_rest_while_a_job_is_in_progress(
    resting: Resting, kind: str
) -> None:
    getattr(resting.rig, kind)([key(1)], [1])
    assert resting.polls() == 10
    resting.rig.kvcr.complete_all()
    resting.rig.poll()
    assert len(resting.rig.finished) == 1
    resting.rig.poll()
    assert resting.polls() == 0


def test_a_job_that_is_answered_at_once_has_its_result_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Without a pool of its own nothing is stored.
    resting = Resting(monkeypatch, control_ports=[7001])
    assert resting.polls() == 0
    job = resting.rig.store([key(1)], [1])
    resting.rig.poll()
    assert resting.rig.finished[job].success


def test_there_is_no_rest_while_a_peer_holds_a_pin(resting: Resting) -> None:
    rig = resting.rig
    rig.kvcr.want(key(1))
    resting.now += _REST_S
    rig.poll()
    assert resting.polls() == 10
    rig.tier.serve_external_requests(RecordingParent({key(1): 7}))
    assert resting.polls() == 10


def test_there_is_no_rest_while_a_peer_is_introduced(resting: Resting) -> None:
    rig = resting.rig
    rig.kvcr.statuses[key(1)] = AT_PEER
    rig.tier.on_new_request(request("r", hint([key(1)], PEER)))
    rig.lookup(key(1))
    assert resting.polls() == 0
    rig.tier.on_schedule_end(ScheduleEndContext((), ()))
    assert rig.kvcr.last.kind == "fetch"
    assert resting.polls() == 10


def test_a_backend_that_died_is_noticed(resting: Resting) -> None:
    resting.rig.kvcr.raises["poll_completed"] = RuntimeError("died")
    resting.polls(1.1 * _REST_S)
    assert resting.rig.tier._health.failed
