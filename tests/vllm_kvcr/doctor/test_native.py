# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What the doctor finds out in processes of its own: plugins, backends, a transfer."""

import os
from typing import Any, ClassVar

import pytest

from tests.vllm_kvcr.doctor.asking import PEERS, setting, the_only
from vllm_kvcr.doctor import adapter, backends, loopback
from vllm_kvcr.doctor.child import Child, ChildFailed, ask
from vllm_kvcr.doctor.finding import Status

POOL = {"secondary_g2_slots": 4}


# --- a child -------------------------------------------------------------------------


def test_a_child_that_crashes_says_how_it_ended():
    with pytest.raises(ChildFailed, match=r"ended with status 1.*No module named"):
        ask("vllm_kvcr.no_such_module", {}, 60)


def test_a_child_that_hangs_is_killed_when_its_time_is_over():
    child = Child("vllm_kvcr.doctor.which_adapter", {})
    pid = child._process.pid
    with child:
        with pytest.raises(ChildFailed, match="no answer in time"):
            child.receive(0.0)
        child.kill()
    assert not os.path.exists(f"/proc/{pid}")


# --- the adapter ---------------------------------------------------------------------


def test_vllm_takes_this_adapter(monkeypatch):
    monkeypatch.setenv("VLLM_PLUGINS", "kvcr")
    told = the_only("adapter", setting())
    assert told.status is Status.OK
    assert told.data["tier"].endswith("manager.py")


def test_a_filtered_plugin_is_named_as_the_reason(monkeypatch):
    monkeypatch.setenv("VLLM_PLUGINS", "another")
    told = the_only("adapter", setting())
    assert told.status is Status.FAIL
    assert "VLLM_PLUGINS='another'" in told.text


@pytest.mark.parametrize(
    ("entry_points", "part"), [([], "entry point"), (["kvcr"], "another plugin")]
)
def test_other_reasons_for_another_adapter(monkeypatch, entry_points, part):
    class Named:
        name = "kvcr"

    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    monkeypatch.setattr(
        adapter, "entry_points", lambda group: [Named() for _ in entry_points]
    )
    answer = {"folder": "/elsewhere/kvcr", "tier": "/elsewhere", "error": None}
    monkeypatch.setattr(adapter, "ask", lambda *given: answer)
    told = the_only("adapter", setting())
    assert told.status is Status.FAIL
    assert "/elsewhere/kvcr" in told.text
    assert part in told.text


def test_vllm_that_cannot_start_fails(monkeypatch):
    def broken(*given: Any) -> Any:
        raise ChildFailed("the process was ended by SIGSEGV")

    monkeypatch.setattr(adapter, "ask", broken)
    told = the_only("adapter", setting())
    assert told.status is Status.FAIL
    assert "SIGSEGV" in told.text


# --- backends ------------------------------------------------------------------------


def test_backends_that_nixl_creates_are_good():
    g3 = {"paths": ["/x"], "capacity_bytes_per_file": 4096, "backend": "POSIX"}
    about = setting(POOL | {"g3": g3})
    found = list(backends.check(about))
    assert [(f.status, f.data["backend"]) for f in found] == [
        (Status.OK, "UCX"),
        (Status.OK, "POSIX"),
    ]


def test_a_backend_that_is_not_there_fails_and_says_what_is():
    told = the_only("backends", setting(PEERS | {"remote_fw_dram_backend": "NONE"}))
    assert told.status is Status.FAIL
    assert "remote_fw_dram_backend" in told.remedy
    assert "UCX" in told.remedy


def test_files_default_that_is_not_there_is_a_warning_that_names_posix(monkeypatch):
    g3 = {"paths": ["/x"], "capacity_bytes_per_file": 4096}
    monkeypatch.setattr(backends, "_file_default", lambda: "NONE")
    found = list(backends.check(setting(POOL | {"g3": g3})))
    assert [f.status for f in found] == [Status.OK, Status.WARN]
    assert '"backend": "POSIX"' in found[1].remedy


# --- the transfer --------------------------------------------------------------------


def test_a_transfer_between_two_processes_has_the_right_bytes():
    told = the_only("loopback", setting(PEERS, chunk_bytes=1 << 20))
    assert told.status is Status.OK, told.text
    assert told.data["arrived"] == told.data["asked"] > 0
    assert told.data["wrong"] == 0
    assert told.data["gigabytes_per_second"] > 0


class Answering:
    """Takes a child's place, and answers ``answers``; an exception is raised."""

    answers: ClassVar[list[Any]]

    def __init__(self, module: str, given: dict[str, Any]) -> None:
        self._answers = list(self.answers)

    def __enter__(self) -> "Answering":
        return self

    def __exit__(self, *raised: object) -> None:
        pass

    def send(self, value: Any) -> None:
        pass

    def kill(self) -> None:
        pass

    def receive(self, deadline: float) -> Any:
        answer = self._answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


@pytest.mark.parametrize(
    ("answers", "part"),
    [
        ([ChildFailed("ended by SIGSEGV")], "the source did not start: ended by SIG"),
        (["ready", ChildFailed("no answer in time")], "did not end: no answer in time"),
    ],
)
def test_a_transfer_that_does_not_start_or_end_fails(monkeypatch, answers, part):
    monkeypatch.setattr(Answering, "answers", answers, raising=False)
    monkeypatch.setattr(loopback, "Child", Answering)
    told = the_only("loopback", setting(PEERS))
    assert told.status is Status.FAIL
    assert part in told.text


@pytest.mark.parametrize(
    ("pulled", "part"),
    [
        ({"asked": 4, "arrived": 3, "wrong": 0}, "3 of 4 blocks arrived"),
        ({"asked": 4, "arrived": 4, "wrong": 1}, "wrong bytes"),
    ],
)
def test_blocks_that_are_lost_or_wrong_fail(monkeypatch, pulled, part):
    monkeypatch.setattr(Answering, "answers", ["ready", pulled], raising=False)
    monkeypatch.setattr(loopback, "Child", Answering)
    told = the_only("loopback", setting(PEERS))
    assert told.status is Status.FAIL
    assert part in told.text


def test_the_ends_use_the_configurations_backends_and_this_host_only():
    given = PEERS | {
        "control_host": "0.0.0.0",
        "control_advertise_host": "10.0.0.5",
        "remote_landing": "primary",
        "remote_fw_dram_backend": "Libfabric",
    }
    ((_, config),) = setting(given).valid
    chosen = loopback.options(config, 20_001, 8)
    assert chosen["control_host"] == chosen["control_advertise_host"] == "127.0.0.1"
    assert chosen["control_ports"] == [20_001]
    assert chosen["remote_landing"] == "primary"
    assert chosen["remote_fw_dram_backend"] == "LIBFABRIC"
