# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What every kvcr tier does, whatever lies below it.

Subclass a contract in a test module and say how its tier is made:

    class TestPool(TierContract):
        @classmethod
        def make(cls, disk, **options):
            return Rig(rows=cls.rows, secondary_g2_slots=cls.pool_slots, **options)

``TierContract`` is for tiers that store, ``PullContract`` for such as serve peers.
Tests that share a tier use keys of their own.
"""

import itertools
import tempfile
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kvcr.policy import FIFOPolicy
from kvcr.types import BlockMeta, PlacementAction, PlacementDecision

from tests.v1.kv_offload.tiering.kvcr.builders import key, keys, make_spec
from tests.v1.kv_offload.tiering.kvcr.rig import Keys, Rig, samples
from tests.v1.kv_offload.tiering.kvcr.standin import RecordingParent
from vllm.v1.kv_offload.base import (
    LookupResult,
    OffloadKey,
    ReqContext,
    ScheduleEndContext,
)
from vllm.v1.kv_offload.tiering.kvcr.manager import KVCRSecondaryTierManager

Pulled = dict[OffloadKey, bytes | None]

STEP = ScheduleEndContext([], [])


def is_declined(block_key: bytes) -> bool:
    return block_key[-5] % 2 == 1  # the last byte of the hash


class DeclinesOddBlocks(FIFOPolicy):
    """A policy that does not take every other block."""

    def decide_ingest(self, meta: BlockMeta, *_: Any, **__: Any) -> PlacementDecision:
        if is_declined(meta.block_key):
            return (PlacementAction.DROP, None)
        return (PlacementAction.KEEP, None)


class Contract(ABC):
    """What a tier's contract is made of."""

    rows = 32
    pool_slots = 8
    capacity = pool_slots
    """Blocks that the tier holds, wherever it holds them."""

    _numbers = itertools.count(1000, 100)

    @classmethod
    @abstractmethod
    def make(cls, disk: Path, **options: Any) -> Rig:
        """A tier over ``cls.rows`` rows; its files, if any, lie in ``disk``."""

    @pytest.fixture
    def rigs(self, disk: Path) -> Iterator[Callable[..., Rig]]:
        """Makes tiers and shuts them down."""
        made: list[Rig] = []

        def make(**options: Any) -> Rig:
            made.append(self.make(Path(tempfile.mkdtemp(dir=disk)), **options))
            return made[-1]

        yield make
        for rig in made:
            rig.close()

    @pytest.fixture(scope="class")
    @classmethod
    def rig(cls, disk: Path) -> Iterator[Rig]:
        """The tier that most tests of a class share."""
        rig = cls.make(Path(tempfile.mkdtemp(dir=disk)))
        yield rig
        rig.close()

    @classmethod
    def fresh(cls, count: int) -> list[OffloadKey]:
        """Keys that no other test uses."""
        return keys(count, first=next(cls._numbers))


