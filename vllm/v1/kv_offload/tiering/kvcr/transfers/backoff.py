# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Which blocks not to try again yet, after a load that failed.

KVCR answers FETCHABLE for a block on disk however often reading it failed, and
vLLM promotes whatever is answered as a hit: without a memory of failures the two
would go round for ever.
"""

import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable

from kvcr.types import CacheTier, InventoryEvent

from vllm.v1.kv_offload.base import OffloadKey

FIRST_DELAY_S = 1.0
LONGEST_DELAY_S = 300.0
_MAX_KEYS = 1 << 16


class Backoff:
    """Failed blocks: a miss for the request that failed, and for all for a while.

    Args:
        prefix_bytes: Length of what a block key has before the offload key.
    """

    def __init__(
        self, prefix_bytes: int = 0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._prefix_bytes = prefix_bytes
        self._clock = clock
        # Only requests that are under way: a load can fail after its request ended.
        self._by_request: dict[str, set[OffloadKey] | None] = {}
        self._requests_with_failures = 0
        # key -> (failures in a row, when to try again)
        self._by_key: OrderedDict[OffloadKey, tuple[int, float]] = OrderedDict()
        self.active = False
        """Whether any failure is remembered; read before ``blocks``."""

    def blocks(self, key: OffloadKey, request_id: str) -> bool:
        """Whether a lookup has to miss."""
        failed = self._by_request.get(request_id)
        if failed is not None and key in failed:
            return True
        entry = self._by_key.get(key)
        return entry is not None and self._clock() < entry[1]

    def begin(self, request_id: str) -> None:
        """Remember failures of a request from here on."""
        self._by_request.setdefault(request_id, None)

    def failed(
        self, keys: Collection[OffloadKey], request_id: str, *, everyone: bool
    ) -> None:
        """Note a failed load.

        Args:
            everyone: It is the blocks' fault: no request should try for a while.
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
        """Forget the failures of blocks that could be loaded, or that are gone."""
        if self._by_key:
            for key in keys:
                self._by_key.pop(key, None)
            self._settle()

    def report(self, event: InventoryEvent) -> None:
        """KVCR's inventory sink: a store makes a block whole.

        A block that no lookup finds enters the pool by a store alone.
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
