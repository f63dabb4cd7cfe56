# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The control channel around KVCR's own one: who is heard, and what goes back."""

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from kvcr.control_channels import ZmqPeerControlChannel

from tests.v1.kv_offload.tiering.kvcr.builders import LOCALHOST, free_port
from tests.v1.kv_offload.tiering.kvcr.rig import wait_until
from vllm.v1.kv_offload.tiering.kvcr.peers import channel as module
from vllm.v1.kv_offload.tiering.kvcr.peers import connections
from vllm.v1.kv_offload.tiering.kvcr.peers.channel import PeerChannel
from vllm.v1.kv_offload.tiering.kvcr.peers.greeting import Envelope, Versions

OLD, NEW = Versions("0.1.0", "1.3.2"), Versions("0.1.1", "1.5.0")
SECRET, OTHER_SECRET = b"s" * 32, b"t" * 32
METADATA = b"metadata that only the same release understands"


class End:
    """One engine's end: its channel, and what KVCR would say and see over it."""

    def __init__(self, channel: Any) -> None:
        self.channel = channel
        self.channel.initialize()
        self.endpoint: str = channel.endpoint
        self.seen: list[dict[str, Any]] = []

    def say(self, to: "End | str", kind: str, **fields: Any) -> bool:
        endpoint = to if isinstance(to, str) else to.endpoint
        message = {
            "type": kind,
            "target_agent": "agent",
            "sender_control_endpoint": self.endpoint,
            "source_control_endpoint": endpoint,
            **fields,
        }
        return bool(self.channel.send(endpoint, msgspec.msgpack.encode(message)))

    def poll(self) -> list[dict[str, Any]]:
        self.seen += map(msgspec.msgpack.decode, self.channel.recv())
        return self.seen


class Ends:
    def __init__(self) -> None:
        self.made: list[End] = []

    def plain(self) -> End:
        """One of a kvcr tier without this adapter."""
        return self._add(ZmqPeerControlChannel(LOCALHOST, free_port(), LOCALHOST))

    def ours(self, versions: Versions = NEW, secret: bytes | None = None) -> End:
        own = ZmqPeerControlChannel(LOCALHOST, free_port(), LOCALHOST)
        return self._add(PeerChannel(own, Envelope(versions, secret)))

    def _add(self, channel: Any) -> End:
        self.made.append(End(channel))
        return self.made[-1]


@pytest.fixture
def ends() -> Iterator[Ends]:
    ends = Ends()
    yield ends
    for end in ends.made:
        end.channel.close()


def hears(end: End, *others: End) -> dict[str, Any]:
    def done() -> list[dict[str, Any]]:
        for other in others:
            other.poll()
        return end.poll()

    return dict(wait_until(done, "a message")[-1])


@pytest.mark.parametrize("secret", [None, SECRET])
def test_the_same_releases_hear_each_other(ends: Ends, secret: bytes | None) -> None:
    reader, source = ends.ours(secret=secret), ends.ours(secret=secret)
    assert reader.say(source, "target_metadata", target_agent_metadata=METADATA)
    assert hears(source, reader)["target_agent_metadata"] == METADATA
    assert source.say(reader, "target_metadata_ack")
    assert hears(reader, source)["type"] == "target_metadata_ack"


@pytest.mark.parametrize("kind", ["target_metadata", "start_write", "write_probe"])
def test_a_peer_without_this_adapter_is_heard_both_ways(ends: Ends, kind: str) -> None:
    plain, ours = ends.plain(), ends.ours()
    assert plain.say(ours, kind, op_handle=1)
    assert hears(ours)["op_handle"] == 1
    assert ours.say(plain, kind, op_handle=2)
    assert hears(plain, ours)["op_handle"] == 2


@pytest.mark.parametrize(("reads", "serves"), [(OLD, NEW), (NEW, OLD)])
def test_other_releases_do_not_see_each_other(
    ends: Ends, tier_log: Any, reads: Versions, serves: Versions
) -> None:
    reader, source = ends.ours(reads), ends.ours(serves)
    reader.say(source, "target_metadata", target_agent_metadata=METADATA)
    wait_until(
        lambda: (
            source.poll()
            or reader.poll()
            or reader.channel.is_incompatible(source.endpoint)
        ),
        "a refusal",
    )
    assert source.seen == []
    # Nothing more is asked of it, so that no pull waits for its deadline.
    assert not reader.say(source, "start_write", op_handle=7)
    assert not reader.say(source, "target_metadata")
    texts = tier_log.texts()
    assert len(texts) == 2, "each side says it once"
    for text in texts:
        assert str(OLD) in text
        assert str(NEW) in text


