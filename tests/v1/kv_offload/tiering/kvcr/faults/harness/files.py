# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Files of KVCR's, which fail or change while it has them open in this process."""

import os
from pathlib import Path
from typing import Any


def g3(paths: Path | list[Path], slots: int, row_bytes: int = 1 << 20) -> Any:
    """The option for files that hold ``slots`` blocks each."""
    return {
        "paths": paths,
        "capacity_bytes_per_file": slots * row_bytes,
        "backend": "POSIX",
    }


def make_unreadable(path: Path) -> None:
    """Have this process's own descriptors of the file refuse to read."""
    _reopen(path, os.O_WRONLY)


def make_unwritable(path: Path) -> None:
    """Have them refuse to write."""
    _reopen(path, os.O_RDONLY)


def make_usable(path: Path) -> None:
    _reopen(path, os.O_RDWR)


def flip_bit(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))
        file.flush()
        os.fsync(file.fileno())


def _reopen(path: Path, mode: int) -> None:
    for entry in Path("/proc/self/fd").iterdir():
        if entry.is_symlink() and os.readlink(entry) == str(path):
            other = os.open(path, mode | os.O_DIRECT | os.O_CLOEXEC)
            os.dup2(other, int(entry.name), inheritable=False)
            os.close(other)
