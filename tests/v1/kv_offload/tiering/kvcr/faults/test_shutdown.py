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
NOBODYS = make_keys(16, "nobody's")
BOUND_S = 10.0


class Scene:
    def __init__(self, peers: Any, engines: Any) -> None:
        # Only as a target does it give up.
        patience = {"operation_timeout_ms": 2000}
        self.peer = peers(patience | {"max_pull_blocks": 32}, rows=64, hold=THEIRS)
        self.port = free_port()
        options = peer_options(self.port, secondary_g2_slots=64, **patience)
        self.engine: Engine = engines(options, rows=128)
        self.engine.finish(self.engine.store(OWN, range(32)))
        self.engine.hold(HELD, first_chunk=64)

    def all_at_once(self) -> None:
        """A pin is held; loads from two peers and the pool, and a store, go on."""
        engine = self.engine
        self.peer.send("pull", self.port, HELD)
        engine.run_until(lambda: engine.probe.pins > 0, 10, "waiting")
        for port, keys, first in (
            (self.peer.port, THEIRS, 32),
            (free_port(), NOBODYS, 0),
        ):
            context = engine.begin(f"pull from {port}", make_hint(port, keys))
            engine.load(keys, range(first, first + 16), context)
        engine.load(OWN, range(96, 128))
        engine.store(make_keys(16, "new"), range(48, 64))

    def asked(self) -> None:
        """A peer waits for a pin: its request was heard, and not yet answered."""
        self.peer.send("pull", self.port, HELD)
        self.engine.all_pending = True
        self.engine.run_until(lambda: self.engine.probe.pins_asked > 0, 10, "waiting")

    def failed(self) -> None:
        self.engine.load(OWN, range(32, 64))
        self.engine.probe.kill_progress(RuntimeError("made to die"))
        self.engine.finish(*self.engine.jobs.values())


@pytest.mark.parametrize("prepare", [Scene.all_at_once, Scene.asked, Scene.failed])
def test_it_ends_in_bounded_time(
    peers: Any,
    engines: Any,
    monkeypatch: pytest.MonkeyPatch,
    prepare: Callable[[Scene], None],
) -> None:
    monkeypatch.setattr("kvcr.progress._OP_CLEANUP_TIMEOUT_SECONDS", 1.0)
    scene = Scene(peers, engines)
    prepare(scene)
    before = len(tier_module._RETAINED_NATIVE_BUFFERS)
    started = time.monotonic()
    scene.engine.close()
    assert time.monotonic() - started < BOUND_S
    assert len(tier_module._RETAINED_NATIVE_BUFFERS) == before
    assert scene.engine.unanswered == []

    # A second time, and whatever vLLM may still call, is harmless.
    started = time.monotonic()
    scene.engine.close()
    for method in ("drain_jobs", "take_events", "get_stats", "has_pending_work"):
        scene.engine.call(method)
    assert time.monotonic() - started < 1.0
