# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Jobs of any size: none stalls KVCR's one thread or keeps others out.

KVCR copies an operation in one go. For as long as that takes it serves nobody, and
after one operation timeout it is no source for its peers any more.
"""

from typing import Any

from tests.v1.kv_offload.tiering.kvcr.faults.harness.blocks import make_keys
from tests.v1.kv_offload.tiering.kvcr.faults.harness.engine import Engine, Job

BIG = 512
SMALL = make_keys(8, "small")


def test_a_big_store_stalls_nobody(engines: Any) -> None:
    engine: Engine = engines({"secondary_g2_slots": BIG + 64}, rows=BIG + 16)
    engine.finish(engine.store(SMALL, range(BIG, BIG + 8)))
    big = engine.store(make_keys(BIG, "big"), range(BIG))
    meanwhile: list[Job] = []
    while big.result is None:
        meanwhile.append(engine.load(SMALL, range(BIG + 8, BIG + 16)))
        engine.finish(meanwhile[-1])
    assert big.result.success
    assert all(job.arrived == SMALL for job in meanwhile)
    assert len(meanwhile) > 2, "small loads shall be done while the big store goes on"


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
    assert all(store.succeeded for store in stores)
    engine.finish(*loads)
