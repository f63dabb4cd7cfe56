# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""KVCR's progress thread dies while jobs and pins are outstanding.

From then on every call into KVCR raises. The engine has to recompute, not to die.
"""

import logging
import time
from typing import Any

import pytest

from tests.v1.kv_offload.tiering.kvcr.builders import (
    free_port,
    make_hint,
    peer_options,
    request,
)
from tests.v1.kv_offload.tiering.kvcr.faults.harness.blocks import make_keys, watch
from tests.v1.kv_offload.tiering.kvcr.faults.harness.engine import MIB, Engine
from tests.v1.kv_offload.tiering.kvcr.faults.harness.managed import ManagedEngine
from tests.v1.kv_offload.tiering.kvcr.faults.harness.probe import state_samples
from vllm.v1.kv_offload.base import LookupResult

OWN = make_keys(16, "own")
NEW = make_keys(16, "new")
HELD = make_keys(32, "held")
THEIRS = make_keys(32, "theirs")
POOL = {"secondary_g2_slots": 64, "operation_timeout_ms": 20_000}
BOOM = "the progress thread was made to die"


def test_jobs_end_once_and_all_goes_on(peers: Any, engines: Any, tier_log: Any) -> None:
    peer = peers({"operation_timeout_ms": 3000, "max_pull_blocks": 64}, rows=64)
    port = free_port()
    options = peer_options(port, enable_telemetry=True, **POOL)
    engine: Engine = engines(options, rows=96)
    engine.finish(engine.store(OWN, range(16)))
    engine.hold(HELD, first_chunk=64)
    peer.pull_from(engine, HELD[:1], "proof")
    peer.send("pull", port, HELD[1:])
    engine.run_until(lambda: engine.probe.pins > 0, 20, "waiting for a pin")
    loads = [engine.load(OWN[:8], range(16, 24)), engine.load(OWN[8:], range(24, 32))]
    store = engine.store(NEW, range(32, 48))
    engine.probe.kill_progress(RuntimeError(BOOM))
    # `finish` checks that none comes twice.
    engine.finish(*loads, store, timeout_s=20)
    started = time.monotonic()
    engine.drain()
    assert time.monotonic() - started < 15
    engine.run_until(lambda: engine.unanswered == [], 20, "the pin")

    assert engine.probe.state == "failed"
    context = request("later")
    assert set(engine.lookup_all(OWN + NEW, context)) == {LookupResult.MISS}
    late = [engine.load(OWN, range(16)), engine.store(NEW, range(16, 32))]
    engine.step()
    assert [job.result and job.result.success for job in late] == [False, False]
    hinted = engine.begin("hinted", make_hint(peer.port, THEIRS))
    assert set(engine.lookup_all(THEIRS, hinted)) == {LookupResult.MISS}
    engine.end(hinted)
    engine.call("touch", OWN, context)
    assert not engine.call("has_pending_work")
    engine.run_for(0.1)
    samples = state_samples(engine.call("get_stats").reduce())
    assert samples["('1', 'failed', 'backend_failed')"] == 1
    (error,) = tier_log.texts(logging.ERROR)
    assert BOOM in error


def test_vllm_serves_on(managed: Any) -> None:
    engine: ManagedEngine = managed(POOL, rows=32)
    engine.run("before", OWN)
    engine.settle()
    engine.primary.reset_cache()
    assert engine.run("served", OWN).hits == len(OWN)
    engine.primary.reset_cache()
    waiting = engine.begin("waiting", OWN)
    engine.step(waiting)
    engine.probe.kill_progress(ValueError(BOOM))
    engine.serve(waiting)
    engine.settle()
    for index in range(20):
        engine.run(f"after {index}", make_keys(4, f"after {index}"))
    assert engine.probe.state == "failed"
    engine.manager.reset_cache()
    assert engine.run("last", OWN).hits == 0


def test_slots_that_may_still_be_written_stay_reserved(
    peers: Any, engines: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A peer hangs in the middle of its write when the thread dies."""
    monkeypatch.setattr("kvcr.progress._OP_CLEANUP_TIMEOUT_SECONDS", 0.5)
    peer = peers({"operation_timeout_ms": 20_000}, rows=64, hold=THEIRS)
    options = peer_options(
        operation_timeout_ms=2000,
        abandon_timeout_ms=4000,
        remote_landing="primary",
        max_operation_bytes=64 * MIB,
    )
    engine: Engine = engines(options, rows=64)
    proof = engine.begin("proof", make_hint(peer.port, THEIRS))
    engine.finish(engine.load(THEIRS[:1], [63], proof))
    written = watch(engine.memory)
    load = engine.load(THEIRS[1:], range(31), proof)
    engine.run_until(written, 10, "waiting for a byte")
    peer.stop()
    engine.probe.kill_progress(RuntimeError(BOOM))
    engine.run_for(1.5)
    assert engine.probe.state == "failed"
    assert load.result is None
    # What nothing can touch any more comes back, all the same.
    other = engine.load(OWN, range(32, 48))
    engine.step()
    assert other.result is not None

    # A drain goes on waiting, since nobody can say what the peer will do.
    assert not engine.tier._drain(1.0)
    assert engine.call("has_pending_work")
    engine.written_off.add(load.job_id)
