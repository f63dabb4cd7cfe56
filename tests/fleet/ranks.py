# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A server with two local data-parallel ranks; another pulls from the second one.

``python -m tests.fleet.ranks``. Each rank has a control port, a pool and KV events of
its own. A prompt that the second rank has computed is hinted at that rank's port, and
served from there; one that only the first rank has is not.
"""

import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from tests import peers_vllm
from tests.fleet.part import main_of
from vllm_kvcr.demo_model import make_prompts, write_model
from vllm_kvcr.demo_plan import TOKENS_PER_CHUNK, Workload
from vllm_kvcr.kv_events import Subscription
from vllm_kvcr.peers_run import (
    BLOCKS,
    METRICS_SECONDS,
    wait_until_introduced,
)
from vllm_kvcr.routing import fetch_hint
from vllm_kvcr.servers import Answer, Server, ServerFailed, longest

WORKLOAD = Workload(prompts=3, chunks_per_prompt=4)
WHOLE = WORKLOAD.chunks_per_prompt * TOKENS_PER_CHUNK
RANKS = 2
START_SECONDS = 600.0
# Three engines share what may be two cores.
EVENTS_SECONDS = 90.0
# Must exceed the time that a subscription takes to an engine on this machine.
SUBSCRIBE_SECONDS = 1.0


def main(argv: Sequence[str] | None = None) -> int:
    summary = "A server pulls from the second data-parallel rank of another one."
    return main_of("ranks", summary, run, argv)


def run(folder: Path) -> list[str]:
    model = folder / "model"
    write_model(model, longest(WORKLOAD.chunks_per_prompt))
    with ExitStack() as stack:

        def server(name: str, ranks: int) -> Server:
            return stack.enter_context(
                Server(
                    name,
                    folder,
                    model,
                    chunks=WORKLOAD.chunks_per_prompt,
                    ranks=ranks,
                    environment=peers_vllm.environment(),
                )
            )

        started = time.monotonic()
        a = server("A", RANKS)
        # A's ranks connect to these.
        events = [
            stack.enter_context(Subscription(endpoint, bind=True))
            for endpoint in a.events_endpoints
        ]
        a.wait_until_ready(START_SECONDS)
        b = server("B", 1)
        b.wait_until_ready(START_SECONDS)
        for each in events:
            each.read()
        time.sleep(SUBSCRIBE_SECONDS)
        print(f"ready after {time.monotonic() - started:.0f} s", flush=True)
        return check(a, b, events)


def check(a: Server, b: Server, events: list[Subscription]) -> list[str]:
    """A's second rank computes two prompts, and its first a third one."""
    prompts = make_prompts(WORKLOAD)
    computed_by = (1, 1, 0)
    faults = []
    cold, hashes = [], []
    for number, (prompt, rank) in enumerate(zip(prompts, computed_by, strict=True)):
        cold.append(a.complete(prompt, WORKLOAD.output_tokens, rank=rank))
        hashes.append(events[rank].wait_for(prompt, WHOLE, EVENTS_SECONDS))
        events[1 - rank].read()
        if not hashes[-1]:
            others = len(events[1 - rank].index.held(prompt))
            raise ServerFailed(
                f"no event of A's rank {rank} told of prompt {number} within "
                f"{EVENTS_SECONDS:.0f} s; the other rank holds {others} blocks of it"
            )
        if events[1 - rank].index.held(prompt):
            faults.append(f"A's rank {1 - rank} told of prompt {number}, not its own")

    def ask(number: int) -> Answer:
        """With a hint at the second rank, whoever has it."""
        hint = fetch_hint(a.control_endpoints[1], hashes[number])
        answer = b.complete(prompts[number], WORKLOAD.output_tokens, hint)
        if answer.token_ids != cold[number].token_ids:
            faults.append(f"the outputs of prompt {number} differ")
        return answer

    ask(0)
    wait_until_introduced(a, b)
    served, not_there = ask(1), ask(2)
    if served.computed_tokens != WORKLOAD.tail_tokens:
        faults.append(
            f"B computed {served.computed_tokens} tokens of a prompt that A's second "
            f"rank had, and not only the last {WORKLOAD.tail_tokens}"
        )
    if not_there.cached_tokens:
        faults.append("the second rank's port served what the first rank had")
    # The metrics of an engine that sleeps are up to two seconds old.
    chunks = 1 + WORKLOAD.chunks_per_prompt
    written = [0] * RANKS
    deadline = time.monotonic() + METRICS_SECONDS
    while written[1] < chunks and time.monotonic() < deadline:
        metrics = a.metrics()
        written = [
            metrics.total(BLOCKS, operation="source_write", engine=str(rank))
            for rank in range(RANKS)
        ]
        time.sleep(0.2)
    print(
        f"B computed {served.computed_tokens} of {served.prompt_tokens} tokens of the "
        f"prompt that A's second rank had, in {served.seconds:.2f} s (cold: "
        f"{cold[1].seconds:.2f} s), and {not_there.computed_tokens} of the one that "
        f"only the first had. Chunks written by A's ranks: {written}"
    )
    if written[0] or written[1] < chunks:
        faults.append(f"A's ranks wrote {written} chunks by their metrics")
    return faults


if __name__ == "__main__":
    sys.exit(main())
