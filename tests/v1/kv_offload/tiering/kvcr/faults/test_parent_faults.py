# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What vLLM's manager, or a peer that gives up, can do to a pin."""

import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.v1.kv_offload.tiering.kvcr.builders import free_port, peer_options
from tests.v1.kv_offload.tiering.kvcr.faults.harness.blocks import make_keys
from tests.v1.kv_offload.tiering.kvcr.faults.harness.engine import Engine
from vllm.v1.kv_offload.base import OffloadKey

PROOF = make_keys(1, "first contact")
KEYS = make_keys(15)
PATIENCE_S = 1.0

Pull = Callable[..., dict[str, Any]]


@pytest.fixture
def source(engines: Any) -> Engine:
    """An engine that holds the blocks, for peers."""
    options = peer_options(free_port()) | {"operation_timeout_ms": 20_000}
    engine: Engine = engines(options, rows=16)
    engine.hold(KEYS + PROOF)
    return engine


@pytest.fixture
def pull(peers: Any, source: Engine) -> Pull:
    """Has a peer, which has little patience, pull all of them."""
    peer = peers(
        {
            "operation_timeout_ms": int(1000 * PATIENCE_S),
            "max_pull_blocks": 16,
        },
        rows=16,
    )
    port = source.options["control_ports"][0]

    def run(keys: list[OffloadKey] = KEYS) -> dict[str, Any]:
        peer.send("pull", port, keys, f"pull of {len(keys)}")
        source.run_until(lambda: peer.answered, 20, "a pull")
        return dict(peer.receive())

    assert run(PROOF)["arrived"] == 1
    return run


def boom() -> None:
    raise RuntimeError("the manager was made to fail")


@pytest.mark.parametrize(
    "call", ["on_new_request", "lookup", "create_store_job", "on_request_finished"]
)
def test_the_manager_raises(source: Engine, pull: Pull, call: str) -> None:
    jobs_before = len(source.jobs)
    source.parent_faults[call] = boom
    answer = pull()
    assert answer["arrived"] < len(KEYS)
    assert answer["seconds"] < 1.5 * PATIENCE_S
    assert answer["wrong"] == []
    source.run_until(lambda: source.unanswered == [], 10, "jobs")
    made = [job for number, job in source.jobs.items() if number > jobs_before]
    if call == "on_request_finished":
        assert made, "the job had been made by then"
        assert [job.result and job.result.success for job in made] == [False]
    else:
        assert made == []
    assert source.probe.lost()["pin_failed"] > 0
    assert source.probe.state == "healthy"
    source.parent_faults.clear()
    others = make_keys(2, "others")
    source.hold(others)
    assert pull(others)["arrived"] == 2, "it serves again"


def test_the_peer_gives_up_before_the_answer(source: Engine, pull: Pull) -> None:
    """A block that is on its way keeps its request waiting, until KVCR cancels it."""
    source.all_pending = True
    answer = pull()
    assert answer["arrived"] < len(KEYS)
    assert answer["seconds"] < 1.5 * PATIENCE_S
    source.run_for(0.5)
    assert source.probe.pins_asked == 0
    source.all_pending = False
    source.run_for(0.2)
    assert source.unanswered == []
    assert source.probe.pins == 0


def test_the_peer_gives_up_before_kvcr_has_the_answer(
    source: Engine, pull: Pull
) -> None:
    source.parent_faults["on_request_finished"] = lambda: time.sleep(1.3 * PATIENCE_S)
    jobs_before = len(source.jobs)
    answer = pull()
    source.parent_faults.clear()
    assert answer["arrived"] < len(KEYS)
    source.run_until(lambda: source.unanswered == [], 10, "the pin")
    made = [job for number, job in source.jobs.items() if number > jobs_before]
    assert made
    assert all(job.result and job.result.success for job in made)
    assert source.probe.pins == 0


def test_a_pin_is_released_twice(source: Engine, peers: Any) -> None:
    peer = peers({"operation_timeout_ms": 20_000, "max_pull_blocks": 16}, rows=16)
    port = source.options["control_ports"][0]
    peer.send("pull", port, KEYS)
    source.run_until(lambda: source.probe.pins > 0, 20, "waiting for a pin")
    assert all(source.probe.release_pins())
    # KVCR's own release comes on top of it. Each result is checked to come once.
    source.run_until(lambda: peer.answered, 20, "the pull")
    peer.receive()
    source.run_for(0.2)
    assert source.unanswered == []
