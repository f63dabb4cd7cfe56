# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""``vllm-kvcr guard``, and the doctor's check of the service that it starts."""

import contextlib
import json
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.vllm_kvcr.doctor.asking import PEERS, ask, failures, transfer
from vllm.v1.kv_offload.tiering.kvcr.keys import make_codec
from vllm_kvcr import guard
from vllm_kvcr.doctor.finding import Status
from vllm_kvcr.doctor.setting import Setting

MIB = 1 << 20
DIGEST = "model/1"
START_S = 100.0


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    # A socket's path must be short.
    with tempfile.TemporaryDirectory(prefix="kvcr-test-", dir="/var/tmp") as path:
        yield Path(path)


def config(folder: Path, **tier: Any) -> dict[str, Any]:
    return transfer(
        PEERS
        | {
            "kvcr_service_socket_path": str(folder / "kvcr.sock"),
            "compatibility_digest": DIGEST,
        }
        | tier
    )


@pytest.fixture(scope="module")
def service(folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A real service, started by the command."""
    log = (folder / "log").open("wb")
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "vllm_kvcr.cli", "guard"),
            *("--config", json.dumps(config(folder, secondary_g2_slots=8))),
            *("--chunk-bytes", "1MiB", "--pool-dir", str(folder)),
            *("--", "--log-level", "warning"),
        ],
        stdout=log,
        stderr=subprocess.STDOUT,
    )
    try:
        deadline = time.monotonic() + START_S
        while not (folder / "kvcr.sock").exists():
            assert process.poll() is None, (folder / "log").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        yield process
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
        log.close()


def test_the_command_starts_a_service_that_the_doctor_finds_good(service, folder):
    found = ask("guard", Setting(config(folder), chunk_bytes=MIB))
    assert [f.status for f in found] == [Status.OK] * 3, found
    alive, agreeing, holding = found
    # It is the command's own process, so that signals reach it.
    assert f"process {service.pid}" in alive.text
    assert alive.data["pool_bytes"] == [8 * MIB]
    assert agreeing.data["guards"] == 1
    assert holding.data["slots"] == 8


@pytest.mark.parametrize(
    ("tier", "chunk_bytes", "parts"),
    [
        ({"compatibility_digest": "b/2"}, None, ["'b/2'", f"'{DIGEST}'"]),
        ({"control_ports": [24990, 24991]}, None, ["1 guards"]),
        ({}, 9 * MIB, ["smaller than one chunk"]),
    ],
)
def test_a_service_that_does_not_fit_fails(service, folder, tier, chunk_bytes, parts):
    about = Setting(config(folder, **tier), chunk_bytes=chunk_bytes)
    (text,) = failures("guard", about)
    assert all(part in text for part in parts)


@pytest.mark.parametrize("auto", ["auto", " AUTO "])
@pytest.mark.parametrize("namespace", ["auto", "On", True])
def test_a_digest_that_only_the_model_tells_is_a_warning(
    service, folder, auto, namespace
):
    given = config(folder, compatibility_digest=auto, namespace=namespace)
    found = ask("guard", Setting(given))
    assert [f.status for f in found] == [Status.OK, Status.WARN]
    assert DIGEST in found[1].text


def test_a_second_service_is_refused_by_the_first(service, folder):
    given = ["--config", json.dumps(config(folder)), "--pool-size", "1MiB"]
    done = subprocess.run(
        [sys.executable, "-m", "vllm_kvcr.guard", *given, "--pool-dir", str(folder)],
        capture_output=True,
        text=True,
        timeout=START_S,
        check=False,
    )
    assert done.returncode != 0
    assert "another KVCR service is listening" in done.stderr


def test_a_socket_at_which_nothing_listens_fails(tmp_path):
    with contextlib.closing(socket.socket(socket.AF_UNIX)) as dead:
        dead.bind(str(tmp_path / "kvcr.sock"))
    (text,) = failures("guard", Setting(config(tmp_path)))
    assert "no service answers" in text
    assert failures("guard", Setting(config(tmp_path / "absent")))


# --- the command line ----------------------------------------------------------------


def command(capsys: Any, given: dict[str, Any], *arguments: str) -> tuple[int, str]:
    status = guard.main(["--config", json.dumps(given), "--dry-run", *arguments])
    return status, capsys.readouterr().err


def test_guards_socket_and_digest_follow_from_the_configuration(tmp_path, capsys):
    two = config(tmp_path, control_ports=[24990, 24991])
    status, line = command(capsys, two, "--pool-size", "2GiB", "--pool-dir", "/var/tmp")
    assert status == 0
    for part in (
        f"--socket-path {tmp_path}/kvcr.sock",
        "--guard-count 2",
        "--pool-sizes-gb 2 ",
        f"--compatibility-digest {DIGEST}",
    ):
        assert part in line


@pytest.mark.parametrize(
    ("options", "delay"), [({}, 1), ({"nixl_progress_delay_ms": 0}, 0)]
)
def test_nixls_thread_sleeps_in_the_service_as_in_the_engine(
    options, delay, tmp_path, capsys
):
    _, line = command(capsys, config(tmp_path, **options), "--pool-size", "1MiB")
    module, *arguments = shlex.split(line)[2:]
    # In place of the service: what an agent that it makes would get.
    instead = f"""
import runpy, sys
from kvcr import kvcr_service
from nixl import _bindings
def main():
    agent = _bindings.nixlAgentConfig()
    agent.pthrDelay = 0
    print(agent.pthrDelay, "vllm" in sys.modules, *sys.argv[1:])
kvcr_service.main = main
sys.argv = ["service", *{arguments!r}]
runpy.run_module({module!r}, run_name="__main__")
"""
    done = subprocess.run(
        [sys.executable, "-c", instead], capture_output=True, text=True, check=True
    )
    delay_us, has_vllm, *given = done.stdout.split()
    assert int(delay_us) == 1000 * delay
    assert has_vllm == "False"
    assert given == arguments[2:]


def test_the_digest_of_a_namespace_with_a_name_is_the_engines(tmp_path, capsys):
    given = config(tmp_path, compatibility_digest="auto", namespace="llama/1")
    _, line = command(capsys, given, "--pool-size", "1MiB")
    digest = make_codec("llama/1", None, 4096).digest
    assert digest
    assert line.rstrip().endswith(f"--compatibility-digest {digest}")


def test_a_size_is_cut_to_whole_chunks_and_filled_up_to_pages():
    chunks = Setting(transfer({"secondary_g2_slots": 3})).valid[0][1]
    assert guard.pool_bytes(chunks, 10 * MIB, None, 3 * MIB) == 9 * MIB
    assert guard.pool_bytes(chunks, None, None, 5000) == 16384
    assert guard.pool_bytes(chunks, None, 2, MIB) == 2 * MIB


@pytest.mark.parametrize(
    ("tier", "arguments", "part"),
    [
        ({}, [], "--pool-size"),
        ({"secondary_g2_slots": 4}, [], "--chunk-bytes"),
        ({}, ["--pool-size", "1KiB", "--chunk-bytes", "2KiB"], "smaller than one"),
        ({"compatibility_digest": "auto"}, ["--pool-size", "1MiB"], "namespace"),
        ({"control_port": 1}, ["--pool-size", "1MiB"], "unknown option control_port"),
        ({"kvcr_service_socket_path": "/x" * 60}, ["--pool-size", "1MiB"], "longer"),
        ({"kvcr_service_socket_path": "/no/x"}, ["--pool-size", "1MiB"], "/no does"),
        ({}, ["--pool-size", "999TiB"], "do not fit"),
        ({}, ["--pool-size", "1MiB", "--pool-dir", "/no/such"], "--pool-dir"),
    ],
)
def test_what_would_not_work_is_refused_with_the_remedy(
    tier, arguments, part, tmp_path, capsys
):
    status, line = command(capsys, config(tmp_path, **tier), *arguments)
    assert status == 1
    assert part in line


def test_a_configuration_without_a_service_is_refused(capsys):
    given = transfer({"secondary_g2_slots": 4})
    status, line = command(capsys, given, "--pool-size", "1MiB")
    assert status == 1
    assert "kvcr_service_socket_path" in line


def test_a_size_that_is_none_is_wrong_usage(capsys):
    for size in ("64GX", "-1", "0"):
        with pytest.raises(SystemExit):
            guard.main(["--config", "{}", f"--pool-size={size}"])
