# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Runs vLLM's OpenAI server, with the kvcr tier, peers and KV events.

Everything that needs several engines starts them with ``Server``, sends them requests
over HTTP and reads their metrics. They run the demos' model on the vLLM that comes
first on ``PYTHONPATH``.

Failure model: if a server does not start or answer in time, ``ServerFailed`` is raised
with the end of its log. After the ``with`` block neither a process nor shared memory is
left.
"""

import json
import os
import subprocess
import sys
import time
import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import httpx
from prometheus_client.parser import text_string_to_metric_families

from vllm_kvcr import process_group
from vllm_kvcr.demo_model import CHUNK_BYTES
from vllm_kvcr.demo_plan import BLOCKS_PER_CHUNK, TOKENS_PER_BLOCK, TOKENS_PER_CHUNK
from vllm_kvcr.demo_process import ENVIRONMENT, SHARED_MEMORY, log_tail
from vllm_kvcr.ports import LOCALHOST, consecutive_free_ports, free_ports

MODEL_NAME = "demo"
# Two servers were ready after 83 s on two shared cores, and after 230 s at a load of
# 10.
START_SECONDS = 400.0
REQUEST_SECONDS = 60.0

# Engines spin while they start, and before vLLM 0.33 also when idle. Their clients come
# first.
NICENESS = 5

# Two servers that pin themselves to the same core can wait for each other for minutes.
OF_SERVERS = {**ENVIRONMENT, "VLLM_CPU_OMP_THREADS_BIND": "nobind"}

ON_CPU = {"spec_name": "CpuTieringOffloadingSpec", "spec_module_path": "vllm_kvcr.cpu"}
ON_GPU = {"spec_name": "TieringOffloadingSpec"}
# Of the device's memory, for each of two.
GPU_SHARE = "0.3"


class ServerFailed(Exception):
    """A server did not start or answer; the text says why."""


@dataclass(frozen=True)
class Answer:
    """A server's answer to a prompt, and its own counts."""

    token_ids: tuple[int, ...]
    prompt_tokens: int
    cached_tokens: int
    seconds: float

    @classmethod
    def read(cls, body: Mapping[str, Any], seconds: float) -> Self:
        usage = body["usage"]
        return cls(
            token_ids=tuple(body["choices"][0]["token_ids"]),
            prompt_tokens=usage["prompt_tokens"],
            # Absent where none were.
            cached_tokens=(usage["prompt_tokens_details"] or {}).get("cached_tokens")
            or 0,
            seconds=seconds,
        )

    @property
    def computed_tokens(self) -> int:
        return self.prompt_tokens - self.cached_tokens


class Metrics:
    """One reading of a server's ``/metrics``."""

    def __init__(self, text: str) -> None:
        self._samples = [
            sample
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        ]

    def total(self, name: str, **labels: str) -> int:
        """The sum over all samples of that name that carry these labels."""
        return int(self.seconds(name, **labels))

    def seconds(self, name: str, **labels: str) -> float:
        """The same for what is no whole number."""
        return sum(
            sample.value
            for sample in self._samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )

    def by_label(self, name: str, label: str) -> dict[str, int]:
        """The sums for each of the label's values; those that are zero are left out."""
        sums = Counter[str]()
        for sample in self._samples:
            if sample.name == name:
                sums[sample.labels[label]] += int(sample.value)
        return {value: count for value, count in sorted(sums.items()) if count}


