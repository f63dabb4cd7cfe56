# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What the tier counts is what vLLM counts, over the pool, files and a real peer."""

from pathlib import Path
from typing import Any

from tests.v1.kv_offload.tiering.kvcr.builders import make_hint, peer_options
from tests.v1.kv_offload.tiering.kvcr.faults.harness.blocks import make_keys
from tests.v1.kv_offload.tiering.kvcr.faults.harness.files import g3
from tests.v1.kv_offload.tiering.kvcr.faults.harness.managed import ManagedEngine
from vllm.v1.kv_offload.tiering.base import TieringOffloadingMetrics as Vllms
from vllm.v1.kv_offload.tiering.kvcr.compat import shims
from vllm.v1.kv_offload.tiering.kvcr.reports import metrics

ROW_BYTES = 1 << 16
OWN = make_keys(24, "own")
THEIRS = make_keys(4, "theirs")


class Counted:
    """All that vLLM was told so far, by metric and labels."""

    def __init__(self, engine: ManagedEngine) -> None:
        self._engine = engine
        self._stats: Any = None

    def take(self) -> dict[str, dict[tuple[str, ...], Any]]:
        self._engine.step()
        stats = self._engine.manager.get_stats()
        self._stats = stats if self._stats is None else self._stats.aggregate(stats)
        return dict(self._stats.data["data"])


def test_the_tiers_counts_are_vllms(peers: Any, managed: Any, tmp_path: Path) -> None:
    telemetry = {"enable_telemetry": True}
    peer = peers(telemetry, rows=8, row_bytes=ROW_BYTES, hold=THEIRS)
    options = peer_options(
        secondary_g2_slots=16,
        g3=g3(tmp_path / "g3.data", 64, ROW_BYTES),
        operation_timeout_ms=20_000,
        **telemetry,
    )
    engine: ManagedEngine = managed(options, rows=8, row_bytes=ROW_BYTES)
    counted = Counted(engine)
    for first in range(0, len(OWN), 4):
        engine.run(f"cold {first}", OWN[first : first + 4])
        engine.settle()
    sources: set[Any] = set()
    requests = [
        *((f"again {first}", OWN[first : first + 4], None) for first in (0, 4, 20)),
        ("pull", THEIRS, make_hint(peer.port, THEIRS)),
    ]
    for name, keys, hint in requests:
        request = engine.begin(name, keys, hint)
        engine.wait_for(request)
        assert request.hits == 4
        if shims.HIT_SOURCES[0] is not None:
            load_source = engine.manager.get_load_source
            sources |= {load_source(key, request.context) for key in keys}
        engine.manager.on_request_finished(request.context)
        engine.settle()

    told = counted.take()
    moved = told[metrics.MOVED_BYTES]
    loaded = {
        place: moved.get(("load", place), 0) for place in ("dram", "disk", "peer")
    }
    assert all(loaded.values()), loaded
    assert sum(loaded.values()) == sum(told[Vllms.READ_BYTES].values())
    assert moved["store", "dram"] == sum(told[Vllms.WRITE_BYTES].values())
    assert loaded["peer"] == len(THEIRS) * ROW_BYTES
    hits = told[metrics.HITS]
    blocks = told[metrics.MOVED_BLOCKS]
    assert {place: blocks["load", place] for (place,) in hits} == {
        place: count for (place,), count in hits.items()
    }
    assert sum(hits.values()) == told[metrics.REQUESTED_BLOCKS][("load",)]
    if shims.HIT_SOURCES[0] is not None:
        assert sources == set(shims.HIT_SOURCES)
    assert told[metrics.PEERS][("1", "usable")] == 1
