# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A process for each test; engines and peers that are gone when it is over, however it
ends."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.v1.kv_offload.tiering.kvcr.faults.harness.engine import Engine
from tests.v1.kv_offload.tiering.kvcr.faults.harness.isolation import ProcessForEach
from tests.v1.kv_offload.tiering.kvcr.faults.harness.managed import ManagedEngine
from tests.v1.kv_offload.tiering.kvcr.faults.harness.peer import Peer

PROCESSES = pytest.StashKey[ProcessForEach]()
HERE = Path(__file__).parent


def _is_ours(item: pytest.Item) -> bool:
    # These hooks are called for the tests of all folders.
    return item.path.is_relative_to(HERE)


def pytest_collection_finish(session: pytest.Session) -> None:
    ours = [item for item in session.items if _is_ours(item)]
    # A debugger needs the terminal, which only this process has.
    if not ours or session.config.option.collectonly or session.config.option.usepdb:
        return
    session.stash[PROCESSES] = ProcessForEach(session)
    for item in ours:
        # Its own process sees to that.
        item.add_marker(pytest.mark.timeout(0), append=False)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> bool | None:
    processes = item.session.stash.get(PROCESSES, None)
    if processes is None or not _is_ours(item):
        return None
    hook = item.ihook
    hook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for report in processes.run(item):
        hook.pytest_runtest_logreport(report=report)
    hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


def pytest_sessionfinish(session: pytest.Session) -> None:
    if processes := session.stash.get(PROCESSES, None):
        processes.close()


@pytest.fixture
def peers() -> Iterator[Callable[..., Peer]]:
    """Starts engines in processes of their own; see ``Peer``."""
    with ExitStack() as stack:

        def start(*arguments: Any, **keywords: Any) -> Peer:
            peer = Peer(*arguments, **keywords)
            stack.callback(peer.close)
            return peer

        yield start


@pytest.fixture
def engines(peers: Any) -> Iterator[Callable[..., Engine]]:
    """Starts engines in this process, which go before the peers do.

    Each is shut down at the end, and must then have answered every job once and have
    loaded no wrong block.
    """
    started: list[Engine] = []
    yield from _ended_right(Engine, started)
    for engine in started:
        assert engine.unanswered == []


@pytest.fixture
def managed(peers: Any) -> Iterator[Callable[..., ManagedEngine]]:
    """As ``engines``, below vLLM's own manager."""
    yield from _ended_right(ManagedEngine, [])


def _ended_right(kind: Any, started: list[Any]) -> Iterator[Callable[..., Any]]:
    """Start engines of a kind, shut them down, and find no wrong block."""

    def start(*arguments: Any, **keywords: Any) -> Any:
        engine = kind(*arguments, **keywords)
        started.append(engine)
        return engine

    yield start
    with ExitStack() as stack:
        for engine in started:
            stack.callback(engine.close)
    for engine in started:
        assert not engine.wrong
