# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Blocks that are right are never called corrupt, and damaged ones always are.

Each engine here has files, and so checks what it loads.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.v1.kv_offload.tiering.kvcr.builders import make_hint, peer_options, request
from tests.v1.kv_offload.tiering.kvcr.faults.harness.blocks import make_keys
from tests.v1.kv_offload.tiering.kvcr.faults.harness.engine import Engine, Job
from tests.v1.kv_offload.tiering.kvcr.faults.harness.files import flip_bit, g3
from tests.v1.kv_offload.tiering.kvcr.faults.harness.peer import Peer
from vllm.v1.kv_offload.base import LookupResult, OffloadKey

ROW = 64 << 10
# A quarter of it may land at a time: all of KEYS.
POOL = 48
FILE_SLOTS = 64
KEYS = make_keys(4)
PROOF = make_keys(1, "first contact")
OTHERS = make_keys(200, "other")


class Scene:
    """An engine with a small pool and a file, and on demand a peer."""

    def __init__(
        self, engines: Any, folder: Path, file_slots: int = FILE_SLOTS, **options: Any
    ) -> None:
        self._path = folder / "g3"
        files = g3(self._path, file_slots, ROW)
        self.engine: Engine = engines(
            {"secondary_g2_slots": POOL, "g3": files} | options, rows=32, row_bytes=ROW
        )
        self._requests = 0

    def store(self, keys: Sequence[OffloadKey], writer: str | None = None) -> None:
        for first in range(0, len(keys), 2):
            part = keys[first : first + 2]
            job = self.engine.store(part, range(len(part)), writer=writer)
            self.engine.finish(job)
            assert job.succeeded

    def load(self, keys: Sequence[OffloadKey], hint: object | None = None) -> Job:
        """Load into slots that held something else before."""
        self._requests += 1
        context = self.engine.begin(f"request-{self._requests}", hint)
        answers = self.engine.lookup_all(keys, context)
        assert set(answers) == {LookupResult.HIT}
        slots = range(16, 16 + len(keys))
        self.engine.memory[list(slots)] = 1
        job = self.engine.load(keys, slots, context)
        self.engine.finish(job)
        self.engine.end(context)
        return job

    def push_out(self, others: Sequence[OffloadKey] = OTHERS[:POOL]) -> None:
        """Fill the pool with other blocks, so that what it had is in the file."""
        self.store(others)
        self.engine.run_for(0.05)

    def damage(self) -> None:
        """One bit of each block in the file."""
        for slot in range(FILE_SLOTS):
            flip_bit(self._path, slot * ROW + 100)

    @property
    def corrupt(self) -> int:
        return self.engine.probe.lost().get("corrupt", 0)

    def resident(self, keys: Sequence[OffloadKey]) -> int:
        answers = self.engine.lookup_all(keys, request("anybody"))
        return answers.count(LookupResult.HIT)


def pair(peers: Any, engines: Any, folder: Path, **options: Any) -> tuple[Scene, Peer]:
    # So patient that it still answers after it was stopped.
    patient = {"operation_timeout_ms": 20_000}
    peer: Peer = peers(patient, rows=8, row_bytes=ROW, hold=KEYS + PROOF)
    options = peer_options(operation_timeout_ms=1000, **options)
    return Scene(engines, folder, **options), peer


def test_all_that_is_held_is_known_and_a_hot_block_stays_however_much_is_stored(
    engines: Any, tmp_path: Path
) -> None:
    scene = Scene(engines, tmp_path, file_slots=POOL)
    hot = KEYS[:1]
    scene.store(hot)
    for first in range(0, len(OTHERS), 2):
        scene.store(OTHERS[first : first + 2])
        scene.engine.call("touch", hot, request("toucher"))
        assert scene.load(hot).arrived == hot
    held = scene.resident(hot + OTHERS)
    assert POOL <= held <= 2 * POOL
    assert scene.engine.probe.known_blocks == held
    assert scene.corrupt == 0


def test_what_a_peer_writes_straight_into_the_primary_tier_is_right(
    peers: Any, engines: Any, tmp_path: Path
) -> None:
    scene, peer = pair(peers, engines, tmp_path, remote_landing="primary")
    assert scene.load(KEYS, make_hint(peer.port, KEYS)).arrived == KEYS
    assert scene.corrupt == 0


def test_a_block_stored_with_other_bytes_is_right(engines: Any, tmp_path: Path) -> None:
    """Recomputing is not exact to the bit, and KVCR keeps the first that it got."""
    scene = Scene(engines, tmp_path)
    scene.store(KEYS)
    for attempt in range(10):
        scene.store(KEYS, writer=f"attempt {attempt}")
    assert scene.load(KEYS).arrived == KEYS
    scene.push_out()
    assert scene.load(KEYS).arrived == KEYS
    assert scene.corrupt == 0


@pytest.mark.parametrize("late", [False, True])
def test_damage_is_found_in_what_a_peer_sent_once_it_was_loaded(
    peers: Any, engines: Any, tmp_path: Path, late: bool
) -> None:
    if late:
        scene, hint = land_late(peers, engines, tmp_path), None
    else:
        scene, peer = pair(peers, engines, tmp_path)
        hint = make_hint(peer.port, KEYS)
    assert scene.load(KEYS, hint).arrived == KEYS
    assert scene.corrupt == 0
    scene.push_out()
    scene.damage()
    assert scene.load(KEYS).arrived == []
    assert scene.corrupt == len(KEYS)


def test_what_landed_late_and_went_to_a_file_unseen_is_not_trusted(
    peers: Any, engines: Any, tmp_path: Path
) -> None:
    scene = land_late(peers, engines, tmp_path)
    scene.push_out()
    assert scene.load(KEYS).arrived == []
    assert scene.engine.probe.lost()["unverified"] == len(KEYS)
    assert scene.corrupt == 0
    assert scene.engine.probe.state == "healthy"


def land_late(peers: Any, engines: Any, folder: Path) -> Scene:
    """Have four blocks in the pool that nobody waited for."""
    scene, peer = pair(peers, engines, folder)
    assert scene.load(PROOF, make_hint(peer.port, PROOF)).arrived == PROOF
    peer.stop()
    assert scene.load(KEYS, make_hint(peer.port, KEYS)).arrived == []
    peer.go_on()
    scene.engine.run_until(lambda: scene.resident(KEYS) == len(KEYS), 10, "landing")
    return scene
