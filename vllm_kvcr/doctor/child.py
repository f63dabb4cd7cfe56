# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Runs code that may crash or hang, such as native code, in a separate process.

The child writes lines of JSON to a separate pipe, because libraries write to its
standard output. It is killed when its time is over.
"""

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from typing import Any

_STOP_S = 5.0
_LOG_LINES = 4
_FD_VARIABLE = "VLLM_KVCR_DOCTOR_FD"


class ChildFailed(Exception):
    """The child crashed, ended without an answer, or took too long."""


class Child:
    """``python -m module arguments``, as a context.

    Args:
        module: Calls ``arguments()`` and ``answer()`` of this module.
        arguments: Built-in types only.
        environment: Variables in addition to this process's own.
    """

    def __init__(
        self,
        module: str,
        arguments: Mapping[str, Any],
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed by close()
        self._read, write = os.pipe()
        self._buffer = b""
        try:
            self._process = subprocess.Popen(
                # -P: like vLLM's own command, do not search the working directory.
                [sys.executable, "-P", "-m", module, json.dumps(arguments)],
                stdin=subprocess.PIPE,
                stdout=self._log,
                stderr=self._log,
                pass_fds=[write],
                env={
                    **os.environ,
                    "VLLM_LOGGING_LEVEL": "WARNING",
                    **(environment or {}),
                    _FD_VARIABLE: str(write),
                },
            )
        except BaseException:
            os.close(self._read)
            self._log.close()
            raise
        finally:
            os.close(write)

    def __enter__(self) -> "Child":
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def send(self, value: Any) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # a dead child is noticed by receive()
            self._process.stdin.write(json.dumps(value).encode() + b"\n")
            self._process.stdin.flush()

    def receive(self, deadline: float) -> Any:
        """Return the next answer.

        Args:
            deadline: In terms of ``time.monotonic()``.

        Raises:
            ChildFailed: there is no answer.
        """
        with selectors.DefaultSelector() as selector:
            selector.register(self._read, selectors.EVENT_READ)
            while b"\n" not in self._buffer:
                left = deadline - time.monotonic()
                if left <= 0 or not selector.select(left):
                    raise ChildFailed(f"no answer in time{self._last_words()}")
                piece = os.read(self._read, 1 << 16)
                if not piece:
                    raise ChildFailed(self._how_it_ended())
                self._buffer += piece
        line, _, self._buffer = self._buffer.partition(b"\n")
        return json.loads(line)

    def close(self) -> None:
        """End the child: close its standard input, and kill it if it goes on."""
        with contextlib.suppress(OSError):
            assert self._process.stdin is not None
            self._process.stdin.close()
        try:
            self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._read)
        self._log.close()

    def kill(self) -> None:
        self._process.kill()

    def _how_it_ended(self) -> str:
        try:
            code = self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            return f"the process stopped answering{self._last_words()}"
        if code < 0:
            how = f"the process was killed by {signal.Signals(-code).name}"
        else:
            how = f"the process ended with status {code}"
        return how + self._last_words()

    def _last_words(self) -> str:
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").split("\n")
        last = [line.strip() for line in lines if line.strip()][-_LOG_LINES:]
        return "; its last lines: " + " | ".join(last) if last else ""


def ask(
    module: str,
    arguments: Mapping[str, Any],
    seconds: float,
    environment: Mapping[str, str] | None = None,
) -> Any:
    """Run a child for one answer.

    Raises:
        ChildFailed: there is no answer.
    """
    with Child(module, arguments, environment) as child:
        try:
            return child.receive(time.monotonic() + seconds)
        except ChildFailed:
            child.kill()
            raise


# --- in the child --------------------------------------------------------------------


def arguments() -> Any:
    return json.loads(sys.argv[1])


def answer(value: Any) -> None:
    os.write(int(os.environ[_FD_VARIABLE]), json.dumps(value).encode() + b"\n")
