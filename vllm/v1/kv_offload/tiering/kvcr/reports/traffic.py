# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What was looked up and found, asked for and moved, and how long loads took.

Together with the losses this is the whole way of a block. Lookups are on the hot path:
they only add to plain integers, which are read when vLLM takes its metrics.
"""

from collections import Counter
from enum import Enum

from kvcr.types import CacheTier, InventoryEvent


class Place(Enum):
    """Where a block is; the value is the metric's label ``place``."""

    DRAM = "dram"
    DISK = "disk"
    PEER = "peer"


class Direction(Enum):
    LOAD = "load"
    STORE = "store"


# Looking an enum's member up costs more than counting.
_DISK = Place.DISK
_LOAD, _STORE = Direction.LOAD, Direction.STORE


class Traffic:
    """Counts since the last ``clear``. Driven by one thread.

    Args:
        timed: Keep how long loads took, for whoever takes and clears it.
    """

    __slots__ = (
        "_timed",
        "deferred",
        "disk_hits",
        "dram_hits",
        "hinted_misses",
        "last_hit",
        "load_seconds",
        "misses",
        "moved",
        "peer_hits",
        "refused",
        "requested",
    )

    def __init__(self, timed: bool) -> None:
        self._timed = timed
        self.last_hit = Place.DRAM
        """Where the lookup that hit last found its block."""
        self.clear()

    def clear(self) -> None:
        # Lookups, each of which counts once.
        self.dram_hits = self.disk_hits = self.peer_hits = 0
        self.misses = 0
        self.hinted_misses = 0
        """Those of the misses that were of requests with a hint."""
        self.refused = 0
        """Found, and lost for a reason that was counted."""
        self.deferred = 0
        """To be repeated: the block is on its way."""
        self.requested: Counter[Direction] = Counter()
        self.moved: Counter[tuple[Direction, Place]] = Counter()
        self.load_seconds: list[tuple[Place, float]] = []

    @property
    def lookups(self) -> int:
        hits = self.dram_hits + self.disk_hits + self.peer_hits
        return hits + self.misses + self.refused + self.deferred

    @property
    def pending(self) -> bool:
        """Whether anything was counted since the last ``clear``."""
        return bool(self.lookups or self.requested or self.moved)

    def request(self, is_load: bool, blocks: int) -> None:
        """vLLM asked for a load or a store."""
        self.requested[_LOAD if is_load else _STORE] += blocks

    def loaded(self, place: Place, blocks: int, seconds: float) -> None:
        """Blocks are in the primary tier, that long after vLLM asked for them."""
        if blocks:
            self.moved[_LOAD, place] += blocks
            if self._timed:
                self.load_seconds.append((place, seconds))

    def kept(self, blocks: int) -> None:
        """Blocks of a store are in the pool."""
        if blocks:
            self.moved[_STORE, Place.DRAM] += blocks

    def report(self, event: InventoryEvent) -> None:
        """KVCR's inventory sink: what enters a file was written out of the pool."""
        if event.tier is CacheTier.G3 and not event.removed:
            self.moved[_STORE, _DISK] += len(event.keys)
