# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Runs two servers, one of which pulls from the other, and judges the results.

A answers all prompts first. B then gets the same prompts with hints that name A: one
that introduces A to it, one that has to be served from A, and one after A was killed.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, Self

from vllm_kvcr.demo_model import CHUNK_BYTES, make_prompts, write_model
from vllm_kvcr.demo_plan import TOKENS_PER_CHUNK, Workload
from vllm_kvcr.kv_events import Subscription
from vllm_kvcr.routing import fetch_hint
from vllm_kvcr.servers import Answer, Metrics, Server, ServerFailed, longest

WORKLOAD = Workload(prompts=3)
EVENTS_SECONDS = 15.0
# Must exceed the introduction of A to B, and the time until their metrics show it.
INTRODUCTION_SECONDS = 20.0
# Must exceed the time between a pull and the metrics of A, which sleeps, that show it.
METRICS_SECONDS = 10.0
IDLE_SECONDS = 3.0
# How long B may take for a prompt whose peer was killed, in addition to twice the time
# that A took. Must be less than pull_timeout_ms, for which B must not wait.
DEAD_PEER_SECONDS = 5.0

BYTES = "vllm:kvcr_transfer_bytes_total"
BLOCKS = "vllm:kvcr_transfer_blocks_total"

Tell = Callable[[str], None]


@dataclass(frozen=True)
class Moved:
    """What A sent to B for the served prompt, according to the metrics of both."""

    blocks_fetched: int
    blocks_written: int
    bytes_written: int
    bytes_delivered: int

    @classmethod
    def so_far(cls, source: Metrics, target: Metrics) -> Self:
        return cls(
            blocks_fetched=target.total(BLOCKS, operation="remote_fetch"),
            blocks_written=source.total(BLOCKS, operation="source_write"),
            bytes_written=source.total(BYTES, operation="source_write"),
            # Blocks that were pulled land in the pool and are copied from there.
            bytes_delivered=target.total(BYTES, operation="local_deliver"),
        )

    def since(self, before: Self) -> Self:
        pairs = zip(astuple(self), astuple(before), strict=True)
        return type(self)(*(now - then for now, then in pairs))

    @property
    def agree(self) -> bool:
        return (
            self.blocks_fetched == self.blocks_written > 0
            and self.bytes_written == self.bytes_delivered > 0
        )


@dataclass(frozen=True)
class PeersResult:
    """The answers of A and B, and their metrics."""

    at_source: tuple[Answer, ...]
    introduced: Answer
    served: Answer
    after_kill: Answer
    moved: Moved
    idle_wakeups: int

    @property
    def at_target(self) -> tuple[Answer, ...]:
        return (self.introduced, self.served, self.after_kill)

    @property
    def equal_outputs(self) -> int:
        pairs = zip(self.at_source, self.at_target, strict=True)
        return sum(cold.token_ids == answer.token_ids for cold, answer in pairs)

    def faults(self, workload: Workload = WORKLOAD) -> list[str]:
        """The reasons why this does not show what it is meant to show."""
        faults = []
        outputs = {answer.token_ids for answer in self.at_source}
        if len(outputs) < len(self.at_source):
            faults.append(
                "different prompts gave the same output, so equal outputs would prove "
                "nothing"
            )
        if self.equal_outputs < len(self.at_source):
            faults.append(
                f"only {self.equal_outputs} of {len(self.at_source)} outputs of B "
                "equal A's"
            )
        if any(answer.cached_tokens for answer in self.at_source):
            faults.append("A did not have to compute all of a prompt")
        if self.served.computed_tokens != workload.tail_tokens:
            faults.append(
                f"B computed {self.served.computed_tokens} tokens of the served prompt "
                f"instead of only its last {workload.tail_tokens}"
            )
        moved, chunks = self.moved, workload.chunks_per_prompt
        if not moved.blocks_fetched == moved.blocks_written == chunks:
            faults.append(
                f"a prompt has {chunks} chunks, but the metrics say that B pulled "
                f"{moved.blocks_fetched} and A wrote {moved.blocks_written}"
            )
        size = chunks * CHUNK_BYTES
        if not moved.bytes_written == moved.bytes_delivered == size:
            faults.append(
                f"{chunks} chunks have {size} bytes, but the metrics say that A wrote "
                f"{moved.bytes_written} and B received {moved.bytes_delivered}"
            )
        if self.idle_wakeups > 100 * IDLE_SECONDS:
            faults.append(
                f"A's engine core woke up {self.idle_wakeups} times in "
                f"{IDLE_SECONDS:.0f} s with nothing to do; since vLLM 0.33 it sleeps"
            )
        allowed = DEAD_PEER_SECONDS + 2 * self.at_source[-1].seconds
        if self.after_kill.seconds > allowed:
            faults.append(
                f"B took {self.after_kill.seconds:.1f} s for a prompt whose peer was "
                "gone"
            )
        return faults


