# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Hints that KVCR does not understand, while other requests go on.

Hints come from routers and from clients. An exception out of the tier on account of one
would end every request of the engine.
"""

from typing import Any

import pytest

from tests.v1.kv_offload.tiering.kvcr.builders import (
    endpoint_of,
    free_port,
    make_hint,
    peer_options,
)
from tests.v1.kv_offload.tiering.kvcr.faults.harness.bad_hints import (
    BAD_HINTS,
    bad_hint,
)
from tests.v1.kv_offload.tiering.kvcr.faults.harness.blocks import make_keys
from tests.v1.kv_offload.tiering.kvcr.faults.harness.engine import Engine
from vllm.v1.kv_offload.base import LookupResult, ReqContext

OWN = make_keys(16, "own")
THEIRS = make_keys(4, "theirs")


@pytest.fixture
def busy(peers: Any, engines: Any) -> tuple[Engine, Any]:
    """An engine with blocks of its own, and a peer with others."""
    peer = peers({"operation_timeout_ms": 20_000}, rows=4)
    peer.call("hold", THEIRS)
    port = free_port()
    options = peer_options(port) | {
        "secondary_g2_slots": 64,
        "operation_timeout_ms": 20_000,
    }
    engine: Engine = engines(options, rows=32)
    stored = engine.store(OWN, range(len(OWN)))
    engine.finish(stored)
    return engine, peer


@pytest.mark.parametrize("carrier", ["kv_hints", "kv_transfer_params"])
def test_each_is_ignored_while_the_others_are_served(
    busy: tuple[Engine, Any], tier_log: Any, carrier: str
) -> None:
    engine, peer = busy
    own = BAD_HINTS | {
        "this engine itself": bad_hint(
            source_control_endpoint=endpoint_of(engine.options["control_ports"][0])
        )
    }
    for name, hint in own.items():
        theirs = engine.begin(f"good {name}", make_hint(peer.port, THEIRS))
        assert set(engine.lookup_all(THEIRS, theirs)) == {LookupResult.HIT}
        remote = engine.load(THEIRS, range(4), theirs)
        local = engine.load(OWN, range(4, 4 + len(OWN)))

        # The request beside it, with the hint that is none.
        context = ReqContext(req_id=name)
        if carrier == "kv_hints":
            context.kv_hints = hint
        else:
            context.kv_transfer_params = {"kv_hint": hint}
        engine.call("on_new_request", context)
        unknown = make_keys(2, "unknown")
        assert set(engine.lookup_all(unknown, context)) == {LookupResult.MISS}
        assert set(engine.lookup_all(OWN, context)) == {LookupResult.HIT}

        engine.finish(remote, local)
        assert remote.arrived == THEIRS
        assert local.arrived == OWN
        engine.end(context)
        engine.end(theirs)
    assert sum(engine.probe.ignored_hints().values()) == len(own)
    assert engine.probe.state == "healthy"
    lines = [line for line in tier_log.texts() if "hint" in line]
    reasons = {line.split(" x")[0] for line in lines}
    assert len(lines) == len(reasons), "each reason at most once a minute"


def test_a_request_that_comes_again_has_its_newbad_hint(
    busy: tuple[Engine, Any],
) -> None:
    """After preemption vLLM adds the same request again; KVCR would keep the old."""
    engine, peer = busy
    engine.begin("again", make_hint(free_port(), THEIRS))
    context = engine.begin("again", make_hint(peer.port, THEIRS))
    assert set(engine.lookup_all(THEIRS, context)) == {LookupResult.HIT}
    job = engine.load(THEIRS, range(4), context)
    engine.finish(job)
    assert job.arrived == THEIRS
    engine.end(context)

    engine.begin("again", make_hint(peer.port, make_keys(1, "other")))
    engine.begin("again", 7)
    context = engine.begin("again")
    assert engine.lookup_all(make_keys(1, "other"), context) == [LookupResult.MISS]
