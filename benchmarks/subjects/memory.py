# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Memory and keys as an engine would have them."""

import mmap

import numpy as np

from vllm.v1.kv_offload.base import OffloadKey, make_offload_key

_HASH_BYTES = 32


class Primary:
    """A primary tier: rows of host memory that are really there."""

    def __init__(self, rows: int, row_bytes: int) -> None:
        self._memory = mmap.mmap(-1, rows * row_bytes)
        self.rows = np.frombuffer(self._memory, dtype=np.uint8).reshape(rows, row_bytes)
        self.rows[:] = (np.arange(rows) % 251 + 1).astype(np.uint8)[:, None]

    @property
    def view(self) -> memoryview:
        # numpy's stubs do not say that arrays are buffers before Python 3.12.
        return memoryview(self.rows)  # type: ignore[arg-type,unused-ignore]


class Keys:
    """Keys that were never used before in this run of a process."""

    def __init__(self) -> None:
        self._next = 0

    def fresh(self, count: int) -> list[OffloadKey]:
        first = self._next
        self._next += count
        # Spread over the first bytes, as hashes are: the fs tier makes folders of them.
        return [key_of(number) for number in range(first, self._next)]


def key_of(number: int) -> OffloadKey:
    scrambled = number * 0x9E3779B97F4A7C15 % (1 << 64)
    head = scrambled.to_bytes(8, "big") + number.to_bytes(8, "big")
    return make_offload_key(head.ljust(_HASH_BYTES, b"\1"), 0)
