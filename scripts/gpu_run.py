# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What ``scripts.gpu_check`` runs: KV blocks on every way that they can take.

Two servers on one GPU: A computes prompts, has them pushed out of the GPU and of the
primary tier, and is served from KVCR's pool; B pulls them from A. Then a server whose
pool is too small is served from files. Every output has to equal the first one, and
only the end of a prompt may be computed again.
"""

import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_kvcr.demo_console import termination_interrupts
from vllm_kvcr.demo_model import CHUNK_BYTES, make_prompts, write_model
from vllm_kvcr.demo_plan import Workload
from vllm_kvcr.demo_process import StageFailed, require_direct_io
from vllm_kvcr.kv_events import Subscription
from vllm_kvcr.peers_run import BLOCKS, BYTES, hint_at, wait_until_introduced
from vllm_kvcr.servers import Answer, Metrics, Server, ServerFailed, longest

PROMPTS = 4
STORE_SECONDS = 30.0
DURATION = "vllm:kvcr_duration_seconds_sum"

# The first contact of two engines aside, nothing here should take long; but what a busy
# machine delays shall not look like a fault.
TIER = {"pull_timeout_ms": 10_000}


@dataclass(frozen=True)
class Hop:
    """One way from one place to the next, by an engine's own metrics."""

    name: str
    bytes: int
    seconds: float

    @classmethod
    def by_vllm(cls, name: str, metrics: Metrics, direction: str) -> "Hop":
        prefix = f"vllm:kv_offload_{direction}"
        return cls(
            name,
            metrics.total(f"{prefix}_bytes_total"),
            metrics.seconds(f"{prefix}_time_total"),
        )

    @classmethod
    def by_kvcr(cls, name: str, metrics: Metrics, *operations: str) -> "Hop":
        return cls(
            name,
            sum(metrics.total(BYTES, operation=each) for each in operations),
            sum(
                metrics.seconds(DURATION, scope=each, result="success")
                for each in operations
            ),
        )

    @property
    def line(self) -> str:
        speed = self.bytes / self.seconds / 1e9 if self.seconds else 0.0
        size = self.bytes / 2**20
        return f"  {self.name:<22}{size:10,.1f} MiB {speed:8.2f} GB/s"


