# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""How often a pull works the first time: ``python -m tests.fleet.first_contact``.

Starts two servers, again and again, and gives B two prompts with a hint at A. The exit
status is zero only if the second prompt was served from A at each start, and every
output equals A's.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests import peers_vllm
from vllm_kvcr.demo_model import make_prompts
from vllm_kvcr.demo_plan import Workload
from vllm_kvcr.peers_run import hint_at, two_servers
from vllm_kvcr.servers import Answer, ServerFailed

WORKLOAD = Workload(prompts=2)


PEERS = "vllm:kvcr_tier_peers"
LOST = "vllm:kvcr_tier_lost_blocks_total"
LOADS = "vllm:kvcr_tier_load_duration_seconds_sum"

PAUSE_S = 6.0
"""Between the two requests: as long as the first contact took on two busy cores."""


@dataclass(frozen=True)
class Contact:
    """What B made of both prompts after one start."""

    workload: Workload
    cold: tuple[Answer, ...]
    hinted: tuple[Answer, ...]
    peers: Mapping[str, int] = field(default_factory=dict)
    """What B's metrics say about A at the end: its standing."""
    lost: Mapping[str, int] = field(default_factory=dict)
    """Blocks that B lost, by reason."""
    pull_seconds: float = 0.0
    """What B's loads from A took, in all."""

    def was_served(self, number: int) -> bool:
        return self.hinted[number].computed_tokens == self.workload.tail_tokens

    @property
    def outputs_are_equal(self) -> bool:
        pairs = zip(self.cold, self.hinted, strict=True)
        return all(cold.token_ids == hinted.token_ids for cold, hinted in pairs)

    @property
    def line(self) -> str:
        parts = [
            f"{answer.cached_tokens:,} of {answer.prompt_tokens:,} tokens from A in "
            f"{answer.seconds:.1f} s"
            for answer in self.hinted
        ]
        equal = "equal" if self.outputs_are_equal else "NOT EQUAL"
        pulled = f"pulled within {self.pull_seconds:.2f} s"
        line = f"{'; '.join(parts)}; {pulled}; outputs {equal}"
        if not self.was_served(-1):
            line += f"; B lost {dict(self.lost)}, its peers are {dict(self.peers)}"
        return line


def contact(
    folder: Path,
    pause: float,
    *,
    workload: Workload = WORKLOAD,
    tier: dict[str, object] | None = None,
    spinning: int = 0,
) -> Contact:
    """Start both servers and send both prompts, ``pause`` seconds apart.

    Args:
        spinning: Processes that keep cores busy once the servers are ready.
    """
    environment = peers_vllm.environment()
    servers = two_servers(folder, lambda doing: None, workload, tier, environment)
    with servers as (a, b, events), busy(spinning):
        prompts = make_prompts(workload)
        cold = [a.complete(prompt, workload.output_tokens) for prompt in prompts]
        hinted = []
        for prompt in prompts:
            if hinted:
                time.sleep(pause)
            hint = hint_at(a, events, prompt, workload)
            hinted.append(b.complete(prompt, workload.output_tokens, hint))
        metrics = b.metrics()
        return Contact(
            workload,
            tuple(cold),
            tuple(hinted),
            metrics.by_label(PEERS, "standing"),
            metrics.by_label(LOST, "reason"),
            metrics.seconds(LOADS, place="peer"),
        )


@contextmanager
def busy(processes: int) -> Iterator[None]:
    """Keep that many cores busy."""
    command = [sys.executable, "-c", "while True: pass"]
    spinning = [subprocess.Popen(command) for _ in range(processes)]
    try:
        yield
    finally:
        for process in spinning:
            process.kill()
            process.wait()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.fleet.first_contact",
        description="How often a pull works the first and the second time.",
    )
    parser.add_argument(
        "--starts", type=int, default=20, help="of both servers (default: %(default)s)"
    )
    parser.add_argument(
        "--pause",
        type=float,
        default=PAUSE_S,
        help="seconds between the two prompts (default: %(default)s)",
    )
    parser.add_argument(
        "--busy", type=int, default=0, help="processes that spin meanwhile"
    )
    parser.add_argument(
        "--tier", type=json.loads, default={}, help="options of the tier, as JSON"
    )
    options = parser.parse_args(argv)
    served = [0, 0]
    unequal = failed = 0
    for number in range(1, options.starts + 1):
        started = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="vllm-kvcr-fleet-") as folder:
            try:
                made = contact(
                    Path(folder),
                    options.pause,
                    tier=options.tier,
                    spinning=options.busy,
                )
            except ServerFailed as failure:
                failed += 1
                print(f"start {number}: {failure}", flush=True)
                continue
        served = [n + made.was_served(i) for i, n in enumerate(served)]
        unequal += not made.outputs_are_equal
        seconds = time.monotonic() - started
        print(f"start {number} ({seconds:.0f} s): {made.line}", flush=True)
    print(
        f"Served from A: the first prompt at {served[0]} of {options.starts} starts, "
        f"the second at {served[1]}. Outputs differed at {unequal}, servers failed at "
        f"{failed}."
    )
    return 0 if served[1] == options.starts and not unequal else 1


if __name__ == "__main__":
    sys.exit(main())
