# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""An engine that only serves peers: nothing of its own is copied anywhere."""

from typing import Any

import numpy as np

from tests.v1.kv_offload.tiering.kvcr.builders import free_port, peer_options
from tests.v1.kv_offload.tiering.kvcr.faults.harness.blocks import make_keys
from tests.v1.kv_offload.tiering.kvcr.faults.harness.engine import Engine
from tests.v1.kv_offload.tiering.kvcr.faults.harness.managed import ManagedEngine

STORES = 100


def test_stores_end_at_once_and_copy_nothing(engines: Any) -> None:
    options = peer_options(free_port()) | {
        "enable_telemetry": True,
        "landing_slots": 8,
    }
    engine: Engine = engines(options, rows=4)
    pool = engine.probe.pool(engine.row_bytes)
    before = pool.copy()
    for index in range(STORES):
        job = engine.store(make_keys(4, f"store {index}"), range(4))
        engine.step()
        assert job.result is not None
        assert job.result.success
    assert engine.probe.lost() == {}
    stats = engine.tier.get_stats()
    moved = [name for name in stats.reduce() if "transfer" in name]
    assert moved == []
    assert np.array_equal(pool, before)


def test_vllm_is_rid_of_such_jobs_at_its_next_step(managed: Any) -> None:
    options = peer_options(free_port()) | {"landing_slots": 8}
    engine: ManagedEngine = managed(options, rows=4)
    for index in range(STORES):
        engine.run(f"request {index}", make_keys(4, f"store {index}"))
        # vLLM takes results once a step, and before what the step stores.
        engine.step()
        engine.step()
        assert not engine.manager._jobs
    assert set(engine.probe.lost()) <= {"not_resident"}
