# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A real vLLM engine on the CPU that has nothing to do.

``python -m benchmarks.subjects.idle_engine FOLDER TIERS`` starts one, serves a prompt,
says so and idles until its standard input ends.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import Any

import psutil

from benchmarks.harness import threads
from benchmarks.harness.remote import end_with_parent

# What ``idle_spec`` reads, in the process of the engine core.
REPORT_VARIABLE = "VLLM_KVCR_BENCHMARK_REPORT"
OURS_VARIABLE = "VLLM_KVCR_BENCHMARK_OURS"

_READY = "ready"
_START_S = 150.0
_STOP_S = 10.0
_SETTLE_S = 1.0
_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    # Threads that spin for work would be measured too.
    "OMP_NUM_THREADS": "1",
    "PYTHONHASHSEED": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    # No plugin, so that the adapter is the one asked for; ours is put in by the spec.
    "VLLM_PLUGINS": "none",
}


class EngineFailed(Exception):
    """An engine did not start or did not answer."""


class IdleEngine:
    """An engine in a process group of its own; starts in the background."""

    def __init__(
        self, folder: Path, tiers: list[dict[str, Any]], *, ours: bool, log: Path
    ) -> None:
        folder.mkdir()
        self._report = folder / "report.json"
        self._log = log
        self.engine_id = f"vllm-kvcr-bench-{uuid.uuid4()}"
        with log.open("ab") as sink:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "benchmarks.subjects.idle_engine",
                    str(folder),
                    self.engine_id,
                    json.dumps(tiers),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=sink,
                env={
                    **os.environ,
                    **_ENVIRONMENT,
                    # Its sockets, which an engine that is killed leaves behind.
                    "VLLM_RPC_BASE_PATH": str(folder),
                    REPORT_VARIABLE: str(self._report),
                    OURS_VARIABLE: str(int(ours)),
                },
                start_new_session=True,
            )

    def wait_until_idle(self) -> None:
        assert self._process.stdout is not None
        os.set_blocking(self._process.stdout.fileno(), False)
        deadline = time.monotonic() + _START_S
        said = b""
        while _READY.encode() not in said:
            said += self._process.stdout.read() or b""
            if self._process.poll() is not None or time.monotonic() > deadline:
                lines = self._log.read_text(errors="replace").splitlines()[-20:]
                raise EngineFailed("\n".join(lines))
            time.sleep(0.1)

    def measure(self, seconds: float) -> list[threads.ThreadLoad]:
        """The load of each thread of all of the engine's processes."""
        time.sleep(_SETTLE_S)
        report = json.loads(self._report.read_text())
        names = {int(thread): name for thread, name in report["names"].items()}
        whole = psutil.Process(self._process.pid)
        pids = [whole.pid, *(child.pid for child in whole.children(recursive=True))]
        started = time.monotonic()
        before = {pid: threads.cpu_seconds(pid) for pid in pids}
        time.sleep(seconds)
        after = {pid: threads.cpu_seconds(pid) for pid in pids}
        passed = time.monotonic() - started
        found = []
        for pid in pids:
            is_core = pid == report["pid"]
            found += threads.loads(
                pid,
                before[pid],
                after[pid],
                passed,
                names if is_core else {},
                report["before_tier"] if is_core else after[pid],
            )
        return sorted(found, key=lambda load: -load.share)

    def end(self) -> None:
        """Have it end, without waiting for that."""
        assert self._process.stdin is not None
        self._process.stdin.close()

    def close(self) -> None:
        try:
            self.end()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_STOP_S)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            for left in Path("/dev/shm").glob(f"vllm_offload_{self.engine_id}*"):
                left.unlink(missing_ok=True)


def _main(folder: Path, engine_id: str, tiers: list[dict[str, Any]]) -> None:
    end_with_parent()

    from vllm import LLM, SamplingParams
    from vllm_kvcr.demo_engine import engine_arguments
    from vllm_kvcr.demo_model import write_model
    from vllm_kvcr.demo_plan import Job, Stage, Workload

    workload = Workload(prompts=1, chunks_per_prompt=4)
    job = Job(
        workload,
        Stage("idle", pool_chunks=1),
        str(folder),
        engine_id,
        spec_name="NotingSpec",
        spec_module_path="benchmarks.subjects.idle_spec",
    )
    model = folder / "model"
    write_model(model, workload.prompt_tokens + workload.output_tokens)
    arguments = engine_arguments(job)
    extra = arguments["kv_transfer_config"]["kv_connector_extra_config"]
    extra["secondary_tiers"] = tiers
    llm = LLM(model=str(model), **arguments)
    prompt: Any = {"prompt_token_ids": [1] * workload.prompt_tokens}
    llm.generate(
        prompt,
        SamplingParams(max_tokens=2, ignore_eos=True, detokenize=False),
        use_tqdm=False,
    )
    print(_READY, flush=True)
    sys.stdin.read()
    llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    _main(Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3]))
