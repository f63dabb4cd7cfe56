# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What a router needs: an index of an engine's blocks by prompt, and the hint.

Needs neither vLLM nor KVCR. Not thread-safe.
"""

import uuid
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

BlockHash = int | bytes


class Residency(NamedTuple):
    """A place where an engine keeps blocks; each stores and removes for itself."""

    medium: str | None
    # The name of a secondary tier; vLLM's own caches have none.
    ownership: str | None

    @property
    def is_pullable(self) -> bool:
        """Whether peers can pull what is there.

        They can pull from vLLM's primary tier and from KVCR's pool and files, but not
        from a GPU or from another secondary tier.
        """
        if self.ownership is None:
            return self.medium == "CPU"
        return self.ownership == "kvcr"


class KvIndex:
    """Which prefixes an engine holds, according to its KV events.

    The engine needs ``self_describing_kv_events``: only then do events for blocks
    outside its GPU carry tokens. Blocks of LoRA adapters are left out. The index grows
    with what the engine holds.
    """

    def __init__(self) -> None:
        self.block_tokens = 0
        # Keys: the hash of the block before, and the block's tokens.
        self._next: dict[tuple[BlockHash | None, tuple[int, ...]], BlockHash] = {}
        self._names: dict[BlockHash, tuple[BlockHash | None, tuple[int, ...]]] = {}
        self._places: dict[BlockHash, set[Residency]] = {}

    def pullable(self, prompt: Sequence[int]) -> list[BlockHash]:
        """The hashes of the prompt's blocks that peers can pull, from its beginning."""
        found: list[BlockHash] = []
        for block in self._walk(prompt):
            if not any(place.is_pullable for place in self._places[block]):
                break
            found.append(block)
        return found

    def held(self, prompt: Sequence[int]) -> list[BlockHash]:
        """The hashes of the prompt's blocks that are anywhere in the engine."""
        return list(self._walk(prompt))

    def blocks(self, place: Residency) -> set[BlockHash]:
        return {block for block, places in self._places.items() if place in places}

    def forget(self) -> None:
        for known in (self._next, self._names, self._places):
            known.clear()

    def apply(self, event: dict[str, Any]) -> None:
        """Apply an event, as returned by ``kv_events.decode``."""
        if event["type"] == "AllBlocksCleared":
            # Sent when the GPU's cache is reset. The others may have been reset too,
            # and what they keep may belong to weights that were replaced.
            self.forget()
            return
        place = Residency(event.get("medium"), event.get("ownership"))
        if event["type"] == "BlockRemoved":
            for block in event["block_hashes"]:
                self._remove(block, place)
        elif event["type"] == "BlockStored" and _is_plain(event):
            self._store(event, place)

    def _walk(self, prompt: Sequence[int]) -> Iterator[BlockHash]:
        size = self.block_tokens
        parent: BlockHash | None = None
        for end in range(size, len(prompt) + 1, size) if size else ():
            block = self._next.get((parent, tuple(prompt[end - size : end])))
            if block is None:
                return
            yield block
            parent = block

    def _store(self, event: dict[str, Any], place: Residency) -> None:
        self.block_tokens = size = event["block_size"]
        parent = event["parent_block_hash"]
        for number, block in enumerate(event["block_hashes"]):
            tokens = event["token_ids"][number * size : (number + 1) * size]
            name = parent, tuple(tokens)
            self._next[name] = block
            self._names[block] = name
            self._places.setdefault(block, set()).add(place)
            parent = block

    def _remove(self, block: BlockHash, place: Residency) -> None:
        places = self._places.get(block)
        if places is None:
            return
        places.discard(place)
        if not places:
            del self._places[block]
            name = self._names.pop(block)
            # A block with a salt has another hash for the same tokens.
            if self._next.get(name) == block:
                del self._next[name]


def _is_plain(event: dict[str, Any]) -> bool:
    described = bool(event["token_ids"])
    return described and event.get("lora_name") is None and event.get("lora_id") is None


def fetch_hint(control_endpoint: str, hashes: Sequence[BlockHash]) -> dict[str, Any]:
    """Make the hint that tells a request that a peer has these blocks.

    Over HTTP it is sent as ``kv_transfer_params["kv_hint"]``.
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
