# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Runs a command whose output goes to a log file, with a sign of life meanwhile."""

import os
import re
import select
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

_NOISE = re.compile(r"^WARNING: Location .* is ignored")
_PIP_STEP = re.compile(
    r"^\s*(Collecting|Downloading|Using cached|Processing|Preparing|Building) "
    r"(?:\S*/)?(?P<what>[\w.]+(?:-[A-Za-z][\w.]*)*)"
)
_SECONDS_BETWEEN_LINES = 15.0


class CommandFailed(Exception):
    """A command ended badly; the text is what it said last."""


def run_quietly(
    title: str,
    command: Sequence[str | os.PathLike[str]],
    log: Path,
    env: Mapping[str, str] | None = None,
    describe: Callable[[str], str | None] = lambda line: None,
) -> None:
    """Run ``command``, appending its output to ``log``.

    ``describe`` may turn a line of output into a few words on what is going on.
    """
    start = log.stat().st_size if log.exists() else 0
    progress = _Progress(title)
    with log.open("ab", buffering=0) as sink:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=env,
        )
        assert process.stdout is not None
        try:
            pending = b""
            while True:
                ready, _, _ = select.select([process.stdout], [], [], 1.0)
                if ready:
                    chunk = os.read(process.stdout.fileno(), 1 << 16)
                    if not chunk:
                        break
                    sink.write(chunk)
                    *lines, pending = (pending + chunk).split(b"\n")
                    for line in lines:
                        doing = describe(line.decode(errors="replace"))
                        progress.doing = doing or progress.doing
                progress.tick()
            status = process.wait()
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
            progress.close()
    if status != 0:
        raise CommandFailed(_output_since(log, start))
    progress.done()


def _output_since(log: Path, start: int) -> str:
    """What was appended to ``log`` after byte ``start``, without pip's noise."""
    with log.open("rb") as file:
        file.seek(start)
        lines = file.read().decode(errors="replace").splitlines()
    return "\n".join(line for line in lines if not _NOISE.match(line))


def describe_pip(line: str) -> str | None:
    """What pip is doing, as far as this line of its output tells."""
    if line.startswith("Installing collected packages:"):
        return f"installing {line.count(',') + 1} packages"
    step = _PIP_STEP.match(line)
    return f"{step[1].lower()} {step['what']}" if step else None


class _Progress:
    """One line that is rewritten on a terminal, a line now and then elsewhere."""

    def __init__(self, title: str) -> None:
        self.doing = ""
        self._title = title
        self._started = self._shown = time.monotonic()
        self._rewrites = sys.stdout.isatty()
        if not self._rewrites:
            print(f"  {title} ...", flush=True)

    def tick(self) -> None:
        now = time.monotonic()
        if now - self._shown < (1.0 if self._rewrites else _SECONDS_BETWEEN_LINES):
            return
        self._shown = now
        text = f"  {self._title} ... {now - self._started:.0f} s"
        if self.doing:
            text += f", {self.doing}"
        if self._rewrites:
            print(f"\r\033[K{text[:78]}", end="", flush=True)
        else:
            print(text, flush=True)

    def close(self) -> None:
        if self._rewrites:
            print("\r\033[K", end="", flush=True)

    def done(self) -> None:
        seconds = time.monotonic() - self._started
        print(f"  {self._title}: done in {seconds:.0f} s", flush=True)
