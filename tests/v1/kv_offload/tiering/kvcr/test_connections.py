# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Connections over real ZeroMQ sockets: bounded, and never waiting for a name."""

import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
import zmq

from tests.v1.kv_offload.tiering.kvcr.builders import LOCALHOST, free_port
from tests.v1.kv_offload.tiering.kvcr.rig import wait_until
from vllm.v1.kv_offload.tiering.kvcr.peers import connections as module
from vllm.v1.kv_offload.tiering.kvcr.peers.connections import (
    MAX_CONNECTIONS,
    MAX_HELD,
    Connections,
)


class Rig:
    def __init__(self) -> None:
        self.closed: list[tuple[str, list[int]]] = []
        self.skipped = 0.0
        self.connections = Connections(
            lambda endpoint, writes: self.closed.append((endpoint, writes)),
            clock=lambda: time.monotonic() + self.skipped,
        )
        self.listeners: list[zmq.Socket] = []

    def listen(self, port: int) -> zmq.Socket:
        listener = zmq.Context.instance().socket(zmq.PULL)
        listener.linger = 0
        listener.bind(f"tcp://{LOCALHOST}:{port}")
        self.listeners.append(listener)
        return listener

    def received(self, listener: zmq.Socket, count: int = 1) -> list[bytes]:
        """The next messages; the connections are polled meanwhile."""
        messages: list[bytes] = []

        def done() -> bool:
            self.connections.flush()
            if listener.poll(0):
                messages.append(listener.recv())
            return len(messages) == count

        wait_until(done, "messages")
        return messages

    def pull(self, name: str, port: int) -> zmq.Socket:
        """Ask a peer for blocks; it listens from now on."""
        listener = self.listen(port)
        self.connections.send(name, b"pull", pulls=True)
        assert self.received(listener) == [b"pull"]
        return listener

    def address(self, name: str) -> str | None:
        self.connections.flush()
        return self.connections._connections[name].address

    def is_lost(self, name: str) -> bool:
        self.connections.flush()
        return self.connections.is_lost(name)

    def stays(self, name: str) -> bool:
        """Whether a peer is still not lost when it could long have been."""
        for _ in range(30):
            time.sleep(0.01)
            self.skipped += module._LOST_S / 4
            if self.is_lost(name):
                return False
        return True

    def close(self) -> None:
        self.connections.close()
        for listener in self.listeners:
            listener.close()


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.close()


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What names mean: an address, ``None``, or an event to wait for first."""
    known: dict[str, Any] = {}

    def resolve(host: str, *arguments: Any) -> Any:
        answer = known[host]
        if isinstance(answer, threading.Event):
            answer.wait(30)
            answer = None
        if answer is None:
            raise socket.gaierror
        return [(0, 0, 0, "", (answer, 0))]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    return known


def endpoint(port: int, host: str = LOCALHOST) -> str:
    return f"tcp://{host}:{port}"


def test_messages_arrive_in_order_also_those_sent_before_the_peer_was_there(
    rig: Rig,
) -> None:
    port = free_port()
    for number in range(5):
        assert rig.connections.send(endpoint(port), b"%d" % number, write=number)
    listener = rig.listen(port)
    assert rig.received(listener, 5) == [b"0", b"1", b"2", b"3", b"4"]
    assert rig.connections.send(endpoint(port), b"5")
    assert rig.received(listener) == [b"5"]
    assert rig.closed == []


def test_a_message_that_has_not_left_is_taken_back_once(rig: Rig) -> None:
    port = free_port()
    for number in range(3):
        rig.connections.send(endpoint(port), b"%d" % number, write=number)
    assert rig.connections.withdraw(endpoint(port), 1)
    assert not rig.connections.withdraw(endpoint(port), 1)
    assert not rig.connections.withdraw(endpoint(free_port()), 0)
    listener = rig.listen(port)
    assert rig.received(listener, 2) == [b"0", b"2"]
    assert not rig.connections.withdraw(endpoint(port), 0), "it has left"


def test_what_waits_for_one_peer_is_bounded(rig: Rig) -> None:
    dead = endpoint(free_port())
    sent = [rig.connections.send(dead, b"x") for _ in range(2 * MAX_HELD)]
    assert sent.count(True) == MAX_HELD
    large = endpoint(free_port())
    sent = [rig.connections.send(large, bytes(1 << 20)) for _ in range(20)]
    assert 0 < sent.count(True) < 6


def test_one_introduction_waits_however_often_it_is_sent(rig: Rig) -> None:
    port = free_port()
    for _ in range(1000):
        assert rig.connections.send(endpoint(port), b"hello", once=True)
    rig.connections.send(endpoint(port), b"last")
    assert rig.received(rig.listen(port), 2) == [b"hello", b"last"]


def test_a_flood_of_endpoints_opens_few_sockets(rig: Rig) -> None:
    before = psutil.Process().num_fds()
    for number in range(1150):
        host = f"127.0.{number // 250}.{number % 250 + 1}"
        # ZMQ closes sockets in its own time, and opens none where too many are left.
        wait_until(
            lambda host=host: rig.connections.send(
                endpoint(9, host), b"hello", once=True
            ),
            "room for a socket",
        )
        rig.connections.flush()
        assert len(rig.connections._connections) <= MAX_CONNECTIONS
    wait_until(
        lambda: psutil.Process().num_fds() - before < 3 * MAX_CONNECTIONS,
        "sockets to close",
    )
    assert len(rig.closed) == 1150 - MAX_CONNECTIONS
    zmq.Context.instance().socket(zmq.PUSH).close()


def test_the_oldest_that_was_never_pulled_from_goes_first(rig: Rig) -> None:
    first, second = endpoint(free_port()), endpoint(free_port())
    rig.connections.send(first, b"pull", write=7, pulls=True)
    rig.connections.send(second, b"hello", once=True)
    others = [endpoint(9, f"127.0.1.{n}") for n in range(1, MAX_CONNECTIONS)]
    for other in others:
        rig.connections.send(other, b"hello", once=True)
        rig.connections.flush()
    assert rig.closed == [(second, [])]
    # Where all were, the oldest; whoever asked for a write over it is told.
    for other in others:
        rig.connections.send(other, b"pull", pulls=True)
    rig.connections.send(second, b"pull", pulls=True)
    assert rig.closed == [(second, []), (first, [7])]


def test_an_idle_connection_is_closed_unless_memory_depends_on_it(rig: Rig) -> None:
    idle, probed = endpoint(free_port()), endpoint(free_port())
    rig.connections.send(idle, b"hello", once=True)
    rig.connections.send(probed, b"probe", pulls=True)
    rig.connections.flush()
    rig.skipped = module._IDLE_S + 1
    rig.connections.flush()
    assert [name for name, _ in rig.closed] == [idle]


def test_a_burst_of_introductions_does_not_stall_the_thread(rig: Rig) -> None:
    burst = [endpoint(9, f"127.0.3.{n}") for n in range(1, 101)]
    sent = [rig.connections.send(each, b"hello", once=True) for each in burst]
    assert sent.count(True) == module._MAX_OPENED
    assert rig.connections.send(burst[-1], b"pull", pulls=True)
    rig.connections.flush()
    assert rig.connections.send(burst[-2], b"hello", once=True)


@pytest.mark.parametrize(
    "bad", ["garbage", "tcp://[::1]:9", "tcp://*:9", "tcp://0.0.0.0:9", ""]
)
def test_what_cannot_be_dialled_opens_nothing(rig: Rig, bad: str) -> None:
    assert not rig.connections.send(bad, b"x")
    assert len(rig.connections._connections) == 0


def test_a_name_that_is_none_fails_what_waited_for_it(
    rig: Rig, names: dict[str, Any]
) -> None:
    names["nobody.example"] = None
    nobody = endpoint(9, "nobody.example")
    assert rig.connections.send(nobody, b"x", write=1)
    wait_until(lambda: rig.connections.flush() or rig.closed, "an answer")
    assert rig.closed == [(nobody, [1])]


def test_a_name_server_that_hangs_holds_up_nobody_else(
    rig: Rig, names: dict[str, Any]
) -> None:
    hangs = threading.Event()
    port = free_port()
    listener = rig.listen(port)
    rig.connections.send(endpoint(port), b"known")
    rig.received(listener)
    started = time.monotonic()
    for number in range(200):
        names[f"n{number}.example"] = hangs
        rig.connections.send(endpoint(9, f"n{number}.example"), b"hello", once=True)
        rig.connections.flush()
    assert rig.connections.send(endpoint(port), b"x", pulls=True)
    assert rig.received(listener) == [b"x"]
    assert time.monotonic() - started < 5
    workers = [t for t in threading.enumerate() if t.name == "kvcr-tier-names"]
    assert len(workers) <= 4
    hangs.set()
    rig.connections.close()
    wait_until(lambda: not any(t.is_alive() for t in workers), "the threads")


def move(rig: Rig, names: dict[str, Any], moving: str, address: str) -> None:
    names["peer.example"] = address
    rig.skipped += module._NAME_LIFETIME_S + 1
    rig.connections.send(moving, b"again", pulls=True)


def test_a_name_that_moves_is_followed(rig: Rig, names: dict[str, Any]) -> None:
    port = free_port()
    names["peer.example"] = "127.0.0.9"
    moving = endpoint(port, "peer.example")
    rig.connections.send(moving, b"hello", pulls=True)
    wait_until(lambda: rig.address(moving) == "127.0.0.9", "a name")
    move(rig, names, moving, LOCALHOST)
    assert rig.received(rig.listen(port), 2) == [b"hello", b"again"]


def test_closing_is_quick_whatever_waits(rig: Rig) -> None:
    for number in range(MAX_CONNECTIONS):
        rig.connections.send(endpoint(9, f"127.0.2.{number + 1}"), b"x" * 1000)
    started = time.monotonic()
    rig.connections.close()
    assert time.monotonic() - started < 2


# --- peers that die --------------------------------------------------------------


def test_a_closed_connection_is_lost_until_it_is_back_or_dropped(rig: Rig) -> None:
    port = free_port()
    peer = endpoint(port)
    listener = rig.pull(peer, port)
    assert not rig.is_lost(peer)
    listener.close()
    wait_until(lambda: rig.is_lost(peer), "the loss")
    listener = rig.listen(port)
    wait_until(lambda: not rig.is_lost(peer), "its return")
    listener.close()
    wait_until(lambda: rig.is_lost(peer), "the next loss")
    rig.connections.drop(peer)
    assert not rig.connections.is_lost(peer)


@pytest.mark.parametrize("pulls", [True, False])
def test_who_was_never_reached_or_asked_for_blocks_is_not_lost(
    rig: Rig, pulls: bool
) -> None:
    port = free_port()
    peer = endpoint(port)
    rig.connections.send(peer, b"x", pulls=pulls)
    if not pulls:
        listener = rig.listen(port)
        rig.received(listener)
        listener.close()
    assert rig.stays(peer)


@pytest.mark.parametrize("died", [False, True])
def test_a_peer_that_moved_is_not_lost_at_its_new_address(
    rig: Rig, names: dict[str, Any], died: bool
) -> None:
    port = free_port()
    names["peer.example"] = LOCALHOST
    moving = endpoint(port, "peer.example")
    listener = rig.pull(moving, port)
    if died:
        listener.close()
        wait_until(lambda: rig.is_lost(moving), "the loss")
    move(rig, names, moving, "127.0.0.9")
    wait_until(lambda: rig.address(moving) == "127.0.0.9", "the new address")
    assert rig.stays(moving)
