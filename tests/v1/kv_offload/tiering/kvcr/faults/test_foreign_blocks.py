# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A peer that holds the same tokens' blocks, computed by another model.

The router names blocks by the hash of their tokens, which is the same for both, and the
sizes agree. All that keeps the peer's bytes out is the namespace in the key.
"""

from typing import Any

import pytest

from tests.v1.kv_offload.tiering.kvcr.builders import (
    free_port,
    make_hint,
    make_spec,
    peer_options,
)
from tests.v1.kv_offload.tiering.kvcr.faults.harness.blocks import make_keys
from tests.v1.kv_offload.tiering.kvcr.faults.harness.engine import Engine, Job
from vllm.v1.kv_offload.base import LookupResult

KEYS = make_keys(8)
CHUNKS = list(range(8))
SLOW = {"operation_timeout_ms": 20_000}


def pull(engine: Engine, peer: Any) -> Job:
    context = engine.begin("pull", make_hint(peer.port, KEYS))
    assert set(engine.lookup_all(KEYS, context)) == {LookupResult.HIT}
    job = engine.load(KEYS, CHUNKS, context)
    engine.finish(job)
    # vLLM looks again after a load that failed.
    missing = [key for key in KEYS if key not in job.arrived]
    answers = engine.lookup_all(missing, context)
    assert set(answers) <= {LookupResult.MISS}
    engine.end(context)
    return job


def small_engine(engines: Any, spec: Any, **options: Any) -> Engine:
    engine: Engine = engines(
        peer_options(free_port()) | SLOW | options, rows=16, spec=spec, writer="ours"
    )
    return engine


@pytest.mark.parametrize(
    ("difference", "field"),
    [
        ({"model": "another"}, "model"),
        ({"dtype": "float16"}, "kv_dtype"),
        ({"tokens_per_block": 32}, "groups"),
        ({"tp_size": 2}, "parallel"),
    ],
)
def test_they_are_a_miss_that_is_counted_and_explained(
    peers: Any, engines: Any, difference: dict[str, Any], field: str
) -> None:
    theirs = make_spec(**{"model": "a model"} | difference)
    peer = peers(SLOW, rows=8, spec=theirs, writer="theirs")
    peer.call("hold", KEYS)
    engine = small_engine(engines, make_spec("a model"))
    assert pull(engine, peer).arrived == []
    report = peer.call("report")
    assert report["lost"] == {"foreign": len(KEYS)}
    lines = [line for line in report["log"] if "foreign" in line]
    assert len(lines) == 1
    assert lines[0].endswith(f"(differs in {field})")


def test_the_same_model_is_served(peers: Any, engines: Any) -> None:
    spec = make_spec("a model")
    peer = peers(SLOW, rows=8, spec=spec, writer="ours")
    peer.call("hold", KEYS)
    assert pull(small_engine(engines, spec), peer).arrived == KEYS


def test_without_a_namespace_they_pass_for_ours(peers: Any, engines: Any) -> None:
    """For a fleet in the middle of an upgrade; and what the namespace is good for."""
    options = {"namespace": "off"}
    peer = peers(SLOW | options, rows=8, spec=make_spec("another"), writer="theirs")
    peer.call("hold", KEYS)
    engine = small_engine(engines, make_spec("a model"), **options)
    assert pull(engine, peer).arrived == KEYS
    assert engine.wrong_blocks(KEYS, CHUNKS, writer="theirs") == []
    engine.wrong.clear()
