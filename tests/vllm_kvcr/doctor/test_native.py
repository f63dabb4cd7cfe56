# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What the doctor finds out in processes of its own: plugins, backends, a transfer."""

import os
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from tests.vllm_kvcr.doctor.asking import PEERS, ask, setting, the_only
from vllm_kvcr.doctor import adapter, backends, child, loopback
from vllm_kvcr.doctor.child import Child, ChildFailed
from vllm_kvcr.doctor.finding import Status

G3 = {"paths": ["/x"], "capacity_bytes_per_file": 4096}


def with_files(**g3: Any) -> Any:
    return setting({"secondary_g2_slots": 4, "g3": G3 | g3})


# --- a child -------------------------------------------------------------------------


def test_a_child_that_crashes_says_how_it_ended():
    with pytest.raises(ChildFailed, match=r"ended with status 1.*No module named"):
        child.ask("vllm_kvcr.no_such_module", {}, 60)


def test_a_child_that_hangs_is_killed_when_its_time_is_over():
    hanging = Child("vllm_kvcr.doctor.which_adapter", {})
    with hanging:
        with pytest.raises(ChildFailed, match="no answer in time"):
            hanging.receive(0.0)
        hanging.kill()
    assert not os.path.exists(f"/proc/{hanging._process.pid}")


# --- the adapter ---------------------------------------------------------------------


def test_vllm_takes_this_adapter(monkeypatch):
    monkeypatch.setenv("VLLM_PLUGINS", "kvcr")
    told = the_only("adapter", setting())
    assert told.status is Status.OK
    assert told.data["tier"].endswith("manager.py")


@pytest.mark.parametrize(
    ("plugins", "entry_points", "part"),
    [
        ("", ["kvcr"], "VLLM_PLUGINS='' leaves it out"),
        ("another", ["kvcr"], "VLLM_PLUGINS='another' leaves it out"),
        ("kvcr", [], "entry point"),
        ("kvcr", ["kvcr"], "another plugin"),
        (None, ["kvcr"], "another plugin"),
    ],
)
def test_why_another_adapter_serves(monkeypatch, plugins, entry_points, part):
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    if plugins is not None:
        monkeypatch.setenv("VLLM_PLUGINS", plugins)
    named = [SimpleNamespace(name=name) for name in entry_points]
    monkeypatch.setattr(adapter, "entry_points", lambda group: named)
    answer = {"folder": "/elsewhere/kvcr", "tier": "/elsewhere", "error": None}
    monkeypatch.setattr(adapter, "ask", lambda *given: answer)
    told = the_only("adapter", setting())
    assert told.status is Status.FAIL
    assert "/elsewhere/kvcr" in told.text
    assert part in told.text


def test_vllm_that_cannot_start_fails(monkeypatch):
    broken = MagicMock(side_effect=ChildFailed("the process was ended by SIGSEGV"))
    monkeypatch.setattr(adapter, "ask", broken)
    told = the_only("adapter", setting())
    assert told.status is Status.FAIL
    assert "SIGSEGV" in told.text


# --- backends ------------------------------------------------------------------------


def test_a_default_that_nixl_cannot_create_is_a_warning_that_names_one_it_can(
    monkeypatch,
):
    monkeypatch.setattr(backends, "_file_default", lambda: "NONE")
    created, absent = ask("backends", with_files())
    assert (created.status, created.data["backend"]) == (Status.OK, "UCX")
    assert (absent.status, absent.data["backend"]) == (Status.WARN, "NONE")
    assert "UCX" in absent.data["available"]
    assert '"backend": "POSIX"' in absent.remedy


def test_a_backend_that_was_chosen_and_is_not_there_fails(monkeypatch):
    def only_ucx(name: str, options: dict[str, str]) -> tuple[list[str], str | None]:
        return ["UCX"], None if name == "UCX" else "no such plugin"

    monkeypatch.setattr(backends, "_try", only_ucx)
    for about, option in (
        (setting(PEERS | {"remote_fw_dram_backend": "NONE"}), "remote_fw_dram_backend"),
        (with_files(backend="POSIX"), "g3.backend"),
    ):
        told = ask("backends", about)[-1]
        assert told.status is Status.FAIL
        assert "no such plugin" in told.text
        assert option in told.remedy
        assert "UCX" in told.remedy


# --- the transfer --------------------------------------------------------------------


def test_a_transfer_between_two_processes_has_the_right_bytes():
    told = the_only("loopback", setting(PEERS, chunk_bytes=1 << 20))
    assert told.status is Status.OK, told.text
    assert told.data["arrived"] == told.data["asked"] > 0
    assert told.data["wrong"] == 0
    assert told.data["gigabytes_per_second"] > 0


@pytest.mark.parametrize(
    ("answers", "part"),
    [
        ([ChildFailed("ended by SIGSEGV")], "the source did not start: ended by SIG"),
        (["ready", ChildFailed("no answer in time")], "did not end: no answer in time"),
        (["ready", {"asked": 4, "arrived": 3, "wrong": 0}], "3 of 4 blocks arrived"),
        (["ready", {"asked": 4, "arrived": 4, "wrong": 1}], "wrong bytes"),
    ],
)
def test_a_transfer_that_does_not_start_or_end_or_loses_blocks_fails(
    monkeypatch, answers, part
):
    def answering(module: str, given: dict[str, Any]) -> MagicMock:
        end = MagicMock()
        end.__enter__.return_value = end
        end.receive.side_effect = answers
        return end

    monkeypatch.setattr(loopback, "Child", answering)
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
