# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What the parts of the fleet have in common."""

import argparse
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from vllm_kvcr import process_group
from vllm_kvcr.servers import NICENESS, ServerFailed


def main_of(
    part: str,
    summary: str,
    run: Callable[[Path], list[str]],
    argv: Sequence[str] | None,
) -> int:
    """The ``main`` of a part that has no options."""
    argparse.ArgumentParser(
        prog=f"python -m tests.fleet.{part}", description=summary
    ).parse_args(argv)
    return status_of(run)


def status_of(run: Callable[[Path], list[str]]) -> int:
    """Run a part in a folder of its own, print its faults, return its exit status."""
    with tempfile.TemporaryDirectory(prefix="vllm-kvcr-fleet-") as folder:
        try:
            faults = run(Path(folder))
        except ServerFailed as failure:
            faults = [str(failure)]
    for fault in faults:
        print(f"FAILED {fault}")
    return 1 if faults else 0


@contextmanager
def started(
    command: Sequence[str], log: Path, environment: Mapping[str, str]
) -> Iterator[subprocess.Popen[bytes]]:
    """A process that ends with the block, and all that it has started."""
    with log.open("ab") as sink:
        process = subprocess.Popen(
            ["nice", "-n", str(NICENESS), *command],
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=sink,
            env=dict(environment),
            start_new_session=True,
        )
    try:
        yield process
    finally:
        process_group.end(process)
