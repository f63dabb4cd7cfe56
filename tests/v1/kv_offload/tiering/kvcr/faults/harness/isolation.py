# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A process for each test, forked before any test has started native threads.

An engine whose peer died keeps its buffers mapped and its native threads running until
the process ends. In one process they would add up, and a crash would end all tests.
"""

import contextlib
import multiprocessing
import signal
import sys
from collections.abc import Mapping
from multiprocessing.connection import Connection

import pytest

from tests.v1.kv_offload.tiering.kvcr.faults.harness.child import (
    start_server,
    use_parents_server,
)

# Longer than pytest-timeout gives a test, so that its traceback is seen first.
KILLED_AFTER_S = 400.0

FORK = multiprocessing.get_context("fork")

Reports = list[dict[str, object]]


class ProcessForEach:
    """Runs tests in children of a process that never runs one itself.

    Not thread-safe.
    """

    def __init__(self, session: pytest.Session) -> None:
        self._starter, theirs = FORK.Pipe()
        start_server()
        items = {item.nodeid: item for item in session.items}
        self._process = FORK.Process(target=_serve, args=(items, theirs, self._starter))
        self._process.start()
        theirs.close()

    def run(self, item: pytest.Item) -> list[pytest.TestReport]:
        """What became of the test, as if it had run here."""
        self._starter.send(item.nodeid)
        return [
            item.config.hook.pytest_report_from_serializable(
                config=item.config, data=report
            )
            for report in self._starter.recv()
        ]

    def close(self) -> None:
        self._starter.close()
        self._process.join()


def _serve(
    items: Mapping[str, pytest.Item], requests: Connection, parents: Connection
) -> None:
    # With its copy here still open, the parent's end would never be seen to close.
    parents.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(EOFError):
        while True:
            requests.send(_run_in_a_child(items[requests.recv()]))


def _run_in_a_child(item: pytest.Item) -> Reports:
    ours, theirs = FORK.Pipe(duplex=False)
    child = FORK.Process(target=_run_here, args=(item, theirs))
    child.start()
    theirs.close()
    reports: Reports = []
    with ours:
        late = not ours.poll(KILLED_AFTER_S)
        with contextlib.suppress(EOFError):
            reports = [] if late else ours.recv()
    if late or reports:
        # Its fixtures have ended; what native code still does is of no interest.
        child.kill()
    child.join()
    return reports or [_of_a_death(item, child.exitcode)]


class Collector(pytest.TerminalReporter):
    """Keeps the reports of one test instead of showing them."""

    def __init__(self, config: pytest.Config) -> None:
        # The writer is pytest-timeout's, which says what all threads were doing.
        super().__init__(config, sys.__stderr__)
        self.reports: Reports = []

    def pytest_runtest_logstart(self) -> None: ...

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        config = self.config
        self.reports.append(
            config.hook.pytest_report_to_serializable(config=config, report=report)
        )

    def pytest_runtest_logfinish(self) -> None: ...


def _run_here(item: pytest.Item, answer: Connection) -> None:
    use_parents_server()
    collector = Collector(item.config)
    plugins = item.config.pluginmanager
    plugins.unregister(name="terminalreporter")
    plugins.register(collector, "terminalreporter")
    # No next test: all fixtures end here.
    item.ihook.pytest_runtest_protocol(item=item, nextitem=None)
    answer.send(collector.reports)


def _of_a_death(item: pytest.Item, exitcode: int | None) -> dict[str, object]:
    report = pytest.TestReport(
        nodeid=item.nodeid,
        location=item.location,
        keywords={},
        outcome="failed",
        longrepr=f"the process of this test ended with exit code {exitcode}",
        when="call",
    )
    return item.config.hook.pytest_report_to_serializable(
        config=item.config, report=report
    )
