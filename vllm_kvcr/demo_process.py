# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Runs a stage of the demo in separate processes, and cleans up after them.

Failure model: a stage that fails, hangs or is interrupted raises, and leaves nothing
behind but its log.
"""

import json
import os
import selectors
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import IO, Any

from pydantic import TypeAdapter

from vllm_kvcr import process_group
from vllm_kvcr.demo_plan import Job, Stage, StageResult, Workload

STAGE_SECONDS = 180.0
LOG_LINES_SHOWN = 15
SHARED_MEMORY = Path("/dev/shm")

# The engine downloads nothing, reports nothing and uses no other plugin.
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "PYTHONHASHSEED": "0",
    "PYTHONUNBUFFERED": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_LOGGING_LEVEL": "INFO",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_PLUGINS": "kvcr",
    "VLLM_TARGET_DEVICE": "cpu",
}


class StageFailed(Exception):
    """A stage has no result; the text says why."""


def run_stage(
    workload: Workload,
    stage: Stage,
    log: Path,
    *,
    tell: Callable[[str], None] = lambda doing: None,
    folder: Path | None = None,
    seconds: float = STAGE_SECONDS,
    spec: tuple[str, str] | None = None,
    environment: Mapping[str, str] | None = None,
    program: Sequence[str] = ("-m", "vllm_kvcr.demo_engine"),
) -> StageResult:
    """Run ``stage`` on an engine whose output is appended to ``log``.

    ``folder`` is for temporary files. ``spec`` is the name and module of another
    offloading spec. ``environment`` is added to the engine's. ``program`` is what
    Python runs, with the job and a file descriptor for events as arguments.
    """
    with tempfile.TemporaryDirectory(prefix="vllm-kvcr-demo-", dir=folder) as scratch:
        if stage.file_chunks:
            require_direct_io(Path(scratch))
        job = Job(workload, stage, scratch, f"vllm-kvcr-demo-{uuid.uuid4()}")
        if spec is not None:
            job = replace(job, spec_name=spec[0], spec_module_path=spec[1])
        command = [*program, json.dumps(asdict(job))]
        everything = {**os.environ, **ENVIRONMENT, **(environment or {})}
        try:
            return _run(command, log, tell, seconds, everything)
        finally:
            # A killed engine cannot remove its shared memory.
            for left_behind in SHARED_MEMORY.glob(f"vllm_offload_{job.engine_id}*"):
                left_behind.unlink(missing_ok=True)


def require_direct_io(folder: Path) -> None:
    """Raise if the file system does not support O_DIRECT, which KVCR uses."""
    probe = folder / "probe"
    try:
        os.close(os.open(probe, os.O_CREAT | os.O_RDWR | os.O_DIRECT, 0o600))
    except OSError as error:
        raise StageFailed(
            f"files in {folder} cannot be opened with O_DIRECT ({error.strerror}); "
            "name a folder on a disk with --folder"
        ) from error
    finally:
        probe.unlink(missing_ok=True)


def _run(
    program: Sequence[str],
    log: Path,
    tell: Callable[[str], None],
    seconds: float,
    environment: Mapping[str, str],
) -> StageResult:
    events, events_of_child = os.pipe()
    try:
        with log.open("ab") as sink:
            child = subprocess.Popen(
                [sys.executable, *program, str(events_of_child)],
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=sink,
                env=environment,
                pass_fds=[events_of_child],
                # In a process group of its own, which can be ended as a whole.
                start_new_session=True,
            )
    except BaseException:
        os.close(events)
        raise
    finally:
        os.close(events_of_child)

    result: StageResult | None = None
    deadline = time.monotonic() + seconds
    try:
        with os.fdopen(events, "rb", buffering=0) as stream:
            for event in _read_events(stream, deadline):
                if "doing" in event:
                    tell(event["doing"])
                else:
                    result = TypeAdapter(StageResult).validate_python(event["result"])
        status = child.wait(timeout=max(1.0, deadline - time.monotonic()))
    except (TimeoutError, subprocess.TimeoutExpired) as error:
        raise StageFailed(
            f"not finished after {seconds:.0f} s; its log ends with\n{log_tail(log)}"
        ) from error
    finally:
        process_group.end(child)
    if status != 0 or result is None:
        raise StageFailed(f"exit status {status}; its log ends with\n{log_tail(log)}")
    return result


def _read_events(stream: IO[bytes], deadline: float) -> Iterator[dict[str, Any]]:
    """Yield events until the other end is closed; TimeoutError at the deadline."""
    pending = b""
    with selectors.DefaultSelector() as selector:
        selector.register(stream, selectors.EVENT_READ)
        while True:
            if not selector.select(max(0.0, deadline - time.monotonic())):
                raise TimeoutError
            chunk = stream.read(1 << 16)
            if not chunk:
                return
            *lines, pending = (pending + chunk).split(b"\n")
            yield from map(json.loads, lines)


def log_tail(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines()[-LOG_LINES_SHOWN:]
    return "\n".join(f"  {line}" for line in lines)
