# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Resolves host names on threads of its own.

ZeroMQ would resolve a name on the thread that serves all of its sockets, so a name
server that does not answer would hold up every peer. Here it holds up only the peers
whose names are not resolved yet.
"""

import queue
import socket
import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import suppress

_THREADS = 4
_MOST_WAITING = 64
_MOST_KNOWN = 1024


class Resolver:
    """Resolves names for one thread, which never has to wait."""

    def __init__(self) -> None:
        self._questions: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[tuple[str, str | None]] = queue.SimpleQueue()
        self._asked: set[str] = set()
        self._threads = 0
        self.known: OrderedDict[str, str] = OrderedDict()
        """The addresses that hosts had when they were last resolved."""

    def ask(self, host: str) -> bool:
        """Have a name resolved; false if too many names wait already."""
        if host in self._asked:
            return True
        if len(self._asked) >= _MOST_WAITING:
            return False
        self._asked.add(host)
        self._questions.put(host)
        if self._threads < _THREADS:
            self._threads += 1
            # A daemon thread, because a lookup that hangs cannot be ended.
            threading.Thread(
                target=self._work, name="kvcr-tier-names", daemon=True
            ).start()
        return True

    def take(self) -> Iterator[tuple[str, str | None]]:
        """Return new answers: names with their addresses, or with ``None``."""
        while self._asked and not self._answers.empty():
            host, address = self._answers.get()
            self._asked.discard(host)
            if address is not None:
                self.known[host] = address
                self.known.move_to_end(host)
                if len(self.known) > _MOST_KNOWN:
                    self.known.popitem(last=False)
            yield host, address

    def close(self) -> None:
        """Make the threads end as soon as they can."""
        for _ in range(self._threads):
            self._questions.put("")

    def _work(self) -> None:
        while host := self._questions.get():
            address = None
            with suppress(OSError, UnicodeError):
                found = socket.getaddrinfo(
                    host, None, socket.AF_INET, socket.SOCK_STREAM
                )
                address = str(found[0][4][0])
            self._answers.put((host, address))
