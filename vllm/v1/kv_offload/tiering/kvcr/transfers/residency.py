# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Tracks which bytes KVCR may hold of each block, for as long as it holds the block.

KVCR reports which blocks enter and leave its pool and its files (``report``), and tells
its policy where a block came from (``ingested``). Together they determine whether a
copy in the pool has the bytes of a store, a file or a peer. A block is forgotten when
KVCR's last copy of it goes, so there are never more entries here than blocks in KVCR
and in the stores in progress.

KVCR makes these calls on the thread that calls it, before that call returns, so nothing
here needs a lock.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from kvcr.types import BlockMeta, CacheTier, InventoryEvent

# A block that is recomputed again and again may have other bytes each time.
_MOST_SUMS = 4


class Sum:
    """The checksum of some bytes; ``value`` is ``None`` until it was computed."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value: int | None = None


RECOVERED = Sum()
"""The checksum of every block that the KVCR service kept from an earlier process."""


@dataclass(slots=True, eq=False)
class Copy:
    """A block in the pool."""

    sums: tuple[Sum, ...]
    """The block has the bytes of one of them."""
    from_file: bool
    """Whether the bytes may come from a file, which may be damaged."""


@dataclass(slots=True, eq=False)
class _Held:
    pool: Copy | None = None
    file: tuple[Sum, ...] = ()
    storing: tuple[Sum, ...] = ()
    """Stores in progress whose bytes KVCR may take."""


class Residency:
    """The blocks that KVCR holds, and those being stored."""

    def __init__(self) -> None:
        self._held: dict[bytes, _Held] = {}
        self._from_peers: set[bytes] = set()

    def __len__(self) -> int:
        return len(self._held)

    # --- what KVCR reports -----------------------------------------------------------

    def report(self, event: InventoryEvent) -> None:
        """Take KVCR's inventory events."""
        if event.tier is CacheTier.LOCAL_G2:
            change = self._left_pool if event.removed else self._entered_pool
        elif event.tier is CacheTier.G3:
            change = self._left_file if event.removed else self._entered_file
        else:
            return
        for key in event.keys:
            change(key)

    def ingested(self, meta: BlockMeta, source: CacheTier) -> None:
        """Take the calls of the policy's hook.

        They come just before ``report``, for blocks of which there was no copy, and at
        the start for each block that the KVCR service kept.
        """
        if source is CacheTier.REMOTE_G2:
            self._from_peers.add(meta.block_key)
        elif source is not CacheTier.FW_G2:
            held = self._held[meta.block_key] = _Held()
            if CacheTier.LOCAL_G2 in meta.resident_tiers:
                held.pool = Copy((RECOVERED,), from_file=False)
            if CacheTier.G3 in meta.resident_tiers:
                held.file = (RECOVERED,)

    # --- what the checksums ask ------------------------------------------------------

    def storing(self, keys: Iterable[bytes]) -> dict[bytes, Sum]:
        """Note a store, and return the checksums that it may add.

        Blocks that are in the pool are left out, because KVCR keeps the copy it has.
        """
        sums = {}
        for key in keys:
            held = self._held.get(key)
            if held is None:
                held = self._held[key] = _Held()
            elif held.pool is not None:
                continue
            sums[key] = new = Sum()
            held.storing = (*held.storing, new) if held.storing else (new,)
        return sums

    def stored(self, sums: dict[bytes, Sum]) -> None:
        """Note that a store is over, successful or not."""
        for key, over in sums.items():
            held = self._held[key]
            if len(held.storing) == 1:
                held.storing = ()
            else:
                held.storing = tuple(s for s in held.storing if s is not over)
            if held.pool is None:
                self._forget_unless_held(key, held)

    def copies(self, keys: Iterable[bytes]) -> dict[bytes, Copy]:
        """The copies that a delivery would read if it started now.

        A block that is in neither tier, or is still on its way from a peer, is left
        out.
        """
        copies = {}
        for key in keys:
            held = self._held.get(key)
            if held is None:
                continue
            if held.pool is not None:
                copies[key] = held.pool
            elif held.file:
                copies[key] = _fill(held)
        return copies

    # --- inside ----------------------------------------------------------------------

    def _entered_pool(self, key: bytes) -> None:
        held = self._held.get(key)
        if held is None:
            held = self._held[key] = _Held()
        if self._from_peers and key in self._from_peers:
            self._from_peers.discard(key)
            held.pool = Copy((Sum(),), from_file=False)
        else:
            held.pool = _fill(held)

    def _left_pool(self, key: bytes) -> None:
        held = self._held.get(key)
        if held is not None:
            held.pool = None
            self._forget_unless_held(key, held)

    def _entered_file(self, key: bytes) -> None:
        # Blocks enter files only from the pool.
        held = self._held.setdefault(key, _Held())
        held.file = (Sum(),) if held.pool is None else held.pool.sums

    def _left_file(self, key: bytes) -> None:
        held = self._held.get(key)
        if held is not None:
            held.file = ()
            self._forget_unless_held(key, held)

    def _forget_unless_held(self, key: bytes, held: _Held) -> None:
        if held.pool is None and not held.file and not held.storing:
            del self._held[key]


def _fill(held: _Held) -> Copy:
    """The copy that the pool has after a store, or after a read from a file."""
    if not held.file:
        return Copy(held.storing or (Sum(),), from_file=False)
    sums = held.file
    for each in held.storing:
        if each.value is None or all(each.value != other.value for other in sums):
            sums = (*sums, each)
    if len(sums) > _MOST_SUMS:
        sums = (*sums[-_MOST_SUMS:], Sum())
    return Copy(sums, from_file=True)
