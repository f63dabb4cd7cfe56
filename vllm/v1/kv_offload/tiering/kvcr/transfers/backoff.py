# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Remembers which blocks failed to load, so that they are not tried again at once.

However often reading a block from disk has failed, KVCR answers FETCHABLE for it, and
vLLM tries to load every block that is a hit. Without this memory the two would try
again for ever.
"""

import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable

from kvcr.types import CacheTier, InventoryEvent

from vllm.v1.kv_offload.base import OffloadKey

# Doubled each time that the block fails again.
FIRST_DELAY_S = 1.0
LONGEST_DELAY_S = 300.0
_MAX_KEYS = 1 << 16


class Backoff:
    """Makes a failed block a miss for its request and, for a while, for all requests.

    Args:
        prefix_bytes: Length of the part of a block key before the offload key.
    """

    def __init__(
        self, prefix_bytes: int = 0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._prefix_bytes = prefix_bytes
        self._clock = clock
        # Only requests in progress: a load can fail after its request has ended.
        self._by_request: dict[str, set[OffloadKey] | None] = {}
        self._requests_with_failures = 0
        # key -> (failures in a row, when to try again)
        self._by_key: OrderedDict[OffloadKey, tuple[int, float]] = OrderedDict()
        self.active = False
        """Whether any failure is remembered; checked before ``blocks`` is called."""

    def blocks(self, key: OffloadKey, request_id: str) -> bool:
        """Whether a lookup has to be a miss."""
        failed = self._by_request.get(request_id)
        if failed is not None and key in failed:
            return True
        entry = self._by_key.get(key)
        return entry is not None and self._clock() < entry[1]

    def begin(self, request_id: str) -> None:
        """Remember a request's failures from now on."""
        self._by_request.setdefault(request_id, None)

    def failed(
        self, keys: Collection[OffloadKey], request_id: str, *, everyone: bool
    ) -> None:
        """Note a failed load.

        Args:
            everyone: Whether it is the blocks' fault, so that no request should try
                them for a while.
        """
        if request_id in self._by_request:
            known = self._by_request[request_id]
            if known is None:
                self._by_request[request_id] = set(keys)
                self._requests_with_failures += 1
            else:
                known.update(keys)
        if everyone:
            for key in keys:
                failures = self._by_key.pop(key, (0, 0.0))[0]
                delay = FIRST_DELAY_S * 2.0 ** min(failures, 16)
                while len(self._by_key) >= _MAX_KEYS:
                    self._by_key.popitem(last=False)
                again_at = self._clock() + min(delay, LONGEST_DELAY_S)
                self._by_key[key] = (failures + 1, again_at)
        self._settle()

    def forget(self, keys: Iterable[OffloadKey]) -> None:
        """Forget the failures of blocks that have been loaded or stored again."""
        if self._by_key:
            for key in keys:
                self._by_key.pop(key, None)
            self._settle()

    def report(self, event: InventoryEvent) -> None:
        """Take KVCR's inventory events: a store replaces a block that failed.

        While lookups do not find a block, only a store can bring it into the pool.
        """
        if not self._by_key or event.removed or event.tier is not CacheTier.LOCAL_G2:
            return
        now, skip = self._clock(), self._prefix_bytes
        keys = [OffloadKey(key[skip:]) for key in event.keys]
        self.forget([k for k in keys if now < self._by_key.get(k, (0, 0.0))[1]])

    def finish(self, request_id: str) -> None:
        """Forget a request."""
        if self._by_request.pop(request_id, None) is not None:
            self._requests_with_failures -= 1
            self._settle()

    def _settle(self) -> None:
        self.active = bool(self._requests_with_failures or self._by_key)
