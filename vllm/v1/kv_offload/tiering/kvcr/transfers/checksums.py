# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Checks that a loaded block holds the bytes that were stored under its key.

With files, KVCR may return other bytes than it was given: another process may write to
a file, a disk may return wrong data, and a read that missed its deadline may complete
into memory that holds another block by then. A 64-bit checksum turns each of these into
a miss. It is computed while the block's slot is pinned for the store, and compared
while its slot is reserved for the load.

A block from a peer gets its checksum when it is first loaded from the pool. If it went
to a file before anybody loaded it, nobody can tell whether it is right; that is a miss
too, but not damage.

Checksums are computed on a thread of their own, in the order of the requests.
Everything else runs on the engine's thread.
"""

from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import xxhash

from vllm.v1.kv_offload.tiering.kvcr.transfers.residency import (
    RECOVERED,
    Copy,
    Residency,
    Sum,
)


class Checked(NamedTuple):
    """The result of one ``record`` or ``verify``."""

    token: Any
    corrupt: list[bytes]
    """Blocks whose bytes are not those that were stored."""
    unverified: list[bytes]
    """Blocks that were in a file, and whose stored bytes nobody knows."""


_Verdict = tuple[list[bytes], list[bytes]]
"""The blocks that are corrupt, and those that are unverified."""
_Judge = Callable[[list[int] | None], _Verdict]
"""Takes the checksums that were computed; ``None`` if that failed."""


class BlockSums:
    """Computes and compares checksums of the blocks that KVCR holds.

    Args:
        rows: The primary tier, one row for each chunk.
        residency: The blocks that KVCR holds.
    """

    def __init__(self, rows: np.ndarray, residency: Residency) -> None:
        self._rows: np.ndarray | None = rows
        self._residency = residency
        self._done: deque[tuple[object, _Judge, list[int] | None]] = deque()
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="kvcr-verify")

    def record(
        self, token: object, blocks: list[tuple[bytes, int]]
    ) -> dict[bytes, Sum]:
        """Compute the checksums of ``(block key, chunk)`` pairs that will be stored.

        The chunks must not change until ``take_done`` returns ``token``. Returns the
        argument for ``stored``.
        """
        sums = self._residency.storing([key for key, _ in blocks])
        chunks = [chunk for key, chunk in blocks if key in sums]
        self._start(token, chunks, partial(_record, list(sums.values())))
        return sums

    def stored(self, sums: dict[bytes, Sum]) -> None:
        """Note that KVCR is done with a store."""
        self._residency.stored(sums)

    def expect(self, keys: Iterable[bytes]) -> dict[bytes, Copy]:
        """The copies that KVCR is about to deliver, as an argument for ``verify``.

        Called before the delivery: KVCR may have evicted a block when it has arrived.
        """
        return self._residency.copies(keys)

    def verify(
        self,
        token: object,
        expected: dict[bytes, Copy],
        blocks: list[tuple[bytes, int]],
    ) -> None:
        """Compare the blocks that arrived; ``take_done`` then returns ``token``."""
        copies = {key: expected[key] for key, _ in blocks if key in expected}
        chunks = [chunk for key, chunk in blocks if key in copies]
        self._start(token, chunks, partial(_compare, copies))

    def take_done(self) -> list[Checked]:
        """The checks that were completed since the last call."""
        checked = []
        while self._done:
            token, judge, found = self._done.popleft()
            checked.append(Checked(token, *judge(found)))
        return checked

    def close(self) -> None:
        """Finish and let go of the primary tier's memory."""
        self._worker.shutdown(wait=True, cancel_futures=True)
        self._rows = None

    def _start(self, token: object, chunks: list[int], judge: _Judge) -> None:
        if chunks:
            self._worker.submit(self._compute, token, chunks, judge)
        else:
            self._done.append((token, judge, []))

    def _compute(self, token: object, chunks: list[int], judge: _Judge) -> None:
        found: list[int] | None = None
        rows = self._rows
        try:
            assert rows is not None
            found = [xxhash.xxh3_64_intdigest(rows[chunk]) for chunk in chunks]
        finally:
            self._done.append((token, judge, found))


def _record(sums: list[Sum], found: list[int] | None) -> _Verdict:
    for each, value in zip(sums, found or (), strict=found is not None):
        each.value = value
    return [], []


def _compare(copies: dict[bytes, Copy], found: list[int] | None) -> _Verdict:
    if found is None:
        return [], list(copies)
    corrupt: list[bytes] = []
    unverified: list[bytes] = []
    for (key, copy), value in zip(copies.items(), found, strict=True):
        if any(known.value == value or known is RECOVERED for known in copy.sums):
            continue
        unknown = [known for known in copy.sums if known.value is None]
        if not unknown:
            corrupt.append(key)
        elif copy.from_file:
            unverified.append(key)
        else:
            unknown[-1].value = value
    return corrupt, unverified
