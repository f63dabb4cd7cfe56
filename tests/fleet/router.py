# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The example's router in front of two servers: ``python -m tests.fleet.router``.

More prompts than both servers can keep are sent through it, several at a time, so that
blocks are stored, pulled and evicted all the while. What the events say is then held
against what the servers do:

- No hint named a block that had been gone for longer than the events take.
- What a hint named was served, or left its source meanwhile.
- In every place that peers pull from, blocks were stored and removed in turn.
- In the end each server finds of each prompt exactly what its events say that it has,
  and gets from the other exactly what the other's events say.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tests import peers_vllm
from tests.fleet.ledger import Ledger, settle
from tests.fleet.part import started, status_of
from vllm_kvcr.demo_model import make_prompts, write_model
from vllm_kvcr.demo_plan import BLOCKS_PER_CHUNK, TOKENS_PER_BLOCK, Workload
from vllm_kvcr.demo_process import log_tail
from vllm_kvcr.routing import fetch_hint
from vllm_kvcr.servers import (
    LOCALHOST,
    OF_SERVERS,
    REQUEST_SECONDS,
    Answer,
    Server,
    ServerFailed,
    completion_request,
    free_ports,
    longest,
)

ROOT = Path(__file__).resolve().parents[2]
ROUTER = ROOT / "examples" / "router" / "router.py"
ROUTER_SECONDS = 60.0

WORKLOAD = Workload(prompts=14, chunks_per_prompt=4)
# Chunks. A request may pull half of what the primary tier holds, which is a prompt.
CACHE, PRIMARY, POOL = 8, 10, 20
AT_A_TIME = 3

LOST = "vllm:kvcr_tier_lost_blocks_total"

TIER = {"secondary_g2_slots": POOL}


@dataclass(frozen=True)
class Routed:
    """A request through the router, and its answer."""

    prompt: int
    engine: str
    source: str
    hinted: int
    sent: float
    answered: float
    answer: Answer

    @property
    def is_served(self) -> bool:
        return self.answer.cached_tokens >= self.hinted * TOKENS_PER_BLOCK


class Client:
    """Asks the router."""

    def __init__(self, port: int) -> None:
        self._http = httpx.Client(base_url=f"http://{LOCALHOST}:{port}")

    def close(self) -> None:
        self._http.close()

    def is_ready(self) -> bool:
        try:
            return self._http.get("/health", timeout=2).is_success
        except httpx.TransportError:
            return False

    def ask(self, number: int, prompt: Sequence[int]) -> Routed:
        body = completion_request(prompt, WORKLOAD.output_tokens)
        sent, started = time.time(), time.perf_counter()
        response = self._http.post(
            "/v1/completions", json=body, timeout=REQUEST_SECONDS
        ).raise_for_status()
        return Routed(
            number,
            response.headers["x-kvcr-engine"],
            response.headers["x-kvcr-source"],
            int(response.headers["x-kvcr-hinted-blocks"]),
            sent,
            time.time(),
            Answer.read(response.json(), time.perf_counter() - started),
        )


@contextmanager
def routed(servers: Sequence[Server], log: Path) -> Iterator[Client]:
    """The router as its own process, ready."""
    (port,) = free_ports(1)
    # The more hints, the better.
    command = [sys.executable, str(ROUTER), "--port", str(port), "--pull-cost", "0"]
    for server in servers:
        url = f"http://{LOCALHOST}:{server.port}"
        endpoints = server.events_endpoint, server.control_endpoint
        command += ["--engine", url, *endpoints, str(server.replay_endpoint)]
    environment = {**os.environ, **OF_SERVERS, "PYTHONPATH": str(ROOT)}
    with started(command, log, environment) as process, closing(Client(port)) as client:
        deadline = time.monotonic() + ROUTER_SECONDS
        while not client.is_ready():
            if process.poll() is not None or time.monotonic() > deadline:
                raise ServerFailed(f"the router does not start:\n{log_tail(log)}")
            time.sleep(0.1)
        yield client


