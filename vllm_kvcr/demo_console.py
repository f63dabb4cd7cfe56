# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Shows the demos' progress, and lets an interrupted one end cleanly."""

import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.table import Table

STARTING = "importing vLLM"


def new_log() -> Path:
    with tempfile.NamedTemporaryFile(
        prefix="vllm-kvcr-demo-", suffix=".log", delete=False
    ) as file:
        return Path(file.name)


@contextmanager
def termination_interrupts() -> Iterator[None]:
    """Make SIGTERM act like Ctrl-C, which stops the engine."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def shown(console: Console, title: str) -> Iterator[Callable[[str], None]]:
    """Show progress: in one changing line on a terminal, else line by line."""
    started = time.monotonic()
    if console.is_terminal:
        with console.status(f"{title}: {STARTING}") as status:
            yield lambda doing: status.update(f"{title}: {doing}")
    else:
        console.print(f"{title}: {STARTING}")
        yield lambda doing: console.print(f"{title}: {doing}", markup=False)
    console.print(f"{title}: done in {time.monotonic() - started:.0f} s")


def conclude(table: Table, faults: Sequence[str], success: str) -> int:
    """Print a demo's results and return its exit status."""
    # A fixed width if the output is not a terminal, since cut-off columns are useless.
    output = Console(width=None if sys.stdout.isatty() else 80)
    output.print(table)
    for fault in faults:
        output.print(f"[red]FAILED[/red] {fault}", soft_wrap=True)
    if not faults:
        output.print(success)
    return 1 if faults else 0
