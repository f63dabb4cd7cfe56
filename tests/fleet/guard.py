# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A pool that outlives its server: ``python -m tests.fleet.guard``.

``vllm-kvcr guard`` owns the pool of server A. A computes prompts and is killed. B gets
some of them from the guard, at A's control endpoint. A new server takes the pool back
and is served from it, without a hint.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests import peers_vllm
from tests.fleet.part import main_of
from vllm_kvcr import process_group
from vllm_kvcr.demo_model import CHUNK_BYTES, make_prompts, write_model
from vllm_kvcr.demo_plan import Workload
from vllm_kvcr.demo_process import log_tail
from vllm_kvcr.kv_events import Subscription
from vllm_kvcr.peers_run import BLOCKS, hint_at
from vllm_kvcr.servers import (
    OF_SERVERS,
    Answer,
    Server,
    ServerFailed,
    longest,
)

WORKLOAD = Workload(prompts=3, chunks_per_prompt=4)
POOL_CHUNKS = 2 * WORKLOAD.prompts * WORKLOAD.chunks_per_prompt
GUARD_SECONDS = 60.0
STALLED = "source progress stalled"
# For a first contact; and for the guard to see that A is gone.
CONTACT_SECONDS = 30.0


def main(argv: Sequence[str] | None = None) -> int:
    return main_of("guard", "A pool that outlives its server.", run, argv)


@contextmanager
def guard(folder: Path, server: Server, socket: str) -> Iterator[None]:
    """``vllm-kvcr guard`` for that server, ready."""
    config = folder / "kv-transfer.json"
    config.write_text(json.dumps(server.transfer_config))
    command = [sys.executable, "-m", "vllm_kvcr.cli", "guard", "--config", str(config)]
    command += ["--pool-size", str(POOL_CHUNKS * CHUNK_BYTES)]
    log = folder / "guard.log"
    with log.open("ab") as sink:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=sink,
            env={**os.environ, **OF_SERVERS},
            start_new_session=True,
        )
    try:
        deadline = time.monotonic() + GUARD_SECONDS
        while not Path(socket).exists():
            if process.poll() is not None or time.monotonic() > deadline:
                raise ServerFailed(f"the guard does not start:\n{log_tail(log)}")
            time.sleep(0.1)
        yield
    finally:
        process_group.end(process)


def run(folder: Path) -> list[str]:
    model = folder / "model"
    write_model(model, longest(WORKLOAD.chunks_per_prompt))
    socket = f"{folder}/kvcr.sock"
    tier = {
        "kvcr_service_socket_path": socket,
        "compatibility_digest": "auto",
        "namespace": "fleet/1",
        "secondary_g2_slots": 0,
    }
    prompts = make_prompts(WORKLOAD)
    common: dict[str, Any] = {
        "chunks": WORKLOAD.chunks_per_prompt,
        "environment": peers_vllm.environment(),
    }
    a = Server("A", folder, model, tier=tier, **common)
    # One after the other: a server starts twice as fast where it is alone.
    with guard(folder, a, socket):
        with a:
            a.wait_until_ready()
            cold, hints = store(a, prompts)
            a.kill()
        print("A is killed", flush=True)

        peer = {"namespace": tier["namespace"], "pull_timeout_ms": 5000}
        with Server("B", folder, model, tier=peer, **common) as b:
            b.wait_until_ready()
            faults = pull(b, prompts, cold, hints)
        if faults and STALLED in (folder / "guard.log").read_text():
            faults.append(
                "the guard's thread was not scheduled for a second, which ends its "
                "service to peers; this machine is too busy"
            )

        new = Server(
            "A2", folder, model, tier=tier, control_ports=a.control_ports, **common
        )
        started = time.monotonic()
        with new as again:
            again.wait_until_ready()
            ready = time.monotonic() - started
            hit = again.complete(prompts[2], WORKLOAD.output_tokens)
            first_hit = time.monotonic() - started
    print(
        f"A new server was ready after {ready:.1f} s. It computed "
        f"{hit.computed_tokens} of {hit.prompt_tokens} tokens of its first prompt and "
        f"answered {first_hit:.1f} s after its start, {hit.seconds:.2f} s after the "
        f"request (cold: {cold[2].seconds:.2f} s)",
        flush=True,
    )
    return faults + faults_of("the new server", hit, cold[2])


def store(
    a: Server, prompts: list[list[int]]
) -> tuple[list[Answer], list[dict[str, Any]]]:
    """Have A compute all; its answers, and where its blocks then are."""
    with Subscription(a.events_endpoint, replay=a.replay_endpoint) as events:
        cold = [a.complete(prompt, WORKLOAD.output_tokens) for prompt in prompts]
        hints = [hint_at(a, events, prompt, WORKLOAD) for prompt in prompts]
    wait_until_stored(a)
    return cold, hints


def pull(
    b: Server,
    prompts: list[list[int]],
    cold: list[Answer],
    hints: list[dict[str, Any]],
) -> list[str]:
    """Have B meet the guard by one prompt, and be served another one."""
    b.complete(prompts[0], WORKLOAD.output_tokens, hints[0])
    deadline = time.monotonic() + CONTACT_SECONDS
    while not fetched(b) and time.monotonic() < deadline:
        time.sleep(0.2)
    pulled = b.complete(prompts[1], WORKLOAD.output_tokens, hints[1])
    print(
        f"B computed {pulled.computed_tokens} of {pulled.prompt_tokens} tokens; "
        f"{fetched(b)} chunks came from the guard",
        flush=True,
    )
    return faults_of("B", pulled, cold[1])


def fetched(server: Server) -> int:
    return server.metrics().total(BLOCKS, operation="remote_fetch")


def wait_until_stored(server: Server) -> None:
    """Until all of it is in the pool."""
    wanted = WORKLOAD.chunks
    deadline = time.monotonic() + CONTACT_SECONDS
    while True:
        stored = server.metrics().total(BLOCKS, operation="local_fill")
        if stored >= wanted:
            return
        if time.monotonic() > deadline:
            raise ServerFailed(f"A stored {stored} of {wanted} chunks")
        time.sleep(0.2)


def faults_of(who: str, answer: Answer, cold: Answer) -> list[str]:
    faults = []
    if answer.computed_tokens != WORKLOAD.tail_tokens:
        faults.append(
            f"{who} computed {answer.computed_tokens} tokens, and not only the last "
            f"{WORKLOAD.tail_tokens}"
        )
    if answer.token_ids != cold.token_ids:
        faults.append(f"{who} gave another output than A")
    return faults


if __name__ == "__main__":
    sys.exit(main())
