# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Watches whether blocks that KVCR's pool evicts can be written to the files.

KVCR drops a block that it cannot write, and tells only its policy. It also drops blocks
if a store missed its deadline because the engine did not step for a long time. That is
not the disk's fault, but KVCR reports it in the same way, so the disk is not blamed
while stores time out.
"""

import time
from collections.abc import Sequence
from pathlib import Path

from kvcr.types import CacheTier, InventoryEvent, PlacementFailure

from vllm.v1.kv_offload.tiering.kvcr.compat.vocabulary import WRITE_FAILURES
from vllm.v1.kv_offload.tiering.kvcr.reports.health import Health, Reason
from vllm.v1.kv_offload.tiering.kvcr.reports.losses import Losses, Lost

_QUIET_S = 60.0
"""How long no write may fail before the disk counts as healthy again. A single success
proves little: one of several files may fail while the others work."""


class DiskWatch:
    """Counts and judges writes to the files."""

    def __init__(self, health: Health, losses: Losses, paths: Sequence[Path]) -> None:
        self._health = health
        self._losses = losses
        self._failed_at = 0.0
        self.files = ", ".join(map(str, paths))
        self.events = 0
        """Grows whenever a block enters or leaves a file."""
        self.unjudged = False
        """Whether writes have failed since the last call of ``judge``."""

    def placement_failed(self, failure: PlacementFailure) -> None:
        """Note that KVCR dropped a block that it should have moved to a file."""
        if failure.reason in WRITE_FAILURES:
            self._losses.add(Lost.DISK_FAILED)
            self.unjudged = True

    def judge(self, *, stores_time_out: bool) -> None:
        """Blame the disk for failed writes, unless stores missed their deadline."""
        self.unjudged = False
        if not stores_time_out:
            self._failed_at = time.monotonic()
            self._health.degrade(
                Reason.DISK_FAILING, f"a write to the g3 files failed ({self.files})"
            )

    def report(self, event: InventoryEvent) -> None:
        """Take KVCR's inventory events: a block that enters a file has been written."""
        if event.tier is not CacheTier.G3:
            return
        self.events += 1
        if (
            self._failed_at
            and not event.removed
            and time.monotonic() - self._failed_at >= _QUIET_S
        ):
            self._failed_at = 0.0
            self._health.recover(Reason.DISK_FAILING)
