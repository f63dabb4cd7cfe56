# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Hints that KVCR does not understand, while other requests go on.

Hints come from routers and from clients. An exception out of the tier on account of one
would end every request of the engine.
"""

from typing import Any

from tests.v1.kv_offload.tiering.kvcr.builders import (
    endpoint_of,
    free_port,
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
UNKNOWN = make_keys(2, "unknown")


def test_only_bad_hints_are_ignored(peers: Any, engines: Any, tier_log: Any) -> None:
    patient = {"operation_timeout_ms": 20_000}
    peer = peers(patient, rows=4, hold=THEIRS)
    port = free_port()
    options = peer_options(port, secondary_g2_slots=64, **patient)
    engine: Engine = engines(options, rows=32)
    engine.finish(engine.store(OWN, range(len(OWN))))
    own = bad_hint(source_control_endpoint=endpoint_of(port))
    hints = (BAD_HINTS | {"this engine itself": own}).items()
    for name, hint in hints:
        good = f"good {name}"
        remote, theirs = engine.begin_pull(peer.port, THEIRS, range(4), good)
        local = engine.load(OWN, range(4, 4 + len(OWN)))

        # The requests beside it, with the hint that is none.
        carriers = {"kv_hints": hint, "kv_transfer_params": {"kv_hint": hint}}
        for carrier, value in carriers.items():
            context = ReqContext(req_id=f"{name} in {carrier}")
            setattr(context, carrier, value)
            engine.call("on_new_request", context)
            assert set(engine.lookup_all(UNKNOWN, context)) == {LookupResult.MISS}
            assert set(engine.lookup_all(OWN, context)) == {LookupResult.HIT}
            engine.end(context)

        engine.finish(remote, local)
        assert remote.arrived == THEIRS
        assert local.arrived == OWN
        engine.end(theirs)
    assert sum(engine.probe.ignored_hints().values()) == 2 * len(hints)
    assert engine.probe.state == "healthy"
    lines = [line for line in tier_log.texts() if "hint" in line]
    reasons = {line.split(" x")[0] for line in lines}
    assert len(lines) == len(reasons), "each reason at most once a minute"
