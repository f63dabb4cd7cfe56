# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A process of ours: started fast, commanded over a pipe, stopped, continued, killed.

Each is forked from a server that has vLLM imported already, which takes several seconds
of CPU otherwise. It ends when this process does, at the latest.
"""

import contextlib
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import forkserver, get_context, reduction
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import pytest

_REPOSITORY = Path(__file__).resolve().parents[7]
_PRELOADED = f"{__package__}.peer_process"
_START_TIMEOUT_S = 60.0
CALL_TIMEOUT_S = 30.0
_STOP_TIMEOUT_S = 5.0
_IDLE_S = 0.0005
STANDARD_OUTPUTS = (1, 2)


class Answering:
    """The handle of a process that is commanded over a pipe."""

    _connection: Connection

    def call(self, name: str, *arguments: Any) -> Any:
        """Have the process do something, and wait for the answer."""
        self.send(name, *arguments)
        return self.receive()

    def send(self, name: str, *arguments: Any) -> None:
        """As ``call``, without waiting for the answer."""
        self._connection.send((name, arguments))

    @property
    def answered(self) -> bool:
        """Whether ``receive`` would return at once."""
        return bool(self._connection.poll(0))

    def receive(self, timeout_s: float = CALL_TIMEOUT_S) -> Any:
        """The answer to the oldest ``send``."""
        if not self._connection.poll(timeout_s):
            raise TimeoutError(f"a process did not answer in {timeout_s} s")
        succeeded, value = self._connection.recv()
        assert succeeded, f"in another process: {value}"
        return value


class Child(Answering):
    """The handle of a process.

    Args:
        run: What the process runs, with its end of the pipe and ``arguments``. It
            answers once when it is ready, and then runs ``obey``.
    """

    def __init__(self, run: Callable[..., None], *arguments: Any) -> None:
        start_server()
        context = get_context("forkserver")
        self._connection, theirs = context.Pipe()
        outputs = [reduction.DupFd(number) for number in STANDARD_OUTPUTS]
        self._process = context.Process(
            target=_run, args=(run, outputs, theirs, *arguments), daemon=True
        )
        self._process.start()
        theirs.close()
        try:
            self.receive(_START_TIMEOUT_S)
        except BaseException:
            self.kill()
            raise

    @property
    def pid(self) -> int:
        pid = self._process.pid
        assert pid is not None
        return pid

    def stop(self) -> None:
        """Stop the process: no thread of it runs any more."""
        os.kill(self.pid, signal.SIGSTOP)
        deadline = time.monotonic() + _STOP_TIMEOUT_S
        process = psutil.Process(self.pid)
        while process.status() != psutil.STATUS_STOPPED:
            assert time.monotonic() < deadline, "the process did not stop"
            time.sleep(0.001)

    def go_on(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        """End the process at once, stopped or not."""
        if self._process.is_alive():
            os.kill(self.pid, signal.SIGKILL)
            self._process.join(_STOP_TIMEOUT_S)

    def close(self) -> None:
        """Have the process end by itself; kill it if that takes too long."""
        if self._process.is_alive():
            self.go_on()
            # It may be gone meanwhile, or be too slow: killed below either way.
            with contextlib.suppress(OSError):
                self._connection.send(None)
            self._process.join(CALL_TIMEOUT_S)
        self.kill()
        self._connection.close()


def _run(run: Callable[..., None], outputs: Sequence[Any], *arguments: Any) -> None:
    # Those of the server are the terminal's; these are what pytest captures.
    for number, output in zip(STANDARD_OUTPUTS, outputs, strict=True):
        os.dup2(output.detach(), number)
    run(*arguments)


def obey(connection: Connection, commands: Any, step: Callable[[], None]) -> None:
    """Step, and do what the other end of the pipe says, until that closes."""
    while True:
        step()
        if not connection.poll(0):
            time.sleep(_IDLE_S)
            continue
        try:
            message = connection.recv()
        except EOFError:
            return
        if message is None:
            return
        name, arguments = message
        try:
            answer = (True, getattr(commands, name)(*arguments))
        except Exception:
            answer = (False, traceback.format_exc())
        connection.send(answer)


def start_server() -> None:
    """Start what processes are forked from, unless it runs. It has to import vLLM."""
    get_context("forkserver").set_forkserver_preload([_PRELOADED])
    # A fresh interpreter, which ignores what it cannot import.
    with pytest.MonkeyPatch.context() as patch, _silence():
        patch.setenv("PYTHONPATH", str(_REPOSITORY), prepend=os.pathsep)
        forkserver._forkserver.ensure_running()


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """What starts meanwhile says nothing on the terminal."""
    saved = [os.dup(number) for number in STANDARD_OUTPUTS]
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        for number in STANDARD_OUTPUTS:
            os.dup2(nowhere, number)
        yield
    finally:
        for number, copy in zip(STANDARD_OUTPUTS, saved, strict=True):
            os.dup2(copy, number)
        for copy in (nowhere, *saved):
            os.close(copy)


def use_parents_server() -> None:
    """In a process forked from one that has called ``start_server``: use that server.

    Left alone, multiprocessing waits for it as if it were a child of this process.
    """
    forkserver._forkserver.ensure_running = lambda: None  # type: ignore[method-assign]
