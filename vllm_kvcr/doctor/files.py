# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Checks the files of ``g3``: each must be this engine's own, and allow direct I/O."""

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil

from vllm_kvcr.doctor.finding import Finding, fail, ok, size, warn
from vllm_kvcr.doctor.setting import Setting

LOCKS = Path("/proc/locks")


def check(setting: Setting) -> Iterator[Finding]:
    # Here, because without kvcr or vLLM other checks still run.
    from vllm.v1.kv_offload.tiering.kvcr.config import OptionError

    configs = [c for _, c in setting.valid if c.g3 is not None]
    if not configs:
        yield ok("no g3: no files are used")
    seen: set[Path] = set()
    for config in configs:
        ranks = len(config.control_ports or (0,))
        for rank in range(ranks):
            try:
                g3 = config.for_rank(rank if ranks > 1 else None).g3
            except OptionError as error:
                yield fail(
                    str(error).removeprefix("kvcr tier: "), "give each rank its own"
                )
                break
            assert g3 is not None
            capacity = g3.capacity_bytes_per_file
            if setting.chunk_bytes is not None:
                capacity -= capacity % setting.chunk_bytes
            for given in g3.paths:
                path = given.expanduser().resolve()
                if path in seen:
                    yield fail(
                        f"{path} is given twice", "give each file once in g3.paths"
                    )
                    continue
                seen.add(path)
                yield _check_file(
                    path,
                    capacity,
                    is_exact=setting.chunk_bytes is not None,
                    kept=config.kvcr_service_socket_path is not None,
                )


def _check_file(path: Path, capacity: int, *, is_exact: bool, kept: bool) -> Finding:
    folder = path.parent
    if not folder.is_dir():
        return fail(
            f"{path}: {folder} is not a folder, and the tier does not create it",
            "mount the disk, or create the folder",
        )
    try:
        held = path.stat() if path.exists() else None
        if held is not None and not stat.S_ISREG(held.st_mode):
            return fail(
                f"{path} is not a file", "give a file's path; it is created if absent"
            )
        filesystem = _filesystem(folder)
        free = shutil.disk_usage(folder).free
    except OSError as error:
        return fail(
            f"{path}: {error.strerror or error}", "give a path that can be used"
        )
    known = {
        "path": str(path),
        "filesystem": filesystem,
        "free": free,
        "capacity": capacity,
        "size": None if held is None else held.st_size,
    }
    where = f"{path} on {filesystem}"
    if not os.access(folder, os.W_OK | os.X_OK) or (
        held is not None and not os.access(path, os.R_OK | os.W_OK)
    ):
        return fail(
            f"{where} cannot be written by this user",
            "give the engine's user write access, or another path",
            **known,
        )
    if held is not None:
        holders = locked_by(path)
        if holders is not None:
            return fail(
                f"{where} is in use by {holders or 'another process'}",
                "stop that engine, or give this one another path",
                holders=holders,
                **known,
            )
    fits = held is None or not held.st_size or _fits(held.st_size, capacity, is_exact)
    if kept and not fits:
        return fail(
            f"{where} has {known['size']} bytes, but g3.capacity_bytes_per_file asks "
            f"for {capacity}, and the KVCR service keeps the file's contents",
            "restore that option, or stop the service and remove the file",
            **known,
        )
    missing = capacity - (held.st_size if held is not None else 0)
    if free < missing:
        return fail(
            f"{where} needs {size(missing)}, but only {size(free)} are free",
            "lower g3.capacity_bytes_per_file, or free space",
            **known,
        )
    refusal = _refuses_direct_io(path if held is not None else None, folder)
    if refusal is not None:
        return fail(
            f"{where} does not support direct I/O, which KVCR needs: {refusal}",
            "use a local file system such as ext4 or xfs, not one in memory",
            **known,
        )
    if not fits:
        return warn(
            f"{where} has {known['size']} bytes and is recreated with {capacity}; what "
            "it holds is not used",
            "nothing, unless another engine still needs that file",
            **known,
        )
    there = "is free to use" if held is not None else "can be created"
    return ok(f"{where} {there}, {size(capacity)} with {size(free)} free", **known)


def _fits(held: int, capacity: int, is_exact: bool) -> bool:
    # KVCR rounds down to whole chunks, whose size may not be known here.
    return held == capacity if is_exact else capacity // 2 < held <= capacity


def _filesystem(folder: Path) -> str:
    mounts = {p.mountpoint: p.fstype for p in psutil.disk_partitions(all=True)}
    for parent in (folder, *folder.parents):
        if str(parent) in mounts:
            return mounts[str(parent)]
    return "unknown file system"


def locked_by(path: Path) -> str | None:
    """Who holds KVCR's lock on a file; ``None`` if nobody does, empty if not known.

    This takes a shared lock for an instant; KVCR's own lock is exclusive.
    """
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return _holders(os.fstat(file.fileno()).st_ino)
        fcntl.flock(file, fcntl.LOCK_UN)
    return None


def _holders(inode: int) -> str:
    pids = []
    with contextlib.suppress(OSError):
        for line in LOCKS.read_text().splitlines():
            # 1: FLOCK  ADVISORY  WRITE 4711 fe:00:131077 0 EOF
            parts = line.split()
            # The device is ignored, since it differs from stat's on some file systems.
            if parts[1] == "FLOCK" and parts[5].split(":")[-1] == str(inode):
                pids.append(int(parts[4]))
    names = []
    for pid in pids:
        name = ""
        with contextlib.suppress(psutil.Error, ValueError):
            name = psutil.Process(pid).name()
        names.append(f"{name} (process {pid})".strip() if pid > 0 else "")
    return ", ".join(filter(None, names))


def _refuses_direct_io(path: Path | None, folder: Path) -> str | None:
    try:
        if path is not None:
            os.close(os.open(path, os.O_RDWR | os.O_DIRECT))
        else:
            with tempfile.NamedTemporaryFile(
                dir=folder, prefix=".kvcr-doctor-"
            ) as file:
                os.close(os.open(file.name, os.O_RDWR | os.O_DIRECT))
    except OSError as error:
        return error.strerror or str(error)
    return None
