# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The compatibility matrix: what it builds, runs and reports, without running it."""

import argparse
import ast
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

from scripts import matrix, matrix_env
from scripts.matrix_env import ROOT, TIER_FOLDER, Environments
from scripts.matrix_report import Outcome, read_junit, table, write_document
from scripts.versions import KVCRS, VLLMS

JUNIT = """<testsuites><testsuite>
<properties><property name="capabilities" value='{"a": true, "b": false}'/></properties>
<testcase classname="t.test_x" name="one"/>
<testcase classname="t.test_x" name="two">%s</testcase>
</testsuite></testsuites>"""


def outcome_of(folder: Path, second_test: str | None, status: int) -> Outcome:
    report = folder / "report.xml"
    if second_test is not None:
        report.write_text(JUNIT % second_test)
    return read_junit(
        report, vllm="0.30.0", kvcr="0.1.0", with_engine=True, status=status, seconds=9
    )


def test_what_passes_is_counted(tmp_path: Path) -> None:
    outcome = outcome_of(tmp_path, "", 0)
    assert outcome.passed
    assert outcome.line == "pass, 2 tests, with engine, 9 s"
    assert outcome.capabilities == {"a": True, "b": False}


@pytest.mark.parametrize("kind", ["failure", "error", "skipped"])
def test_a_test_that_did_not_pass_is_named(tmp_path: Path, kind: str) -> None:
    outcome = outcome_of(tmp_path, f"<{kind}/>", 1)
    assert not outcome.passed
    assert outcome.failures == ["t.test_x::two"]
    assert outcome.verdict == "FAIL, 1 of 2 tests"


@pytest.mark.parametrize(
    ("second_test", "status", "failure"),
    [
        ("", -signal.SIGSEGV, "pytest ended with status -11"),
        (None, -9, "no report; pytest ended with status -9"),
    ],
)
def test_a_run_that_ends_badly_or_without_a_report_has_failed(
    second_test: str | None, status: int, failure: str, tmp_path: Path
) -> None:
    assert outcome_of(tmp_path, second_test, status).failures == [failure]


def test_the_table_has_a_cell_for_each_pair(tmp_path: Path) -> None:
    outcomes = [
        Outcome("0.30.0", "0.1.0", True, tests=5, capabilities={"a": True}),
        Outcome("0.33.0", "0.1.1", False, tests=5, failures=["x"], capabilities={}),
    ]
    assert table(outcomes).splitlines() == [
        "| vLLM   | kvcr 0.1.0                 | kvcr 0.1.1         |",
        "| ------ | -------------------------- | ------------------ |",
        "| 0.30.0 | pass, 5 tests, with engine | -                  |",
        "| 0.33.0 | -                          | FAIL, 1 of 5 tests |",
    ]
    document = tmp_path / "docs" / "compatibility.md"
    write_document(document, outcomes, {"0.1.0": "1.3.2"})
    assert "(1.3.2 for kvcr 0.1.0)" in document.read_text()
    assert table(outcomes) in document.read_text()
    assert "| `a` | on" in document.read_text()


def test_a_pair_is_chosen_by_name() -> None:
    (pair,) = matrix._pairs("0.33.0:0.1.1")
    assert (pair.vllm.version, pair.kvcr, pair.in_tree) == ("0.33.0", "0.1.1", False)
    with pytest.raises(argparse.ArgumentTypeError, match=r"no such pair: 0.9.0:1"):
        matrix._pairs("0.30.0:0.1.0,0.9.0:1")


def with_engine(*arguments: str) -> list[matrix.Pair]:
    options = matrix._parser().parse_args(list(arguments))
    return [pair for pair in matrix.PAIRS if matrix._runs_engine(pair, options)]


def test_each_vllm_runs_its_engine_once_and_each_kvcr_serves_one() -> None:
    pairs = with_engine()
    assert [pair.vllm for pair in pairs] == list(VLLMS)
    assert {pair.kvcr for pair in pairs} == set(KVCRS)


def test_engines_can_be_asked_for_on_every_pair_or_on_none() -> None:
    assert len(with_engine("--all-engines")) == len(VLLMS) * len(KVCRS)
    assert with_engine("--adapter-level") == []


def test_the_tier_calls_tested_what_the_matrix_tests() -> None:
    source = (ROOT / TIER_FOLDER / "compat/environment.py").read_text()
    (tested,) = [
        ast.literal_eval(node.value)
        for node in ast.parse(source).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "TESTED"
    ]
    assert tested == {
        "vllm": (VLLMS[0].version, VLLMS[-1].version),
        "kvcr": (KVCRS[0], KVCRS[-1]),
    }


@pytest.mark.parametrize(
    ("requirement", "name"),
    [
        ("Foo_Bar.baz>=1; python_version > '3'", "foo-bar-baz"),
        ("humming-kernels[cu13]==0.1", "humming-kernels"),
        ("torch", "torch"),
    ],
)
def test_the_name_in_a_requirement(requirement: str, name: str) -> None:
    assert matrix_env._name(requirement) == name


def test_an_interrupted_build_is_built_anew(tmp_path: Path) -> None:
    environments = Environments(tmp_path)
    built: list[Path] = []

    def interrupted(folder: Path) -> None:
        (folder / "half").touch()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        environments._built("x", {"pin": "1"}, interrupted)
    for pin in ("1", "1", "2"):
        folder = environments._built("x", {"pin": pin}, built.append)
        assert not (folder / "half").exists()
    assert len(built) == 2


def test_the_shared_environment_is_changed_in_place(tmp_path: Path) -> None:
    environments = Environments(tmp_path)

    def make(folder: Path) -> None:
        (folder / str(len(list(folder.iterdir())))).touch()

    for pin in ("a", "b"):
        folder = environments._built("x", {"pin": pin}, make, in_place=True)
    assert {file.name for file in folder.iterdir()} == {"0", "1", "ready.json"}


def test_a_run_is_stopped_with_its_children(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    code = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen(['sleep', '60'])\n"
        f"open({str(pid)!r}, 'w').write(str(child.pid))\n"
        "time.sleep(60)"
    )
    stop = threading.Event()

    def stop_once_started() -> None:
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline and not (pid.exists() and pid.read_text()):
            time.sleep(0.01)
        stop.set()

    threading.Thread(target=stop_once_started).start()
    started = time.monotonic()
    command = [sys.executable, "-c", code]
    status = matrix._run_bounded(command, tmp_path, tmp_path / "log", stop)
    assert status < 0
    assert time.monotonic() - started < 20
    assert is_gone(int(pid.read_text()))


def is_gone(pid: int) -> bool:
    """Whether a process has ended, if need be within a moment."""
    for _ in range(200):
        with suppress(FileNotFoundError):
            if Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "Z":
                time.sleep(0.01)
                continue
        return True
    return False
