# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""One engine with a pool and files, two peers, and whatever may happen to them.

Actions are drawn from a seeded generator: stores, loads, pulls, bad hints, requests
that end at once, peers that are stopped, continued, killed and replaced, files that
are cut or overwritten. After each step what holds always is checked: every result
belongs to a job that has none yet (``Engine``), and every block that counts as loaded
has the right bytes. In the end nothing may have piled up, no call may have kept the
engine's thread for long, and every job must have had its result.

Timing of what KVCR does is not drawn, so the same seed gives the same actions, and not
quite the same run.
"""

import gc
import os
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Self

import numpy as np

from tests.v1.kv_offload.tiering.kvcr.builders import make_hint
from tests.v1.kv_offload.tiering.kvcr.faults.harness.bad_hints import BAD_HINTS
from tests.v1.kv_offload.tiering.kvcr.faults.harness.blocks import make_keys
from tests.v1.kv_offload.tiering.kvcr.faults.harness.engine import Engine, Job
from tests.v1.kv_offload.tiering.kvcr.faults.harness.peer import Peer
from vllm.v1.kv_offload.base import LookupResult, OffloadKey, ReqContext
from vllm.v1.kv_offload.tiering.kvcr import manager

ROWS = 128
ROW_BYTES = 64 << 10
POOL = 96
FILE_SLOTS = 512
OWN = make_keys(400, "own")
AT_PEERS = make_keys(32, "peer")
MOST_JOBS = 12
QUIET_S = 90.0
LONGEST_CALL_S = 0.05
_REPORT_INTERVAL_S = 15.0
_NOT_TIMED = ("drain_jobs", "shutdown")
# Bounded by themselves, or fixed.
_TABLES_THAT_MAY_STAY = (
    "backoff.",
    "hints._own_endpoints",
    # What a dead peer never finished is KVCR's until it gives it up.
    "staging._fetches",
    "staging._lanes",
    "staging.fetching",
    "staging.unawaited",
    "quarantine.",
    "liveness.",
    "transfers._refs",
)


class Soak:
    """See above. Leaving it shuts everything down."""

    def __init__(self, seed: int, folder: Path) -> None:
        self._random = np.random.default_rng(seed)
        self._file = folder / "g3"
        self._stack = ExitStack()
        self._peers = [self._new_peer(None) for _ in range(2)]
        self.engine = Engine(
            {
                "secondary_g2_slots": POOL,
                "control_ports": [self._peers[0].port + 1000],
                "control_host": "127.0.0.1",
                "control_advertise_host": "127.0.0.1",
                "enable_telemetry": True,
                "max_operation_bytes": 8 * ROW_BYTES,
                "max_inflight_bytes": 32 * ROW_BYTES,
                "g3": {
                    "paths": self._file,
                    "capacity_bytes_per_file": FILE_SLOTS * ROW_BYTES,
                    "backend": "POSIX",
                },
            },
            rows=ROWS,
            row_bytes=ROW_BYTES,
        )
        self._stopped: set[int] = set()
        self._open: list[tuple[Job, ReqContext | None]] = []
        self._free = set(range(ROWS))
        self._requests = 0
        self.actions: Counter[str] = Counter()
        self._piled_up: list[str] = []
        self._quiet = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.engine.close()
        self._stack.close()

    def run(self, seconds: float, report: Callable[[str], None]) -> None:
        """Act for a while, then wait until nothing is under way any more."""
        # As vLLM's engine core does once it has started: a collection that goes over
        # all that vLLM and torch have imported takes a third of a second.
        gc.collect()
        gc.freeze()
        try:
            self._run(seconds, report)
        finally:
            gc.unfreeze()

    def _run(self, seconds: float, report: Callable[[str], None]) -> None:
        actions = [
            (self.store, 30),
            (self.load, 30),
            (self.pull, 20),
            (self.bad_hint, 6),
            (self.abort, 6),
            (self.stop_or_continue, 2),
            (self.kill_and_replace, 0.3),
            (self.damage_file, 0.5),
        ]
        weights = np.array([weight for _, weight in actions])
        until = time.monotonic() + seconds
        reported = time.monotonic()
        while time.monotonic() < until:
            act, _ = actions[
                self._random.choice(len(actions), p=weights / sum(weights))
            ]
            self.actions[act.__name__] += 1
            act()
            for _ in range(int(self._random.integers(1, 6))):
                self.engine.step()
            self._collect()
            time.sleep(0.0005)
            if time.monotonic() - reported > _REPORT_INTERVAL_S:
                reported = time.monotonic()
                report(self.summary())
        self._become_quiet()

    # --- what may happen -------------------------------------------------------------

    def store(self) -> None:
        keys = self._some(OWN, 16)
        chunks = self._slots(len(keys))
        if chunks is not None:
            self._open.append((self.engine.store(keys, chunks), None))

    def load(self) -> None:
        self._load(self._begin(None), self._some(OWN, 16))

    def pull(self, ends_at_once: bool = False) -> None:
        port = self._peers[self._any_peer()].port
        keys = self._some(AT_PEERS, 8)
        self._load(self._begin(make_hint(port, keys)), keys, ends_at_once)

    def bad_hint(self) -> None:
        hint = list(BAD_HINTS.values())[int(self._random.integers(len(BAD_HINTS)))]
        self._load(self._begin(hint), self._some(OWN, 4))

    def abort(self) -> None:
        """A request that ends as soon as its load was submitted."""
        self.pull(ends_at_once=True)

    def stop_or_continue(self) -> None:
        number = self._any_peer()
        if number in self._stopped:
            self._peers[number].go_on()
            self._stopped.discard(number)
        else:
            self._peers[number].stop()
            self._stopped.add(number)

    def kill_and_replace(self) -> None:
        number = self._any_peer()
        port = self._peers[number].port
        self._peers[number].kill()
        self._stopped.discard(number)
        self._peers[number] = self._new_peer(port)

    def damage_file(self) -> None:
        if self._random.random() < 0.5:
            with self._file.open("r+b") as file:
                file.seek(int(self._random.integers(FILE_SLOTS)) * ROW_BYTES)
                file.write(self._random.bytes(4 * ROW_BYTES))
        else:
            size = self._file.stat().st_size
            os.truncate(self._file, size // 2)
            os.truncate(self._file, size)

    # --- what is checked -------------------------------------------------------------

    def faults(self) -> list[str]:
        """What did not hold; empty after a good run."""
        found = [f"wrong bytes: {wrong}" for wrong in self.engine.wrong]
        found += [f"job {job} has no result" for job in self.engine.unanswered]
        found += self._piled_up
        if not self._quiet:
            found.append("something was still under way at the end")
        if self.engine.probe.state == "failed":
            found.append("the tier failed")
        for name, call in self.engine.slowest.items():
            # CPU time: on a busy machine any call can be made to wait.
            if name not in _NOT_TIMED and call.cpu_seconds > LONGEST_CALL_S:
                found.append(f"{name} kept the thread for {call.cpu_seconds:.3f} s")
        if self.engine.tier._backend.slots and self._held_back():
            found.append("buffers are kept although no peer was killed or stopped")
        return found

    def summary(self) -> str:
        slowest = max(
            (call.cpu_seconds, name)
            for name, call in self.engine.slowest.items()
            if name not in _NOT_TIMED
        )
        jobs = self.engine.jobs.values()
        loaded = sum(len(job.arrived) for job in jobs if job.is_load)
        return (
            f"{sum(self.actions.values())} actions {dict(self.actions)}, "
            f"{len(self.engine.jobs)} jobs, {loaded} blocks loaded and compared, "
            f"{len(self.engine.wrong)} wrong, lost {self.engine.probe.lost()}, "
            f"state {self.engine.probe.state}, slowest call "
            f"{slowest[1]} {1000 * slowest[0]:.1f} ms of CPU"
        )

    # --- inside ----------------------------------------------------------------------

    def _new_peer(self, port: int | None) -> Peer:
        peer = Peer({"landing_slots": 16}, port, rows=64, row_bytes=ROW_BYTES)
        self._stack.callback(peer.close)
        peer.call("hold", AT_PEERS)
        return peer

    def _any_peer(self) -> int:
        return int(self._random.integers(len(self._peers)))

    def _begin(self, hint: object | None) -> ReqContext:
        self._requests += 1
        return self.engine.begin(f"request-{self._requests}", hint)

    def _load(
        self, context: ReqContext, keys: list[OffloadKey], ends_at_once: bool = False
    ) -> None:
        answers = self.engine.lookup_all(keys, context)
        hits = [k for k, a in zip(keys, answers, strict=True) if a is LookupResult.HIT]
        chunks = self._slots(len(hits)) if hits else None
        if chunks is None:
            self.engine.end(context)
            return
        job = self.engine.load(hits, chunks, context)
        if ends_at_once:
            self.engine.end(context)
        self._open.append((job, None if ends_at_once else context))

    def _some(self, keys: list[OffloadKey], most: int) -> list[OffloadKey]:
        count = int(self._random.integers(1, most + 1))
        first = int(self._random.integers(len(keys) - count + 1))
        return keys[first : first + count]

    def _slots(self, count: int) -> list[int] | None:
        if len(self._open) >= MOST_JOBS or len(self._free) < count:
            return None
        return [self._free.pop() for _ in range(count)]

    def _collect(self) -> None:
        """Take slots back, as vLLM does, and write over those of failed loads."""
        still = []
        for job, context in self._open:
            if job.result is None:
                still.append((job, context))
                continue
            if context is not None:
                self.engine.end(context)
            self._free.update(job.chunks)
        self._open = still

    def _become_quiet(self) -> None:
        for number in self._stopped:
            self._peers[number].go_on()
        self._stopped.clear()
        until = time.monotonic() + QUIET_S
        while self._open and time.monotonic() < until:
            self.engine.step()
            self._collect()
            time.sleep(0.001)
        self._quiet = not self._open
        self.engine.run_for(1.0)
        self._piled_up = [
            f"{name} still has {size} entries"
            for name, size in self.engine.probe.tables().items()
            if size and not name.startswith(_TABLES_THAT_MAY_STAY)
        ]

    def _held_back(self) -> bool:
        disturbed = self.actions["stop_or_continue"] + self.actions["kill_and_replace"]
        return bool(manager._RETAINED_NATIVE_BUFFERS) and not disturbed
