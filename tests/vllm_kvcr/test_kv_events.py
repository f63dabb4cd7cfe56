# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""KV events as vLLM's own publisher sends them, and as each release encodes them."""

import importlib.util
import os
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import msgspec
import pytest
import zmq

from tests import peers_vllm
from tests.vllm_kvcr.publishing import (
    BOTH,
    FIRST,
    PROMPT,
    SECOND,
    Engine,
    removed,
    stored,
)
from vllm.distributed import kv_events as vllm_events
from vllm.distributed.kv_events import KVEventBatch
from vllm_kvcr import kv_events
from vllm_kvcr.kv_events import Feed, Subscription, decode
from vllm_kvcr.routing import Residency

# --- over ZMQ --------------------------------------------------------------------


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    engine = Engine(tmp_path)
    yield engine
    engine.stop()


def join(events: Subscription, engine: Engine) -> None:
    """What is published before the subscription has arrived is lost."""
    deadline = time.monotonic() + 30
    while not events.index.held([-1] * 4):
        assert time.monotonic() < deadline
        engine.publish(stored(None, -1, [-1] * 4))
        events.wait_for([-1] * 4, 4, 0.1)
    # Until each of those has been read.
    engine.publish(stored(None, -2, [-2] * 4))
    assert events.wait_for([-2] * 4, 4, 30)


def test_what_is_published_arrives(engine: Engine) -> None:
    with Subscription(engine.events) as events:
        join(events, engine)
        engine.publish(*BOTH)
        assert events.wait_for(PROMPT, 8, 30) == [FIRST, SECOND]
        engine.publish(removed(SECOND), stored(None, -3, [-3] * 4))
        assert events.wait_for([-3] * 4, 4, 30)
        # What never comes is waited for only so long.
        started = time.monotonic()
        assert events.wait_for(PROMPT, 8, 0.5) == [FIRST]
        assert time.monotonic() - started >= 0.5


def test_what_was_published_before_is_replayed(engine: Engine) -> None:
    engine.publish(BOTH[0])
    engine.publish(BOTH[1])
    with Subscription(engine.events, replay=engine.replay) as events:
        assert events.index.pullable(PROMPT) == [FIRST, SECOND]
        join(events, engine)
        assert events.index.pullable(PROMPT) == [FIRST, SECOND]


def test_a_long_replay_is_complete_although_the_reader_stalls(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_events, "REPLAY_SECONDS", 0.5)
    engine.publish(*BOTH)
    for number in range(4000):
        engine.publish_soon(stored(None, 1000 + number, [number] * 4))
    engine.publish()
    receive = zmq.Socket.recv_multipart
    stall = iter([1.0])

    def stalling(socket: zmq.Socket) -> list[bytes]:
        if socket.type == zmq.DEALER:
            time.sleep(next(stall, 0.0))
        return receive(socket)

    monkeypatch.setattr(zmq.Socket, "recv_multipart", stalling)
    with Subscription(engine.events, replay=engine.replay) as events:
        assert events.index.pullable(PROMPT) == [FIRST, SECOND]
        assert events.index.held([3999] * 4)


