# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Which blocks not to try again yet, after a load that failed.

KVCR answers FETCHABLE for a block on disk however often reading it failed, and
vLLM promotes whatever is answered as a hit: without a memory of failures the two
would go round for ever.
"""

import time
from collections import OrderedDict
from collections.abc import Callable

from vllm.v1.kv_offload.base import OffloadKey

FIRST_DELAY_S = 1.0
LONGEST_DELAY_S = 300.0
_MAX_KEYS = 1 << 16


class Backoff:
    """Failed blocks: a miss for the request that failed, and for all for a while."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._by_request: dict[str, set[OffloadKey]] = {}
        # key -> (failures in a row, when to try again)
        self._by_key: OrderedDict[OffloadKey, tuple[int, float]] = OrderedDict()
        self.active = False
        """Whether anything is remembered at all; read before ``blocks``."""

    def blocks(self, key: OffloadKey, request_id: str) -> bool:
        """Whether a lookup has to miss."""
        failed = self._by_request.get(request_id)
        if failed is not None and key in failed:
            return True
        entry = self._by_key.get(key)
        return entry is not None and self._clock() < entry[1]

    def failed(self, key: OffloadKey, request_id: str, *, everyone: bool) -> None:
        """Note a failed load. ``everyone``: it is the block's fault, not a peer's."""
        self.active = True
        self._by_request.setdefault(request_id, set()).add(key)
        if not everyone:
            return
        failures = self._by_key.pop(key, (0, 0.0))[0]
        delay = min(FIRST_DELAY_S * 2.0 ** min(failures, 16), LONGEST_DELAY_S)
        while len(self._by_key) >= _MAX_KEYS:
            self._by_key.popitem(last=False)
        self._by_key[key] = (failures + 1, self._clock() + delay)

    def succeeded(self, keys: list[OffloadKey]) -> None:
        """Forget the failures of blocks that could be loaded."""
        if self._by_key:
            for key in keys:
                self._by_key.pop(key, None)
            self._settle()

    def finish(self, request_id: str) -> None:
        """Forget a request."""
        if self._by_request.pop(request_id, None) is not None:
            self._settle()

    def _settle(self) -> None:
        self.active = bool(self._by_request or self._by_key)
