# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The little router: what vLLM's own publisher says."""

import itertools
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from vllm.distributed.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVEventBatch,
    ZmqEventPublisher,
)
from vllm_kvcr.routing import KvIndex

PROMPT = list(range(10))
FIRST, SECOND = 11, 22
MARKS = itertools.count(-2, -1)

Publish = Callable[..., None]


def stored(parent: int | None, block: int, tokens: list[int], medium: str = "CPU"):
    return BlockStored(
        block_hashes=[block],
        parent_block_hash=parent,
        token_ids=tokens,
        block_size=4,
        lora_id=None,
        medium=medium,
        lora_name=None,
    )


BOTH = (stored(None, FIRST, PROMPT[:4]), stored(FIRST, SECOND, PROMPT[4:8]))


@pytest.fixture
def index(tmp_path: Path) -> Iterator[tuple[KvIndex, Publish]]:
    endpoint = f"ipc://{tmp_path}/events"
    publisher = ZmqEventPublisher(0, endpoint=endpoint)
    with KvIndex(endpoint) as index:

        def publish(*events: object) -> None:
            publisher.publish(KVEventBatch(ts=0.0, events=list(events)))

        # What is published before the subscription has arrived is lost.
        deadline = time.monotonic() + 10
        while not index.held([-1] * 4):
            assert time.monotonic() < deadline
            publish(stored(None, -1, [-1] * 4))
            index.wait_for([-1] * 4, 4, 0.1)
        yield index, publish
    publisher.shutdown()


def arrived(index: KvIndex, publish: Publish) -> None:
    """Whatever was published before has been read."""
    # New each time: an earlier mark, still held, would be found at once.
    block = next(MARKS)
    mark = [block] * 4
    publish(stored(None, block, mark))
    assert index.wait_for(mark, 4, 10)


def test_a_prompts_blocks_are_found_by_its_tokens(index) -> None:
    index, publish = index
    publish(*BOTH)
    assert index.wait_for(PROMPT, 8, 10) == [FIRST, SECOND]
    assert index.held(PROMPT[:7]) == [FIRST]
    assert index.held([*PROMPT[:4], 0, 0, 0, 0]) == [FIRST]
    assert index.held([0, *PROMPT]) == []
    assert index.held([]) == []


def test_only_what_peers_can_be_given_counts(index) -> None:
    index, publish = index
    publish(stored(None, FIRST, PROMPT[:4], "GPU"))
    arrived(index, publish)
    assert index.held(PROMPT) == []
    publish(stored(None, FIRST, PROMPT[:4], "STORAGE"))
    assert index.wait_for(PROMPT, 4, 10) == [FIRST]


def test_a_block_is_held_until_each_medium_has_let_go(index) -> None:
    index, publish = index
    publish(*BOTH, stored(None, FIRST, PROMPT[:4], "STORAGE"))
    publish(BlockRemoved(block_hashes=[FIRST, SECOND], medium="CPU"))
    arrived(index, publish)
    assert index.held(PROMPT) == [FIRST]
    publish(BlockRemoved(block_hashes=[FIRST], medium="STORAGE"))
    arrived(index, publish)
    assert index.held(PROMPT) == []
    publish(*BOTH)
    assert index.wait_for(PROMPT, 8, 10) == [FIRST, SECOND]
    publish(AllBlocksCleared())
    arrived(index, publish)
    assert index.held(PROMPT) == []


def test_what_never_comes_is_waited_for_only_so_long(index) -> None:
    index, publish = index
    publish(BOTH[0])
    started = time.monotonic()
    assert index.wait_for(PROMPT, 8, 0.5) == [FIRST]
    assert 0.5 <= time.monotonic() - started < 5
