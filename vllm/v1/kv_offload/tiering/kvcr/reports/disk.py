# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Whether the files take what KVCR's pool evicts.

KVCR drops a block that it cannot write, and tells its policy alone. That the deadline
of a store passed meanwhile, because the engine did not step for long, is no fault of
the disk, and not told apart by KVCR: while stores time out, nothing is said of it.
"""

import time
from collections.abc import Sequence
from pathlib import Path

from kvcr.types import CacheTier, InventoryEvent, PlacementFailure

from vllm.v1.kv_offload.tiering.kvcr.compat.vocabulary import WRITE_FAILURES
from vllm.v1.kv_offload.tiering.kvcr.reports.health import Health, Reason
from vllm.v1.kv_offload.tiering.kvcr.reports.losses import Losses, Lost

_QUIET_S = 60.0
"""How long writing has to go well before the disk counts as sound again: one of several
files may fail while the others work."""


class DiskWatch:
    """Told of what could, and could not, be written to the files."""

    def __init__(self, health: Health, losses: Losses, paths: Sequence[Path]) -> None:
        self._health = health
        self._losses = losses
        self._failed_at = 0.0
        self.files = ", ".join(map(str, paths))
        self.events = 0
        """Grows whenever a block enters or leaves a file: something moves."""
        self.unjudged = False
        """Writes failed since the last call of ``judge``."""

    def placement_failed(self, failure: PlacementFailure) -> None:
        """KVCR's policy hook: a block that should have moved to a file is dropped."""
        if failure.reason in WRITE_FAILURES:
            self._losses.add(Lost.DISK_FAILED)
            self.unjudged = True

    def judge(self, *, stores_time_out: bool) -> None:
        """Hold failed writes against the disk, unless stores missed their deadline."""
        self.unjudged = False
        if not stores_time_out:
            self._failed_at = time.monotonic()
            self._health.degrade(
                Reason.DISK_FAILING, f"a write to the g3 files failed ({self.files})"
            )

    def report(self, event: InventoryEvent) -> None:
        """KVCR's inventory sink: what enters a file has been written."""
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
