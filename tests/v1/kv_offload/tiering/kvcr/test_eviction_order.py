# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""KVCR's pool evicts in the order in which vLLM uses blocks, where kvcr can be told."""

import random
from collections.abc import Callable, Sequence

from tests.v1.kv_offload.tiering.kvcr.builders import keys
from tests.v1.kv_offload.tiering.kvcr.rig import Rig
from vllm.v1.kv_offload.base import OffloadKey, ReqContext
from vllm.v1.kv_offload.tiering.kvcr.compat import shims

PREFIX = keys(4)
ROUNDS = 6


def hit_rate(touching: bool) -> float:
    """Blocks of a shared prefix that are still there when a request wants them.

    Requests with one prefix come in turn, each followed by other blocks. vLLM has the
    prefix on its GPU, so that it never loads it from below and only tells of its use;
    the prefix is wanted from below at the end.
    """
    rig = Rig(rows=16, secondary_g2_slots=12)
    rig.result_of(rig.store(PREFIX, range(4)))
    for turn in range(ROUNDS):
        if touching:
            rig.tier.touch(PREFIX, ReqContext(f"request-{turn}"))
        others: Sequence[OffloadKey] = keys(4, first=100 + 4 * turn)
        rig.result_of(rig.store(others, range(4, 8)))
    hits = len(rig.hits(PREFIX)) / len(PREFIX)
    rig.tier.shutdown()
    return hits


def test_a_prefix_in_use_is_not_evicted() -> None:
    assert hit_rate(touching=False) == 0.0
    assert hit_rate(touching=True) == (1.0 if shims.HAS_SEQUENCE_ALIGNMENT else 0.0)


def rebuilds(touch: Callable[[Rig, list[OffloadKey]], None]) -> int:
    """How often KVCR rebuilds its eviction queue while requests come and go."""
    rig = Rig(rows=16, secondary_g2_slots=64)
    chance = random.Random(0)
    queue = rig.tier._kvcr._core._local_dram._evictable  # type: ignore[union-attr]
    found = 0
    for turn in range(150):
        heap = queue._heap
        rig.result_of(rig.store(keys(4, first=4 * turn), range(4)))
        for _ in range(4):
            first = chance.randrange(max(1, 4 * turn - 64), 4 * turn + 4)
            touch(rig, keys(min(24, 4 * turn + 4 - first), first=first))
        found += queue._heap is not heap
    rig.tier.shutdown()
    return found


def test_touching_alone_never_makes_kvcr_rebuild_its_queue() -> None:
    context = ReqContext("request")
    assert rebuilds(lambda rig, used: rig.tier.touch(used, context)) == 0
    if shims.HAS_SEQUENCE_ALIGNMENT:  # what the bound is there for
        assert rebuilds(lambda rig, used: rig.tier._kvcr.align_sequence(used, True)) > 3
