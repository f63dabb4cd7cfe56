# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The host memory of KVCR's pool: checks that it fits, and populates it."""

import ctypes
import errno
import os
import time
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
_CGROUPS = (  # version 2, then version 1
    (_CGROUP, "max", "current", "inactive_file"),
    (_CGROUP / "memory", "limit_in_bytes", "usage_in_bytes", "total_inactive_file"),
)


def check_room(size: int, option: str) -> None:
    """Raise a ``ValueError``, which names ``option``, if a pool does not fit."""
    available = available_memory()
    if size > available:
        raise ValueError(
            f"{option}: the pool needs {size:,} bytes, but only {available:,} are "
            "available on this machine or to this container; make it smaller"
        )


def available_memory() -> int:
    """Bytes that can still be allocated, within the container's limit."""
    available = psutil.virtual_memory().available
    for folder, limit_name, used_name, cache in _CGROUPS:
        try:
            limit = int((folder / f"memory.{limit_name}").read_text())
            used = int((folder / f"memory.{used_name}").read_text())
            lines = (folder / "memory.stat").read_text().splitlines()
            stat = dict(line.split() for line in lines)
        except (OSError, ValueError):  # no such controller, or "max"
            continue
        # The kernel reclaims inactive file pages before it refuses memory.
        used -= int(stat.get(cache, 0))
        available = min(available, max(0, limit - used))
    return available


def address_of(buffer: Any) -> int:
    # Nothing exported may remain, because then the buffer could not be closed.
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))


def populate(buffer: Any) -> None:
    """Back all of a buffer with memory now.

    Otherwise that happens page by page during the first stores, on KVCR's only thread,
    at a fraction of the speed.
    """
    address, size = address_of(buffer), len(buffer)
    # A ctypes call releases the GIL, so other threads can still meet their deadlines.
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    madvise(address, size, _MADV_HUGEPAGE)  # only advice: small pages will do
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
