# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Jobs of any size: none stalls KVCR's one thread, loses blocks or keeps others out.

KVCR copies an operation in one go. For as long as that takes it serves nobody, and
after one operation timeout it is no source for its peers any more.
"""

from pathlib import Path
from typing import Any

from tests.v1.kv_offload.tiering.kvcr.builders import free_port, peer_options
from tests.v1.kv_offload.tiering.kvcr.faults.harness.blocks import make_keys
from tests.v1.kv_offload.tiering.kvcr.faults.harness.engine import MIB, Engine, Job
from tests.v1.kv_offload.tiering.kvcr.faults.harness.probe import ProgressWatch

BIG = 512
SMALL = make_keys(8, "small")


def test_a_big_store_stalls_nobody(engines: Any) -> None:
    # A kernel that reclaims memory in the middle adds to one measurement.
    assert any(cut < 0.5 * whole for cut, whole in map(stalls, 3 * [engines]))


def stalls(engines: Any) -> tuple[float, float]:
    """How long KVCR serves nobody in a big store: as the tier cuts it, and whole."""
    engine: Engine = engines(
        peer_options(free_port()) | {"secondary_g2_slots": BIG + 64},
        rows=BIG + 16,
    )
    stored = engine.store(SMALL, range(BIG, BIG + 8))
    engine.finish(stored)

    watch = ProgressWatch(engine.tier)
    big = engine.store(make_keys(BIG, "big"), range(BIG))
    meanwhile: list[Job] = []
    while big.result is None:
        meanwhile.append(engine.load(SMALL, range(BIG + 8, BIG + 16)))
        engine.finish(meanwhile[-1])
    assert big.result.success
    assert all(job.arrived == SMALL for job in meanwhile)
    assert len(meanwhile) > 2, "small loads shall be done while the big store goes on"
    assert engine.probe.state == "healthy"
    longest_s = watch.longest_s

    watch.longest_s = 0.0
    engine.probe.deposit_at_once(make_keys(BIG, "at once"))
    engine.run_until(lambda: engine.probe.operations == 0, 20, "the deposit")
    engine.close()
    return longest_s, watch.longest_s


def test_a_store_larger_than_the_pool_loses_nothing(
    engines: Any, tmp_path: Path
) -> None:
    blocks, pool = 256, 32
    engine: Engine = engines(
        {
            "secondary_g2_slots": pool,
            "operation_timeout_ms": 20_000,
            "g3": {
                "paths": tmp_path / "g3",
                "capacity_bytes_per_file": blocks * MIB,
                "backend": "POSIX",
            },
        },
        rows=blocks,
    )
    keys = make_keys(blocks)
    store = engine.store(keys, range(blocks))
    engine.finish(store)
    assert store.result is not None
    assert store.result.success
    assert engine.probe.lost() == {}
    engine.memory.fill(0)
    load = engine.load(keys, range(blocks))
    engine.finish(load)
    assert load.arrived == keys


def test_loads_go_before_stores_and_starve_none(engines: Any) -> None:
    engine: Engine = engines({"secondary_g2_slots": BIG}, rows=BIG)
    half = BIG // 2
    engine.finish(engine.store(SMALL, range(half, half + 8)))

    stores = [
        engine.store(make_keys(64, f"store {first}"), range(first, first + 64))
        for first in range(0, half, 64)
    ]
    load = engine.load(SMALL, range(half + 8, half + 16))
    engine.finish(load)
    assert load.arrived == SMALL
    assert stores[-1].result is None, "the load came last and was done first"

    # The other way round: loads without end, and the stores end all the same.
    slots = [range(half + 16 + 8 * n, half + 24 + 8 * n) for n in range(16)]
    loads = [engine.load(SMALL, part) for part in slots]

    def keep_loading() -> bool:
        for index, job in enumerate(loads):
            if job.result is not None:
                loads[index] = engine.load(SMALL, slots[index])
        return all(store.result is not None for store in stores)

    engine.run_until(keep_loading, 20, "stores, which starve")
    assert all(store.result and store.result.success for store in stores)
    engine.finish(*loads)
