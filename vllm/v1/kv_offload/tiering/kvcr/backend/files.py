# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Prepares the files of ``g3`` for KVCR, and removes them after a failed start.

KVCR itself creates missing folders, refuses a file of another size, and leaves
half-made files behind. None of that suits a container that restarts; see ``prepare``.
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


def prepare(paths: Sequence[Path], size: int, *, kept: bool) -> list[Path]:
    """Get every file ready for KVCR, which extends an empty one to ``size``.

    Args:
        kept: Whether a service keeps the pool and with it the files' contents.
            Otherwise the contents are worthless, and a file of another size is emptied.

    Returns:
        The files that were made here; see ``remove``.

    Raises:
        OptionError: a file cannot be used. The files made here are removed again.
    """
    made: list[Path] = []
    try:
        with ExitStack() as opened:
            found = {
                path: _look_at(path, size) if kept else _open(path, made, opened)
                for path in paths
            }
            _check_room(found, size)
            for path, status in found.items():
                # Never a file that a service keeps, which ``_look_at`` has refused.
                if status is not None and status.st_size not in (0, size):
                    logger.warning(
                        "kvcr tier: g3.paths: %s has %d bytes and is recreated with "
                        "%d; its old contents are not used",
                        path,
                        status.st_size,
                        size,
                    )
                    os.truncate(path, 0)
    except BaseException:
        remove(made)
        raise
    return made


def remove(made: Iterable[Path]) -> None:
    """Remove the files that a failed start has made."""
    for path in made:
        with suppress(OSError):
            path.unlink()


def explain(error: OSError, paths: Sequence[Path], size: int) -> OptionError | None:
    """Explain why KVCR could not open its files after all."""
    names = ", ".join(map(str, paths))
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return _refusal(
            f"{names}: there is no room for {size:,} bytes each ({error.strerror}); "
            "make g3.capacity_bytes_per_file smaller, or free space"
        )
    if isinstance(error, BlockingIOError):
        return _refusal(f"{names}: {_in_use('another engine')}")
    return None


def _refusal(text: str) -> OptionError:
    return OptionError(f"kvcr tier: g3.paths: {text}")


def _target(path: Path) -> Path:
    # Like ``Path.resolve``, which however raises if links form a loop.
    return Path(os.path.realpath(path))


def _check_kind(path: Path) -> os.stat_result | None:
    """The status of a regular file, links followed; ``None`` if nothing is there."""
    folder = _target(path).parent
    if not folder.is_dir():
        raise _refusal(
            f"{path}: the folder {folder} does not exist, and it is not created "
            "automatically, because then a disk that is not mounted would silently be "
            "replaced by the root disk; mount the disk, or create the folder"
        )
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    if stat.S_ISDIR(found.st_mode):
        raise _refusal(f"{path}: is a folder; give the path of a file in it")
    if not stat.S_ISREG(found.st_mode):
        raise _refusal(f"{path}: is not a regular file")
    return found


def _look_at(path: Path, size: int) -> os.stat_result | None:
    """Check a file that the service may hold."""
    try:
        found = _check_kind(path)
        where = path if found is not None else _target(path).parent
        if not os.access(where, os.W_OK):
            raise _refusal(f"{path}: this user cannot write to {where}")
    except OSError as error:
        raise _refusal(f"{path}: {error.strerror}") from error
    if found is not None and found.st_size not in (0, size):
        raise _refusal(
            f"{path}: has {found.st_size:,} bytes, but g3.capacity_bytes_per_file "
            f"gives {size:,} in whole chunks, and the KVCR service keeps the file's "
            "contents. Set the option to the file's size, or stop the service and "
            "remove the file"
        )
    return found


def _open(path: Path, made: list[Path], opened: ExitStack) -> os.stat_result:
    """Open and lock a file for this engine alone; create it if it does not exist."""
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
        return os.fstat(descriptor)
    except OSError as error:
        raise _refusal(
            f"{path}: {error.strerror}; give a file that this user may write, on a "
            "filesystem that supports locks"
        ) from error


def _check_direct(path: Path) -> None:
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_DIRECT))
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        raise _refusal(
            f"{path}: {_filesystem(path)} does not support direct I/O (O_DIRECT), "
            "which KVCR needs; use a filesystem on a disk, such as ext4 or XFS"
        ) from None


def _check_room(found: Mapping[Path, os.stat_result | None], size: int) -> None:
    """Check that each filesystem has room for the files that have to be extended."""
    together: dict[int, list[Path]] = {}
    for path, status in found.items():
        if status is None or status.st_size != size:
            device = _target(path).parent.stat().st_dev
            together.setdefault(device, []).append(path)
    for paths in together.values():
        room = os.statvfs(_target(paths[0]).parent)
        # A file of another size frees its blocks first.
        statuses = [status for path in paths if (status := found[path])]
        freed = sum(512 * status.st_blocks for status in statuses)
        free = room.f_bavail * room.f_frsize + freed
        needed = size * len(paths)
        if needed > free:
            raise _refusal(
                f"{', '.join(map(str, paths))}: {needed:,} bytes are needed "
                f"(g3.capacity_bytes_per_file = {size:,} in whole chunks), but only "
                f"{free:,} are free there; make it smaller, or free space"
            )


def _in_use(by: str) -> str:
    return (
        f"is in use by {by}; give each engine, and each local data-parallel rank, a "
        "file of its own"
    )


def _holder(descriptor: int) -> str:
    """The process that locked a file, as far as this container can see it."""
    found = os.fstat(descriptor)
    major, minor = os.major(found.st_dev), os.minor(found.st_dev)
    wanted = f"{major:02x}:{minor:02x}:{found.st_ino}"
    with suppress(OSError):
        for line in Path("/proc/locks").read_text().splitlines():
            fields = line.split()
            if len(fields) > 5 and fields[1] == "FLOCK" and fields[5] == wanted:
                if int(fields[4]) == os.getpid():
                    return "another tier or path of this engine"
                return f"another engine, process {fields[4]}"
    return "another engine"


def _filesystem(path: Path) -> str:
    with suppress(Exception):
        mounts = psutil.disk_partitions(all=True)
        above = [mount for mount in mounts if path.is_relative_to(mount.mountpoint)]
        nearest = max(above, key=lambda mount: len(mount.mountpoint))
        return f"its filesystem, {nearest.fstype},"
    return "its filesystem"
