# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The KVCR service: an engine that dies, a service that dies, one that refuses."""

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.v1.kv_offload.tiering.kvcr.builders import make_spec, peer_options, request
from tests.v1.kv_offload.tiering.kvcr.faults.harness.blocks import make_keys
from tests.v1.kv_offload.tiering.kvcr.faults.harness.engine import MIB, Engine
from tests.v1.kv_offload.tiering.kvcr.service import DIGEST, Service
from vllm.v1.kv_offload.base import LookupResult
from vllm.v1.kv_offload.tiering.kvcr import manager

KEYS = make_keys(16, "kept")
SLOTS = 32


@pytest.fixture
def service(disk: Path) -> Iterator[Service]:
    with contextlib.closing(Service(disk, slots=SLOTS, row_bytes=MIB)) as running:
        yield running


def options_for(service: Service, **more: Any) -> dict[str, Any]:
    return peer_options(service.port) | service.options() | more


def start_when_free(engines: Any, options: dict[str, Any]) -> Engine:
    """Start an engine; sooner after the last one's end than vLLM could."""
    deadline = time.monotonic() + 20
    while True:
        try:
            return engines(options, rows=64)  # type: ignore[no-any-return]
        except RuntimeError as error:
            if "is busy" not in str(error) or time.monotonic() > deadline:
                raise
        time.sleep(0.1)


def test_blocks_outlive_an_engine(service: Service, peers: Any, engines: Any) -> None:
    first = peers(service.options(), port=service.port, rows=32)
    assert first.call("store", KEYS)
    first.kill()
    engine = start_when_free(engines, options_for(service))
    answers = engine.lookup_all(KEYS, request("next"))
    assert answers == [LookupResult.HIT] * len(KEYS)
    job = engine.load(KEYS, range(16))
    engine.finish(job)
    # The fixture compares the bytes.
    assert job.succeeded


def test_an_engine_outlives_its_service(service: Service, engines: Any) -> None:
    engine: Engine = engines(options_for(service), rows=64)
    engine.finish(engine.store(KEYS, range(16)))
    service.kill()
    more = make_keys(8, "more")
    stored = engine.store(more, range(16, 24))
    loaded = engine.load(KEYS, range(32, 48))
    engine.finish(stored, loaded)
    assert len(loaded.arrived) == len(KEYS)


def test_a_refusal_names_the_options_and_leaves_nothing_open(
    service: Service, engines: Any, retained: list[Any]
) -> None:
    memory = np.zeros((4, MIB), np.uint8)
    view = memoryview(memory)

    def refuse(digest: str) -> None:
        options = options_for(service, compatibility_digest=digest)
        with pytest.raises(RuntimeError) as refused:
            manager.KVCRSecondaryTierManager(make_spec(), view, "kvcr", None, **options)
        for part in (str(service.socket), repr(digest), "--compatibility-digest"):
            assert part in str(refused.value)
        assert refused.value.__cause__ is not None
        assert str(refused.value.__cause__) in str(refused.value)
        assert retained == []

    refuse("another")
    # Another engine holds the pool.
    engine = start_when_free(engines, options_for(service))
    refuse(DIGEST)
    engine.close()
    service.kill()
    refuse(DIGEST)
    view.release()