def test_no_replay_is_an_error_that_says_where(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(kv_events, "REPLAY_SECONDS", 0)
    endpoint = f"ipc://{tmp_path}/nobody"
    with pytest.raises(TimeoutError, match=endpoint):
        Subscription(f"ipc://{tmp_path}/events", replay=endpoint)


def test_an_engine_can_be_told_to_connect(tmp_path: Path) -> None:
    """Then nothing of it listens on every interface."""
    port = 20_000 + os.getpid() % 10_000
    endpoint = f"tcp://127.0.0.1:{port}"
    with Subscription(endpoint, bind=True) as events:
        engine = Engine(tmp_path, endpoint)
        join(events, engine)
        engine.stop()


# --- what is missing -------------------------------------------------------------


def message(number: int, *events: object, ts: float | None = None) -> list[bytes]:
    batch = KVEventBatch(ts=number if ts is None else ts, events=list(events))
    return [b"", number.to_bytes(8, "big"), msgspec.msgpack.encode(batch)]


def test_after_a_gap_nothing_is_known() -> None:
    """One of the lost messages may have been a block's removal."""
    feed = Feed()
    feed.take(message(0, *BOTH))
    feed.take(message(1))
    assert feed.index.pullable(PROMPT) == [FIRST, SECOND]
    feed.take(message(3, BOTH[0]))
    assert feed.index.pullable(PROMPT) == [FIRST]


def test_a_gap_is_filled_by_a_replay_that_reaches_back_far_enough() -> None:
    sent = [message(0, *BOTH), message(1, removed(SECOND)), message(2), message(3)]
    feed = Feed(lambda number: sent[number:])
    feed.take(sent[0])
    assert len(feed.take(sent[2])) == 3
    assert feed.index.pullable(PROMPT) == [FIRST]
    # Replayed before it came.
    assert feed.take(sent[3]) == []
    assert len(feed.take(message(4, BOTH[1]))) == 1
    assert feed.index.pullable(PROMPT) == [FIRST, SECOND]

    sent = [message(0, *BOTH), message(1), message(2, BOTH[0])]
    feed = Feed(lambda number: sent[2:])
    feed.take(sent[0])
    feed.take(message(3))
    assert feed.index.pullable(PROMPT) == [FIRST]


def test_what_a_replay_drops_is_asked_for_again() -> None:
    sent = [message(0, BOTH[0]), message(1), message(2, BOTH[1]), message(3)]
    # A message within it is missing, then its end.
    replays = [[sent[0], sent[2]], [sent[1], sent[2]], [sent[3]], []]
    asked = []

    def replay(number: int) -> list[list[bytes]]:
        asked.append(number)
        return replays.pop(0)

    feed = Feed(replay)
    assert len(feed.catch_up()) == 4
    assert asked == [0, 1, 3, 4]
    assert feed.index.pullable(PROMPT) == [FIRST, SECOND]


@pytest.mark.parametrize("first", [0, 2])
def test_an_engine_that_starts_anew_holds_nothing(first: int) -> None:
    feed = Feed()
    for number in range(4):
        feed.take(message(number, *BOTH))
    feed.take(message(first, BOTH[0], ts=100))
    assert feed.index.pullable(PROMPT) == [FIRST]


# --- each release's spelling -----------------------------------------------------


def with_peers() -> ModuleType:
    """That vLLM's module. The rest of it would take half a minute to import."""
    folder = Path(peers_vllm.environment()["PYTHONPATH"])
    file = folder / "vllm" / "distributed" / "kv_events.py"
    spec = importlib.util.spec_from_file_location("kv_events_of_peers_vllm", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


RELEASES = {"installed": lambda: vllm_events, "with peers": with_peers}


def encoded_by(release: ModuleType) -> list[bytes]:
    stored = release.BlockStored(
        block_hashes=[FIRST, SECOND],
        parent_block_hash=None,
        token_ids=PROMPT[:8],
        block_size=4,
        lora_id=None,
        medium="CPU",
        lora_name=None,
        ownership="kvcr",
    )
    removed = release.BlockRemoved(
        block_hashes=[SECOND], medium="CPU", ownership="kvcr"
    )
    batches = [[stored], [removed], [release.AllBlocksCleared()]]
    encode = msgspec.msgpack.Encoder().encode
    return [encode(release.KVEventBatch(ts=1.5, events=b)) for b in batches]


def as_arrays(payload: bytes) -> bytes:
    """The same as before vLLM 0.30: the fields of its own classes, in their order."""
    timestamp, events, *more = msgspec.msgpack.decode(payload)
    spelled = []
    for event in events:
        kind = getattr(vllm_events, event.pop("type"))
        spelled.append([kind.__name__, *map(event.get, kind.__struct_fields__)])
    return msgspec.msgpack.encode([timestamp, spelled, *more])


def check(payloads: list[bytes], place: Residency) -> None:
    feed = Feed()
    seen = []
    for number, payload in enumerate(payloads):
        feed.take([b"", number.to_bytes(8, "big"), payload])
        seen.append((feed.index.pullable(PROMPT), feed.index.blocks(place)))
    assert seen == [([FIRST, SECOND], {FIRST, SECOND}), ([FIRST], {FIRST}), ([], set())]
    assert decode(payloads[0]).timestamp == 1.5


@pytest.mark.parametrize("release", RELEASES)
def test_each_release_is_understood(release: str) -> None:
    check(encoded_by(RELEASES[release]()), Residency("CPU", "kvcr"))


def test_arrays_are_understood() -> None:
    """They named no secondary tier: all of an engine's memory was one place."""
    payloads = [as_arrays(payload) for payload in encoded_by(vllm_events)]
    check(payloads, Residency("CPU", None))