def send_all(
    client: Client, prompts: list[list[int]], requests: int, ledgers: list[Ledger]
) -> list[Routed]:
    """Several at a time, some prompts far more often than others."""
    draw = random.Random(0)
    weights = [1 / (n + 1) for n in range(len(prompts))]
    order = draw.choices(range(len(prompts)), weights, k=requests)
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        waiting: list[Future[Routed]] = [
            pool.submit(client.ask, number, prompts[number]) for number in order
        ]
        while not all(future.done() for future in waiting):
            for ledger in ledgers:
                ledger.read()
            time.sleep(0.01)
    return [future.result() for future in waiting]


def faults_of_load(
    made: list[Routed], prompts: list[list[int]], ledgers: dict[str, Ledger]
) -> list[str]:
    """What was wrong with hints, and with what became of them."""
    faults = []
    outputs: dict[int, tuple[int, ...]] = {}
    introduced: set[tuple[str, str]] = set()
    for each in sorted(made, key=lambda each: each.sent):
        if outputs.setdefault(each.prompt, each.answer.token_ids) != (
            each.answer.token_ids
        ):
            faults.append(f"prompt {each.prompt} had two outputs")
        if not each.source:
            continue
        pair, late = (each.engine, each.source), lateness(each, prompts, ledgers)
        if late > ledgers[each.source].slowest:
            faults.append(
                f"prompt {each.prompt}: a block was hinted {late:.1f} s after it had "
                "left its source"
            )
        if each.is_served:
            introduced.add(pair)
        elif pair in introduced and not left_meanwhile(each, prompts, ledgers):
            faults.append(
                f"prompt {each.prompt}: {each.hinted} blocks were hinted, and only "
                f"{each.answer.cached_tokens} tokens served, though none had left"
            )
    if not introduced:
        faults.append("no hint was ever served")
    return faults


def left_meanwhile(
    each: Routed, prompts: list[list[int]], ledgers: dict[str, Ledger]
) -> bool:
    ledger = ledgers[each.source]
    start = each.sent - ledger.slowest
    return any(
        ledger.left_between(block, start, each.answered)
        for block in ledger.ever_held(prompts[each.prompt])[: each.hinted]
    )


def lateness(
    each: Routed, prompts: list[list[int]], ledgers: dict[str, Ledger]
) -> float:
    """For how long the hinted block that was gone longest had been gone."""
    ledger = ledgers[each.source]
    blocks = ledger.ever_held(prompts[each.prompt])[: each.hinted]
    return max(ledger.gone_for(block, each.sent) for block in blocks)


def tell_load(
    made: list[Routed], prompts: list[list[int]], ledgers: dict[str, Ledger]
) -> None:
    hinted = [each for each in made if each.source]
    late = [lateness(each, prompts, ledgers) for each in hinted]
    delays = sorted(delay for ledger in ledgers.values() for delay in ledger.delays)
    print(
        f"{len(made)} requests through the router, {len(hinted)} with a hint, of which "
        f"{sum(each.is_served for each in hinted)} were served all that was hinted. "
        f"Longest that a hinted block had been gone: {1000 * max(late, default=0):.0f} "
        f"ms. Events took {1000 * delays[len(delays) // 2]:.0f} ms (median), "
        f"{1000 * delays[-1]:.0f} ms at most."
    )


def faults_at_rest(
    servers: Sequence[Server], ledgers: Sequence[Ledger], prompts: list[list[int]]
) -> list[str]:
    """What each server finds, and what it gets from the other, against its events."""
    faults = []
    found = pulled = 0
    for number, prompt in enumerate(prompts):
        for here, there in ((0, 1), (1, 0)):
            settle(ledgers)
            expected = ledgers[here].expected_hit(prompt, BLOCKS_PER_CHUNK)
            hashes = ledgers[there].index.pullable(prompt)
            hint = None
            if len(hashes) > expected:
                hint = fetch_hint(servers[there].control_endpoint, hashes)
                expected = len(hashes)
                pulled += 1
            answer = servers[here].complete(prompt, WORKLOAD.output_tokens, hint)
            found += expected > 0
            if answer.cached_tokens != expected * TOKENS_PER_BLOCK:
                what = (
                    f"found with a hint at {servers[there].name}" if hint else "found"
                )
                faults.append(
                    f"server {servers[here].name} {what} {answer.cached_tokens} tokens "
                    f"of prompt {number}, and by the events "
                    f"{expected * TOKENS_PER_BLOCK}"
                )
    print(
        f"At rest, {2 * len(prompts)} requests: {found} had to find blocks, {pulled} "
        f"of them at the other server; {len(faults)} found others than the events say."
    )
    if not pulled:
        faults.append("in the end neither server had what the other had not")
    return faults


