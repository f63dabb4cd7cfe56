# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What an engine holds, by its KV events."""

from typing import Any

import pytest

from vllm_kvcr.routing import KvIndex, Residency

PROMPT = list(range(10))
FIRST, SECOND = 11, 22
PRIMARY = Residency("CPU", None)
POOL = Residency("CPU", "kvcr")
GPU = Residency("GPU", None)


def stored(place: Residency, *, salt: int = 0, **more: Any) -> dict[str, Any]:
    return {
        "type": "BlockStored",
        "block_hashes": [FIRST + salt, SECOND + salt],
        "parent_block_hash": None,
        "token_ids": PROMPT[:8],
        "block_size": 4,
        **place._asdict(),
        **more,
    }


def removed(place: Residency, *blocks: int) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": list(blocks), **place._asdict()}


@pytest.fixture
def index() -> KvIndex:
    return KvIndex()


def apply(index: KvIndex, *events: dict[str, Any]) -> None:
    for event in events:
        index.apply(event)


def test_a_prompts_blocks_are_found_by_its_tokens(index: KvIndex) -> None:
    assert index.pullable(PROMPT) == []
    apply(index, stored(PRIMARY))
    assert index.pullable(PROMPT) == [FIRST, SECOND]
    assert index.pullable(PROMPT[:7]) == [FIRST]
    assert index.pullable([*PROMPT[:4], 0, 0, 0, 0]) == [FIRST]
    assert index.pullable([0, *PROMPT]) == []
    assert index.pullable([]) == []


@pytest.mark.parametrize(
    ("place", "pullable"),
    [
        (PRIMARY, True),
        (POOL, True),
        (Residency("STORAGE", "kvcr"), True),
        (GPU, False),
        (Residency("STORAGE", "fs"), False),
        (Residency("CPU", "p2p"), False),
    ],
)
def test_only_what_peers_can_be_given_is_pullable(
    index: KvIndex, place: Residency, pullable: bool
) -> None:
    apply(index, stored(place))
    assert index.held(PROMPT) == [FIRST, SECOND]
    assert bool(index.pullable(PROMPT)) == pullable


def test_the_primary_tier_and_the_pool_let_go_each_for_itself(index: KvIndex) -> None:
    """Both are the medium CPU."""
    apply(index, stored(PRIMARY), stored(POOL), removed(PRIMARY, FIRST, SECOND))
    assert index.pullable(PROMPT) == [FIRST, SECOND]
    assert index.blocks(POOL) == {FIRST, SECOND}
    assert index.blocks(PRIMARY) == set()
    apply(index, removed(POOL, SECOND))
    assert index.pullable(PROMPT) == [FIRST]
    apply(index, removed(POOL, FIRST), removed(POOL, FIRST))
    assert index.held(PROMPT) == []


def test_a_block_that_is_pullable_may_follow_one_that_is_not(index: KvIndex) -> None:
    apply(index, stored(GPU), stored(PRIMARY), removed(PRIMARY, FIRST))
    assert index.held(PROMPT) == [FIRST, SECOND]
    assert index.pullable(PROMPT) == []


def test_nothing_is_kept_of_what_is_gone(index: KvIndex) -> None:
    for salt in range(100):
        blocks = FIRST + salt, SECOND + salt
        apply(index, stored(PRIMARY, salt=salt), removed(PRIMARY, *blocks))
    assert not [*index._next, *index._names, *index._places]


def test_the_same_tokens_with_a_salt_are_other_blocks(index: KvIndex) -> None:
    apply(index, stored(PRIMARY), stored(PRIMARY, salt=100))
    apply(index, removed(PRIMARY, FIRST, SECOND))
    assert index.pullable(PROMPT) == [FIRST + 100, SECOND + 100]


def test_a_reset_forgets_everything(index: KvIndex) -> None:
    apply(index, stored(PRIMARY), stored(POOL), {"type": "AllBlocksCleared"})
    assert index.held(PROMPT) == []


@pytest.mark.parametrize(
    "more",
    [{"lora_name": "mine"}, {"lora_id": 3}, {"token_ids": [], "block_size": 0}],
    ids=["adapter", "its id", "undescribed"],
)
def test_blocks_of_an_adapter_or_that_nobody_describes_are_left_out(
    index: KvIndex, more: dict[str, Any]
) -> None:
    apply(index, stored(PRIMARY, **more))
    assert index.block_tokens == 0
    assert index.held(PROMPT) == []