class BlockContract(Contract):
    """For tiers that store: what one tier can be asked, with its defaults."""

    # --- bytes -------------------------------------------------------------------

    def test_what_was_stored_comes_back_and_nothing_else(self, rig: Rig) -> None:
        *wanted, other = self.fresh(5)
        stored = rig.fill(range(4))
        assert rig.result_of(rig.store(wanted, range(4))).success
        rig.memory[:] = 0
        assert rig.hits([*wanted, other, key(1, group=1)]) == wanted
        assert rig.result_of(rig.load(wanted, [9, 8, 7, 6])).success
        assert np.array_equal(rig.memory[[9, 8, 7, 6]], stored)

    def test_a_partial_load_names_and_touches_what_arrived(self, rig: Rig) -> None:
        a, b, c, never, nor_this = self.fresh(5)
        stored = rig.fill(range(3))
        rig.result_of(rig.store([a, b, c], range(3)))
        before = rig.fill(range(self.rows), seed=1)
        wanted = [a, never, b, nor_this, c]
        result = rig.result_of(rig.load(wanted, range(10, 15)))
        assert result.success is False
        assert result.successful_keys == {a, b, c}
        assert np.array_equal(rig.memory[[10, 12, 14]], stored)
        others = [row for row in range(self.rows) if row not in range(10, 15)]
        assert np.array_equal(rig.memory[others], before[others])

    def test_groups_of_a_block_are_apart(self, rig: Rig) -> None:
        number, stored = next(self._numbers), rig.fill(range(2))
        both = [key(number, group=0), key(number, group=1)]
        rig.result_of(rig.store(both, range(2)))
        rig.result_of(rig.load(list(reversed(both)), [10, 11]))
        assert np.array_equal(rig.memory[[11, 10]], stored)

    # --- more than fits ----------------------------------------------------------

    def test_what_was_evicted_is_a_miss_and_the_rest_is_right(self, rig: Rig) -> None:
        stored = {}
        for number, each in enumerate(self.fresh(self.capacity + 6)):
            row = number % self.rows
            stored[each] = rig.fill([row], seed=number)[0]
            assert rig.result_of(rig.store([each], [row])).success
        left = rig.hits(stored)
        assert 0 < len(left) <= self.capacity
        assert left[-1] == list(stored)[-1]
        loaded = 0
        # The newest first: a load may move others, and so evict the oldest.
        for each in reversed(left):
            if rig.lookup(each) is LookupResult.HIT:
                rig.memory[0] = 0
                assert rig.result_of(rig.load([each], [0])).success
                assert np.array_equal(rig.memory[0], stored[each])
                loaded += 1
        assert loaded >= len(left) // 2

    def test_a_job_larger_than_the_pool_goes_in_parts(self, rig: Rig) -> None:
        count = 3 * self.pool_slots
        wanted, stored = self.fresh(count), rig.fill(range(count))
        assert rig.result_of(rig.store(wanted, range(count))).success
        rig.memory[:] = 0
        result = rig.result_of(rig.load(wanted, range(count)))
        arrived = wanted if result.success else list(result.successful_keys or ())
        assert self.pool_slots // 2 <= len(arrived) <= self.capacity
        rows = [wanted.index(each) for each in arrived]
        assert np.array_equal(rig.memory[rows], stored[rows])

    def test_loads_and_stores_at_once(self, rig: Rig) -> None:
        half = self.pool_slots // 2
        old, new = self.fresh(half), self.fresh(half)
        stored = rig.fill(range(half))
        rig.result_of(rig.store(old, range(half)))
        rig.fill(range(20, 20 + half), seed=3)
        jobs = []
        for number in range(half):
            jobs.append(rig.load([old[number]], [10 + number]))
            jobs.append(rig.store([new[number]], [20 + number]))
        for job in jobs:
            assert rig.result_of(job).success
        assert np.array_equal(rig.memory[10 : 10 + half], stored)

    # --- the end -----------------------------------------------------------------

    def test_after_a_drain_nothing_is_under_way(self, rig: Rig) -> None:
        idle = rig.tier.has_pending_work()
        wanted = self.fresh(8)
        rig.fill(range(8))
        jobs = [rig.store([each], [row]) for row, each in enumerate(wanted)]
        jobs.append(rig.load(wanted[:1], [20]))
        rig.tier.drain_jobs()
        before = rig.fill(range(self.rows), seed=4)
        rig.poll()
        assert set(jobs) <= rig.finished.keys()
        assert rig.tier.has_pending_work() == idle
        assert np.array_equal(rig.memory, before)

    def test_an_idle_tier_has_nothing_to_do(self, rig: Rig) -> None:
        rig.tier.drain_jobs()
        assert rig.poll() == []
        assert list(rig.tier.take_events()) == []
        rig.tier.on_schedule_end(STEP)
        rig.tier.touch(self.fresh(2), ReqContext("r"))
        assert rig.tier.get_stats() is None


