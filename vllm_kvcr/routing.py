# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The least that a router does: learn from KV events who holds what, and say so.

Needs neither vLLM nor KVCR. Not thread-safe.
"""

import time
import uuid
from collections import defaultdict
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

import msgspec
import zmq

BlockHash = int | bytes

# Whose blocks peers can be given: vLLM's primary tier, and KVCR's pool and files.
PULLABLE = frozenset({"CPU", "STORAGE"})


class KvIndex:
    """Which prefixes an engine holds outside its GPU, as its KV events tell.

    The engine needs ``self_describing_kv_events``: only then do the events of these
    blocks carry their tokens. Events of before the start are not known.
    """

    def __init__(self, endpoint: str) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.setsockopt(zmq.SUBSCRIBE, b"")
        self._socket.connect(endpoint)
        # By the hash of the block before, and the block's tokens.
        self._next: dict[tuple[BlockHash | None, tuple[int, ...]], BlockHash] = {}
        self._media: defaultdict[BlockHash, set[str]] = defaultdict(set)
        self._block_tokens = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._context.destroy(linger=0)

    def read(self) -> None:
        """Take in the events that have arrived."""
        while self._socket.poll(0):
            payload = self._socket.recv_multipart()[-1]
            for event in msgspec.msgpack.decode(payload)[1]:
                self._apply(event)

    def held(self, prompt: Sequence[int]) -> list[BlockHash]:
        """The hashes of the prompt's blocks that can be pulled, from its beginning."""
        hashes: list[BlockHash] = []
        size = self._block_tokens
        parent: BlockHash | None = None
        for end in range(size, len(prompt) + 1, size) if size else ():
            block = self._next.get((parent, tuple(prompt[end - size : end])))
            if block is None or not self._media[block]:
                break
            hashes.append(block)
            parent = block
        return hashes

    def wait_for(
        self, prompt: Sequence[int], tokens: int, seconds: float
    ) -> list[BlockHash]:
        """Read until that many of the prompt's tokens are held, or time is up."""
        deadline = time.monotonic() + seconds
        while True:
            self.read()
            hashes = self.held(prompt)
            if len(hashes) * self._block_tokens >= tokens > 0:
                return hashes
            if time.monotonic() > deadline:
                return hashes
            self._socket.poll(50)

    def _apply(self, event: dict[str, Any]) -> None:
        if event["type"] == "AllBlocksCleared":
            self._media.clear()
            return
        medium = event.get("medium")
        if medium not in PULLABLE:
            return
        if event["type"] == "BlockRemoved":
            for block in event["block_hashes"]:
                self._media[block].discard(medium)
        elif event["type"] == "BlockStored" and event["token_ids"]:
            self._block_tokens = size = event["block_size"]
            parent = event["parent_block_hash"]
            for number, block in enumerate(event["block_hashes"]):
                tokens = event["token_ids"][number * size : (number + 1) * size]
                self._next[parent, tuple(tokens)] = block
                self._media[block].add(medium)
                parent = block


def fetch_hint(control_endpoint: str, hashes: Sequence[BlockHash]) -> dict[str, Any]:
    """What tells a request that a peer has these blocks.

    Over HTTP it goes into the request as ``kv_transfer_params["kv_hint"]``.
    """
    return {
        "protocol_version": "0.1",
        "message_id": str(uuid.uuid4()),
        "actions": [
            {
                "action_id": str(uuid.uuid4()),
                "action_type": "kv.fetch",
                "action_version": "1.0",
                "payload": {
                    "source_control_endpoint": control_endpoint,
                    "block_hashes": list(hashes),
                },
            }
        ],
    }