class Check:
    """What was asked, what was wrong, and what moved."""

    def __init__(self, folder: Path, workload: Workload, on_gpu: bool) -> None:
        self.faults: list[str] = []
        self.hops: list[Hop] = []
        self._folder = folder
        self._work = workload
        self._on_gpu = on_gpu
        self._prompts = make_prompts(workload)
        write_model(folder / "model", longest(workload.chunks_per_prompt))

    def peers(self) -> None:
        """GPU, primary tier, pool and back; and a second engine on the same GPU."""
        per_prompt = self._work.chunks_per_prompt
        with ExitStack() as stack:
            a = stack.enter_context(
                self._small_server("A", secondary_g2_slots=self._work.chunks + 8)
            )
            b = stack.enter_context(self._server("B"))
            for server in (a, b):
                server.wait_until_ready()
            events = stack.enter_context(
                Subscription(a.events_endpoint, replay=a.replay_endpoint)
            )
            cold = self._cold(a)
            self._again(a, cold, "served from A's pool")
            # By the first, B gets to know A.
            for number in range(2):
                hint = hint_at(a, events, self._prompts[number], self._work)
                answer = b.complete(
                    self._prompts[number], self._work.output_tokens, hint
                )
                if number:
                    self._judge(answer, cold[number], "pulled by B from A")
                wait_until_introduced(a, b)
            metrics = a.metrics()
            self.hops += [
                Hop.by_vllm("GPU to primary", metrics, "store"),
                Hop.by_kvcr("primary to pool", metrics, "local_fill"),
                Hop.by_kvcr("pool to primary", metrics, "local_deliver"),
                Hop.by_vllm("primary to GPU", metrics, "load"),
                Hop.by_kvcr("A to B", b.metrics(), "remote_fetch"),
            ]
            self._require_blocks(b, "remote_fetch", per_prompt)

    def files(self) -> None:
        """The same through files, over a pool that holds a prompt and a half."""
        require_direct_io(self._folder)
        files = {
            "paths": [f"{self._folder}/kvcr.g3"],
            "capacity_bytes_per_file": self._work.chunks * CHUNK_BYTES,
            "backend": "POSIX",
        }
        slots = self._work.chunks_per_prompt * 3 // 2
        with self._small_server("C", secondary_g2_slots=slots, g3=files) as c:
            c.wait_until_ready()
            cold = self._cold(c)
            self._again(c, cold, "served from files")
            metrics = c.metrics()
            self.hops += [
                Hop.by_kvcr("pool to file", metrics, "g3_store"),
                Hop.by_kvcr("file to pool", metrics, "g3_fill", "g3_deliver"),
            ]
            if not self.hops[-1].bytes:
                self.faults.append("nothing was read from files")

    def _cold(self, server: Server) -> list[Answer]:
        """Each prompt once; each is in KVCR before the next one pushes it out."""
        answers = []
        for number, prompt in enumerate(self._prompts, start=1):
            answers.append(server.complete(prompt, self._work.output_tokens))
            wanted = number * self._work.chunks_per_prompt
            self._require_blocks(server, "local_fill", wanted)
        if len({answer.token_ids for answer in answers}) < len(answers):
            self.faults.append("prompts that differ gave the same output")
        return answers

    def _again(self, server: Server, cold: list[Answer], how: str) -> None:
        for prompt, first in zip(self._prompts, cold, strict=True):
            answer = server.complete(prompt, self._work.output_tokens)
            self._judge(answer, first, how)

    def _judge(self, answer: Answer, cold: Answer, how: str) -> None:
        wrong = []
        if answer.computed_tokens != self._work.tail_tokens:
            wrong.append(f"{answer.computed_tokens:,} tokens were computed again")
        if answer.token_ids != cold.token_ids:
            wrong.append("the output is another one")
        print(
            f"  {answer.cached_tokens:,} of {answer.prompt_tokens:,} tokens {how} in "
            f"{answer.seconds:.2f} s (cold: {cold.seconds:.2f} s)"
            f"{': ' if wrong else ''}{', '.join(wrong)}",
            flush=True,
        )
        self.faults += [f"{how}: {each}" for each in wrong]

    def _require_blocks(self, server: Server, operation: str, wanted: int) -> None:
        deadline = time.monotonic() + STORE_SECONDS
        while True:
            moved = server.metrics().total(BLOCKS, operation=operation)
            if moved >= wanted:
                return
            if time.monotonic() > deadline:
                raise ServerFailed(
                    f"server {server.name}: {operation} moved {moved} of {wanted} "
                    f"chunks in {STORE_SECONDS:.0f} s"
                )
            time.sleep(0.05)

    def _small_server(self, name: str, **tier: Any) -> Server:
        """GPU and primary tier hold little more than one prompt each."""
        per_prompt = self._work.chunks_per_prompt
        return self._server(
            name,
            cache_chunks=per_prompt * 5 // 4 + 2,
            primary_chunks=per_prompt * 3 // 2,
            **tier,
        )

    def _server(
        self,
        name: str,
        *,
        cache_chunks: int | None = None,
        primary_chunks: int | None = None,
        **tier: Any,
    ) -> Server:
        return Server(
            name,
            self._folder,
            self._folder / "model",
            chunks=self._work.chunks_per_prompt,
            cache_chunks=cache_chunks,
            primary_chunks=primary_chunks,
            tier={**TIER, **tier},
            on_gpu=self._on_gpu,
        )


def run(folder: Path | None, chunks: int, on_gpu: bool) -> int:
    """All of it; returns the exit status."""
    started = time.monotonic()
    workload = Workload(prompts=PROMPTS, chunks_per_prompt=chunks)
    scratch = tempfile.TemporaryDirectory(prefix="vllm-kvcr-gpu-", dir=folder)
    with scratch, termination_interrupts():
        try:
            check = Check(Path(scratch.name), workload, on_gpu)
            print("Two engines: memory", flush=True)
            check.peers()
            print("One engine: files", flush=True)
            check.files()
        except (ServerFailed, StageFailed) as failure:
            print(f"FAILED {failure}")
            return 1
    print(f"Moved, in chunks of {CHUNK_BYTES:,} bytes, and how fast while it moved:")
    for hop in check.hops:
        print(hop.line)
    for fault in check.faults:
        print(f"FAILED {fault}")
    outcome = "FAILED" if check.faults else "passed"
    print(f"{outcome} in {time.monotonic() - started:.0f} s")
    return 1 if check.faults else 0
