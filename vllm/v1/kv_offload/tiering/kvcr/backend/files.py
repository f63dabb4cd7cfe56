# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The files of ``g3``: checked before KVCR opens them, removed after a failed start.

KVCR makes missing folders, stops at a file of another size, and leaves behind what it
could not finish. None of that suits a container that restarts: see ``prepare``.
"""

import errno
import fcntl
import os
import stat
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

import psutil

from vllm.logger import init_logger
from vllm.v1.kv_offload.tiering.kvcr.config import OptionError

logger = init_logger(__name__)

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def prepare(paths: Sequence[Path], size: int, *, kept: bool) -> list[Path]:
    """Have every file ready for KVCR, which fills an empty one up to ``size``.

    Args:
        kept: Whether a service keeps the pool, and so what the files hold. Otherwise
            that counts for nothing, and a file of another size is made anew.

    Returns:
        The files that were made here; see ``remove``.

    Raises:
        OptionError: a file cannot be used. What was made here is removed again.
    """
    made: list[Path] = []
    try:
        if kept:
            _check_room({path: _look_at(path, size) for path in paths}, size)
            return made
        with ExitStack() as opened:
            descriptors = {path: _open(path, made, opened) for path in paths}
            found = {path: os.fstat(each) for path, each in descriptors.items()}
            _check_room(found, size)
            for path, status in found.items():
                if status.st_size not in (0, size):
                    logger.warning(
                        "kvcr tier: g3.paths: %s has %d bytes and is made anew with "
                        "%d; what it holds counts for nothing",
                        path,
                        status.st_size,
                        size,
                    )
                    os.ftruncate(descriptors[path], 0)
    except BaseException:
        remove(made)
        raise
    return made


def remove(made: Iterable[Path]) -> None:
    """Remove the files that a start made which then failed."""
    for path in made:
        with suppress(OSError):
            path.unlink()


def explain(error: OSError, paths: Sequence[Path], size: int) -> OptionError | None:
    """What an operator reads when KVCR could not open its files after all."""
    names = ", ".join(map(str, paths))
    if error.errno in _NO_ROOM:
        return _refusal(
            f"{names}: no room for {size:,} bytes each ({error.strerror}); make "
            "g3.capacity_bytes_per_file smaller, or free space"
        )
    if isinstance(error, BlockingIOError):
        return _refusal(f"{names}: {_in_use('another engine')}")
    return None


def _refusal(text: str) -> OptionError:
    return OptionError(f"kvcr tier: g3.paths: {text}")


def _target(path: Path) -> Path:
    # As ``Path.resolve``, which raises where links go round in a circle.
    return Path(os.path.realpath(path))


def _check_kind(path: Path) -> os.stat_result | None:
    """Look at what is there, following links; ``None`` if there is nothing yet."""
    folder = _target(path).parent
    if not folder.is_dir():
        raise _refusal(
            f"{path}: there is no folder {folder}, and none is made, so that a disk "
            "that is not mounted does not become the root disk; mount it, or make it"
        )
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    if stat.S_ISDIR(found.st_mode):
        raise _refusal(f"{path}: is a folder; give the path of a file in it")
    if not stat.S_ISREG(found.st_mode):
        raise _refusal(f"{path}: is no regular file")
    return found


def _look_at(path: Path, size: int) -> os.stat_result | None:
    """Check a file that the service may hold."""
    try:
        found = _check_kind(path)
        where = path if found is not None else _target(path).parent
        if not os.access(where, os.W_OK):
            raise _refusal(f"{path}: {where} is not writable for this user")
    except OSError as error:
        raise _refusal(f"{path}: {error.strerror}") from error
    if found is not None and found.st_size not in (0, size):
        raise _refusal(
            f"{path}: has {found.st_size:,} bytes, and g3.capacity_bytes_per_file "
            f"makes {size:,} in whole chunks; the KVCR service keeps what it holds. "
            "Set the option to that, or stop the service and remove the file"
        )
    return found


def _open(path: Path, made: list[Path], opened: ExitStack) -> int:
    """Open a file that is this engine's alone, making it if it is absent."""
    try:
        there = _check_kind(path)
        target = _target(path)
        new = os.O_CREAT | os.O_EXCL if there is None else 0
        descriptor = os.open(target, os.O_RDWR | os.O_CLOEXEC | new, 0o600)
        opened.callback(os.close, descriptor)
        if new:
            made.append(target)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise _refusal(f"{path}: {_in_use(_holder(descriptor))}") from None
        _check_direct(path)
    except OSError as error:
        raise _refusal(
            f"{path}: {error.strerror}; give a file that this user may write, on a "
            "filesystem with locks"
        ) from error
    return descriptor


def _check_direct(path: Path) -> None:
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_DIRECT))
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        raise _refusal(
            f"{path}: {_filesystem(path)} takes no direct I/O (O_DIRECT), which KVCR "
            "needs; use a filesystem on a disk, such as ext4 or XFS"
        ) from None


def _check_room(found: Mapping[Path, os.stat_result | None], size: int) -> None:
    """Room for the files that have to be filled, by filesystem."""
    together: dict[int, list[Path]] = {}
    had: dict[int, int] = {}
    for path, status in found.items():
        if status is not None and status.st_size == size:
            continue
        device = _target(path).parent.stat().st_dev
        together.setdefault(device, []).append(path)
        # A file that is made anew gives its room back first.
        blocks = 0 if status is None else status.st_blocks
        had[device] = had.get(device, 0) + 512 * blocks
    for device, paths in together.items():
        room = os.statvfs(_target(paths[0]).parent)
        free = room.f_bavail * room.f_frsize + had[device]
        needed = size * len(paths)
        if needed > free:
            raise _refusal(
                f"{', '.join(map(str, paths))}: {needed:,} bytes are needed "
                f"(g3.capacity_bytes_per_file = {size:,} in whole chunks), and "
                f"{free:,} are free there; make it smaller, or free space"
            )


def _in_use(by: str) -> str:
    return (
        f"is in use by {by}; give each engine, and each local data-parallel rank, a "
        "file of its own"
    )


def _holder(descriptor: int) -> str:
    """Which process locked a file, as far as the kernel tells in this container."""
    found = os.fstat(descriptor)
    device = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}"
    wanted = f"{device}:{found.st_ino}"
    with suppress(OSError):
        for line in Path("/proc/locks").read_text().splitlines():
            fields = line.split()
            if len(fields) > 5 and fields[1] == "FLOCK" and fields[5] == wanted:
                own = int(fields[4]) == os.getpid()
                return (
                    "another tier or path of this engine"
                    if own
                    else (f"another engine, process {fields[4]}")
                )
    return "another engine"


def _filesystem(path: Path) -> str:
    with suppress(Exception):
        mounts = [
            mount
            for mount in psutil.disk_partitions(all=True)
            if path.is_relative_to(mount.mountpoint)
        ]
        longest = max(mounts, key=lambda mount: len(mount.mountpoint))
        return f"its filesystem, {longest.fstype},"
    return "its filesystem"