class TierContract(BlockContract):
    """The same, and what takes a tier of its own."""

    # --- policy ------------------------------------------------------------------

    def test_what_the_policy_declines_is_no_failure_and_no_hit(self, rigs: Any) -> None:
        policy = f"{__name__}.{DeclinesOddBlocks.__name__}"
        rig = rigs(policy=policy, enable_telemetry=True)
        wanted, stored = self.fresh(4), rig.fill(range(4))
        assert rig.result_of(rig.store(wanted, range(4))).success
        assert rig.losses() == {"dropped": 2}
        taken = [each for each in wanted if not is_declined(each)]
        assert rig.hits(wanted) == taken
        rig.result_of(rig.load(taken, [10, 11]))
        rows = [wanted.index(each) for each in taken]
        assert np.array_equal(rig.memory[[10, 11]], stored[rows])

    # --- reports -----------------------------------------------------------------

    def test_events_balance(self, rigs: Any) -> None:
        rig = rigs(spec=make_spec(events=True, described=True))
        held: Counter[tuple[OffloadKey, Any]] = Counter()
        everything = self.fresh(self.capacity + 6)
        for number, each in enumerate(everything):
            rig.result_of(rig.store([each], [number % self.rows]))
            tally(rig, held)
        settle(rig, held)
        assert {each for each, _ in held} == set(rig.hits(everything))
        assert len(held) > 0

    def test_every_metric_emitted_is_declared(self, rigs: Any) -> None:
        rig = rigs(enable_telemetry=True)
        emitted = names_and_labels(rig)
        wanted = self.fresh(12)
        rig.result_of(rig.store(wanted, range(12)))
        rig.result_of(rig.load([*wanted[-2:], *self.fresh(1)], range(3)))
        rig.lookup(self.fresh(1)[0])
        emitted += names_and_labels(rig)
        for part in ("transfer_bytes", "transfer_blocks", "duration", "lost_blocks"):
            assert any(part in name for name, _ in emitted), part
        check_declared(emitted)

    # --- the end -----------------------------------------------------------------

    def test_a_shutdown_ends_what_goes_on(self, rigs: Any, retained: list[Any]) -> None:
        rig = rigs()
        for number, each in enumerate(self.fresh(8)):
            rig.store([each], [number])
        rig.tier.shutdown()
        rig.tier.shutdown()
        rig.poll()
        assert sorted(rig.finished) == rig.given
        assert retained == []


class PullContract(Contract):
    """For tiers that serve peers."""

    @abstractmethod
    def pull(self, source: Rig, parent: RecordingParent, wanted: Keys) -> Pulled:
        """Have a peer pull blocks of ``source``'s primary tier: what it got of each."""

    def test_a_peer_gets_what_is_there_and_changes_nothing(self, rig: Rig) -> None:
        one, missing, other = self.fresh(3)
        before = rig.fill(range(self.rows))
        parent = RecordingParent({one: 9, other: 3})
        pulled = self.pull(rig, parent, [one, missing, other])
        there = {one: before[9].tobytes(), other: before[3].tobytes()}
        assert pulled == there | {missing: None}
        rig.tier.drain_jobs()
        assert np.array_equal(rig.memory, before)

    def test_each_pin_is_given_back_once(self, rig: Rig) -> None:
        one, other, third = self.fresh(3)
        parent = RecordingParent({one: 3, other: 4, third: 5})
        for wanted in ([one], [one, other], [third]):
            assert None not in self.pull(rig, parent, wanted).values()
        rig.tier.drain_jobs()
        rig.poll()
        assert parent.jobs
        for job in parent.jobs:
            assert rig.finished[job.job_id].success
        opened = parent.call_names.count("on_new_request")
        assert parent.call_names.count("on_request_finished") == opened


class SourceContract(PullContract):
    """The same, and what takes a tier of its own."""

    def test_every_metric_emitted_by_a_source_is_declared(self, rigs: Any) -> None:
        rig = rigs(enable_telemetry=True)
        there, missing = self.fresh(2)
        self.pull(rig, RecordingParent({there: 3}), [there, missing])
        check_declared(names_and_labels(rig))


def names_and_labels(rig: Rig) -> list[tuple[str, tuple[str, ...]]]:
    """What the tier's metrics say since the last time."""
    found = samples(rig.tier.get_stats())
    return [(name, labels) for name, values in found.items() for labels in values]


def check_declared(emitted: list[tuple[str, tuple[str, ...]]]) -> None:
    """Each metric's name is declared, with as many labels as it has values."""
    declared = KVCRSecondaryTierManager.build_metric_definitions(
        {"type": "kvcr", "enable_telemetry": True}
    )
    assert emitted
    for name, labels in emitted:
        assert len(declared[name].labelnames) == len(labels), name


def tally(rig: Rig, held: Counter[tuple[OffloadKey, Any]]) -> None:
    """Count each block's events by medium: there, or not there, and nothing else."""
    for event in rig.tier.take_events():
        assert event.ownership == "kvcr"
        for each in event.keys:
            held[each, event.medium] += -1 if event.removed else 1
            count = held[each, event.medium]
            assert count in (0, 1), f"{event}: told {count} times"
            if not count:
                del held[each, event.medium]


def settle(rig: Rig, held: Counter[tuple[OffloadKey, Any]]) -> None:
    """Tally until no more comes: moves to a file go on for a while after a store."""
    quiet = 0
    while quiet < 20:
        before = dict(held)
        rig.tier.drain_jobs()
        rig.poll()
        tally(rig, held)
        quiet = quiet + 1 if dict(held) == before else 0
