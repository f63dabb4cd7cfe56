# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Requests, aborts and failures without end leave nothing behind."""

import random
from typing import Any

from tests.v1.kv_offload.tiering.kvcr.builders import hint, key, keys, request
from tests.v1.kv_offload.tiering.kvcr.faults.harness.probe import Probe
from tests.v1.kv_offload.tiering.kvcr.rig import StandinRig
from tests.v1.kv_offload.tiering.kvcr.staging_rigs import FILES
from tests.v1.kv_offload.tiering.kvcr.standin import (
    ANSWERS,
    FAILED,
    SUCCESS,
    FetchingStandin,
)
from vllm.v1.kv_offload.base import ReqContext

REQUESTS = 30_000
KEPT = {
    # Bounded by themselves: known peers, how chunks are described, own names.
    "liveness._sources",
    "transfers._refs",
    "hints._own_endpoints",
}
HINTS = [hint(keys(8), f"tcp://10.9.9.{number}:7001") for number in range(4)]


class Play:
    """One random request after the other, up to eight at a time."""

    def __init__(self, rig: StandinRig, seed: int) -> None:
        self.rig = rig
        self.random = random.Random(seed)
        self.running: list[ReqContext] = []

    def begin(self, number: int) -> None:
        name = f"r{number}"
        context: Any = ReqContext(name)
        if self.random.random() < 0.3:
            context = request(name, self.random.choice(HINTS))
        self.rig.tier.on_new_request(context)
        self.running.append(context)
        for each in keys(4):
            self.rig.tier.lookup(each, context)
        if self.random.random() < 0.2:
            chosen = [key(number) for number in self.random.sample(range(12), 3)]
            self.rig.load(chosen, range(3), name)

    def end_one(self) -> None:
        index = self.random.randrange(len(self.running))
        self.rig.tier.on_request_finished(self.running.pop(index))

    def answer_some(self, share: float) -> None:
        kvcr = self.rig.kvcr
        for handle, operation in list(kvcr.operations.items()):
            if self.random.random() < share:
                status = self.random.choice([SUCCESS, SUCCESS, FAILED])
                kvcr.complete(handle, dict.fromkeys(operation.blocks, status))
                del kvcr.operations[handle]
        self.rig.poll()


def test_every_table_is_empty_in_the_end() -> None:
    options: dict[str, Any] = FILES | {"secondary_g2_slots": 64}
    rig = StandinRig(kvcr=FetchingStandin, control_ports=[7001], **options)
    kvcr, play = rig.kvcr, Play(rig, 7)
    for number in range(REQUESTS):
        if number % 50 == 0:
            status = play.random.choice(ANSWERS)
            kvcr.statuses[key(play.random.randrange(12))] = status
        play.begin(number)
        while len(play.running) > 8:
            play.end_one()
        if number % 10 == 0:
            play.answer_some(0.5)
        for seen in (kvcr.calls, kvcr.hints, kvcr.discarded, kvcr.released):
            seen.clear()
    while play.running:
        play.end_one()
    for _ in range(200):
        play.answer_some(1.0)
    assert sorted(rig.finished) == rig.given
    left = {name for name, size in Probe(rig.tier).tables().items() if size}
    # Failed blocks are remembered for a while, with an end; nothing of a request is.
    assert left <= KEPT | {"backoff._by_key"}
    assert len(rig.tier._backoff._by_key) <= 12
    assert not any(rig.staging_tables().values())
