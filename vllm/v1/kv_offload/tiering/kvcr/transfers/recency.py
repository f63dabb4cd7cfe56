# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Tells KVCR which blocks vLLM uses without asking for them, within a bound.

A prefix that vLLM has on its GPU is never loaded from below, so KVCR would take it for
unused. A vLLM that reports use (``shims.REPORTS_USE``) reports all keys of a request,
many times over. Each key passed on costs KVCR some 10 µs on the engine's thread and
leaves a stale entry in its eviction queue. KVCR rebuilds that queue at once when stale
entries outnumber the others: a third of a second with 200,000 slots.

So a call reports at most ``MAX_KEYS``; no blocks again that were reported a short while
ago, counted in stores; and of all blocks half as many as were stored. A full pool
evicts a block for each one stored, which takes stale entries along, so that reporting
by itself does not make KVCR rebuild its queue.
"""

from collections import OrderedDict
from collections.abc import Callable, Collection
from itertools import islice
from typing import Any

from vllm.v1.kv_offload.base import OffloadKey

MAX_KEYS = 128
"""Reported in one call: 1 to 4 ms, as busy as the machine is."""
GROUP = 16
"""Blocks that are remembered as one. A key stands for all blocks before it, too, so
that a group's last key names it."""
MAX_LOOKED_AT = 4096
STORES_PER_KEY = 2
"""With 1, KVCR rebuilds its queue every other time that its pool was filled anew."""
_MAX_CREDIT = 4096
_REMEMBERED_GROUPS = 1 << 14
# A block in use is then never older, to KVCR, than this share of its pool's stores.
_STALE_AFTER_POOLS = 1 / 8


class Recency:
    """What was reported of late. Runs on the thread that drives the tier.

    Args:
        align: KVCR's ``align_sequence``; what it raises is raised here.
        prefix: In front of each key.
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
        """Blocks are on their way into the pool, and others out of it."""
        self._stored += blocks
        self._credit = min(self._credit + blocks, self._most_credit)

    def used(self, keys: Collection[OffloadKey]) -> None:
        """A request uses these blocks, in this order."""
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
