# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""vLLM's real offloading manager over the real tier, KVCR and NIXL."""

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kvcr import TRANSFER_BLOCKS_METRIC

from tests.v1.kv_offload.tiering.kvcr.builders import (
    endpoint_of,
    key,
    keys,
    make_hint,
    peer_options,
    request,
)
from tests.v1.kv_offload.tiering.kvcr.contract import DeclinesOddBlocks, is_declined
from tests.v1.kv_offload.tiering.kvcr.faults.harness.files import g3
from tests.v1.kv_offload.tiering.kvcr.rig import ROW_BYTES, wait_until
from tests.v1.kv_offload.tiering.kvcr.vllm_engine import Engine
from vllm.v1.kv_offload.base import LookupResult, Medium, OffloadKey, ReqContext
from vllm.v1.kv_offload.tiering.base import TieringOffloadingMetrics
from vllm.v1.kv_offload.tiering.kvcr.reports.metrics import LOST_BLOCKS

POOL = {"secondary_g2_slots": 32, "operation_timeout_ms": 10_000}

MakeEngine = Callable[..., Engine]
Blocks = dict[OffloadKey, np.ndarray]


@pytest.fixture
def engine_of() -> Iterator[MakeEngine]:
    """Makes engines and shuts them down."""
    made: list[Engine] = []

    def make(*tiers: dict[str, Any], **options: Any) -> Engine:
        made.append(Engine(*tiers, **options))
        return made[-1]

    yield make
    for engine in made:
        engine.shutdown()


def with_files(path: Path) -> dict[str, Any]:
    """A small pool, and a file below it."""
    options = {"secondary_g2_slots": 4, "g3": g3([str(path)], 64, ROW_BYTES)}
    return POOL | options | {"enable_telemetry": True}


def blocks(count: int, first: int = 0) -> Blocks:
    rows = np.random.default_rng(first).integers(0, 256, (count, ROW_BYTES), np.uint8)
    return dict(zip(keys(count, first), rows, strict=True))


def put_all(engine: Engine, contents: Blocks) -> None:
    """Offload more than the primary tier holds, as requests come and go."""
    items = list(contents.items())
    for first in range(0, len(items), 4):
        context = engine.begin(ReqContext(f"put {first}"))
        engine.put(context, dict(items[first : first + 4]))
        engine.settle()
        engine.end(context)


def assert_same(found: Blocks, expected: Blocks) -> None:
    assert set(found) <= set(expected)
    for each, contents in found.items():
        assert np.array_equal(contents, expected[each])


def assert_all_come_back(engine: Engine, contents: Blocks) -> None:
    for first in range(0, len(contents), 4):
        context = engine.begin(ReqContext(f"get {first}"))
        found = engine.get(context, keys(4, first))
        assert list(found) == keys(4, first)
        assert_same(found, contents)
        engine.end(context)


def test_blocks_come_back_once_the_primary_is_overrun(engine_of: MakeEngine) -> None:
    engine = engine_of(POOL)
    assert engine.tiers[0]._prefix, "no namespace of its model"
    contents = blocks(24)
    put_all(engine, contents)
    primary = engine.manager.primary_tier
    assert primary.lookup(key(0), ReqContext("x")) is LookupResult.MISS
    assert_all_come_back(engine, contents)
    assert not engine.manager.has_pending_work()


def test_a_request_may_end_before_its_jobs(engine_of: MakeEngine) -> None:
    engine = engine_of(POOL)
    contents = blocks(16)
    put_all(engine, contents)
    context = engine.begin(ReqContext("short"))
    engine.ask(context, keys(4))
    engine.step()
    engine.end(context)
    engine.settle()
    context = engine.begin(ReqContext("next"))
    assert_same(engine.get(context, keys(4)), contents)
    engine.end(context)


def test_files_serve_what_the_pool_evicted(engine_of: MakeEngine, disk: Path) -> None:
    engine = engine_of(with_files(disk / "evicted.data"))
    contents = blocks(24)
    put_all(engine, contents)
    assert_all_come_back(engine, contents)
    moved = engine.stats()[f"vllm:{TRANSFER_BLOCKS_METRIC}"]
    assert any("g3" in operation for (operation,) in moved)


