# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Checks that a block read from below is one that was stored under its key.

With files, what KVCR hands back need not be what it was given: another process may
write to a file, a disk may lie, and a read that missed its deadline may complete into
memory that holds another block by then. A 64-bit checksum of each block, taken while
its slot is pinned for the store and compared while its slot is reserved for the load,
turns each of these into a miss.

A peer's block is taken as it comes: its checksum is that of its first load out of the
pool. If it went to a file before anybody loaded it, nobody can tell whether it is
right; that is a miss too, and no damage.

Checksums are computed on one thread beside the engine's, in the order in which they
were asked for. Everything else runs on the engine's.
"""

from collections import deque
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
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
    """The outcome of one ``record`` or ``verify``."""

    token: Any
    corrupt: list[bytes]
    """They are not what was stored."""
    unverified: list[bytes]
    """They were in a file, and nobody knows what was stored."""


@dataclass(slots=True)
class _Work:
    token: Any
    chunks: list[int]
    sums: list[Sum] | None
    """To be filled in; ``None``: to be compared with ``copies``."""
    keys: list[bytes]
    copies: list[Copy]


class BlockSums:
    """Checksums of the blocks that KVCR holds.

    Args:
        rows: The primary tier, one row a chunk.
        residency: What KVCR holds.
    """

    def __init__(self, rows: np.ndarray, residency: Residency) -> None:
        self._rows: np.ndarray | None = rows
        self._residency = residency
        self._done: deque[tuple[_Work, list[int] | None]] = deque()
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="kvcr-verify")

    def record(
        self, token: object, blocks: list[tuple[bytes, int]]
    ) -> dict[bytes, Sum]:
        """Take the checksums of ``(block key, chunk)`` pairs that KVCR is about to be
        given; then ``token`` is done.

        The chunks must stay unchanged until then. Returns what ``stored`` is to be
        told.
        """
        sums = self._residency.storing([key for key, _ in blocks])
        if len(sums) < len(blocks):
            blocks = [block for block in blocks if block[0] in sums]
        chunks = [chunk for _, chunk in blocks]
        self._start(_Work(token, chunks, list(sums.values()), [], []))
        return sums

    def stored(self, sums: dict[bytes, Sum]) -> None:
        """KVCR is done with what it was given."""
        self._residency.stored(sums)

    def expect(self, keys: Iterable[bytes]) -> dict[bytes, Copy]:
        """What KVCR is about to deliver: for ``verify``, when it has.

        To be asked before: by the time a block has arrived, KVCR may have evicted it.
        """
        return self._residency.copies(keys)

    def verify(
        self,
        token: object,
        expected: dict[bytes, Copy],
        blocks: list[tuple[bytes, int]],
    ) -> None:
        """Compare the blocks that arrived; then ``token`` is done."""
        blocks = [block for block in blocks if block[0] in expected]
        keys = [key for key, _ in blocks]
        chunks = [chunk for _, chunk in blocks]
        copies = [expected[key] for key in keys]
        self._start(_Work(token, chunks, None, keys, copies))

    def take_done(self) -> list[Checked]:
        """What was done since the last call."""
        outcomes = []
        while self._done:
            work, found = self._done.popleft()
            outcomes.append(_finish(work, found))
        return outcomes

    def close(self) -> None:
        """Finish and let go of the primary tier's memory."""
        self._worker.shutdown(wait=True, cancel_futures=True)
        self._rows = None

    def _start(self, work: _Work) -> None:
        if work.chunks:
            self._worker.submit(self._compute, work)
        else:
            self._done.append((work, []))

    def _compute(self, work: _Work) -> None:
        found: list[int] | None = None
        rows = self._rows
        try:
            assert rows is not None
            found = [xxhash.xxh3_64_intdigest(rows[chunk]) for chunk in work.chunks]
        finally:
            self._done.append((work, found))


def _finish(work: _Work, found: list[int] | None) -> Checked:
    outcome = Checked(work.token, [], [])
    if found is None:
        outcome.unverified.extend(work.keys)
    elif work.sums is not None:
        for each, value in zip(work.sums, found, strict=True):
            each.value = value
    else:
        for key, copy, value in zip(work.keys, work.copies, found, strict=True):
            _judge(key, copy, value, outcome)
    return outcome


def _judge(key: bytes, copy: Copy, value: int, outcome: Checked) -> None:
    unknown = None
    for known in copy.sums:
        if known.value == value or known is RECOVERED:
            return
        if known.value is None:
            unknown = known
    if unknown is None:
        outcome.corrupt.append(key)
    elif copy.from_file:
        outcome.unverified.append(key)
    else:
        unknown.value = value
