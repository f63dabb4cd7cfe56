# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What KVCR is told of the use of blocks, and that a large pool costs no more."""

from typing import Any

import pytest

from tests.v1.kv_offload.tiering.kvcr.builders import key, keys
from tests.v1.kv_offload.tiering.kvcr.rig import StandinRig
from tests.v1.kv_offload.tiering.kvcr.standin import KvcrStandin
from vllm.v1.kv_offload.base import OffloadKey, ReqContext
from vllm.v1.kv_offload.tiering.kvcr.transfers import recency
from vllm.v1.kv_offload.tiering.kvcr.transfers.recency import Recency

PREFIX = b"p"


class Told:
    """Takes the place of KVCR's ``align_sequence`` and counts."""

    def __init__(self) -> None:
        self.calls: list[list[bytes]] = []

    def __call__(self, ordered_keys: list[bytes], use_current_time: bool) -> None:
        assert use_current_time
        self.calls.append(ordered_keys)

    @property
    def total(self) -> int:
        return sum(map(len, self.calls))

    def take(self) -> list[bytes]:
        told = [each for call in self.calls for each in call]
        self.calls.clear()
        return told


def prefixed(chosen: list[OffloadKey]) -> list[bytes]:
    return [PREFIX + each for each in chosen]


@pytest.mark.parametrize("slots", [2_000, 200_000, 2_000_000])
@pytest.mark.parametrize("count", [1_000, 100_000])
def test_the_work_of_a_call_is_bounded(slots: int, count: int) -> None:
    told = Told()
    order = Recency(told, PREFIX, slots)
    used = iter(keys(count))
    order.stored(slots)
    order.used(used)  # type: ignore[arg-type]
    assert count - len(list(used)) <= recency.MAX_LOOKED_AT
    assert 0 < told.total <= recency.MAX_KEYS
    assert len(told.calls) == 1


def test_all_calls_together_report_half_of_what_is_stored() -> None:
    told = Told()
    order = Recency(told, PREFIX, slots=64)
    for turn in range(50):
        order.used(keys(64, first=1000 * turn))
    assert told.total == 0
    stored = 0
    for turn in range(200):
        order.stored(turn % 40)
        stored += turn % 40
        order.used(keys(64, first=1000 * turn))
        assert told.total <= stored / recency.STORES_PER_KEY
    assert told.total > stored / 4


def test_a_saved_up_bound_is_bounded() -> None:
    told = Told()
    order = Recency(told, PREFIX, slots=10**6)
    order.stored(10**9)
    for turn in range(200):
        order.used(keys(64, first=1000 * turn))
    assert told.total <= recency._MAX_CREDIT


def test_a_long_prefix_is_reported_from_its_head_on_over_several_calls() -> None:
    told = Told()
    order = Recency(told, PREFIX, slots=80_000)
    order.stored(3000)
    prefix = keys(300)
    reported: list[bytes] = []
    for _ in range(3):
        order.used(prefix)
        assert told.total <= recency.MAX_KEYS
        reported += told.take()
    assert reported == prefixed(prefix)
    order.used(prefix)
    assert told.take() == []


def test_only_what_is_new_is_reported_until_the_rest_has_grown_old() -> None:
    told = Told()
    order = Recency(told, PREFIX, slots=8 * 100)
    order.stored(1000)
    shared = keys(2 * recency.GROUP)
    order.used([*shared, key(900)])
    assert told.take() == prefixed([*shared, key(900)])
    order.stored(99)
    order.used([*shared, key(901)])
    assert told.take() == prefixed([key(901)])
    order.stored(1)
    order.used([*shared, key(901)])
    assert told.take() == prefixed(shared)


def test_what_is_remembered_is_bounded() -> None:
    order = Recency(Told(), PREFIX, slots=1 << 40)
    for number in range(recency._REMEMBERED_GROUPS + 100):
        order.stored(2)
        order.used([key(number)])
    assert len(order._reported) == recency._REMEMBERED_GROUPS


class Aligning(KvcrStandin):
    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.align_sequence = Told()


def test_touch_tells_nothing_where_nothing_would_follow() -> None:
    for policy, told in (("fifo", []), ("lru", [key(1)])):
        rig = StandinRig(kvcr=Aligning, policy=policy)
        rig.store(keys(4), range(4))
        rig.tier.touch([key(1)], ReqContext("r"))
        assert rig.kvcr.align_sequence.take() == told
    without = StandinRig()  # a KVCR that cannot be told
    without.store(keys(4), range(4))
    without.tier.touch([key(1)], ReqContext("r"))


def test_kvcr_raising_does_not_leave_touch() -> None:
    class Raising(KvcrStandin):
        def align_sequence(self, ordered_keys: Any, use_current_time: Any) -> None:
            raise RuntimeError("gone")

    rig = StandinRig(kvcr=Raising)
    rig.store(keys(4), range(4))
    rig.tier.touch([key(1)], ReqContext("r"))
    rig.tier.touch([key(1)], ReqContext("r"))
    assert not rig.hits([key(1)])
