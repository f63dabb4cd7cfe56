# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The rule of CI: a test that would be skipped fails the run, and is named."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.distribution.clean_env import REPOSITORY, clean_environ

_TESTS = """
import pytest
def test_runs(): pass
@pytest.mark.skip(reason="by a mark")
def test_marked(): pass
def test_inside(): pytest.skip("by a call")
@pytest.mark.xfail(strict=True)
def test_expected_to_fail(): assert False
"""
_MODULE = "import pytest\npytest.importorskip('no_such_package')\n"


def _run_pytest(
    folder: Path, *options: str, ci: str = ""
) -> subprocess.CompletedProcess[str]:
    (folder / "conftest.py").write_text((REPOSITORY / "tests/conftest.py").read_text())
    plugins = ("-p", "no:cacheprovider", "-p", "no:hypothesispytest")
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *plugins, *options, folder],
        capture_output=True,
        text=True,
        cwd=folder,
        env=clean_environ(CI=ci),
        timeout=120,
    )


@pytest.mark.parametrize(
    ("options", "ci"), [(["--no-skips"], ""), ([], "true"), ([], "1")]
)
def test_skipped_tests_fail_and_are_named(options, ci, tmp_path):
    (tmp_path / "test_some.py").write_text(_TESTS)

    done = _run_pytest(tmp_path, *options, ci=ci)

    assert done.returncode == pytest.ExitCode.TESTS_FAILED
    for name, reason in (("test_marked", "by a mark"), ("test_inside", "by a call")):
        assert f"test_some.py::{name}" in done.stdout
        assert reason in done.stdout
    assert "1 passed" in done.stdout
    assert "1 xfailed" in done.stdout
    assert "skipped" not in done.stdout.splitlines()[-1]


def test_a_skipped_module_fails_the_run(tmp_path):
    (tmp_path / "test_some.py").write_text(_TESTS)
    (tmp_path / "test_other.py").write_text(_MODULE)

    done = _run_pytest(tmp_path, "--no-skips")

    assert done.returncode not in (pytest.ExitCode.OK, pytest.ExitCode.USAGE_ERROR)
    assert "test_other.py" in done.stdout
    assert "no_such_package" in done.stdout


@pytest.mark.parametrize("ci", ["", "0", "false"])
def test_elsewhere_a_skip_is_a_skip(ci, tmp_path):
    (tmp_path / "test_some.py").write_text(_TESTS)

    done = _run_pytest(tmp_path, ci=ci)

    assert done.returncode == pytest.ExitCode.OK
    assert "2 skipped" in done.stdout