def test_a_file_cut_to_nothing_costs_a_load(engine_of: MakeEngine, disk: Path) -> None:
    path = disk / "cut.data"
    engine = engine_of(with_files(path))
    contents = blocks(24)
    put_all(engine, contents)
    assert engine.tiers[0].lookup(key(0), ReqContext("x")) is LookupResult.HIT
    os.truncate(path, 0)
    engine.stats()
    context = engine.begin(ReqContext("victim"))
    attempts = 0
    for _ in range(200):
        (result,) = engine.ask(context, [key(0)])
        engine.step()
        if result is LookupResult.HIT_PENDING:
            attempts += 1
            engine.settle()
        else:
            assert result is LookupResult.MISS
    engine.end(context)
    assert attempts == 1
    failures = engine.stats().get(TieringOffloadingMetrics.PROMOTION_JOB_FAILURES, {})
    assert sum(failures.values()) <= 1
    # Nobody else gets wrong bytes, and what lies in the pool is still served.
    context = engine.begin(ReqContext("other"))
    assert_same(engine.get(context, keys(2, first=22)), contents)
    assert_same(engine.get(context, keys(8)), contents)
    engine.end(context)


def test_stores_with_nowhere_to_go_are_no_failures(engine_of: MakeEngine) -> None:
    engine = engine_of(peer_options(enable_telemetry=True))
    for number in range(20):
        context = engine.begin(ReqContext(f"r{number}"))
        engine.put(context, blocks(1, first=number))
        engine.step()
        engine.end(context)
    engine.settle()
    stats = engine.stats()
    assert TieringOffloadingMetrics.CASCADE_JOB_FAILURES not in stats
    assert f"vllm:{TRANSFER_BLOCKS_METRIC}" not in stats
    assert not any(stats[LOST_BLOCKS].values())


def test_events_of_primary_and_tier_reach_vllm(engine_of: MakeEngine) -> None:
    engine = engine_of(POOL, events=True)
    put_all(engine, blocks(4))
    events = [event for event in engine.events() if event.ownership == "kvcr"]
    assert {each for event in events for each in event.keys} == set(keys(4))
    assert {event.medium for event in events} == {Medium.CPU}
    assert engine.events() == []


def test_a_shutdown_leaves_no_shared_memory() -> None:
    engine = Engine(POOL)
    path = Path(engine.manager.primary_tier._mmap_region.mmap_path)
    context = engine.begin(ReqContext("r"))
    engine.put(context, blocks(4))
    engine.shutdown()
    assert not path.exists()


def test_after_a_reset_nothing_touches_the_primary_tier(engine_of: MakeEngine) -> None:
    # What its pool declines lies in the source's primary tier alone: a peer that
    # asks for it needs a pin.
    policy = f"{DeclinesOddBlocks.__module__}.{DeclinesOddBlocks.__name__}"
    serving = peer_options(policy=policy, **POOL)
    source = engine_of(serving, chunks=16)
    sink = engine_of(peer_options(max_pull_blocks=8, **POOL))
    stored = {k: v for k, v in blocks(48, first=100).items() if not is_declined(k)}
    pulled = {k: v for k, v in blocks(8, first=500).items() if is_declined(k)}
    put_all(source, stored)
    put_all(source, pulled)

    tier = source.tiers[0]
    (port,) = serving["control_ports"]
    sink.tiers[0]._staging._liveness.heard(endpoint_of(port))
    pull = sink.begin(request("pull", make_hint(port, pulled)))
    busy = source.begin(ReqContext("busy"))

    def pinned() -> bool:
        sink.ask(pull, pulled)
        sink.step()
        tier._poll()
        tier.serve_external_requests(source.manager._tier_parents[tier])
        return tier._pins.outstanding > 0

    with source.lock:  # nothing else steps the source meanwhile
        wait_until(pinned, "a pin")
        source.ask(busy, list(stored)[:4])
        source.put(busy, blocks(4, first=200))
        source.manager._flush_pending_promotions()
        jobs = [job.transfer_job for job in source.manager._transfer_jobs.values()]
        assert {job.is_promotion for job in jobs} == {True, False}

        source.manager.reset_cache()

        random = np.random.default_rng(9)
        pattern = random.integers(0, 256, source.memory.shape, np.uint8)
        source.memory[:] = pattern
        assert not source.manager._transfer_jobs
        assert tier._pins.outstanding == 0
    deadline = time.monotonic() + 0.5
    while time.monotonic() < deadline:
        source.step()
        sink.step()
        time.sleep(0.002)
    assert np.array_equal(source.memory, pattern)
    # What the peer was given is what was there before.
    assert_same(sink.get(pull, list(pulled)), pulled)
    # The engine goes on, once its workers have nothing of before under way.
    with source.lock:
        getattr(source.manager, "on_reset_flushed", lambda: None)()
    after = source.begin(ReqContext("after"))
    oldest = list(stored)[:4]
    found = source.get(after, oldest)
    assert list(found) == oldest
    assert_same(found, stored)
