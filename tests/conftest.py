# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Every test is of this checkout's adapter, and in CI a skipped one is a failed one:
there no dependency is ever absent."""

import os
from collections.abc import Generator

import pytest

from vllm_kvcr.plugin import register

# Before any test module can import the adapter that vLLM ships.
register()

Report = pytest.TestReport | pytest.CollectReport


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--no-skips",
        action="store_true",
        default=os.environ.get("CI", "").lower() not in ("", "0", "false"),
        help="fail each test that would be skipped (default where CI is set)",
    )


def _fail_if_skipped(config: pytest.Config, report: Report) -> Report:
    expected_failure = hasattr(report, "wasxfail")
    if report.skipped and config.getoption("--no-skips") and not expected_failure:
        report.outcome = "failed"
        reason = report.longrepr
        reason = reason[-1] if isinstance(reason, tuple) else reason
        report.longrepr = f"{report.nodeid}: no test may be skipped here. {reason}"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, Report, Report]:
    return _fail_if_skipped(item.config, (yield))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, Report, Report]:
    return _fail_if_skipped(collector.config, (yield))
