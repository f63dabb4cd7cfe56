# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""When a failed write counts as a failing disk."""

import time
from pathlib import Path

import pytest
from kvcr.types import (
    BlockKey,
    CacheTier,
    InventoryEvent,
    PlacementAction,
    PlacementFailure,
)

from tests.v1.kv_offload.tiering.kvcr.builders import key
from tests.v1.kv_offload.tiering.kvcr.rig import StandinRig
from tests.v1.kv_offload.tiering.kvcr.standin import FAILED
from vllm.v1.kv_offload.tiering.kvcr.reports import disk
from vllm.v1.kv_offload.tiering.kvcr.reports.disk import DiskWatch
from vllm.v1.kv_offload.tiering.kvcr.reports.health import Health
from vllm.v1.kv_offload.tiering.kvcr.reports.losses import Losses

WRITTEN = InventoryEvent((BlockKey(key(1)),), CacheTier.G3, False)


def failure(reason: str = "transfer failed") -> PlacementFailure:
    moved = (PlacementAction.MOVE_TO, CacheTier.G3)
    return PlacementFailure(moved, CacheTier.LOCAL_G2, reason, 1)


class Watched:
    def __init__(self) -> None:
        self.health = Health()
        self.losses = Losses()
        self.watch = DiskWatch(self.health, self.losses, [Path("/data/g3")])

    @property
    def reason(self) -> str:
        return self.health.reason.label

    def lost(self) -> dict[str, int]:
        return self.losses.take()[0]


@pytest.mark.parametrize(
    "reason", ["G3 destination unavailable", "store failed to start", "of tomorrow"]
)
def test_no_room_in_the_files_is_no_failure(reason: str) -> None:
    watched = Watched()
    watched.watch.placement_failed(failure(reason))
    assert (watched.reason, watched.lost()) == ("none", {})


def test_while_stores_time_out_it_may_be_their_deadline() -> None:
    watched = Watched()
    watched.watch.placement_failed(failure())
    assert watched.watch.unjudged
    watched.watch.judge(stores_time_out=True)
    assert (watched.reason, watched.lost()) == ("none", {"disk_failed": 1})
    assert not watched.watch.unjudged
    watched.watch.placement_failed(failure())
    watched.watch.judge(stores_time_out=False)
    assert watched.reason == "disk_failing"


def test_only_writing_well_for_a_while_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched()
    watched.watch.judge(stores_time_out=False)
    watched.watch.report(WRITTEN)
    assert watched.reason == "disk_failing"
    monkeypatch.setattr(disk, "_QUIET_S", 0.0)
    for tier, removed in ((CacheTier.LOCAL_G2, False), (CacheTier.G3, True)):
        watched.watch.report(InventoryEvent(WRITTEN.keys, tier, removed))
        assert watched.reason == "disk_failing"
    watched.watch.report(WRITTEN)
    assert watched.reason == "none"


def test_a_store_that_times_out_is_noticed_before_and_after_it_ends() -> None:
    rig = StandinRig(operation_timeout_ms=50)
    transfers = rig.tier._transfers
    rig.load([key(1)], [0])
    time.sleep(0.06)
    job = rig.store([key(1)], [0])
    assert not transfers.stores_time_out(), "a load may take long"
    time.sleep(0.06)
    assert transfers.stores_time_out()
    rig.kvcr.complete_all(FAILED)
    rig.result_of(job)
    assert transfers.stores_time_out()
    time.sleep(0.06)
    assert not transfers.stores_time_out()
