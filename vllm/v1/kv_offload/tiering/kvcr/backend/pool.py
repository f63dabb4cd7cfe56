# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The host memory of KVCR's pool: obtained, populated, given back."""

import ctypes
import errno
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from vllm.logger import init_logger

logger = init_logger(__name__)

_MADV_HUGEPAGE = 14
_MADV_POPULATE_WRITE = 23  # Linux 5.14
_STEP_BYTES = 256 << 20
_PROGRESS_INTERVAL_S = 2.0
_CGROUP = Path("/sys/fs/cgroup")


class PoolMemory:
    """Anonymous memory at a fixed address.

    Args:
        allocate: ``mmap.mmap``, called with ``(-1, size)``.
        size: Bytes.
        option: The option that set the size, for messages.
        populate: Back all of it with memory now. It would otherwise happen page by
            page during the first stores, on KVCR's one thread, at a fraction of the
            speed.

    Raises:
        ValueError: this machine, or this container, has not enough memory.
    """

    def __init__(
        self,
        allocate: Callable[[int, int], Any],
        size: int,
        option: str,
        populate: bool,
    ) -> None:
        available = available_memory()
        if size > available:
            raise ValueError(
                f"{option}: the pool needs {size:,} bytes, and {available:,} are "
                "available on this machine or to this container; make it smaller"
            )
        self.size = size
        self.buffer = allocate(-1, size)
        exported = ctypes.c_char.from_buffer(self.buffer)
        self.address = ctypes.addressof(exported)
        # An export would keep the buffer from ever being closed.
        del exported
        if populate:
            try:
                _populate(self.address, size)
            except BaseException:
                self.free()
                raise

    def free(self) -> None:
        """Give the memory back. Nothing may touch it any more."""
        self.buffer.close()


def available_memory() -> int:
    """Bytes that can still be had, the container's limit included."""
    available = psutil.virtual_memory().available
    for limit_file, used_file, stat_file, cache in (
        ("memory.max", "memory.current", "memory.stat", "inactive_file"),
        (
            "memory/memory.limit_in_bytes",
            "memory/memory.usage_in_bytes",
            "memory/memory.stat",
            "total_inactive_file",
        ),
    ):
        try:
            limit = int((_CGROUP / limit_file).read_text())
            used = int((_CGROUP / used_file).read_text())
            stat = dict(
                line.split() for line in (_CGROUP / stat_file).read_text().splitlines()
            )
        except (OSError, ValueError):  # no such controller, or "max"
            continue
        # File pages are given up before anything else is refused.
        used -= int(stat.get(cache, 0))
        available = min(available, max(0, limit - used))
    return available


def _populate(address: int, size: int) -> None:
    # A ctypes call lets go of the GIL, so that no other thread's deadline suffers.
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    madvise(address, size, _MADV_HUGEPAGE)  # advice: where not allowed, small pages
    reported_at = time.monotonic()
    for offset in range(0, size, _STEP_BYTES):
        length = min(_STEP_BYTES, size - offset)
        if madvise(address + offset, length, _MADV_POPULATE_WRITE) != 0:
            code = ctypes.get_errno()
            if code != errno.EINVAL:
                raise OSError(code, f"populating KVCR's pool: {os.strerror(code)}")
            ctypes.memset(address + offset, 0, length)
        now = time.monotonic()
        if now - reported_at >= _PROGRESS_INTERVAL_S:
            reported_at = now
            logger.info(
                "kvcr tier: populating the pool, %d of %d MiB",
                (offset + length) >> 20,
                size >> 20,
            )
