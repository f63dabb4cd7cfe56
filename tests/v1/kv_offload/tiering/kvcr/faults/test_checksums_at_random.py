# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Whatever happens to right blocks, none is called corrupt; each damaged one is found.

Stores, stores of the same keys with other bytes, loads, touches, pulls, pulls that are
given up and land later, all under a pool and a file that are too small, and single bits
that are flipped in the file. Actions come from a seeded generator; what KVCR does when
is its own affair.
"""

import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.v1.kv_offload.tiering.kvcr.builders import make_hint, peer_options, request
from tests.v1.kv_offload.tiering.kvcr.faults.harness.blocks import make_keys
from tests.v1.kv_offload.tiering.kvcr.faults.harness.engine import (
    Engine,
    Job,
    Keys,
    Slots,
)
from tests.v1.kv_offload.tiering.kvcr.faults.harness.files import flip_bit, g3
from vllm.v1.kv_offload.base import LookupResult, OffloadKey
from vllm.v1.kv_offload.tiering.kvcr.peers import liveness

ROW = 16 << 10
ROWS = 64
POOL = 24
FILE_SLOTS = 40
OWN = make_keys(70, "own")
AT_PEER = make_keys(30, "peer")
EVERYTHING = OWN + AT_PEER
WRITERS = ("model", "the same model, computed in another order")
PULL_TIMEOUT_S = 0.1
SEED = 1
SECONDS = 5.0
# It goes on for longer where little has happened by then.
LONGEST_S = 60.0


class Play:
    """The actions, and what must hold after each."""

    def __init__(self, engine: Engine, peer: Any, path: Path) -> None:
        self._random = np.random.default_rng(SEED)
        self._engine = engine
        self._peer = peer
        self._path = path
        self._open: list[Job] = []
        self._free = list(range(ROWS))
        self._requests = 0
        self.done: Counter[str] = Counter()
        self._damaged: set[bytes] = set()
        self._called_bad: set[bytes] = set()
        self.falsely_corrupt: list[bytes] = []
        engine.probe.watch_checks(self._judged)
        # Either writer's bytes are right.
        wrong_blocks = engine.wrong_blocks

        def wrong_under_both(keys: Keys, chunks: Slots, **_: Any) -> list[int]:
            wrong = [set(wrong_blocks(keys, chunks, writer=w)) for w in WRITERS]
            return sorted(set.intersection(*wrong))

        engine.wrong_blocks = wrong_under_both  # type: ignore[method-assign]

    def run(self) -> None:
        often = [self.store, self.load] * 8 + [self.pull] * 5 + [self.touch] * 2
        actions = [*often, self.damage, self.give_up]
        started = time.monotonic()
        while (ran := time.monotonic() - started) < SECONDS or not self._was_worth_it:
            assert ran < LONGEST_S, dict(self.done)
            action = actions[int(self._random.integers(len(actions)))]
            action()
            self.done[action.__name__] += 1
            self._step(int(self._random.integers(1, 12)))
        self._settle()

    def store(self) -> None:
        keys = self._some(EVERYTHING, 5)
        chunks = self._slots(len(keys))
        if chunks:
            writer = WRITERS[int(self._random.integers(2))]
            self._open.append(self._engine.store(keys, chunks, writer=writer))

    def load(self) -> None:
        self._load(self._some(EVERYTHING, 5), None)

    def pull(self) -> None:
        keys = self._some(AT_PEER, 5)
        self._load(keys, make_hint(self._peer.port, keys))

    def touch(self) -> None:
        self._engine.call("touch", self._some(OWN, 20), request("toucher"))

    def give_up(self) -> None:
        """Have the peer hang for longer than anybody waits for it."""
        self.pull()
        self._peer.stop()
        self.pull()
        until = time.monotonic() + 1.5 * PULL_TIMEOUT_S
        while time.monotonic() < until:
            self._step(1)
        self._peer.go_on()

    def damage(self) -> None:
        """Flip a bit in a block that is nowhere but in the file, and load it."""
        self._settle()
        in_file = self._engine.probe.only_in_files()
        keys = [k for k in EVERYTHING if k in in_file and k not in self._damaged]
        if not keys:
            return
        key = keys[int(self._random.integers(len(keys)))]
        offset = int(self._random.integers(ROW))
        flip_bit(self._path, in_file[key] * ROW + offset)
        self._damaged.add(key)
        self._called_bad.discard(key)
        job = self._load([key], None)
        if job is not None:
            self._settle()
            assert job.arrived == []
            assert key in self._called_bad
            self.done["damage found"] += 1

    @property
    def _was_worth_it(self) -> bool:
        done = self.done
        return done["loaded"] > 100 and min(done["give_up"], done["damage found"]) > 3

    def _judged(self, corrupt: list[bytes], unverified: list[bytes]) -> None:
        self._called_bad.update(corrupt + unverified)
        self.done["unverified"] += len(unverified)
        self.falsely_corrupt += [k for k in corrupt if k not in self._damaged]

    def _load(self, keys: list[OffloadKey], hint: object | None) -> Job | None:
        self._requests += 1
        context = self._engine.begin(f"request-{self._requests}", hint)
        answers = self._engine.lookup_all(keys, context)
        hits = [k for k, a in zip(keys, answers, strict=True) if a is LookupResult.HIT]
        chunks = self._slots(len(hits))
        if not chunks:
            self._engine.end(context)
            return None
        self._open.append(self._engine.load(hits, chunks, context))
        return self._open[-1]

    def _some(self, keys: list[OffloadKey], most: int) -> list[OffloadKey]:
        count = int(self._random.integers(1, most + 1))
        first = int(self._random.integers(len(keys) - count + 1))
        return keys[first : first + count]

    def _slots(self, count: int) -> list[int]:
        if len(self._free) < count:
            return []
        return [self._free.pop(0) for _ in range(count)]

    def _step(self, steps: int) -> None:
        for _ in range(steps):
            self._engine.step()
            time.sleep(0.0002)
        for job in self._open:
            if job.result is not None:
                self._free += job.chunks
                self.done["loaded"] += len(job.arrived) if job.is_load else 0
        self._open = [job for job in self._open if job.result is None]
        # What KVCR has let go of, and nobody is loading, is damaged no more.
        busy = {key for job in self._open for key in job.keys}
        self._damaged &= self._engine.probe.held_blocks() | busy

    def _settle(self) -> None:
        self._engine.run_until(
            lambda: all(job.result is not None for job in self._open), 30, "all jobs"
        )
        self._step(1)


def test_it(
    peers: Any, engines: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # So that a peer is asked again soon after it hung.
    monkeypatch.setattr(liveness, "FIRST_COOLDOWN_S", 0.01)
    monkeypatch.setattr(liveness, "LONGEST_COOLDOWN_S", 0.01)
    patient = {"operation_timeout_ms": 20_000}
    peer = peers(patient, rows=len(AT_PEER), row_bytes=ROW, hold=AT_PEER)
    path = tmp_path / "g3"
    options = peer_options(
        secondary_g2_slots=POOL,
        pull_timeout_ms=int(1000 * PULL_TIMEOUT_S),
        g3=g3(path, FILE_SLOTS, ROW),
    )
    engine: Engine = engines(options, rows=ROWS, row_bytes=ROW)
    play = Play(engine, peer, path)
    play.run()

    assert play.falsely_corrupt == [], (dict(play.done), engine.probe.lost())
    assert not engine.wrong
    # Nothing is remembered but of what KVCR still has.
    engine.run_for(0.5)
    assert engine.probe.known_blocks <= len(engine.probe.held_blocks())
