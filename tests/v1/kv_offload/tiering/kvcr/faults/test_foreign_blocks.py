# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A peer that holds the same tokens' blocks, computed by another model.

The router names blocks by the hash of their tokens, which is the same for both, and the
sizes agree. All that keeps the peer's bytes out is the namespace in the key.
"""

from typing import Any

from tests.v1.kv_offload.tiering.kvcr.builders import make_spec, peer_options
from tests.v1.kv_offload.tiering.kvcr.faults.harness.blocks import make_keys
from tests.v1.kv_offload.tiering.kvcr.faults.harness.engine import Engine
from vllm.v1.kv_offload.base import LookupResult

KEYS = make_keys(8)
OTHERS = make_keys(8, "others")
SLOW = {"operation_timeout_ms": 20_000}


def test_they_are_a_miss_counted_and_explained(peers: Any, engines: Any) -> None:
    spec = make_spec("a model")
    other = make_spec("a model", dtype="float16")
    foreign = peers(SLOW, hold=KEYS, rows=8, spec=other, writer="theirs")
    same = peers(SLOW, hold=OTHERS, rows=8, spec=spec, writer="ours")
    engine: Engine = engines(peer_options(**SLOW), rows=16, spec=spec, writer="ours")
    job, context = engine.begin_pull(foreign.port, KEYS, range(8), "foreign")
    engine.finish(job)
    assert job.arrived == []
    # vLLM looks again after a load that failed.
    assert set(engine.lookup_all(KEYS, context)) == {LookupResult.MISS}
    engine.end(context)
    report = foreign.call("report")
    assert report["lost"] == {"foreign": len(KEYS)}
    (line,) = [line for line in report["log"] if "foreign" in line]
    assert line.endswith("(differs in kv_dtype)")

    assert engine.pull(same.port, OTHERS, range(8), "same").arrived == OTHERS
