# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""vLLM's own publisher of KV events, and the events of a prompt of two blocks."""

import time
from pathlib import Path

from vllm.distributed.kv_events import (
    BlockRemoved,
    BlockStored,
    KVEventBatch,
    ZmqEventPublisher,
)

BLOCK_TOKENS = 4
PROMPT = list(range(10))
FIRST, SECOND = 11, 22


def stored(
    parent: int | None, block: int, tokens: list[int], medium: str = "CPU"
) -> BlockStored:
    return BlockStored(
        block_hashes=[block],
        parent_block_hash=parent,
        token_ids=tokens,
        block_size=BLOCK_TOKENS,
        lora_id=None,
        medium=medium,
        lora_name=None,
    )


def removed(*blocks: int) -> BlockRemoved:
    return BlockRemoved(block_hashes=list(blocks), medium="CPU")


BOTH = (stored(None, FIRST, PROMPT[:4]), stored(FIRST, SECOND, PROMPT[4:8]))


class Engine:
    """Publishes as an engine does."""

    def __init__(self, folder: Path, endpoint: str | None = None) -> None:
        self.events = endpoint or f"ipc://{folder}/events"
        self.replay = f"ipc://{folder}/replay"
        self._publisher = ZmqEventPublisher(0, self.events, self.replay)

    def publish(self, *events: object) -> None:
        """Returns when the events have been sent and can be replayed."""
        before = len(self._publisher._buffer) + self._publisher._event_queue.qsize()
        self.publish_soon(*events)
        while len(self._publisher._buffer) <= before:
            time.sleep(0.001)

    def publish_soon(self, *events: object) -> None:
        self._publisher.publish(KVEventBatch(ts=time.time(), events=list(events)))

    def stop(self) -> None:
        self._publisher.shutdown()
