# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A target that is stopped while this engine writes to it.

KVCR gives such a pin back once it has called the memory uncertain. The write goes on
from there whenever the target does: what vLLM has put into the slots by then would go
to the peer, under the old key.
"""

from typing import Any

import pytest

from tests.v1.kv_offload.tiering.kvcr.builders import free_port, peer_options
from tests.v1.kv_offload.tiering.kvcr.faults.harness.blocks import make_keys
from tests.v1.kv_offload.tiering.kvcr.faults.harness.bounds import at_most
from tests.v1.kv_offload.tiering.kvcr.faults.harness.engine import Engine
from tests.v1.kv_offload.tiering.kvcr.faults.harness.peer import Peer

BLOCKS = 96
ABANDON_S = 2.0
KEYS = make_keys(BLOCKS)


class Scene:
    """This engine as a source, and a target that stops while it is written to."""

    def __init__(self, peers: Any, engines: Any, patch: pytest.MonkeyPatch) -> None:
        # Shared memory is written without the target's help; a socket fills up.
        patch.setenv("UCX_TLS", "tcp")
        at_once = {
            "operation_timeout_ms": 20_000,
            "max_operation_bytes": BLOCKS << 20,
            "max_inflight_bytes": BLOCKS << 20,
            "landing_slots": 2 * BLOCKS,
            "max_pull_blocks": BLOCKS,
        }
        self.target: Peer = peers(at_once, rows=BLOCKS)
        port = free_port()
        options = peer_options(
            port,
            operation_timeout_ms=int(500 * ABANDON_S),
            abandon_timeout_ms=int(1000 * ABANDON_S),
        )
        self.source: Engine = engines(options, rows=BLOCKS)
        self.source.hold(KEYS)
        # First contact asks for one block; let that be over.
        proof = self.target.pull_from(self.source, KEYS[:1], "proof")
        assert proof["arrived"] == 1
        self.target.send("pull", port, KEYS[1:], "pull")
        self.source.run_until(lambda: self.source.probe.pins > 0, 20, "waiting")
        self.target.stop()
        self.job = max(self.source.jobs.values(), key=lambda job: job.job_id)
        assert self.job.result is None


def test_a_pin_is_kept_until_nothing_can_read_it_any_more(
    peers: Any, engines: Any, tier_log: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = Scene(peers, engines, monkeypatch)
    source = scene.source
    source.run_until(
        lambda: any("memory_uncertain" in line for line in tier_log.texts()),
        10,
        "waiting for doubt",
    )
    source.run_for(1.0)
    assert scene.job.result is None
    assert source.probe.pins > 0

    scene.target.go_on()
    source.finish(scene.job)
    assert scene.job.succeeded
    source.run_until(lambda: scene.target.answered, 20, "the target's pull")
    assert scene.target.receive()["wrong"] == []
    # The pull may be more than one operation: the others end in their own time.
    source.run_until(
        lambda: source.probe.state == "healthy", 20, "the end of the last write"
    )


def test_a_target_that_died_does_not_hold_up_a_reset(
    peers: Any, engines: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """KVCR never hears of the end of a write to a dead peer."""
    scene = Scene(peers, engines, monkeypatch)
    scene.target.kill()
    with at_most(4 * ABANDON_S):
        scene.source.drain()
    assert scene.job.result is not None
