# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The rule of CI: a test that would be skipped fails the run, and is named."""

from collections.abc import Callable

import pytest

from tests.distribution.clean_env import REPOSITORY

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

Run = Callable[..., pytest.RunResult]


@pytest.fixture
def run(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Run:
    """pytest over the tests above, below this repository's own conftest.py."""
    pytester.makeconftest((REPOSITORY / "tests/conftest.py").read_text())
    pytester.makepyfile(test_some=_TESTS)

    def run(*options: str, ci: str = "") -> pytest.RunResult:
        monkeypatch.setenv("CI", ci)
        return pytester.runpytest_inprocess("-p", "no:cacheprovider", *options)

    return run


@pytest.mark.parametrize(
    ("options", "ci"), [(["--no-skips"], ""), ([], "true"), ([], "1")]
)
def test_skipped_tests_fail_and_are_named(run: Run, options, ci):
    done = run(*options, ci=ci)
    assert done.ret == pytest.ExitCode.TESTS_FAILED
    # A marked one fails as it is set up, which pytest calls an error.
    done.assert_outcomes(passed=1, failed=1, errors=1, xfailed=1)
    for name, reason in (("test_marked", "by a mark"), ("test_inside", "by a call")):
        done.stdout.fnmatch_lines([f"*test_some.py::{name}*{reason}*"])


def test_a_skipped_module_fails_the_run(run: Run, pytester: pytest.Pytester):
    pytester.makepyfile(test_other=_MODULE)
    done = run("--no-skips")
    assert done.ret not in (pytest.ExitCode.OK, pytest.ExitCode.USAGE_ERROR)
    done.stdout.fnmatch_lines(["*test_other.py*no_such_package*"])


@pytest.mark.parametrize("ci", ["", "0", "false"])
def test_elsewhere_a_skip_is_a_skip(run: Run, ci):
    done = run(ci=ci)
    assert done.ret == pytest.ExitCode.OK
    done.assert_outcomes(passed=1, skipped=2, xfailed=1)
