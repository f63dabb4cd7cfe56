# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""An engine that ends in whatever state it is in.

The fixture adds that each job had its one result by then, and no wrong block.
"""

import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.v1.kv_offload.tiering.kvcr.builders import free_port, make_hint, peer_options
from tests.v1.kv_offload.tiering.kvcr.faults.harness.blocks import make_keys
from tests.v1.kv_offload.tiering.kvcr.faults.harness.engine import Engine
from vllm.v1.kv_offload.tiering.kvcr import manager as tier_module

OWN = make_keys(32, "own")
HELD = make_keys(32, "held")
THEIRS = make_keys(16, "theirs")
BOUND_S = 10.0


class Scene:
    def __init__(self, peers: Any, engines: Any) -> None:
        # Only as a target does it give up.
        self.peer = peers(
            {"operation_timeout_ms": 2000, "max_pull_blocks": 32}, rows=64
        )
        self.peer.call("hold", THEIRS)
        self.port = free_port()
        options = peer_options(self.port) | {
            "secondary_g2_slots": 64,
            "operation_timeout_ms": 2000,
        }
        self.engine: Engine = engines(options, rows=128)
        self.engine.finish(self.engine.store(OWN, range(32)))
        self.engine.hold(HELD, first_chunk=64)

    def idle(self) -> None:
        pass

    def loading(self) -> None:
        self.engine.load(OWN, range(32, 64))

    def storing(self) -> None:
        self.engine.store(make_keys(32, "new"), range(32, 64))

    def pulling(self) -> None:
        context = self.engine.begin("pull", make_hint(self.peer.port, THEIRS))
        self.engine.load(THEIRS, range(32, 48), context)

    def pulling_from_nobody(self) -> None:
        context = self.engine.begin("pull", make_hint(free_port(), THEIRS))
        self.engine.load(THEIRS, range(32, 48), context)

    def asked(self) -> None:
        """A peer waits for a pin: its request was heard, and not yet answered."""
        self.peer.send("pull", self.port, HELD)
        self.engine.all_pending = True
        self.engine.run_until(lambda: self.engine.probe.pins_asked > 0, 10, "waiting")

    def pinned(self) -> None:
        self.peer.send("pull", self.port, HELD)
        self.engine.run_until(lambda: self.engine.probe.pins > 0, 10, "waiting")

    def all_at_once(self) -> None:
        self.pinned()
        self.pulling()
        self.engine.load(OWN, range(96, 128))
        self.storing_elsewhere()

    def storing_elsewhere(self) -> None:
        self.engine.store(make_keys(16, "new"), range(48, 64))

    def failed(self) -> None:
        self.loading()
        self.engine.probe.kill_progress(RuntimeError("made to die"))
        self.engine.finish(*self.engine.jobs.values())

    def drained(self) -> None:
        self.loading()
        self.engine.drain()


STATES: dict[str, tuple[Callable[[Scene], None], int]] = {
    "idle": (Scene.idle, 0),
    "loading": (Scene.loading, 0),
    "storing": (Scene.storing, 0),
    "pulling": (Scene.pulling, 0),
    "pulling from nobody": (Scene.pulling_from_nobody, 0),
    "a pin asked for": (Scene.asked, 0),
    "a pin held": (Scene.pinned, 0),
    "all at once": (Scene.all_at_once, 0),
    "failed": (Scene.failed, 0),
    "drained": (Scene.drained, 0),
}


@pytest.mark.parametrize("state", STATES)
def test_it_ends_in_bounded_time(
    peers: Any, engines: Any, monkeypatch: pytest.MonkeyPatch, state: str
) -> None:
    monkeypatch.setattr("kvcr.progress._OP_CLEANUP_TIMEOUT_SECONDS", 1.0)
    prepare, kept = STATES[state]
    scene = Scene(peers, engines)
    prepare(scene)
    before = len(tier_module._RETAINED_NATIVE_BUFFERS)
    started = time.monotonic()
    scene.engine.close()
    assert time.monotonic() - started < BOUND_S
    assert len(tier_module._RETAINED_NATIVE_BUFFERS) - before == kept
    assert scene.engine.unanswered == []

    # A second time, and whatever vLLM may still call, is harmless.
    started = time.monotonic()
    scene.engine.close()
    scene.engine.call("drain_jobs")
    scene.engine.call("take_events")
    scene.engine.call("get_stats")
    scene.engine.call("has_pending_work")
    assert time.monotonic() - started < 1.0
