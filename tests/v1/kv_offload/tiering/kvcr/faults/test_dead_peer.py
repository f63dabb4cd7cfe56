# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Peers that are gone: what a request waits, and how an engine ends afterwards."""

import time
from typing import Any

import pytest

from tests.v1.kv_offload.tiering.kvcr.builders import free_port, make_hint, peer_options
from tests.v1.kv_offload.tiering.kvcr.faults.harness.blocks import make_keys, watch
from tests.v1.kv_offload.tiering.kvcr.faults.harness.engine import MIB, Engine
from tests.v1.kv_offload.tiering.kvcr.faults.harness.managed import (
    ManagedEngine,
    Request,
)
from vllm.v1.kv_offload.base import LookupResult
from vllm.v1.kv_offload.tiering.kvcr import manager as tier_module
from vllm.v1.kv_offload.tiering.kvcr.peers import liveness as peers_module

OPERATION_S = 1.0
# KVCR itself takes 5 s to give up operations that do not end.
CLOSE_S = 12.0
KEYS = make_keys(64)


def options(**further: Any) -> dict[str, Any]:
    return peer_options(
        **{
            "operation_timeout_ms": int(1000 * OPERATION_S),
            "abandon_timeout_ms": int(2000 * OPERATION_S),
            "max_pull_blocks": 64,
            "landing_slots": 96,
        }
        | further
    )


def retained_by(engine: Any) -> float:
    """Shut an engine down; the buffers that were kept. It must not take long."""
    before = len(tier_module._RETAINED_NATIVE_BUFFERS)
    started = time.monotonic()
    engine.close()
    assert time.monotonic() - started < CLOSE_S
    return len(tier_module._RETAINED_NATIVE_BUFFERS) - before


def pull_to_the_first_byte(
    engine: ManagedEngine, landing: str, hint: object
) -> Request:
    """Have a request pull all blocks; return when the peer has begun to write."""
    written = watch(engine.memory if landing == "primary" else engine.probe.pool(MIB))
    pulling = engine.begin("pulling", KEYS, hint)
    engine.step(pulling)
    engine.run_until(written, what="waiting")
    return pulling


def test_a_port_where_nobody_listens_costs_one_wait(
    peers: Any, managed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # However slow this machine is, no probe falls due.
    monkeypatch.setattr(peers_module, "FIRST_COOLDOWN_S", 600.0)
    peer = peers({"operation_timeout_ms": 20_000}, rows=8, hold=KEYS[:8])
    engine: ManagedEngine = managed(options(), rows=64)
    served = engine.run("served", KEYS[:8], make_hint(peer.port, KEYS))
    assert served.hits == 8
    # A peer that dies when all is said and done leaves nothing behind.
    peer.kill()
    nobody = free_port()
    room = engine.probe.landing_room
    waves = []
    for wave in range(20):
        requests = []
        for index in range(10):
            name = f"{wave}/{index}"
            keys = make_keys(4, name)
            requests.append(engine.begin(name, keys, make_hint(nobody, keys)))
        engine.serve(*requests)
        assert all(request.hits == 0 for request in requests)
        waves.append(requests)
    first, rest = waves[0], [request for wave in waves[1:] for request in wave]
    assert max(request.seconds for request in first) < 3 * OPERATION_S
    assert {request.steps for request in rest} == {1}, "no other has waited at all"
    waited = {request.context.req_id for request in first}
    assert set(engine.load_jobs) <= {"served"} | waited
    # What never left cannot be answered: nobody can still write.
    assert engine.probe.landing_room == room
    assert retained_by(engine) == 0


def test_after_a_pause_it_is_asked_again(
    peers: Any, engines: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers_module, "FIRST_COOLDOWN_S", 1.0)
    engine: Engine = engines(options(), rows=64)
    port = free_port()
    job, early = engine.begin_pull(port, KEYS, range(64), "early")
    assert engine.finish(job) < 1.3 * OPERATION_S
    assert not job.arrived
    engine.end(early)
    # Other blocks take the slots, and the peer comes up: what the first request asked
    # for is still on its way to it.
    others = make_keys(64, "others")
    engine.write(others, range(64), writer="somebody else")
    soon = engine.begin("soon", make_hint(port, KEYS))
    assert set(engine.lookup_all(KEYS, soon)) == {LookupResult.MISS}
    engine.end(soon)

    peers({"operation_timeout_ms": 20_000}, port=port, rows=64, hold=KEYS)
    engine.run_for(1.5)
    assert engine.wrong_blocks(others, range(64), writer="somebody else") == []

    # It is introduced again, beside a request that runs as if it had no hint.
    first = engine.begin("first", make_hint(port, KEYS))
    assert set(engine.lookup_all(KEYS, first)) == {LookupResult.MISS}
    engine.run_until(lambda: not engine.probe.introducing, 10, "the introduction")
    engine.end(first)

    late = engine.pull(port, KEYS, range(64), "late")
    assert late.arrived == KEYS
    assert retained_by(engine) == 0


@pytest.mark.parametrize("landing", ["pool", "primary"])
def test_a_peer_killed_in_the_middle(
    peers: Any, managed: Any, monkeypatch: pytest.MonkeyPatch, landing: str
) -> None:
    # KVCR's patience while it closes; not what is tested here.
    monkeypatch.setattr("kvcr.progress._OP_CLEANUP_TIMEOUT_SECONDS", 0.5)
    peer = peers({"operation_timeout_ms": 20_000}, rows=64, hold=KEYS)
    at_once = {"max_operation_bytes": 64 * MIB, "max_inflight_bytes": 64 * MIB}
    engine: ManagedEngine = managed(options(remote_landing=landing, **at_once), rows=64)
    hint = make_hint(peer.port, KEYS)
    assert engine.run("proof", KEYS[:1], hint).hits == 1
    victim = pull_to_the_first_byte(engine, landing, hint)
    peer.kill()

    if landing == "pool":
        engine.serve(victim)
        assert victim.seconds < 3 * OPERATION_S
        other = engine.run("other", make_keys(8, "other"), hint)
        assert (other.hits, other.steps) == (0, 1)
    else:
        # Nothing can tell that a peer is dead, and does not just hang.
        engine.run_for(3 * OPERATION_S)
        engine.step(victim)
        assert victim.hits is None
    # vLLM's own shutdown went on to its end, whatever was kept: the primary tier, and
    # the pool.
    assert retained_by(engine) == 2
    assert engine.primary._mmap_region.fd is None


def test_nobody_waits_for_a_peer_that_died(
    peers: Any, managed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the defaults a peer that hangs has 10 s; one that died closes its socket."""
    monkeypatch.setattr("kvcr.progress._OP_CLEANUP_TIMEOUT_SECONDS", 0.5)
    peer = peers(rows=64, hold=KEYS)
    engine: ManagedEngine = managed(peer_options(), rows=64)
    hint = make_hint(peer.port, KEYS)
    assert engine.run("proof", KEYS[:1], hint).hits == 1
    peer.stop()
    waiting = engine.begin("waiting", KEYS[8:16], hint)
    engine.step(waiting)
    engine.run_for(0.3)
    engine.step(waiting)
    assert waiting.hits is None
    peer.kill()
    engine.serve(waiting)
    assert waiting.hits == 0
    assert waiting.seconds < 5
    assert engine.probe.lost()["peer_down"] == 8
    assert engine.run("next", make_keys(8, "next"), hint).steps == 1
