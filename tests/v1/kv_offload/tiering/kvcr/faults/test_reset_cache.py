# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""``reset_cache`` while loads, stores and pins are under way.

vLLM hands the whole primary tier out anew as soon as it returns; whatever the tier or a
peer writes there from then on would be in some later prompt. vLLM asserts that no job
is left, so a drain that returned early would end the engine.
"""

import threading
import time
from typing import Any

import pytest

from tests.v1.kv_offload.tiering.kvcr.builders import free_port, make_hint, peer_options
from tests.v1.kv_offload.tiering.kvcr.faults.harness.blocks import make_keys
from tests.v1.kv_offload.tiering.kvcr.faults.harness.bounds import at_most
from tests.v1.kv_offload.tiering.kvcr.faults.harness.managed import ManagedEngine

ROWS = 160
OWN = make_keys(24, "own")
FILLERS = make_keys(64, "filler")
NEW = make_keys(24, "new")
THEIRS = make_keys(32, "theirs")
OPERATION_S = 1.0


def busy_engine(peers: Any, managed: Any, landing: str) -> tuple[ManagedEngine, Any]:
    """An engine with a load from a peer, a store and a pin under way, all at once.

    The peer that is loaded from is stopped in the middle of it, the other is not.
    """
    source = peers({"operation_timeout_ms": 20_000}, rows=32, hold=THEIRS)
    target = peers(
        {"operation_timeout_ms": 20_000, "max_pull_blocks": 64, "landing_slots": 64},
        rows=32,
    )
    port = free_port()
    options = peer_options(
        port,
        operation_timeout_ms=int(1000 * OPERATION_S),
        abandon_timeout_ms=int(2000 * OPERATION_S),
        secondary_g2_slots=len(FILLERS),
        remote_landing=landing,
    )
    engine: ManagedEngine = managed(options, rows=ROWS)
    engine.run("own", OWN)
    engine.settle()
    # Out of KVCR's pool, so that peers are served from the primary tier.
    engine.run("fillers", FILLERS)
    engine.settle()
    hint = make_hint(source.port, THEIRS)
    assert engine.run("first contact", THEIRS[:1], hint).hits
    target.pull_from(engine, OWN[:1], "first contact")
    engine.settle()

    source.stop()
    loading = engine.begin("loading", THEIRS[1:], hint)
    engine.step(loading)
    target.send("pull", port, OWN[1:])
    engine.run_until(lambda: engine.probe.pins > 0, what="waiting for a pin")
    engine.compute(NEW, engine.begin("computing", NEW).context)
    jobs = [job.transfer_job for job in engine.manager._jobs.values()]
    assert sum(job.is_promotion for job in jobs) == 1
    assert len(jobs) >= 3
    return engine, source


@pytest.mark.parametrize("landing", ["pool", "primary"])
def test_nothing_is_written_afterwards(peers: Any, managed: Any, landing: str) -> None:
    engine, source = busy_engine(peers, managed, landing)
    stopped_s = 3 * OPERATION_S
    resume = threading.Timer(stopped_s, source.go_on)
    resume.start()
    started = time.monotonic()
    with at_most(30):
        engine.manager.reset_cache()
    waited = time.monotonic() - started
    if landing == "pool":
        assert waited < 2 * OPERATION_S, "held up by a peer that hangs"
    else:
        assert waited > 0.9 * stopped_s, "the peer may still write"

    assert not engine.manager._jobs
    engine.memory.fill(0xA5)
    resume.join()
    engine.run_for(1.0)
    assert (engine.memory == 0xA5).all()
    assert engine.probe.state == "healthy"
