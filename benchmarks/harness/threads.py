# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""CPU time by thread, and whose threads they are."""

import os
import threading
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")

# KVCR names its one thread. A thread without a Python name that came with a tier is
# NIXL's, UCX's or ZMQ's.
KVCR_THREAD = "kvcr-progress"
NATIVE = "native "


@dataclass(frozen=True)
class ThreadLoad:
    """A thread's name and its share of a core."""

    name: str
    share: float

    @property
    def is_backend(self) -> bool:
        """Whether it is KVCR's or native, and so nothing a tier can change."""
        return self.name == KVCR_THREAD or self.name.startswith(NATIVE)


def cpu_seconds(pid: int) -> dict[int, float]:
    """CPU seconds of each thread of a process so far."""
    seconds = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            fields = (task / "stat").read_text().rpartition(")")[2].split()
        except FileNotFoundError:
            continue
        seconds[int(task.name)] = (int(fields[11]) + int(fields[12])) / _TICKS
    return seconds


def python_names() -> dict[int, str]:
    """This process's Python threads by their native id."""
    return {
        thread.native_id: thread.name
        for thread in threading.enumerate()
        if thread.native_id is not None
    }


def loads(
    pid: int,
    before: dict[int, float],
    after: dict[int, float],
    seconds: float,
    names: dict[int, str],
    before_tier: Collection[int],
) -> list[ThreadLoad]:
    """What each thread used between two readings, the busiest first.

    Args:
        names: Of Python's threads.
        before_tier: Threads that were there before the tier was.
    """
    found = []
    for thread, used in after.items():
        name = names.get(thread)
        if name is None and thread in before_tier:
            name = _kernel_name(pid, thread)
        elif name is None:
            name = NATIVE + _native_name(pid, thread)
        share = (used - before.get(thread, 0.0)) / seconds
        found.append(ThreadLoad(name, share))
    return sorted(found, key=lambda load: -load.share)


def _kernel_name(pid: int, thread: int) -> str:
    try:
        return Path(f"/proc/{pid}/task/{thread}/comm").read_text().strip()
    except FileNotFoundError:
        return "ended"


def _native_name(pid: int, thread: int) -> str:
    # Without a name of its own it has that of the thread that started it.
    name = _kernel_name(pid, thread)
    inherited = (_kernel_name(pid, pid), "python", "python3")
    return "NIXL" if name in inherited else name
