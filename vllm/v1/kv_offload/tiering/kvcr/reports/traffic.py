# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What was looked up and found, asked for and moved, and how long loads took.

Together with the losses this is the whole way of a block. Lookups are on the hot path:
they only add to plain integers, which are read when vLLM takes its metrics.
"""

from collections import Counter

from kvcr.types import CacheTier, InventoryEvent

# Strings and not enums, which cost more to look up than what is counted by them.
DRAM, DISK, PEER = PLACES = ("dram", "disk", "peer")
"""Where a block is: the values of the metrics' label ``place``."""
LOAD, STORE = DIRECTIONS = ("load", "store")
"""The values of the label ``direction``."""


class Traffic:
    """Counts since the last ``clear``. Driven by one thread.

    Args:
        timed: Keep how long loads took, for whoever takes and clears it.
    """

    __slots__ = (
        "_last_elsewhere",
        "_timed",
        "deferred",
        "dram_hits",
        "hinted_misses",
        "load_seconds",
        "misses",
        "moved",
        "other_hits",
        "refused",
        "requested",
    )

    def __init__(self, timed: bool) -> None:
        self._timed = timed
        self.clear()

    def clear(self) -> None:
        # Lookups, each of which counts once.
        self.dram_hits = 0
        self.other_hits: Counter[str] = Counter()
        self._last_elsewhere = (DRAM, 0)
        self.misses = 0
        self.hinted_misses = 0
        """Those of the misses that were of requests with a hint."""
        self.refused = 0
        """Found, and lost for a reason that was counted."""
        self.deferred = 0
        """To be repeated: the block is on its way."""
        # Blocks, by direction and place.
        self.requested: Counter[str] = Counter()
        self.moved: Counter[tuple[str, ...]] = Counter()
        self.load_seconds: list[tuple[str, float]] = []

    def hit_elsewhere(self, place: str) -> None:
        """A lookup found its block in a file or at a peer."""
        self.other_hits[place] += 1
        self._last_elsewhere = (place, self.dram_hits)

    @property
    def last_hit(self) -> str:
        """Where the lookup that hit last found its block.

        Derived, so that hits in the pool, the most frequent, only count themselves.
        """
        place, dram_hits = self._last_elsewhere
        return place if dram_hits == self.dram_hits else DRAM

    @property
    def lookups(self) -> int:
        hits = self.dram_hits + self.other_hits.total()
        return hits + self.misses + self.refused + self.deferred

    @property
    def pending(self) -> bool:
        """Whether anything was counted since the last ``clear``."""
        return bool(self.lookups or self.requested or self.moved)

    def loaded(self, place: str, blocks: int, seconds: float) -> None:
        """Blocks are in the primary tier, that long after vLLM asked for them."""
        if blocks:
            self.moved[LOAD, place] += blocks
            if self._timed:
                self.load_seconds.append((place, seconds))

    def report(self, event: InventoryEvent) -> None:
        """KVCR's inventory sink: what enters a file was written out of the pool."""
        if event.tier is CacheTier.G3 and not event.removed:
            self.moved[STORE, DISK] += len(event.keys)
