# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A load from a peer in a process of its own, as between two engines.

What happens when that process hangs or dies is tested in ``faults``.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest

from tests.v1.kv_offload.tiering.kvcr.builders import make_hint, peer_options
from tests.v1.kv_offload.tiering.kvcr.faults.harness.blocks import make_keys
from tests.v1.kv_offload.tiering.kvcr.faults.harness.engine import Engine
from tests.v1.kv_offload.tiering.kvcr.faults.harness.peer import Peer
from vllm.v1.kv_offload.base import LookupResult, ReqContext

BLOCKS = 12
PATIENT = {"operation_timeout_ms": 10_000}
FIELDS = {field.name for field in dataclasses.fields(ReqContext)}
CARRIERS = sorted(FIELDS & {"kv_hints", "kv_transfer_params"})


@pytest.fixture(scope="module")
def peer() -> Iterator[Peer]:
    process = Peer(PATIENT, rows=64)
    yield process
    process.kill()


@pytest.mark.parametrize("landing", ["pool", "primary"])
def test_a_load_has_the_bytes_of_the_other_engine(peer: Peer, landing: str) -> None:
    engine = Engine(peer_options(remote_landing=landing, **PATIENT), rows=64)
    for number, carrier in enumerate(CARRIERS):
        held = make_keys(BLOCKS, f"{landing}/{carrier}")
        peer.call("hold", held, number * BLOCKS)
        hint = make_hint(peer.port, held)
        carried: Any = hint if carrier == "kv_hints" else {"kv_hint": hint}
        context = ReqContext(f"pull by {carrier}", **{carrier: carried})
        engine.probe.know(hint)
        engine.call("on_new_request", context)
        answers = engine.lookup_all([*held, *make_keys(1, "unknown")], context)
        assert answers == [*([LookupResult.HIT] * BLOCKS), LookupResult.MISS]
        job = engine.load(held, range(number * BLOCKS, (number + 1) * BLOCKS), context)
        engine.finish(job)
        engine.end(context)
        assert len(job.arrived) == BLOCKS
    # The bytes were compared as they arrived.
    assert engine.wrong == []
    engine.close()
    assert peer.call("report")["wrong"] == []
