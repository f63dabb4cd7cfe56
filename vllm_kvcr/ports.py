# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Free ports on this machine."""

import random
import socket
from contextlib import ExitStack, suppress

LOCALHOST = "127.0.0.1"


def free_ports(count: int) -> list[int]:
    """Free ports below the range from which the system, and so NIXL, picks ports.

    Raises:
        OSError: there are not that many.
    """
    found: list[int] = []
    with ExitStack() as held:
        for port in random.SystemRandom().sample(range(20_000, 32_000), 200):
            if len(found) == count:
                return found
            with suppress(OSError):
                held.enter_context(socket.create_server((LOCALHOST, port)))
                found.append(port)
    raise OSError(f"there are no {count} free ports on {LOCALHOST}")


def consecutive_free_ports(count: int) -> list[int]:
    """As ``free_ports``, each one above the other."""
    for _ in range(100):
        (first,) = free_ports(1)
        ports = list(range(first, first + count))
        with suppress(OSError), ExitStack() as held:
            for port in ports:
                held.enter_context(socket.create_server((LOCALHOST, port)))
            return ports
    raise OSError(f"there are no {count} free ports in a row on {LOCALHOST}")