def faults_of_hints(
    servers: Sequence[Server], ledgers: Sequence[Ledger], prompts: list[list[int]]
) -> list[str]:
    """What ``vllm-kvcr hint`` prints, from the engines' replay of their events."""
    faults = []
    for server, ledger in zip(servers, ledgers, strict=True):
        for number, prompt in enumerate(prompts):
            expected = ledger.index.pullable(prompt)
            command = [sys.executable, "-m", "vllm_kvcr.cli", "hint", "--tokens", "@-"]
            command += ["--events", server.events_endpoint]
            command += ["--replay", str(server.replay_endpoint)]
            command += ["--source", server.control_endpoint]
            if not expected:
                continue
            done = subprocess.run(
                command, input=json.dumps(prompt), capture_output=True, text=True
            )
            hint = json.loads(done.stdout) if done.returncode == 0 else {}
            # What the last request stored may have evicted the prompt meanwhile.
            settle([ledger])
            if hashes_of(hint) not in (expected, ledger.index.pullable(prompt)):
                faults.append(
                    f"vllm-kvcr hint printed another hint for prompt {number} at "
                    f"{server.name}: {done.stdout}{done.stderr}"
                )
            if hint:
                print(f"vllm-kvcr hint: {done.stderr.strip()}")
                break
        else:
            faults.append(f"vllm-kvcr hint knew no prompt at {server.name}")
    return faults


def hashes_of(hint: dict[str, Any]) -> list[int | bytes]:
    return (
        [block for each in hint["actions"] for block in each["payload"]["block_hashes"]]
        if hint
        else []
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.fleet.router",
        description="A router in front of two servers, whose events have to be right.",
    )
    parser.add_argument("--requests", type=int, default=80)
    options = parser.parse_args(argv)
    return status_of(lambda folder: run(folder, options.requests))


def run(folder: Path, requests: int) -> list[str]:
    write_model(folder / "model", longest(WORKLOAD.chunks_per_prompt))
    prompts = make_prompts(WORKLOAD)
    with ExitStack() as stack:
        servers = [
            stack.enter_context(
                Server(
                    name,
                    folder,
                    folder / "model",
                    chunks=WORKLOAD.chunks_per_prompt,
                    cache_chunks=CACHE,
                    primary_chunks=PRIMARY,
                    tier=TIER,
                    environment=peers_vllm.environment(),
                )
            )
            for name in "AB"
        ]
        for server in servers:
            server.wait_until_ready()
        ledgers = [
            stack.enter_context(Ledger(s.events_endpoint, s.replay_endpoint))
            for s in servers
        ]
        client = stack.enter_context(routed(servers, folder / "router.log"))
        made = send_all(client, prompts, requests, ledgers)
        settle(ledgers)
        urls = [f"http://{LOCALHOST}:{server.port}" for server in servers]
        by_url = dict(zip(urls, ledgers, strict=True))
        faults = faults_of_load(made, prompts, by_url)
        tell_load(made, prompts, by_url)
        faults += faults_at_rest(servers, ledgers, prompts)
        faults += faults_of_hints(servers, ledgers, prompts)
        for server, ledger in zip(servers, ledgers, strict=True):
            faults += [f"server {server.name}: {fault}" for fault in ledger.faults]
            print(
                f"{server.name}: {ledger.stored} blocks stored and {ledger.removed} "
                f"removed by its events, {len(ledger.faults)} of them not in turn; "
                f"blocks lost: {server.metrics().by_label(LOST, 'reason')}"
            )
    return faults


if __name__ == "__main__":
    sys.exit(main())
