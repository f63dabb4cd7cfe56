# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Runs and measures one real vLLM engine on the CPU with the kvcr tier.

``python -m vllm_kvcr.demo_engine JOB FD`` runs one stage of the demo. It is a separate
process, so that everything that vLLM and native code print can go to a log. The engine
core runs in another process, as it does in production. Events are written to the file
descriptor ``FD``, one JSON object per line: ``{"doing": text}`` to show progress, and
``{"result": ...}`` at the end.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from vllm import LLM, RequestOutput, SamplingParams
from vllm.v1.metrics.reader import Counter
from vllm_kvcr.demo_model import CHUNK_BYTES, make_prompts, write_model
from vllm_kvcr.demo_plan import (
    BLOCKS_PER_CHUNK,
    TOKENS_PER_BLOCK,
    TOKENS_PER_CHUNK,
    Job,
    Moved,
    Pass,
    StageResult,
)

# vLLM's counters; KVCR's are below.
KEPT_TOKENS = "vllm:prefix_cache_hits"
TIER_BYTES_READ = "vllm:kv_offload_tiering_read_bytes"

STORE_SECONDS = 30.0
STOP_SECONDS = 30.0

Tell = Callable[[str], None]


def tier_config(job: Job) -> dict[str, Any]:
    """The entry for ``secondary_tiers``; it has no control ports, so no peers."""
    tier: dict[str, Any] = {
        "type": "kvcr",
        "secondary_g2_slots": job.stage.pool_chunks,
        "policy": "lru",
        "enable_telemetry": True,
        # Generous, because the demo may share two cores with others.
        "operation_timeout_ms": 20_000,
        "abandon_timeout_ms": 60_000,
    }
    if job.stage.file_chunks:
        tier["policy"] = "g3_lru"
        tier["g3"] = {
            "paths": [f"{job.folder}/kvcr.g3"],
            "capacity_bytes_per_file": job.stage.file_chunks * CHUNK_BYTES,
            "backend": "POSIX",
        }
    return tier


def engine_arguments(job: Job) -> dict[str, Any]:
    work = job.workload
    return {
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        # At lower precision a served prompt may be rounded differently from a cold one.
        "dtype": "float32",
        "max_model_len": work.prompt_tokens + work.output_tokens,
        "max_num_batched_tokens": max(2048, work.prompt_tokens),
        "max_num_seqs": 2,
        "block_size": TOKENS_PER_BLOCK,
        "num_gpu_blocks_override": work.cache_blocks,
        "enable_prefix_caching": True,
        "disable_log_stats": False,
        "kv_transfer_config": {
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            "engine_id": job.engine_id,
            "kv_connector_extra_config": {
                "spec_name": job.spec_name,
                "spec_module_path": job.spec_module_path,
                "blocks_per_chunk": BLOCKS_PER_CHUNK,
                "cpu_bytes_to_use": work.primary_chunks * CHUNK_BYTES,
                "secondary_tiers": [tier_config(job)],
            },
        },
    }


