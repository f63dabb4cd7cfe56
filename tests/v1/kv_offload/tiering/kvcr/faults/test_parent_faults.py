# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What vLLM's manager, or a peer that gives up, can do to a pin."""

import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.v1.kv_offload.tiering.kvcr.builders import peer_options
from tests.v1.kv_offload.tiering.kvcr.faults.harness.blocks import make_keys
from tests.v1.kv_offload.tiering.kvcr.faults.harness.engine import Engine, Job
from vllm.v1.kv_offload.base import OffloadKey

PROOF = make_keys(1, "first contact")
KEYS = make_keys(15)
CALLS = ("on_new_request", "lookup", "create_store_job", "on_request_finished")
PATIENCE_S = 1.0

Pull = Callable[..., dict[str, Any]]


@pytest.fixture
def source(engines: Any) -> Engine:
    """An engine that holds the blocks, for peers."""
    engine: Engine = engines(peer_options(operation_timeout_ms=20_000), rows=40)
    engine.hold(KEYS + PROOF)
    return engine


@pytest.fixture
def pull(peers: Any, source: Engine) -> Pull:
    """Has a peer, which has little patience, pull blocks."""
    options = {"operation_timeout_ms": int(1000 * PATIENCE_S), "max_pull_blocks": 16}
    peer = peers(options, rows=16)

    def run(keys: list[OffloadKey] = KEYS) -> dict[str, Any]:
        answer: dict[str, Any] = peer.pull_from(source, keys, keys[0].hex())
        return answer

    assert run(PROOF)["arrived"] == 1
    return run


def boom() -> None:
    raise RuntimeError("the manager was made to fail")


def made_since(source: Engine, jobs_before: int) -> list[Job]:
    return [job for number, job in source.jobs.items() if number > jobs_before]


def test_the_manager_raises(source: Engine, pull: Pull) -> None:
    for number, call in enumerate(CALLS):
        wanted, others = make_keys(4, call), make_keys(2, f"after {call}")
        source.hold(wanted + others, 16 + 6 * number)
        failed = source.probe.lost().get("pin_failed", 0)
        jobs_before = len(source.jobs)
        source.parent_faults[call] = boom
        answer = pull(wanted)
        assert answer["arrived"] < len(wanted), call
        assert answer["seconds"] < 1.5 * PATIENCE_S, call
        assert answer["wrong"] == [], call
        source.run_until(lambda: source.unanswered == [], 10, "jobs")
        made = made_since(source, jobs_before)
        if call == "on_request_finished":
            assert made, "the job had been made by then"
            assert [job.result and job.result.success for job in made] == [False]
        else:
            assert made == [], call
        assert source.probe.lost()["pin_failed"] > failed, call
        assert source.probe.state == "healthy", call
        source.parent_faults.clear()
        assert pull(others)["arrived"] == 2, f"it serves again after {call}"


def test_a_peer_gives_up_before_the_answer(source: Engine, pull: Pull) -> None:
    """A block that is on its way keeps its request waiting, until KVCR cancels it."""
    source.all_pending = True
    answer = pull()
    assert answer["arrived"] < len(KEYS)
    assert answer["seconds"] < 1.5 * PATIENCE_S
    source.run_until(lambda: source.probe.pins_asked == 0, 10, "the request")
    source.all_pending = False
    source.run_for(0.2)
    assert source.unanswered == []
    assert source.probe.pins == 0


def test_a_peer_gives_up_before_kvcr_has_the_answer(source: Engine, pull: Pull) -> None:
    source.parent_faults["on_request_finished"] = lambda: time.sleep(1.3 * PATIENCE_S)
    jobs_before = len(source.jobs)
    answer = pull()
    source.parent_faults.clear()
    assert answer["arrived"] < len(KEYS)
    source.run_until(lambda: source.unanswered == [], 10, "the pin")
    made = made_since(source, jobs_before)
    assert made
    assert all(job.result and job.result.success for job in made)
    assert source.probe.pins == 0
