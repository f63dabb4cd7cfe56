# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Keys, and the bytes that belong under them.

A block's content follows from its key and from who wrote it, so that every block that
is reported as loaded can be compared byte by byte, in any process, without sending its
content around.
"""

import hashlib
from collections.abc import Callable
from functools import lru_cache

import numpy as np

from vllm.v1.kv_offload.base import OffloadKey, make_offload_key


def make_keys(count: int, label: str = "prompt") -> list[OffloadKey]:
    """``count`` keys, the same for the same label in every process."""
    return [
        make_offload_key(hashlib.sha256(f"{label}/{index}".encode()).digest(), 0)
        for index in range(count)
    ]


def fill(row: np.ndarray, key: bytes, writer: str) -> None:
    """Write what ``writer`` has under ``key``."""
    np.bitwise_xor(_noise(row.nbytes), _seed(key, writer), out=row.view(np.uint64))


def wrong_words(row: np.ndarray, key: bytes, writer: str) -> int:
    """How many 8-byte words of a block are not what ``writer`` has under ``key``."""
    expected = _noise(row.nbytes) ^ _seed(key, writer)
    return int(np.count_nonzero(row.view(np.uint64) != expected))


@lru_cache(maxsize=4)
def _noise(size: int) -> np.ndarray:
    # Differs from word to word: a shifted or half-written block is a wrong one.
    generator = np.random.default_rng(20_250_101)
    return generator.integers(0, 1 << 64, size // 8, dtype=np.uint64)


def _seed(key: bytes, writer: str) -> np.uint64:
    digest = hashlib.blake2b(key + writer.encode(), digest_size=8).digest()
    return np.frombuffer(digest, dtype=np.uint64)[0]


def watch(memory: np.ndarray) -> Callable[[], bool]:
    """Tells whether the last byte of any slot has changed since."""
    before = memory[:, -1].copy()
    return lambda: bool((memory[:, -1] != before).any())