class MeasuredEngine:
    """Runs one request at a time and reads vLLM's and KVCR's own counters."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._requests = 0
        model = Path(job.folder) / "model"
        write_model(model, job.workload.prompt_tokens + job.workload.output_tokens)
        self._llm = LLM(model=str(model), **engine_arguments(job))

    def close(self) -> None:
        # By default vLLM kills its engine core after five seconds.
        self._llm.llm_engine.engine_core.shutdown(timeout=STOP_SECONDS)

    def run(self, prompt: list[int], tokens: int) -> tuple[tuple[int, ...], int, float]:
        """Return the output, the tokens not computed, and the seconds to the first."""
        engine = self._llm.llm_engine
        sampling = SamplingParams(
            temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False
        )
        self._requests += 1
        started = time.perf_counter()
        engine.add_request(
            f"demo-{self._requests}", {"prompt_token_ids": prompt}, sampling
        )
        first: float | None = None
        output: tuple[int, ...] = ()
        cached = 0
        while engine.has_unfinished_requests():
            for answer in engine.step():
                assert isinstance(answer, RequestOutput)
                output = tuple(answer.outputs[0].token_ids)
                cached = answer.num_cached_tokens or 0
                if first is None and output:
                    first = time.perf_counter() - started
        if first is None:
            raise RuntimeError("the engine finished a request without an output")
        return output, cached, first

    def run_all(
        self, title: str, prompts: list[list[int]], store: bool, tell: Tell
    ) -> Pass:
        """Run each prompt once and, with ``store``, wait until KVCR has stored it."""
        kept_before = self._total(KEPT_TOKENS)
        read_before = self._total(TIER_BYTES_READ)
        moved_before = self._moved()
        runs = []
        for number, prompt in enumerate(prompts, start=1):
            tell(f"{title}, prompt {number} of {len(prompts)}")
            runs.append(self.run(prompt, self._job.workload.output_tokens))
            if store:
                before = moved_before.get("local_fill", Moved()).chunks
                self._wait_for_chunks(
                    before + number * self._job.workload.chunks_per_prompt
                )
        self._step_once()
        return Pass(
            prompt_tokens=sum(map(len, prompts)),
            cached_tokens=sum(cached for _, cached, _ in runs),
            kept_tokens=self._total(KEPT_TOKENS) - kept_before,
            tier_bytes_read=self._total(TIER_BYTES_READ) - read_before,
            seconds_to_first_token=tuple(first for _, _, first in runs),
            outputs=tuple(output for output, _, _ in runs),
            moved={
                name: Moved(
                    now.chunks - moved_before.get(name, Moved()).chunks,
                    now.bytes - moved_before.get(name, Moved()).bytes,
                )
                for name, now in self._moved().items()
            },
        )

    def warm_up(self) -> None:
        """Warm up with a prompt that is too short to be offloaded."""
        self.run([1] * (TOKENS_PER_CHUNK // 2), tokens=2)

    def _step_once(self) -> None:
        # Counters arrive with the output of requests.
        self.run([1], tokens=1)

    def _wait_for_chunks(self, wanted: int) -> None:
        deadline = time.monotonic() + STORE_SECONDS
        while True:
            self._step_once()
            stored = self._moved().get("local_fill", Moved()).chunks
            if stored >= wanted:
                return
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"KVCR stored {stored} of {wanted} chunks in {STORE_SECONDS:.0f} s"
                )
            time.sleep(0.01)

    def _moved(self) -> dict[str, Moved]:
        """What each kind of KVCR operation has moved since the start."""
        chunks = self._by_operation("vllm:kvcr_transfer_blocks")
        sizes = self._by_operation("vllm:kvcr_transfer_bytes")
        return {name: Moved(chunks[name], sizes.get(name, 0)) for name in chunks}

    def _by_operation(self, name: str) -> dict[str, int]:
        return {
            counter.labels["operation"]: counter.value
            for counter in self._counters(name)
        }

    def _total(self, name: str) -> int:
        return sum(counter.value for counter in self._counters(name))

    def _counters(self, name: str) -> list[Counter]:
        return [
            metric
            for metric in self._llm.get_metrics()
            if isinstance(metric, Counter) and metric.name == name
        ]


def run_stage(job: Job, tell: Tell) -> StageResult:
    tell("starting the engine")
    engine = MeasuredEngine(job)
    try:
        prompts = make_prompts(job.workload)
        engine.warm_up()
        cold = engine.run_all("cold", prompts, store=True, tell=tell)
        served = engine.run_all("again", prompts, store=False, tell=tell)
        tell("stopping vLLM")
    finally:
        engine.close()
    return StageResult(cold, served)


def main(arguments: list[str]) -> None:
    job = TypeAdapter(Job).validate_json(arguments[0])
    # The engine's processes must not inherit it, or it would stay open.
    os.set_inheritable(int(arguments[1]), False)
    with os.fdopen(int(arguments[1]), "w", buffering=1) as events:

        def tell(doing: str) -> None:
            print(json.dumps({"doing": doing}), file=events)

        result = run_stage(job, tell)
        print(json.dumps({"result": asdict(result)}), file=events)


if __name__ == "__main__":
    main(sys.argv[1:])
