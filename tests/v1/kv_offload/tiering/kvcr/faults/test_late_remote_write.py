# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A peer that is stopped while it writes into this engine, and continued later.

What it then still writes belongs to a job that ended long ago, whose slots may hold
another prompt's blocks by now.
"""

import threading
import time
from typing import Any

import pytest

from tests.v1.kv_offload.tiering.kvcr.builders import peer_options
from tests.v1.kv_offload.tiering.kvcr.faults.harness.blocks import make_keys, watch
from tests.v1.kv_offload.tiering.kvcr.faults.harness.engine import MIB, Engine, Job
from tests.v1.kv_offload.tiering.kvcr.faults.harness.peer import Peer
from vllm.v1.kv_offload.tiering.kvcr import draining
from vllm.v1.kv_offload.tiering.kvcr.reports.quarantine import Quarantine

BLOCKS = 96
OPERATION_S = 1.0
ABANDON_S = 2.0
PROOF = make_keys(1, "first contact")
KEYS = make_keys(BLOCKS)
OTHERS = make_keys(BLOCKS, "somebody else's prompt")
SLOTS = list(range(BLOCKS))


class Scene:
    """A victim that pulls from a peer, which is stopped in the middle of it."""

    def __init__(self, peers: Any, engines: Any, landing: str) -> None:
        patient = {"operation_timeout_ms": 20_000}
        self.peer: Peer = peers(patient, rows=BLOCKS + 1, hold=KEYS + PROOF)
        options = peer_options() | {
            "operation_timeout_ms": int(1000 * OPERATION_S),
            "abandon_timeout_ms": int(1000 * ABANDON_S),
            "remote_landing": landing,
            "landing_slots": 2 * BLOCKS,
            "max_pull_blocks": BLOCKS,
            # One operation a job: the longer it takes, the surer it is hit.
            "max_operation_bytes": BLOCKS * MIB,
            "max_inflight_bytes": BLOCKS * MIB,
        }
        self.victim: Engine = engines(options, rows=BLOCKS)
        self._landing = self.victim.memory if landing == "primary" else None

    def prove(self, name: str) -> None:
        job = self.victim.pull(self.peer.port, PROOF, SLOTS[:1], name)
        assert job.arrived == PROOF

    def stop_in_the_middle(self) -> Job:
        """Have the peer proven, then stop it while it writes."""
        self.prove("proof")
        landing = self._landing
        written = watch(self.victim.probe.pool(MIB) if landing is None else landing)
        job, _ = self.victim.begin_pull(self.peer.port, KEYS, SLOTS, "pull")
        self.victim.run_until(written, 10, "waiting for a byte")
        self.peer.stop()
        assert job.result is None
        return job

    def reuse(self, slots: list[int]) -> None:
        """Give slots to another prompt's blocks, as vLLM does at once."""
        self.victim.write(OTHERS[: len(slots)], slots, writer="somebody else")

    def harmed(self, slots: list[int]) -> list[int]:
        """Reused slots that are not as they were left."""
        return self.victim.wrong_blocks(
            OTHERS[: len(slots)], slots, writer="somebody else"
        )


@pytest.mark.parametrize("transport", ["all", "tcp"])
def test_a_late_write_ends_in_the_pool(
    peers: Any,
    engines: Any,
    tier_log: Any,
    monkeypatch: pytest.MonkeyPatch,
    transport: str,
) -> None:
    monkeypatch.setenv("UCX_TLS", transport)
    scene = Scene(peers, engines, "pool")
    victim = scene.victim
    job = scene.stop_in_the_middle()

    waited = victim.finish(job)
    assert waited < 1.5 * OPERATION_S, "held for longer than one operation timeout"
    assert not job.succeeded
    slots = job.failed_chunks
    scene.reuse(slots)

    # Only now does KVCR call the memory uncertain: the write was under way.
    probe = victim.probe
    room = probe.landing_room
    victim.run_until(lambda: probe.landing_room < room, 5, "waiting for doubt")
    assert any("memory_uncertain" in line for line in tier_log.texts())
    scene.peer.go_on()
    victim.run_until(lambda: probe.landing_room == room, 10, "the quarantine")
    victim.run_for(0.5)

    assert not scene.harmed(slots)
    assert probe.state == "healthy"
    # The peer and the pool are of use again.
    scene.prove("again")


def test_where_it_ends_in_the_primary_tier_the_slots_are_held_back(
    peers: Any, engines: Any, tier_log: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draining, "_WARNING_INTERVAL_S", 0.3)
    scene = Scene(peers, engines, "primary")
    victim = scene.victim
    job = scene.stop_in_the_middle()
    victim.run_for(ABANDON_S + 0.5)
    assert job.result is None, "KVCR failed it, and the peer may still write"

    # Nor does a drain, as ``reset_cache`` asks for, end before the peer is heard of.
    stopped_for = 1.0
    threading.Timer(stopped_for, scene.peer.go_on).start()
    started = time.monotonic()
    victim.drain()
    assert time.monotonic() - started >= stopped_for
    assert any("waiting for 1 jobs and 0 pins" in line for line in tier_log.texts())

    assert job.result is not None
    assert not job.arrived
    scene.reuse(SLOTS)
    victim.run_for(0.5)
    assert not scene.harmed(SLOTS)


def test_without_holding_them_back_it_is_the_wrong_bytes(
    peers: Any, engines: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the tests above would see if KVCR's reports about memory were ignored."""
    monkeypatch.setattr(Quarantine, "may_write", lambda ledger, operation: False)
    scene = Scene(peers, engines, "primary")
    job = scene.stop_in_the_middle()
    scene.victim.finish(job)
    scene.reuse(SLOTS)
    scene.peer.go_on()
    scene.victim.run_until(
        lambda: len(scene.harmed(SLOTS)) > 0, 10, "waiting for a wrong block"
    )
