# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Checks that a block read from below is one that was stored under its key.

With files, what KVCR hands back need not be what it was given: another process may
write to a file, a disk may lie, and a read that missed its deadline may complete into
memory that holds another block by then. A 64-bit checksum of each block, taken while
its slot is pinned for the store and compared while its slot is reserved for the load,
turns each of these into a miss. All work is done on one thread beside the engine's.
"""

from collections import OrderedDict, deque
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import xxhash

_MAX_SUMS_PER_KEY = 4
"""A block may be stored again with other bytes: recomputing is not always exact to
the bit. Each of them is what was stored under that key."""


class BlockSums:
    """Checksums of stored blocks, by block key.

    Args:
        rows: The primary tier, one row a chunk.
        capacity: How many keys to remember; the oldest go first.
        strict: Whether a block without a checksum counts as wrong. Off where blocks
            can outlive this process, which then cannot know them.
    """

    def __init__(self, rows: np.ndarray, capacity: int, strict: bool) -> None:
        self._rows: np.ndarray | None = rows
        self._capacity = capacity
        self._strict = strict
        self._sums: OrderedDict[bytes, tuple[int, ...]] = OrderedDict()
        self._done: deque[tuple[Any, list[bytes]]] = deque()
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="kvcr-verify")

    def record(self, token: object, blocks: list[tuple[bytes, int]]) -> None:
        """Take the checksums of ``(block key, chunk)`` pairs; then ``token`` is done.

        The chunks must stay unchanged until then.
        """
        self._worker.submit(self._run, self._record_all, token, blocks)

    def verify(
        self, token: object, blocks: list[tuple[bytes, int]], *, adopt: bool
    ) -> None:
        """Compare the same way; then ``token`` is done, with the keys that differ.

        Args:
            adopt: Take the checksum of a block that has none: it comes from a peer.
        """
        self._worker.submit(self._run, self._verify_all, token, blocks, adopt)

    def take_done(self) -> list[tuple[Any, list[bytes]]]:
        """Tokens whose work is done, with the block keys found wrong."""
        done = []
        while self._done:
            done.append(self._done.popleft())
        return done

    def close(self) -> None:
        """Finish and let go of the primary tier's memory."""
        self._worker.shutdown(wait=True, cancel_futures=True)
        self._rows = None

    def _run(self, work: Any, token: object, blocks: Any, *rest: Any) -> None:
        try:
            wrong = work(blocks, *rest)
        except Exception:
            wrong = [key for key, _ in blocks]
        self._done.append((token, wrong))

    def _record_all(self, blocks: list[tuple[bytes, int]]) -> list[bytes]:
        for key, chunk in blocks:
            self._remember(key, self._sum(chunk))
        return []

    def _verify_all(self, blocks: list[tuple[bytes, int]], adopt: bool) -> list[bytes]:
        wrong = []
        for key, chunk in blocks:
            known = self._sums.get(key)
            found = self._sum(chunk)
            if known is None and adopt:
                self._remember(key, found)
            elif (known is None and self._strict) or (
                known is not None and found not in known
            ):
                wrong.append(key)
        return wrong

    def _sum(self, chunk: int) -> int:
        rows = self._rows
        assert rows is not None
        return xxhash.xxh3_64_intdigest(rows[chunk])

    def _remember(self, key: bytes, value: int) -> None:
        known = self._sums.pop(key, ())
        if value not in known:
            known = (*known, value)[-_MAX_SUMS_PER_KEY:]
        self._sums[key] = known
        while len(self._sums) > self._capacity:
            self._sums.popitem(last=False)
