# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Objects that live in processes of their own, so that contenders do not meet.

Each contender gets a process: two of them would share an interpreter lock, and the two
adapters have the same module name. A process that is not being measured is stopped, so
that its native threads take nothing from the one that is.

Failure model: what a method raises is raised here as ``RemoteError``, with its
traceback and the end of the process's log. A process ends when the one that started it
does, however that ends.
"""

import ctypes
import importlib
import multiprocessing
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

# Importing vLLM takes seconds; a fork server pays for it once. KVCR and NIXL stay out:
# native code with threads does not survive a fork.
PRELOADED = (
    "benchmarks.harness.remote",
    "vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics",
    "vllm.v1.core.kv_cache_utils",
    "vllm.v1.kv_offload.tiering.factory",
    "vllm.v1.kv_offload.tiering.fs.manager",
)

serves_ours = False
"""In a remote object's process: whether it was made with ``ours``."""

_PR_SET_PDEATHSIG = 1
_LOG_LINES_SHOWN = 20


class RemoteError(Exception):
    """A method of a remote object raised, or its process is gone."""


def prepare(log: Path) -> None:
    """Once, before the first remote object: start what they are forked from."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("PYTHONHASHSEED", "0")
    multiprocessing.get_context("forkserver").set_forkserver_preload(list(PRELOADED))
    with _printing_to(log):
        forkserver.ensure_running()


class Remote:
    """An object in a process of its own; ``take`` waits until it is there.

    Args:
        factory: ``module:name`` of what makes the object there.
        log: Takes what the process prints.
        ours: Whether the tier type ``kvcr`` is this project's adapter there, or what
            the installed vLLM ships.
    """

    def __init__(
        self, factory: str, *arguments: Any, log: Path, ours: bool = True
    ) -> None:
        context = multiprocessing.get_context("forkserver")
        self._connection, theirs = context.Pipe()
        self._log = log
        self._stopped = False
        self._process = context.Process(
            target=_serve, args=(theirs, log, ours, factory, arguments), daemon=True
        )
        self._process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def call(self, method: str, *arguments: Any, timeout: float = 120.0) -> Any:
        self.post(method, *arguments)
        return self.take(timeout)

    def post(self, method: str, *arguments: Any) -> None:
        """Begin a call whose result ``take`` waits for."""
        self.resume()
        try:
            self._connection.send((method, arguments))
        except OSError as error:
            raise self._gone() from error

    def take(self, timeout: float = 120.0) -> Any:
        try:
            if not self._connection.poll(timeout):
                self.kill()
                raise RemoteError(f"no answer within {timeout:.0f} s\n{self._tail()}")
            succeeded, result = self._connection.recv()
        except (EOFError, OSError) as error:
            raise self._gone() from error
        if not succeeded:
            raise RemoteError(f"{result}\n{self._tail()}")
        return result

    def pause(self) -> None:
        """Stop every thread of the process until the next call."""
        if not self._stopped and self._process.is_alive():
            os.kill(self.pid, signal.SIGSTOP)
            self._stopped = True

    def resume(self) -> None:
        if self._stopped:
            os.kill(self.pid, signal.SIGCONT)
            self._stopped = False

    def kill(self) -> None:
        self._connection.close()
        if not self._stopped:
            self._process.join(2.0)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    @property
    def is_alive(self) -> bool:
        return self._process.is_alive()

    def _gone(self) -> RemoteError:
        self._process.join(5.0)
        return RemoteError(
            f"process ended with {self._process.exitcode}\n{self._tail()}"
        )

    def _tail(self) -> str:
        lines = self._log.read_text(errors="replace").splitlines()
        return "\n".join(lines[-_LOG_LINES_SHOWN:])


class Fleet:
    """The remote objects of one measurement; all of them end with it."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._members: dict[str, Remote] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        try:
            if kind is None:
                members = [m for m in self._members.values() if m.is_alive]
                for member in members:
                    member.post("close")
                for member in members:
                    member.take()
        finally:
            for member in self._members.values():
                member.kill()

    def start(
        self, name: str, factory: str, *arguments: Any, ours: bool = True
    ) -> None:
        """Begin to make a member; ``ready`` waits for it."""
        self._members[name] = Remote(factory, *arguments, log=self._log, ours=ours)

    def ready(self) -> None:
        for member in self._members.values():
            member.take()

    def __getitem__(self, name: str) -> Remote:
        return self._members[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._members)

    def call_alone(self, name: str, method: str, *arguments: Any) -> Any:
        """A call during which every other member is stopped."""
        for other, member in self._members.items():
            if other != name:
                member.pause()
        return self._members[name].call(method, *arguments)


@contextmanager
def _printing_to(log: Path) -> Iterator[None]:
    """Have what is started inside print to ``log``."""
    kept = [os.dup(stream) for stream in (1, 2)]
    _print_to(log)
    try:
        yield
    finally:
        for stream, original in zip((1, 2), kept, strict=True):
            os.dup2(original, stream)
            os.close(original)


def _print_to(log: Path) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    with log.open("ab", buffering=0) as sink:
        os.dup2(sink.fileno(), 1)
        os.dup2(sink.fileno(), 2)


def end_with_parent() -> None:
    """Have this process killed when the one that started it ends; even if stopped."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _serve(
    connection: Connection,
    log: Path,
    ours: bool,
    factory: str,
    arguments: tuple[Any, ...],
) -> None:
    end_with_parent()
    _print_to(log)
    global serves_ours
    serves_ours = ours
    if ours:
        from vllm_kvcr.plugin import register

        register()
    target: Any = None
    name = "__init__"
    while True:
        try:
            if name == "__init__":
                module, _, kind = factory.partition(":")
                made = getattr(importlib.import_module(module), kind)
                target, result = made(*arguments), None
            else:
                result = getattr(target, name)(*arguments)
            connection.send((True, result))
        except BaseException:
            connection.send((False, traceback.format_exc()))
        if target is None or name == "close":
            break
        try:
            name, arguments = connection.recv()
        except EOFError:
            break
    # Native threads may keep an interpreter from ending.
    threading.Timer(1.0, os._exit, (0,)).start()
