# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""``vllm-kvcr doctor``: its arguments, exit status and record."""

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.vllm_kvcr.doctor.asking import transfer
from vllm_kvcr.doctor import command
from vllm_kvcr.doctor.finding import Finding, fail, ok, warn
from vllm_kvcr.doctor.setting import Setting

SECRET = "hunter2-hunter2"
OBJECT_STORE = {
    "secondary_g2_slots": 4,
    "g3": {
        "paths": ["/x"],
        "capacity_bytes_per_file": 4096,
        "backend_options": {"access": SECRET},
    },
}


def pretend(monkeypatch: pytest.MonkeyPatch, *findings: Finding | Exception) -> None:
    """Have each check give these findings."""

    def check(setting: Setting) -> Iterator[Finding]:
        for finding in findings:
            if isinstance(finding, Exception):
                raise finding
            yield finding

    def import_module(name: str) -> SimpleNamespace:
        assert name.rpartition(".")[2] in command.CHECKS
        return SimpleNamespace(check=check)

    monkeypatch.setattr(command, "import_module", import_module)


def record(capsys: Any, *arguments: str) -> tuple[int, dict[str, Any]]:
    status = command.main(["--json", *arguments])
    return status, json.loads(capsys.readouterr().out)


def test_the_record_has_each_finding_and_counts_them(monkeypatch, capsys):
    pretend(monkeypatch, ok("good", number=3), fail("bad", "do"))
    status, told = record(capsys, "--only", "files", "--only", "memory")
    assert status == 1
    assert told["summary"] == {"ok": 2, "warn": 0, "fail": 2}
    assert [c["check"] for c in told["checks"]] == ["files"] * 2 + ["memory"] * 2
    assert told["checks"][0] == {
        "check": "files",
        "status": "ok",
        "text": "good",
        "remedy": None,
        "data": {"number": 3},
    }
    assert set(told) == {"vllm_kvcr", "machine", "summary", "checks"}


def test_a_check_that_breaks_is_a_warning_and_no_failure(monkeypatch, capsys):
    pretend(monkeypatch, ok("good"), RuntimeError("broken"))
    status, told = record(capsys)
    assert status == 0
    count = len(command.CHECKS)
    assert told["summary"] == {"ok": count, "warn": count, "fail": 0}
    assert "RuntimeError: broken" in told["checks"][1]["text"]


def test_checks_can_be_left_out(monkeypatch, capsys):
    pretend(monkeypatch, ok("good"))
    _, told = record(capsys, "--skip", "loopback", "--skip", "adapter")
    left = [c for c in command.CHECKS if c not in ("loopback", "adapter")]
    assert [c["check"] for c in told["checks"]] == left


def test_nothing_secret_is_in_the_record(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("SOME_VARIABLE", "a-secret-of-the-environment")
    pretend(
        monkeypatch,
        warn(f"NIXL said {SECRET}", f"change {SECRET}", deep=[{"x": f"<{SECRET}>"}]),
    )
    file = tmp_path / "config.json"
    file.write_text(json.dumps(transfer(OBJECT_STORE)))
    _, told = record(capsys, "--config", str(file), "--only", "options")
    assert told["checks"][0]["text"] == "NIXL said <hidden>"
    assert SECRET not in json.dumps(told)
    assert "a-secret-of" not in json.dumps(told)


def test_secrets_are_taken_out_of_a_refusal_that_quotes_them(capsys):
    bad = transfer(OBJECT_STORE | {"g3": {"backend_options": {"key": [SECRET]}}})
    status, told = record(capsys, "--config", json.dumps(bad), "--only", "options")
    assert status == 1
    assert "backend_options" in told["checks"][0]["text"]
    assert SECRET not in json.dumps(told)


def test_people_read_the_status_the_line_and_the_remedy(monkeypatch, capsys):
    pretend(monkeypatch, fail("[bold]bad", "do [this]"))
    assert command.main(["--only", "files"]) == 1
    shown = capsys.readouterr().out
    for part in ("fail", "files", "[bold]bad", "→ do [this]", "0 ok, 0 warn, 1 fail"):
        assert part in shown


@pytest.mark.parametrize("given", ["{", "[1]", "/no/such/file"])
def test_what_is_not_a_configuration_is_wrong_usage(given, capsys):
    with pytest.raises(SystemExit) as exit_:
        command.main(["--config", given])
    assert exit_.value.code == 2
    assert "--config" in capsys.readouterr().err


def test_every_check_named_is_a_module_of_the_package():
    folder = Path(command.__file__).parent
    assert all((folder / f"{name}.py").is_file() for name in command.CHECKS)
