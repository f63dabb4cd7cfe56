# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Dynamo's own router in front of two engines: ``python -m tests.fleet.dynamo``.

Dynamo's frontend chooses a worker for each request, hardly by what it has, and adds the
hint. Every prompt is sent several times, so that workers are chosen that lack what the
other one has. Its packages, 260 MiB, are installed into a folder of their own first.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

import httpx
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from scripts.pip import pip
from tests import peers_vllm
from tests.fleet.part import main_of, started
from vllm_kvcr.demo_model import VOCABULARY, make_prompts, write_model
from vllm_kvcr.demo_plan import BLOCKS_PER_CHUNK, TOKENS_PER_BLOCK, Workload
from vllm_kvcr.demo_process import log_tail
from vllm_kvcr.servers import (
    LOCALHOST,
    MODEL_NAME,
    OF_SERVERS,
    REQUEST_SECONDS,
    START_SECONDS,
    Metrics,
    Server,
    ServerFailed,
    free_ports,
    longest,
)

ROOT = Path(__file__).resolve().parents[2]
UNDER_DYNAMO = ROOT / "tests" / "fleet" / "under_dynamo.py"
RELEASE = "1.6.1"
PACKAGES = (
    f"ai-dynamo=={RELEASE}",
    f"ai-dynamo-runtime=={RELEASE}",
    "kubernetes==32.0.1",
    "redis==8.1.0",
)

WORKLOAD = Workload(prompts=4, chunks_per_prompt=4)
TIMES = 6
PLANES = ("--discovery-backend", "file", "--request-plane", "tcp")
PLANES += ("--event-plane", "zmq")
# Without any credit for overlap, Dynamo keeps no index and adds no hints.
ROUTER = ("--router-mode", "kv", "--router-kv-events")
ROUTER += ("--router-kv-overlap-score-credit", "0.01")
ROUTER += ("--router-host-cache-hit-weight", "0.01", "--router-temperature", "10")

RUNNING = "vllm:num_requests_running"
MOVED = "vllm:kvcr_tier_moved_blocks_total"
LOST = "vllm:kvcr_tier_lost_blocks_total"


def main(argv: Sequence[str] | None = None) -> int:
    return main_of("dynamo", "Dynamo's router in front of two engines.", run, argv)


def run(folder: Path) -> list[str]:
    model = folder / "model"
    write_model(model, longest(WORKLOAD.chunks_per_prompt))
    write_tokenizer(model)
    (http,) = free_ports(1)
    url = f"http://{LOCALHOST}:{http}"
    environment = {
        **os.environ,
        **OF_SERVERS,
        "PYTHONPATH": os.pathsep.join(
            [peers_vllm.environment()["PYTHONPATH"], str(installed()), str(ROOT)]
        ),
        "DYN_FILE_KV": str(folder / "discovery"),
    }
    with ExitStack() as stack:

        def start(name: str, module: str, arguments: list[str], port: int) -> Path:
            # Without -P, Dynamo's own package would be looked for beside that file.
            command = [sys.executable, "-P", str(UNDER_DYNAMO), module]
            command += [*arguments, *PLANES]
            log = folder / f"{name}.log"
            mine = {**environment, "DYN_SYSTEM_PORT": str(port)}
            stack.enter_context(started(command, log, mine))
            return log

        listen = ["--http-host", LOCALHOST, "--http-port", str(http), *ROUTER]
        frontend = start("frontend", "dynamo.frontend", listen, -1)
        workers = []
        for name in "AB":
            (port,) = free_ports(1)
            log = start(name, "dynamo.vllm", worker_arguments(name, folder), port)
            metrics = f"http://{LOCALHOST}:{port}/metrics"
            # One after the other: two that start take minutes on two cores.
            wait_for(lambda at=metrics: RUNNING in httpx.get(at, timeout=5).text, log)
            workers.append(metrics)
        served = f"{url}/v1/models"
        wait_for(lambda: bool(httpx.get(served, timeout=5).json()["data"]), frontend)
        faults = send_all(url)
        moved = [Metrics(httpx.get(each, timeout=20).text) for each in workers]
    pulled = [each.total(MOVED, place="peer", direction="load") for each in moved]
    lost = [each.by_label(LOST, "reason") for each in moved]
    print(
        f"{TIMES * WORKLOAD.prompts} requests through Dynamo {RELEASE}. Chunks that A "
        f"and B pulled from each other: {pulled}; blocks lost: {lost}"
    )
    if not sum(pulled):
        faults.append("no worker was served by the other one")
    return faults


def send_all(url: str) -> list[str]:
    faults = []
    outputs: dict[int, str] = {}
    for number, prompt in [*enumerate(make_prompts(WORKLOAD))] * TIMES:
        body = {"model": MODEL_NAME, "prompt": prompt, "max_tokens": 8}
        response = httpx.post(
            f"{url}/v1/completions",
            json={**body, "temperature": 0},
            timeout=REQUEST_SECONDS,
        )
        if not response.is_success:
            faults.append(f"prompt {number}: {response.status_code} {response.text}")
            continue
        text = response.json()["choices"][0]["text"]
        if outputs.setdefault(number, text) != text:
            faults.append(f"prompt {number} had two outputs")
    if len(set(outputs.values())) < WORKLOAD.prompts:
        faults.append("two prompts had the same output, so equal ones prove nothing")
    return faults


def worker_arguments(name: str, folder: Path) -> list[str]:
    chunks = WORKLOAD.chunks_per_prompt
    model = folder / "model"
    like = Server(name, folder, model, chunks=chunks)
    events = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        # Dynamo connects to a port only, and vLLM binds none but on all interfaces.
        "endpoint": f"tcp://*:{free_ports(1)[0]}",
    }
    return [
        *("--model", str(model), "--served-model-name", MODEL_NAME),
        *("--enforce-eager", "--dtype", "float32"),
        *("--max-model-len", str(longest(chunks)), "--max-num-seqs", "4"),
        *("--max-num-batched-tokens", "2048", "--block-size", str(TOKENS_PER_BLOCK)),
        *("--num-gpu-blocks-override", str(4 * (chunks + 1) * BLOCKS_PER_CHUNK)),
        *("--kv-transfer-config", json.dumps(like.transfer_config)),
        *("--kv-events-config", json.dumps(events)),
    ]


def write_tokenizer(model: Path) -> None:
    """Dynamo wants one, with a template for chats: each token is a word."""
    words = {f"t{token}": token for token in range(VOCABULARY)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="t0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.save(str(model / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "t1",
        "unk_token": "t0",
        "chat_template": "{{ messages[0].content }}",
    }
    (model / "tokenizer_config.json").write_text(json.dumps(config))


def installed() -> Path:
    """The folder with Dynamo's packages, and with nothing that they require."""
    folder = Path(sys.prefix) / "dynamo"
    ready = folder / "ready"
    if not (ready.exists() and ready.read_text() == str(PACKAGES)):
        arguments = ("install", "--no-deps", "--upgrade", "--target", str(folder))
        log = folder.with_suffix(".log")
        pip(Path(sys.executable), log, f"Dynamo {RELEASE}", *arguments, *PACKAGES)
        ready.write_text(str(PACKAGES))
    return folder


def wait_for(is_there: Callable[[], bool], log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        with suppress(httpx.HTTPError, ValueError):
            if is_there():
                return
        time.sleep(0.5)
    raise ServerFailed(f"{log.stem} is not ready; its log ends with\n{log_tail(log)}")


if __name__ == "__main__":
    sys.exit(main())
