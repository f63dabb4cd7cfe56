# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Tells KVCR, within bounds, which blocks vLLM uses without loading them.

A prefix that vLLM has on its GPU is never loaded from below, so KVCR would consider it
unused. A vLLM that reports use (``shims.REPORTS_USE``) reports all keys of a request,
many times. Each key that is passed on costs about 10 µs on the engine's thread and
leaves a stale entry in KVCR's eviction queue. When stale entries outnumber the others,
KVCR rebuilds the queue in one go, which takes a third of a second with 200,000 slots.

So a call reports at most ``MAX_KEYS`` keys, skips blocks that were reported a short
while ago (counted in stores), and over time reports half as many blocks as are stored.
A full pool evicts one block for each block stored, and stale entries with it, so that
reports alone never make KVCR rebuild its queue.
"""

from collections import OrderedDict
from collections.abc import Callable, Collection
from itertools import islice
from typing import Any

from vllm.v1.kv_offload.base import OffloadKey

MAX_KEYS = 128
"""Most keys reported in one call, which takes 1 to 4 ms, depending on the load."""
GROUP = 16
"""Blocks that are remembered together. A key also stands for all blocks before it, so
the last key of a group identifies the group."""
MAX_LOOKED_AT = 4096
STORES_PER_KEY = 2
"""Must exceed 1: with 1, KVCR rebuilds its queue every second time that its pool is
refilled."""
_MAX_CREDIT = 4096
_REMEMBERED_GROUPS = 1 << 14
# To KVCR a block in use never looks older than this share of a pool's worth of stores.
_STALE_AFTER_POOLS = 1 / 8


class Recency:
    """Remembers recent reports. Runs on the thread that drives the tier.

    Args:
        align: KVCR's ``align_sequence``; its exceptions pass through.
        prefix: The prefix of each key.
        slots: Blocks in KVCR's pool.
    """

    def __init__(
        self, align: Callable[[list[Any], bool], None], prefix: bytes, slots: int
    ) -> None:
        self._align = align
        self._prefix = prefix
        self._stale_after = max(1, int(slots * _STALE_AFTER_POOLS))
        self._most_credit = STORES_PER_KEY * min(slots, _MAX_CREDIT)
        self._stored = 0
        self._credit = 0
        self._reported: OrderedDict[OffloadKey, int] = OrderedDict()

    def stored(self, blocks: int) -> None:
        """Note that blocks are being stored, so that a full pool evicts as many."""
        self._stored += blocks
        self._credit = min(self._credit + blocks, self._most_credit)

    def used(self, keys: Collection[OffloadKey]) -> None:
        """Note that a request uses these blocks, in this order."""
        room = min(MAX_KEYS, self._credit // STORES_PER_KEY)
        if not room:
            return
        looked_at = list(islice(keys, MAX_LOOKED_AT))
        chosen: list[bytes] = []
        for first in range(0, len(looked_at), GROUP):
            group = looked_at[first : first + GROUP]
            if len(chosen) + len(group) > room:
                break
            reported = self._reported.get(group[-1])
            if reported is None or self._stored - reported >= self._stale_after:
                self._remember(group[-1])
                chosen += [self._prefix + key for key in group]
        if chosen:
            self._credit -= STORES_PER_KEY * len(chosen)
            self._align(chosen, True)

    def _remember(self, name: OffloadKey) -> None:
        self._reported[name] = self._stored
        self._reported.move_to_end(name)
        if len(self._reported) > _REMEMBERED_GROUPS:
            self._reported.popitem(last=False)
