# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The files of g3 at start: what is refused, what is recreated, what is left behind.

Over the real KVCR and NIXL, which open the files.
"""

import contextlib
import errno
import fcntl
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.v1.kv_offload.tiering.kvcr.builders import free_port
from tests.v1.kv_offload.tiering.kvcr.conftest import LogLines
from tests.v1.kv_offload.tiering.kvcr.rig import ROW_BYTES, Rig
from tests.v1.kv_offload.tiering.kvcr.service import Service
from vllm.v1.kv_offload.tiering.kvcr.backend import files
from vllm.v1.kv_offload.tiering.kvcr.config import OptionError

SIZE = 16 * ROW_BYTES


@pytest.fixture
def folder(tmp_path: Path, disk: Path) -> Path:
    """Empty, on a disk that takes direct I/O."""
    own = disk / tmp_path.name
    own.mkdir()
    return own


def options(paths: Any, size: Any = SIZE, **more: Any) -> dict[str, Any]:
    g3 = {"paths": paths, "capacity_bytes_per_file": size, "backend": "POSIX"}
    return {"secondary_g2_slots": 8, "g3": g3} | more


@contextlib.contextmanager
def started(paths: Any, size: Any = SIZE, **more: Any) -> Iterator[Rig]:
    with contextlib.closing(Rig(**options(paths, size, **more))) as rig:
        yield rig


def refusal(paths: Any, size: Any = SIZE, **more: Any) -> str:
    with pytest.raises(OptionError) as refused:
        Rig(**options(paths, size, **more))
    assert "g3." in str(refused.value)
    return str(refused.value)


def content(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in folder.iterdir()}


# --- restarts --------------------------------------------------------------------


@pytest.mark.parametrize("before", [1, 2 * SIZE, SIZE + 1])
def test_a_file_of_another_size_is_made_anew_once(
    folder: Path, before: int, tier_log: LogLines
) -> None:
    """As left by another capacity, chunk size or model, or half made."""
    path = folder / "kv"
    path.write_bytes(b"x" * before)
    with started(path):
        assert content(folder) == {"kv": SIZE}
        assert not any(path.read_bytes())
    with started(path):
        assert content(folder) == {"kv": SIZE}
    (line,) = [text for text in tier_log.texts() if "recreated" in text]
    for part in (str(path), str(before), str(SIZE)):
        assert part in line


def test_a_service_keeps_what_a_file_holds(folder: Path) -> None:
    (folder / "kv").write_bytes(b"x" * 3 * ROW_BYTES)
    with contextlib.closing(Service(folder, slots=8)) as service:
        more = service.options() | {"control_ports": [service.port]}
        text = refusal(folder / "kv", **more)
    assert f"{3 * ROW_BYTES:,}" in text
    assert f"{SIZE:,}" in text
    assert (folder / "kv").read_bytes() == b"x" * 3 * ROW_BYTES


# --- a failed start --------------------------------------------------------------


def test_a_failed_start_leaves_no_file_behind(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fill(descriptor: int, offset: int, size: int) -> None:
        os.ftruncate(descriptor, size // 2)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, "posix_fallocate", fill)
        text = refusal([folder / "a", folder / "b"])
    assert "No space left" in text
    assert "capacity_bytes_per_file" in text
    assert content(folder) == {}
    with started([folder / "a", folder / "b"]):
        assert content(folder) == {"a": SIZE, "b": SIZE}


def test_a_start_that_fails_elsewhere_leaves_no_file_either(folder: Path) -> None:
    with pytest.raises(ValueError, match="secondary_g2_slots"):
        Rig(**options(folder / "kv", secondary_g2_slots=1 << 40))
    assert content(folder) == {}


def test_a_file_that_was_there_stays(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "kv").touch()
    error = OSError(errno.EDQUOT, "quota")
    monkeypatch.setattr(os, "posix_fallocate", lambda *_: (_ for _ in ()).throw(error))
    assert "no room" in refusal(folder / "kv")
    assert content(folder) == {"kv": 0}


def test_without_room_nothing_is_begun(folder: Path) -> None:
    free = os.statvfs(folder).f_bavail * os.statvfs(folder).f_frsize
    each = free // ROW_BYTES * ROW_BYTES
    text = refusal([folder / "a", folder / "b"], each)
    assert f"{2 * each:,}" in text
    assert str(folder / "b") in text
    assert content(folder) == {}


def test_a_refused_start_changes_no_file(folder: Path) -> None:
    (folder / "a").write_bytes(b"x" * 100)
    refusal([folder / "a", folder / "no" / "b"])
    assert content(folder) == {"a": 100}


# --- what is no file to use ------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("mount/kv", "mount does not exist, and it is not created"),
        (".", "is a folder"),
        ("/dev/null", "is not a regular file"),
        ("circle", "symbolic links"),
    ],
)
def test_what_is_no_file_to_use(folder: Path, path: str, told: str) -> None:
    (folder / "circle").symlink_to(folder / "back")
    (folder / "back").symlink_to(folder / "circle")
    assert told in refusal(folder / path)
    assert {each.name for each in folder.iterdir()} == {"circle", "back"}


@pytest.mark.parametrize("link", [os.symlink, os.link])
def test_one_file_by_two_names_is_refused(folder: Path, link: Any) -> None:
    (folder / "kv").touch()
    link(folder / "kv", folder / "same")
    text = refusal([folder / "kv", folder / "same"])
    assert str(folder / "same") in text
    assert "in use" in text


def test_a_link_to_a_file_is_followed(folder: Path) -> None:
    (folder / "link").symlink_to(folder / "kv")
    with started(folder / "link"):
        assert content(folder) == {"kv": SIZE, "link": SIZE}


def test_a_file_that_may_not_be_written_is_told_with_the_reason(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def deny(path: Any, *arguments: Any, **keywords: Any) -> int:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    # Root may write anything.
    monkeypatch.setattr(os, "open", deny)
    with pytest.raises(OptionError, match=r"g3\.paths: .*/kv: Permission denied"):
        files.prepare([folder / "kv"], SIZE, kept=False)


def test_a_filesystem_without_direct_io_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse_direct(path: Any, flags: int, *mode: int, real: Any = os.open) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return int(real(path, flags, *mode))

    monkeypatch.setattr(os, "open", refuse_direct)
    text = refusal(folder / "kv")
    assert "O_DIRECT" in text
    assert "its filesystem, " in text
    assert content(folder) == {}


# --- files in use ----------------------------------------------------------------


def test_a_second_tier_of_an_engine_needs_a_file_of_its_own(folder: Path) -> None:
    with started(folder / "kv"):
        text = refusal(folder / "kv")
    assert f"{folder / 'kv'}: is in use by another tier" in text


HOLD = "import fcntl, sys; f = open(sys.argv[1], 'r+'); fcntl.flock(f, fcntl.LOCK_EX)"


def test_a_file_of_another_engine_is_told_with_its_process(folder: Path) -> None:
    (folder / "kv").touch()
    holder = subprocess.Popen(
        [sys.executable, "-c", f"{HOLD}; print(); input()", str(folder / "kv")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        text = refusal(folder / "kv")
        holder.kill()
    assert "is in use by another engine" in text
    assert f"process {holder.pid};" in text


def test_a_file_that_was_taken_in_between_is_told_the_same_way(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """KVCR's own refusal is a bare ``BlockingIOError``."""
    with (folder / "kv").open("w") as other:
        monkeypatch.setattr(files, "prepare", lambda *_, **__: [])
        fcntl.flock(other, fcntl.LOCK_EX)
        text = refusal(folder / "kv")
    assert "is in use by another engine" in text


def test_a_port_is_refused_before_a_file_is_made(folder: Path) -> None:
    port = free_port()
    with (
        socket.create_server(("0.0.0.0", port)),
        pytest.raises(OptionError, match=rf"control_ports: port {port} .*in use"),
    ):
        Rig(**options(folder / "kv", control_ports=[port]))
    assert content(folder) == {}
