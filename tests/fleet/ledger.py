# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""An engine's KV events as an account: what was stored, what was removed, and when."""

import math
import time
from collections.abc import Sequence
from typing import Any, Self

from vllm_kvcr.kv_events import Subscription
from vllm_kvcr.routing import BlockHash, KvIndex, Residency

GPU = Residency("GPU", None)


class Ledger:
    """Follows one engine, and finds fault with events that do not balance.

    Only for places that peers pull from: in a GPU a block may be twice.
    """

    def __init__(self, endpoint: str, replay: str | None) -> None:
        self._events = Subscription(endpoint, replay=replay)
        self.index = self._events.index
        self.faults: list[str] = []
        # Seconds from an engine's account of an event to its arrival here.
        self.delays: list[float] = []
        self.stored = self.removed = 0
        self._present: set[tuple[BlockHash, Residency]] = set()
        # When a block came, and when it was gone from every place, in turn.
        self._history: dict[BlockHash, list[float]] = {}
        self._ever = KvIndex()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self._events.__exit__(*raised)

    @property
    def slowest(self) -> float:
        """Seconds that the slowest event took."""
        return max(self.delays, default=0.0)

    def read(self) -> int:
        """Take in what has arrived; returns how many events."""
        batches = self._events.read()
        now = time.time()
        for batch in batches:
            self.delays.append(now - batch.timestamp)
            for event in batch.events:
                self._enter(event, batch.timestamp)
        return sum(len(batch.events) for batch in batches)

    def ever_held(self, prompt: Sequence[int]) -> list[BlockHash]:
        return self._ever.held(prompt)

    def gone_for(self, block: BlockHash, when: float) -> float:
        """For how long it had been gone at that time; 0 if peers could pull it."""
        turns = [turn for turn in self._history.get(block, ()) if turn <= when]
        if not turns:
            return math.inf
        return when - turns[-1] if len(turns) % 2 == 0 else 0.0

    def left_between(self, block: BlockHash, start: float, end: float) -> bool:
        gone = self._history.get(block, [])[1::2]
        return any(start <= when <= end for when in gone)

    def expected_hit(self, prompt: Sequence[int], per_chunk: int) -> int:
        """How many leading blocks vLLM has to find: in its GPU, then chunk by chunk."""
        held = self.index.held(prompt)
        on_gpu = self.index.blocks(GPU)
        pullable = self._pullable()
        found = next((n for n, b in enumerate(held) if b not in on_gpu), len(held))
        start = found - found % per_chunk
        for chunk in range(start, len(held) - per_chunk + 1, per_chunk):
            if not pullable.issuperset(held[chunk : chunk + per_chunk]):
                break
            found = chunk + per_chunk
        return found

    def _pullable(self) -> set[BlockHash]:
        return {block for block, _ in self._present}

    def _enter(self, event: dict[str, Any], when: float) -> None:
        place = Residency(event.get("medium"), event.get("ownership"))
        if not place.is_pullable:
            return
        is_store = event["type"] == "BlockStored"
        if is_store:
            self._ever.apply(event)
        for block in event["block_hashes"]:
            if is_store == ((block, place) in self._present):
                done = "stored twice" if is_store else "removed without being stored"
                self.faults.append(f"block {block} was {done} in {place}")
            was_here = block in self._pullable()
            if is_store:
                self.stored += 1
                self._present.add((block, place))
            else:
                self.removed += 1
                self._present.discard((block, place))
            if was_here != (block in self._pullable()):
                self._history.setdefault(block, []).append(when)


def settle(
    ledgers: Sequence[Ledger], quiet: float = 1.0, seconds: float = 60.0
) -> None:
    """Read until nothing has come for a while.

    Raises:
        TimeoutError: it never stops.
    """
    started = last = time.monotonic()
    while time.monotonic() < last + quiet:
        if sum(ledger.read() for ledger in ledgers):
            last = time.monotonic()
        if last > started + seconds:
            raise TimeoutError(f"events kept coming for {seconds:.0f} s")
        time.sleep(0.01)
