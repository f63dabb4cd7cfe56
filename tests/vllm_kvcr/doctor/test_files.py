# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What the doctor says of the files of ``g3``, on a real file system."""

import fcntl
import os
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.vllm_kvcr.doctor.asking import failures, setting, the_only
from vllm_kvcr.doctor import files
from vllm_kvcr.doctor.finding import Status

CAPACITY = 64 << 10


@pytest.fixture
def folder():
    # One in memory may take no direct I/O.
    with tempfile.TemporaryDirectory(prefix="kvcr-test-", dir="/var/tmp") as path:
        yield Path(path)


@pytest.fixture
def path(folder):
    return folder / "kv.g3"


def g3(*paths: Path, **tier: Any) -> dict[str, Any]:
    files = {"paths": [str(p) for p in paths], "capacity_bytes_per_file": CAPACITY}
    return {"secondary_g2_slots": 4, "g3": files, **tier}


def test_a_file_that_can_be_created_is_good_and_is_not_created(folder, path):
    told = the_only("files", setting(g3(path)))
    assert told.status is Status.OK
    assert told.data["filesystem"] in told.text
    assert told.data["free"] > CAPACITY
    assert list(folder.iterdir()) == []


def test_a_file_of_the_right_size_is_good(path):
    path.write_bytes(bytes(CAPACITY))
    assert the_only("files", setting(g3(path))).status is Status.OK
    # As an engine takes it afterwards.
    with path.open("r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


@pytest.mark.parametrize("known", [True, False])
def test_a_locked_file_fails_and_names_who_has_it(known, path, monkeypatch, tmp_path):
    if not known:
        monkeypatch.setattr(files, "LOCKS", tmp_path / "absent")
    path.write_bytes(bytes(CAPACITY))
    with path.open("r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        (text,) = failures("files", setting(g3(path)))
    assert (f"process {os.getpid()}" if known else "another process") in text


def test_a_file_of_another_size_is_recreated_unless_a_service_keeps_it(path):
    path.write_bytes(bytes(CAPACITY // 2))
    told = the_only("files", setting(g3(path)))
    assert told.status is Status.WARN
    assert str(CAPACITY // 2) in told.text
    service = {
        "kvcr_service_socket_path": "/run/kvcr.sock",
        "compatibility_digest": "digest",
        "control_ports": [24990],
        "secondary_g2_slots": 0,
    }
    (text,) = failures("files", setting(g3(path, **service)))
    assert str(CAPACITY // 2) in text


def test_each_local_rank_needs_files_of_its_own(folder, path):
    ports = {"control_ports": [24990, 24991]}
    (text,) = failures("files", setting(g3(path, **ports)))
    assert "rank" in text
    told = list(files.check(setting(g3(folder / "kv-{rank}.g3", **ports))))
    assert [Path(each.data["path"]).name for each in told] == ["kv-0.g3", "kv-1.g3"]
    assert {each.status for each in told} == {Status.OK}


def test_capacity_is_rounded_down_to_chunks_where_their_size_is_known(path):
    path.write_bytes(bytes(48 << 10))
    for chunk, status in ((48 << 10, Status.OK), (32 << 10, Status.WARN)):
        told = the_only("files", setting(g3(path), chunk_bytes=chunk))
        assert told.status is status


@pytest.mark.parametrize(
    ("path", "part"),
    [
        (".", "is not a file"),
        ("absent/kv.g3", "is not a folder"),
        ("plain/kv.g3", "is not a folder"),
    ],
)
def test_what_is_no_file_or_in_no_folder_fails(path, part, folder):
    (folder / "plain").write_bytes(b"")
    (text,) = failures("files", setting(g3(folder / path)))
    assert part in text


def test_what_cannot_be_written_fails(path, monkeypatch):
    # Permissions do not bind root, as which tests may run.
    monkeypatch.setattr(files.os, "access", lambda path, mode: False)
    (text,) = failures("files", setting(g3(path)))
    assert "cannot be written" in text


def test_a_full_file_system_fails(path, monkeypatch):
    usage = SimpleNamespace(free=CAPACITY - 1)
    monkeypatch.setattr(files.shutil, "disk_usage", lambda path: usage)
    (text,) = failures("files", setting(g3(path)))
    assert "are free" in text


def test_a_file_system_without_direct_io_fails(path, monkeypatch):
    def refuse(path: Any, flags: int) -> int:
        assert flags & os.O_DIRECT
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr(files.os, "open", refuse)
    path.write_bytes(b"")
    (text,) = failures("files", setting(g3(path)))
    assert "direct I/O" in text