class Server:
    """One server, from ``__enter__`` to ``__exit__``.

    Args:
        name: Used in file names and messages.
        folder: For the socket of its KV events and, unless ``log`` is given, its log.
        model: Written by ``demo_model.write_model`` for ``longest(chunks)`` tokens.
        chunks: The longest prompt.
        cache_chunks: Size of the KV cache; by default several prompts.
        primary_chunks: Size of the primary tier; by default several prompts.
        ranks: Data-parallel ranks, each with a control port and KV events of its own.
        control_ports: By default ports that are free now.
        tier: Options of the kvcr tier, in addition to those that peers need.
        environment: Variables in addition to the demos'.
        on_gpu: Run on a share of a CUDA device instead of the CPU.
    """

    def __init__(
        self,
        name: str,
        folder: Path,
        model: Path,
        *,
        chunks: int = 16,
        cache_chunks: int | None = None,
        primary_chunks: int | None = None,
        ranks: int = 1,
        control_ports: Sequence[int] | None = None,
        tier: Mapping[str, Any] | None = None,
        environment: Mapping[str, str] | None = None,
        log: Path | None = None,
        on_gpu: bool = False,
    ) -> None:
        self.name = name
        (self.port,) = free_ports(1)
        self.control_ports = list(control_ports or free_ports(ranks))
        self.control_endpoints = [
            f"tcp://{LOCALHOST}:{port}" for port in self.control_ports
        ]
        self.control_endpoint = self.control_endpoints[0]
        self.replay_endpoint: str | None = None
        if ranks == 1:
            # vLLM binds a TCP endpoint on every interface, and this one to a file.
            self.events_endpoints = [f"ipc://{folder}/{name}.events"]
            self.replay_endpoint = f"ipc://{folder}/{name}.replay"
        else:
            # Files are for one rank only. Each connects to a port of its own, where
            # a ``Subscription`` has to listen.
            self.events_endpoints = [
                f"tcp://{LOCALHOST}:{port}" for port in consecutive_free_ports(ranks)
            ]
        self.events_endpoint = self.events_endpoints[0]
        self.log = log or folder / f"{name}.log"
        self._model = model
        self._chunks = chunks
        self._cache_chunks = cache_chunks or 4 * (chunks + 1)
        self._primary_chunks = primary_chunks or 8 * chunks
        self._ranks = ranks
        self._tier = dict(tier or {})
        self._on_gpu = on_gpu
        device = {"VLLM_TARGET_DEVICE": "cuda"} if on_gpu else {}
        if ranks > 1:
            # Or each takes its memory from a NUMA node of its own. Only whether it is
            # set matters.
            device["VLLM_CPU_SIM_MULTI_NUMA"] = "0"
        self._environment = {
            **os.environ,
            **OF_SERVERS,
            **device,
            **(environment or {}),
        }
        self._engine_id = f"vllm-kvcr-{name}-{uuid.uuid4()}"
        self._process: subprocess.Popen[bytes] | None = None
        self._http = httpx.Client(base_url=f"http://{LOCALHOST}:{self.port}")

    def __enter__(self) -> Self:
        command = ["nice", "-n", str(NICENESS), sys.executable]
        command += ["-m", "vllm.entrypoints.openai.api_server", *self._arguments()]
        with self.log.open("ab") as sink:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=sink,
                env=self._environment,
                start_new_session=True,
            )
        return self

    def __exit__(self, *raised: object) -> None:
        self._http.close()
        assert self._process is not None
        process_group.end(self._process)
        # A killed server cannot remove its shared memory.
        for left_behind in SHARED_MEMORY.glob(f"vllm_offload_{self._engine_id}*"):
            left_behind.unlink(missing_ok=True)

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def kill(self) -> None:
        """Kill all its processes at once, as if the machine had failed."""
        assert self._process is not None
        process_group.kill(self._process)

    def wait_until_ready(self, seconds: float = START_SECONDS) -> None:
        assert self._process is not None
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            status = self._process.poll()
            if status is not None:
                raise self._failure(f"ended with status {status}")
            with suppress(httpx.TransportError):
                if self._http.get("/health", timeout=2).is_success:
                    return
            time.sleep(0.2)
        raise self._failure(f"not ready after {seconds:.0f} s")

    def complete(
        self,
        prompt: Sequence[int],
        tokens: int = 16,
        hint: Mapping[str, Any] | None = None,
        seconds: float = REQUEST_SECONDS,
        rank: int | None = None,
    ) -> Answer:
        """Complete a prompt of token ids greedily.

        Args:
            hint: Says where the prompt's blocks are; see ``routing.fetch_hint``.
            rank: The data-parallel rank that has to do it; by default any.
        """
        request = completion_request(prompt, tokens)
        if hint is not None:
            request["kv_transfer_params"] = {"kv_hint": hint}
        headers = {} if rank is None else {"X-data-parallel-rank": str(rank)}
        started = time.perf_counter()
        try:
            response = self._http.post(
                "/v1/completions", json=request, headers=headers, timeout=seconds
            )
        except httpx.TransportError as error:
            raise self._failure(f"gave no answer: {error!r}") from error
        if not response.is_success:
            raise self._failure(f"answered {response.status_code}: {response.text}")
        return Answer.read(response.json(), time.perf_counter() - started)

    def metrics(self) -> Metrics:
        return Metrics(self.metrics_text())

    def metrics_text(self) -> str:
        try:
            response = self._http.get("/metrics", timeout=REQUEST_SECONDS)
            return response.raise_for_status().text
        except httpx.HTTPError as error:
            raise self._failure(f"shows no metrics: {error!r}") from error

    def engine_wakeups(self) -> int:
        """How often the thread that steps the engine has gone to sleep."""
        for process in process_group.members(self.pid):
            if (process / "comm").read_text().startswith("VLLM::EngineCor"):
                status = (process / "status").read_text()
                return int(status.split("voluntary_ctxt_switches:")[1].split()[0])
        raise self._failure("has no engine core")

    def _failure(self, what: str) -> ServerFailed:
        return ServerFailed(
            f"server {self.name} {what}; its log ends with\n{log_tail(self.log)}"
        )

    @property
    def transfer_config(self) -> dict[str, Any]:
        """What it is given as ``--kv-transfer-config``."""
        return {
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            "engine_id": self._engine_id,
            "kv_connector_extra_config": {
                **(ON_GPU if self._on_gpu else ON_CPU),
                "blocks_per_chunk": BLOCKS_PER_CHUNK,
                "self_describing_kv_events": True,
                "cpu_bytes_to_use": self._primary_chunks * CHUNK_BYTES,
                "secondary_tiers": [
                    {
                        "type": "kvcr",
                        "secondary_g2_slots": 8 * self._chunks,
                        "control_ports": self.control_ports,
                        "control_host": LOCALHOST,
                        "control_advertise_host": LOCALHOST,
                        "router_capabilities": ["router_hint"],
                        "enable_telemetry": True,
                        **self._tier,
                    }
                ],
            },
        }

    def _arguments(self) -> list[str]:
        max_tokens = longest(self._chunks)
        events = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": self.events_endpoint,
            "replay_endpoint": self.replay_endpoint,
        }
        return [
            *("--model", str(self._model), "--served-model-name", MODEL_NAME),
            *("--host", LOCALHOST, "--port", str(self.port)),
            *("--skip-tokenizer-init", "--enforce-eager", "--dtype", "float32"),
            *("--max-model-len", str(max_tokens)),
            *("--max-num-batched-tokens", str(max(2048, max_tokens))),
            *("--max-num-seqs", "4", "--block-size", str(TOKENS_PER_BLOCK)),
            *("--num-gpu-blocks-override", str(self._cache_chunks * BLOCKS_PER_CHUNK)),
            *("--data-parallel-size", str(self._ranks)),
            "--enable-prompt-tokens-details",
            *(("--gpu-memory-utilization", GPU_SHARE) if self._on_gpu else ()),
            *("--kv-transfer-config", json.dumps(self.transfer_config)),
            *("--kv-events-config", json.dumps(events)),
        ]


def completion_request(prompt: Sequence[int], tokens: int) -> dict[str, Any]:
    """What has a prompt of token ids completed, greedily, and the output's ids told."""
    return {
        "model": MODEL_NAME,
        "prompt": list(prompt),
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }


def longest(chunks: int) -> int:
    """Tokens of a prompt that is slightly longer than ``chunks``, and of its output."""
    return (chunks + 1) * TOKENS_PER_CHUNK