@pytest.mark.parametrize(
    ("kind", "refused"),
    [
        # Without the option to connect early, the pull itself is the first message.
        ("start_write", 7),
        # Whoever had the endpoint before may still be writing.
        ("write_probe", None),
    ],
)
def test_other_releases_refuse_a_pull_and_answer_no_probe(
    ends: Ends, kind: str, refused: int | None
) -> None:
    reader, source = ends.ours(OLD), ends.ours(NEW)
    assert reader.say(source, kind, op_handle=7)
    refusal = hears(reader, source)
    assert refusal["type"] == "write_refused"
    assert refusal["op_handle"] == refused
    assert refusal["sender_control_endpoint"] == source.endpoint
    assert source.seen == []


def test_upgraded_peers_are_retried(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, source = ends.ours(OLD), ends.ours(NEW)
    monkeypatch.setattr(module, "INCOMPATIBLE_S", 0.2)
    reader.say(source, "target_metadata")
    hears(reader, source)
    wait_until(
        lambda: not reader.channel.is_incompatible(source.endpoint), "the end of it"
    )
    assert reader.say(source, "target_metadata")


def test_nobody_is_called_incompatible_by_others(ends: Ends) -> None:
    """Only whom this engine dialled can say that it runs other releases."""
    reader, liar = ends.ours(NEW), ends.ours(OLD)
    victim = "tcp://10.0.0.6:24990"
    liar.say(reader, "write_refused", sender_control_endpoint=victim)
    hears(reader, liar)
    assert not reader.channel.is_incompatible(victim)


@pytest.mark.parametrize("theirs", [None, OTHER_SECRET])
def test_strangers_go_unheard(ends: Ends, tier_log: Any, theirs: bytes | None) -> None:
    source = ends.ours(secret=SECRET)
    for stranger in (ends.ours(secret=theirs), ends.plain()):
        for _ in range(10):
            stranger.say(source, "start_write", op_handle=7)

    def all_counted() -> bool:
        for end in ends.made:
            end.poll()
        return source.channel._unauthentic == 19  # those since the log line

    wait_until(all_counted, "twenty messages")
    assert source.seen == []
    (line,) = tier_log.texts()
    assert "control_secret_file" in line


def test_a_pull_that_never_left_is_settled_without_its_peer(ends: Ends) -> None:
    reader = ends.ours()
    nobody = f"tcp://{LOCALHOST}:{free_port()}"
    assert reader.say(nobody, "start_write", op_handle=7)
    assert reader.poll() == []
    assert reader.say(nobody, "write_probe", op_handle=7)
    expected = {"type": "write_refused", "sender_control_endpoint": nobody}
    assert reader.poll() == [expected | {"op_handle": 7}]


def test_an_acknowledgement_nobody_waits_for_is_not_seen(ends: Ends) -> None:
    """KVCR would remember each endpoint that is named in one."""
    ours, stranger = ends.ours(), ends.plain()
    for port in range(1, 101):
        sender = f"tcp://10.0.0.1:{port}"
        stranger.say(ours, "target_metadata_ack", sender_control_endpoint=sender)
    stranger.say(ours, "start_write", op_handle=7)
    assert hears(ours)["op_handle"] == 7
    assert len(ours.seen) == 1


def test_a_message_nested_without_end_does_not_reach_kvcr(ends: Ends) -> None:
    ours, stranger = ends.ours(), ends.plain()
    deep = b"\x81" + msgspec.msgpack.encode("a") + b"\x91" * 100_000 + b"\xc0"
    stranger.channel.send(ours.endpoint, deep)
    stranger.say(ours, "start_write", op_handle=7)
    assert hears(ours)["op_handle"] == 7


def test_a_closed_one_is_forgotten(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "MAX_CONNECTIONS", 2)
    forgotten: list[str] = []
    ours = ends.ours()
    ours.channel.forget = forgotten.append
    others = [f"tcp://127.0.0.{number}:9" for number in range(1, 5)]
    for other in others:
        ours.say(other, "target_metadata")
    assert forgotten == others[:2]
