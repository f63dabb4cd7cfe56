# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The connections that this engine opens to peers, in bounded number.

Hints and peers choose the endpoints, so this bounds the number of connections, the
messages that wait in them, and the time spent on host names. A message waits until its
peer is connected. If the peer never is, the caller learns that the message never left.
The sockets have their own ZeroMQ context, so that they cannot use up the sockets of the
process's default one.

Everything but ``is_lost`` runs on KVCR's progress thread.
"""

import time
from collections import OrderedDict, deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

import zmq

from vllm.v1.kv_offload.tiering.kvcr.peers.endpoints import (
    Endpoint,
    Unusable,
    parse_endpoint,
)
from vllm.v1.kv_offload.tiering.kvcr.peers.resolver import Resolver

MAX_CONNECTIONS = 128
MAX_SOCKETS = MAX_CONNECTIONS + 64
"""Must exceed the connections: ZeroMQ closes sockets on a thread of its own, which may
lag a few behind."""
MAX_HELD = 256
"""Messages that may wait for one peer. Must exceed its pulls in progress."""
_MAX_HELD_BYTES = 4 << 20
_MAX_OPENED = 8
"""Connections that introductions may open between two polls. Each takes up to a
millisecond, and KVCR declares this thread stalled after one operation timeout."""
_IDLE_S = 300.0
"""After this time an unused connection is closed. ZeroMQ redials while it is open."""
_CHECK_S = 0.05
_LOST_S = 0.2
"""A connection that is gone for this long is lost. Must exceed the first pause before
ZeroMQ redials, so that a peer that only closed it is not taken for a dead one."""
_FIRST_TRY_S, _LAST_TRY_S = 0.001, 0.1
_NAME_LIFETIME_S = 30.0


class _Held(NamedTuple):
    message: bytes
    write: int | None
    once: bool


@dataclass(slots=True)
class _Connection:
    endpoint: Endpoint
    used_at: float
    pulls: bool = False  # blocks were requested over it
    reached: bool = False  # a message was sent over it
    gone_since: float | None = None
    lost: bool = False  # it was closed, for long enough, after a message was sent
    socket: zmq.Socket | None = None
    address: str | None = None
    asked_at: float = float("-inf")
    held: deque[_Held] = field(default_factory=deque)
    held_bytes: int = 0
    held_since: float = 0.0
    try_at: float = 0.0

    def close_socket(self) -> None:
        if self.socket is not None:
            self.socket.close()
            self.socket = None


class Connections:
    """Sockets by endpoint, the least recently used first.

    Args:
        on_closed: Called with the endpoint of each connection that is closed, and with
            the writes whose requests never left.
    """

    def __init__(
        self,
        on_closed: Callable[[str, list[int]], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._on_closed = on_closed
        self._resolver = Resolver()
        self._clock = clock
        self._context = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, MAX_SOCKETS)
        self._connections: OrderedDict[str, _Connection] = OrderedDict()
        self._waiting: dict[str, _Connection] = {}
        self._check_at = 0.0
        self._opened = 0

    def __contains__(self, endpoint: str) -> bool:
        return endpoint in self._connections

    def is_lost(self, endpoint: str) -> bool:
        """Whether a peer that was pulled from has closed the connection, or died."""
        connection = self._connections.get(endpoint)
        return connection is not None and connection.lost

    def send(
        self,
        endpoint: str,
        message: bytes,
        *,
        write: int | None = None,
        pulls: bool = False,
        once: bool = False,
    ) -> bool:
        """Send a message, now or once the peer is connected.

        Args:
            write: The operation for which the message requests a write, if it does.
            pulls: Whether the message is about blocks. Connections for blocks are kept
                longer than others.
            once: Whether one such message waiting is as good as several.
        """
        connection = self._connections.get(endpoint) or self._open(endpoint, once)
        if connection is None:
            return False
        now = self._clock()
        connection.used_at = now
        connection.pulls = connection.pulls or pulls
        self._connections.move_to_end(endpoint)
        if connection.endpoint.address is None:
            self._keep_resolved(connection, now)
        if not connection.held and self._sent(connection, message):
            return True
        if once and any(held.once for held in connection.held):
            return True
        size = connection.held_bytes + len(message)
        too_large = connection.held and size > _MAX_HELD_BYTES
        if too_large or len(connection.held) >= MAX_HELD:
            return False
        connection.held.append(_Held(message, write, once))
        connection.held_bytes = size
        if endpoint not in self._waiting:
            self._waiting[endpoint] = connection
            connection.held_since, connection.try_at = now, now + _FIRST_TRY_S
        return True

    def withdraw(self, endpoint: str, write: int) -> bool:
        """Take back the message that requests a write, if it has not left yet."""
        connection = self._connections.get(endpoint)
        if connection is None:
            return False
        for held in connection.held:
            if held.write == write:
                connection.held.remove(held)
                connection.held_bytes -= len(held.message)
                return True
        return False

    def flush(self) -> None:
        """Send waiting messages and close unused connections. Called at each poll."""
        self._opened = 0
        for host, address in self._resolver.take():
            self._resolved(host, address)
        if not self._connections:
            return
        now = self._clock()
        if now >= self._check_at:
            self._check_at = now + _CHECK_S
            for endpoint, connection in list(self._connections.items()):
                # A message that waits for a peer with pulls may free memory.
                needed = connection.pulls and connection.held
                if now - connection.used_at > _IDLE_S and not needed:
                    self.drop(endpoint)
                elif connection.pulls and connection.reached:
                    _look_for_loss(connection, now)
        for endpoint, connection in list(self._waiting.items()):
            if now < connection.try_at:
                continue
            if connection.socket is None:
                self._keep_resolved(connection, now)
            held = connection.held
            while held and self._sent(connection, held[0].message):
                connection.held_bytes -= len(held.popleft().message)
            if held:
                waited = now - connection.held_since
                pause = min(_LAST_TRY_S, max(_FIRST_TRY_S, waited / 4))
                connection.try_at = now + pause
            else:
                del self._waiting[endpoint]

    def drop(self, endpoint: str) -> None:
        connection = self._connections.pop(endpoint)
        self._waiting.pop(endpoint, None)
        connection.close_socket()
        writes = [held.write for held in connection.held if held.write is not None]
        self._on_closed(endpoint, writes)

    def close(self) -> None:
        self._connections.clear()
        self._waiting.clear()
        self._resolver.close()
        self._context.destroy(linger=0)

    def _open(self, endpoint: str, once: bool) -> _Connection | None:
        if once and self._opened >= _MAX_OPENED:
            return None
        try:
            parsed = parse_endpoint(endpoint)
        except Unusable:
            return None
        while len(self._connections) >= MAX_CONNECTIONS:
            self.drop(self._least_useful())
        self._opened += 1
        connection = _Connection(parsed, self._clock())
        host = parsed.host
        address = host if parsed.address else self._resolver.known.get(host)
        if address is not None:
            self._connect(connection, address)
            if connection.socket is None:
                return None
        self._connections[endpoint] = connection
        return connection

    def _least_useful(self) -> str:
        """The oldest connection without pulls, or else the oldest."""
        unpulled = (e for e, each in self._connections.items() if not each.pulls)
        return next(unpulled, next(iter(self._connections)))

    def _connect(self, connection: _Connection, address: str) -> None:
        """Connect anew; without success there is no socket afterwards."""
        connection.close_socket()
        try:
            socket = connection.socket = self._context.socket(zmq.PUSH)
            socket.setsockopt(zmq.LINGER, 0)
            # Otherwise a message for a peer that never existed would count as sent.
            socket.setsockopt(zmq.IMMEDIATE, 1)
            socket.setsockopt(zmq.SNDHWM, MAX_HELD)
            # Milliseconds.
            socket.setsockopt(zmq.CONNECT_TIMEOUT, 5000)
            socket.setsockopt(zmq.RECONNECT_IVL, 100)
            socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
            socket.connect(f"tcp://{address}:{connection.endpoint.port}")
        except zmq.ZMQError:
            connection.close_socket()
            return
        connection.address = address
        connection.reached = connection.lost = False
        connection.gone_since = None

    def _sent(self, connection: _Connection, message: bytes) -> bool:
        socket = connection.socket
        if socket is not None and _is_writable(socket):
            with suppress(zmq.ZMQError):
                socket.send(message, flags=zmq.NOBLOCK)
                connection.reached = True
                return True
        return False

    def _keep_resolved(self, connection: _Connection, now: float) -> None:
        """Check now and then whether a name still has the address connected to."""
        due = now - connection.asked_at > _NAME_LIFETIME_S
        if due and self._resolver.ask(connection.endpoint.host):
            connection.asked_at = now

    def _resolved(self, host: str, address: str | None) -> None:
        for endpoint, connection in list(self._connections.items()):
            if connection.endpoint.host != host:
                continue
            if address is not None and address != connection.address:
                self._connect(connection, address)
            if connection.socket is None:
                self.drop(endpoint)


def _look_for_loss(connection: _Connection, now: float) -> None:
    if connection.socket is not None and _is_writable(connection.socket):
        connection.gone_since = None
        connection.lost = False
    elif connection.gone_since is None:
        connection.gone_since = now
    elif now - connection.gone_since >= _LOST_S:
        connection.lost = True


def _is_writable(socket: zmq.Socket) -> bool:
    return bool(int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLOUT)
