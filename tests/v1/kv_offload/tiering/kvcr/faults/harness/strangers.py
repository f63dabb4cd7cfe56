# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What peers of other releases must be to each other: nothing."""

from typing import Any

from tests.v1.kv_offload.tiering.kvcr.builders import make_hint, peer_options
from tests.v1.kv_offload.tiering.kvcr.faults.harness.blocks import make_keys
from tests.v1.kv_offload.tiering.kvcr.faults.harness.engine import Engine
from vllm.v1.kv_offload.base import LookupResult
from vllm.v1.kv_offload.tiering.kvcr.compat.environment import installed

KEYS = make_keys(4, "theirs")
PATIENCE = {"operation_timeout_ms": 10_000}


def own_engine(engines: Any, **options: Any) -> Engine:
    engine: Engine = engines(peer_options(**PATIENCE | options), rows=16)
    return engine


def pull(engine: Engine, port: int, name: str) -> float | None:
    """Run a request that is hinted at ``port``; seconds its load took, if any."""
    context = engine.begin(name, make_hint(port, KEYS))
    found = engine.lookup_all(KEYS, context)
    seconds = None
    if LookupResult.HIT in found:
        job = engine.load(KEYS, range(8, 12), context)
        seconds = engine.finish(job)
        assert not job.arrived
    engine.end(context)
    return seconds


def assert_no_peer_of_each_other(engine: Engine, peer: Any, tier_log: Any) -> None:
    """Neither side pulls from the other, waits for it, or dies of it."""
    engine.hold(KEYS)
    port = engine.options["control_ports"][0]
    first = pull(engine, peer.port, "first")
    assert first is None or first < 5
    engine.run_for(0.2)
    assert pull(engine, peer.port, "second") is None
    ignored = engine.probe.ignored_hints()
    assert ignored["incompatible_peer"] >= 1

    peer.send("pull", port, KEYS, "first")
    engine.run_until(lambda: peer.answered, timeout_s=20)
    answer = peer.receive()
    assert (answer["arrived"], answer["wrong"]) == (0, [])
    assert answer["seconds"] < 5

    report = peer.call("report")
    assert report["state"] == engine.probe.state == "healthy"
    assert report["pinned"] == 0
    assert engine.probe.pins == 0
    # A load that was refused leaves nothing behind that could still be written.
    assert not engine.probe.unstopped
    ours = installed()["kvcr"]
    for texts in (tier_log.texts(), report["log"]):
        (line,) = [text for text in texts if "exchange no blocks" in text]
        assert f"kvcr {ours}" in line
        assert line.count("with nixl") == 2
