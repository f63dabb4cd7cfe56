# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Ends a process that was started with ``start_new_session``, with all its children.

The whole group has to end, since vLLM's other processes outlive one that is killed.
"""

import os
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

STOP_SECONDS = 15.0


def end(leader: subprocess.Popen[bytes]) -> None:
    """Terminate the group, so that it can clean up, and then kill what is left."""
    deadline = time.monotonic() + STOP_SECONDS
    with suppress(ProcessLookupError):
        os.killpg(leader.pid, signal.SIGTERM)
        while members(leader.pid) and time.monotonic() < deadline:
            leader.poll()
            time.sleep(0.05)
    kill(leader)


def kill(leader: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(leader.pid, signal.SIGKILL)
    leader.wait()


def members(group: int) -> list[Path]:
    """The folders in /proc of the group's running processes, without zombies."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, _, its_group = stat.read_text().rpartition(")")[2].split()[:3]
            if int(its_group) == group and state != "Z":
                found.append(stat.parent)
    return found