def run(
    folder: Path,
    tell: Tell,
    *,
    workload: Workload = WORKLOAD,
    tier: Mapping[str, Any] | None = None,
    environment: Mapping[str, str] | None = None,
    log: Path | None = None,
) -> PeersResult:
    """Start both servers, have them answer, and kill A.

    Args:
        folder: For the model, logs and sockets; the caller removes it.
        tier: Options of the tier, in addition to those that peers need.
        environment: Variables in addition to the servers' own.
        log: The log of both servers; by default, logs in ``folder``.

    Raises:
        ServerFailed: One of them did not start or answer.
    """
    first, second, third = make_prompts(workload)
    servers = two_servers(folder, tell, workload, tier, environment, log)
    with servers as (a, b, events):
        tell("A answers the prompts")
        at_source = tuple(
            a.complete(prompt, workload.output_tokens)
            for prompt in (first, second, third)
        )

        def ask(prompt: list[int]) -> Answer:
            hint = hint_at(a, events, prompt, workload)
            return b.complete(prompt, workload.output_tokens, hint)

        tell("B is introduced to A")
        introduced = ask(first)
        before = wait_until_introduced(a, b)
        tell("B answers with blocks of A")
        served = ask(second)
        tell("reading both metrics")
        moved = _wait_until_agreed(a, b, before)
        tell("both do nothing")
        idle_wakeups = a.engine_wakeups()
        time.sleep(IDLE_SECONDS)
        idle_wakeups = a.engine_wakeups() - idle_wakeups
        hint = hint_at(a, events, third, workload)
        tell("A is killed, B answers without it")
        a.kill()
        after_kill = b.complete(third, workload.output_tokens, hint)
        tell("stopping vLLM")
    return PeersResult(at_source, introduced, served, after_kill, moved, idle_wakeups)


@contextmanager
def two_servers(
    folder: Path,
    tell: Tell,
    workload: Workload = WORKLOAD,
    tier: Mapping[str, Any] | None = None,
    environment: Mapping[str, str] | None = None,
    log: Path | None = None,
) -> Iterator[tuple[Server, Server, Subscription]]:
    """Servers A and B, ready, and a subscription to A's KV events from its start."""
    model = folder / "model"
    if not model.exists():
        write_model(model, longest(workload.chunks_per_prompt))
    options: dict[str, Any] = {
        "chunks": workload.chunks_per_prompt,
        "tier": tier,
        "environment": environment,
        "log": log,
    }
    tell("starting both servers")
    with (
        Server("A", folder, model, **options) as a,
        Server("B", folder, model, **options) as b,
        Subscription(a.events_endpoint) as events,
    ):
        a.wait_until_ready()
        b.wait_until_ready()
        yield a, b, events


def hint_at(
    source: Server, events: Subscription, prompt: list[int], workload: Workload
) -> dict[str, Any]:
    """The hint that a router would add to the prompt's request."""
    whole = workload.chunks_per_prompt * TOKENS_PER_CHUNK
    hashes = events.wait_for(prompt, whole, EVENTS_SECONDS)
    if not hashes:
        raise ServerFailed(f"server {source.name} published no block of a prompt")
    return fetch_hint(source.control_endpoint, hashes)


def wait_until_introduced(a: Server, b: Server) -> Moved:
    """Wait until both sides' metrics show the block of the introduction."""
    deadline = time.monotonic() + INTRODUCTION_SECONDS
    while True:
        moved = Moved.so_far(a.metrics(), b.metrics())
        if moved.blocks_fetched == moved.blocks_written > 0:
            return moved
        if time.monotonic() >= deadline:
            return moved
        time.sleep(0.2)


def _wait_until_agreed(source: Server, target: Server, before: Moved) -> Moved:
    """What was moved since ``before``, once both sides have counted it."""
    deadline = time.monotonic() + METRICS_SECONDS
    while True:
        moved = Moved.so_far(source.metrics(), target.metrics()).since(before)
        if moved.agree or time.monotonic() > deadline:
            return moved
        time.sleep(0.2)
