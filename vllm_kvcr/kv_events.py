# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""vLLM's KV events: read from ZMQ, in the spelling of any release.

Needs neither vLLM nor KVCR. Not thread-safe.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import msgspec
import zmq

from vllm_kvcr.routing import BlockHash, KvIndex

REPLAY_SECONDS = 10

# The fields of an event that is an array behind its name. vLLM sent arrays before
# 0.30, and sends maps since.
_ARRAY_FIELDS: dict[str, tuple[str, ...]] = {
    "BlockStored": (
        "block_hashes",
        "parent_block_hash",
        "token_ids",
        "block_size",
        "lora_id",
        "medium",
        "lora_name",
    ),
    "BlockRemoved": ("block_hashes", "medium"),
    "AllBlocksCleared": (),
}

Replay = Callable[[int], Iterable[Sequence[bytes]]]
"""Gives the messages from that number on, as far as the engine still has them."""


@dataclass(frozen=True)
class Batch:
    """What an engine published at once; each event has its name as ``type``."""

    timestamp: float
    events: list[dict[str, Any]]


def decode(payload: bytes) -> Batch:
    timestamp, events, *_ = msgspec.msgpack.decode(payload)
    return Batch(timestamp, [_as_map(event) for event in events])


def _as_map(event: dict[str, Any] | list[Any]) -> dict[str, Any]:
    if isinstance(event, dict):
        return event
    name, *values = event
    # What was added to an event later is not needed here.
    return {"type": name, **dict(zip(_ARRAY_FIELDS[name], values, strict=False))}


class Feed:
    """Puts the messages of one engine into an index, and notices what is missing."""

    def __init__(self, replay: Replay | None = None) -> None:
        self.index = KvIndex()
        self._replay = replay
        self._last = -1
        self._timestamp = float("-inf")

    def take(self, frames: Sequence[bytes]) -> list[Batch]:
        """Take in a message, and before it what was missed.

        Where a gap stays, or the engine has started anew, what was known of it may no
        longer hold and is forgotten.
        """
        number, batch = int.from_bytes(frames[-2], "big"), decode(frames[-1])
        taken: list[Batch] = []
        if number <= self._last:
            if batch.timestamp <= self._timestamp:
                return []  # known from a replay
            self.index.forget()
            self._last = -1
        if number > self._last + 1:
            with suppress(TimeoutError):
                taken = self.catch_up()
            if number <= self._last:
                return taken
        if number > self._last + 1:
            self.index.forget()
        self._put(number, batch)
        return [*taken, batch]

    def catch_up(self) -> list[Batch]:
        """Take in what the engine has published since the last message.

        Raises:
            TimeoutError: the engine does not answer.
        """
        taken: list[Batch] = []
        while self._replay is not None:
            asked_from = self._last + 1
            for frames in self._replay(asked_from):
                number, batch = int.from_bytes(frames[-2], "big"), decode(frames[-1])
                if number > self._last + 1:
                    if self._last >= asked_from:
                        break  # dropped on its way here
                    self.index.forget()
                self._put(number, batch)
                taken.append(batch)
            # The end can have been dropped, too: only an empty replay is complete.
            if self._last < asked_from:
                break
        return taken

    def _put(self, number: int, batch: Batch) -> None:
        self._last, self._timestamp = number, batch.timestamp
        for event in batch.events:
            self.index.apply(event)


class Subscription:
    """The KV events of one engine, and what they say.

    Args:
        endpoint: Where the engine publishes.
        replay: The engine's ``replay_endpoint``. With it events that were missed, be
            it before the start, are known, too, as far back as the engine keeps them.
        bind: The engine connects here, as it does where its endpoint names an address
            instead of ``*``. What it publishes before the first ``read`` after that
            connection does not arrive, because ZMQ subscribes in there.

    Raises:
        TimeoutError: there is no replay at ``replay``.
    """

    def __init__(
        self, endpoint: str, *, replay: str | None = None, bind: bool = False
    ) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.setsockopt(zmq.SUBSCRIBE, b"")
        self._feed = Feed(partial(self._replayed, replay) if replay else None)
        try:
            (self._socket.bind if bind else self._socket.connect)(endpoint)
            self._feed.catch_up()
        except BaseException:
            self._context.destroy(linger=0)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self._context.destroy(linger=0)

    @property
    def index(self) -> KvIndex:
        return self._feed.index

    def read(self) -> list[Batch]:
        """Take in the events that have arrived."""
        batches = []
        while self._socket.poll(0):
            batches += self._feed.take(self._socket.recv_multipart())
        return batches

    def wait_for(
        self, prompt: Sequence[int], tokens: int, seconds: float
    ) -> list[BlockHash]:
        """Read until that many of the prompt's tokens can be pulled, or time is up."""
        deadline = time.monotonic() + seconds
        while True:
            self.read()
            hashes = self.index.pullable(prompt)
            if len(hashes) * self.index.block_tokens >= tokens > 0:
                return hashes
            if time.monotonic() > deadline:
                return hashes
            self._socket.poll(50)

    def _replayed(self, endpoint: str, number: int) -> list[list[bytes]]:
        messages: list[list[bytes]] = []
        with self._context.socket(zmq.DEALER) as socket:
            socket.setsockopt(zmq.LINGER, 0)
            # The engine's socket drops what does not fit, and it sends all at once.
            socket.setsockopt(zmq.RCVHWM, 0)
            socket.connect(endpoint)
            socket.send_multipart((b"", number.to_bytes(8, "big")))
            while socket.poll(1000 * REPLAY_SECONDS):
                frames = socket.recv_multipart()
                if not frames[-1]:
                    return messages
                messages.append(frames)
        if messages:
            return messages
        raise TimeoutError(
            f"no replay of KV events from {endpoint} within {REPLAY_SECONDS} "
            "s; it has to be the replay_endpoint of the engine's KV events"
        )
