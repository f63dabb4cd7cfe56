# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Hints that name ever other endpoints: none takes more than a few sockets.

Whoever may send a request may send a hint. What this opens is bounded, and a live peer
is pulled from afterwards as before.
"""

import os
import socket
import threading
from collections.abc import Callable
from typing import Any

import psutil
import pytest
import zmq

from tests.v1.kv_offload.tiering.kvcr.builders import (
    free_port,
    hint,
    make_hint,
    peer_options,
)
from tests.v1.kv_offload.tiering.kvcr.faults.harness.blocks import make_keys
from tests.v1.kv_offload.tiering.kvcr.faults.harness.engine import Engine
from vllm.v1.kv_offload.tiering.kvcr.peers.connections import (
    MAX_CONNECTIONS,
    MAX_SOCKETS,
)

HINTS = 1150
KEYS = make_keys(4, "theirs")
# A connection is a socket and what wakes its owner.
MOST_FDS = 2 * MAX_SOCKETS + 32

FLOODS: dict[str, Callable[[int, int], str]] = {
    "dead ports": lambda n, port: f"tcp://127.0.0.1:{32_768 + n}",
    "hosts that do not answer": lambda n, port: (
        f"tcp://192.0.2.{n % 250 + 1}:{n // 250 + 1}"
    ),
    "spellings of the live peer": lambda n, port: (
        f"tcp://{_mixed_case('localhost', n)}:{port:05}"
    ),
    "names for a name server that hangs": lambda n, port: f"tcp://n{n}.slow:9",
    "ways to the live peer": lambda n, port: (
        f"tcp://127.2.{n // 250}.{n % 250 + 1}:{port}"
    ),
}


def _mixed_case(name: str, number: int) -> str:
    return "".join(
        letter.upper() if number >> index & 1 else letter
        for index, letter in enumerate(name)
    )


@pytest.fixture
def pair(peers: Any, engines: Any) -> tuple[Engine, Any]:
    # The live peer listens on every address of this machine.
    options = {"operation_timeout_ms": 20_000, "control_host": "0.0.0.0"}
    peer = peers(options, rows=4, hold=KEYS)
    return engines(peer_options(operation_timeout_ms=20_000), rows=16), peer


def used(engine: Engine) -> tuple[int, int]:
    """Descriptors of this process; endpoints that KVCR itself keeps something of."""
    backend = engine.tier._kvcr._core._remote_fw_dram
    remembered = (
        backend._metadata_acked_sources
        | set(backend._metadata_retry_after)
        | set(backend._dangling_ops.sources)
    )
    return psutil.Process().num_fds(), len(remembered)


def test_floods_take_few_sockets_and_a_live_peer_still_serves(
    pair: tuple[Engine, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, peer = pair
    hangs = threading.Event()
    resolve = socket.getaddrinfo

    def slow(host: Any, *arguments: Any) -> Any:
        if str(host).endswith(".slow"):
            # Longer than a pull may take.
            hangs.wait(60)
            raise socket.gaierror
        return resolve(host, *arguments)

    monkeypatch.setattr(socket, "getaddrinfo", slow)
    assert engine.pull(peer.port, KEYS, range(4), "before").arrived == KEYS
    fds_before, _ = used(engine)
    for name, endpoint in FLOODS.items():
        seen = []
        for number in range(HINTS):
            value = hint(KEYS, endpoint(number, peer.port))
            engine.end(engine.begin(f"{name} {number}", value))
            if number % 20 == 0:
                engine.step()
                seen.append(used(engine))
        engine.run_for(0.3)
        seen.append(used(engine))
        assert max(fds for fds, _ in seen) - fds_before < MOST_FDS, name
        assert max(kept for _, kept in seen) <= MAX_CONNECTIONS + 1, name

        zmq.Context.instance().socket(zmq.PUSH).close()
        os.close(os.dup(0))
        after = engine.pull(peer.port, KEYS, range(4), f"after {name}")
        assert after.arrived == KEYS, name
        assert engine.probe.state == "healthy", name
    hangs.set()


def test_requests_under_way_are_hinted_at_few_peers(pair: tuple[Engine, Any]) -> None:
    engine, peer = pair
    dead = [hint(KEYS, f"tcp://127.1.0.{number + 1}:9") for number in range(100)]
    contexts = [engine.begin(f"r{n}", value) for n, value in enumerate(dead)]
    engine.begin("v6", hint(KEYS, "tcp://[::1]:9"))
    engine.begin("decimal", hint(KEYS, "tcp://2130706433:9"))
    ignored = engine.probe.ignored_hints()
    assert ignored == {"too_many_peers": 36, "ipv6": 1, "bad_endpoint": 1}

    # When they are over there is room for others, also for those with a name.
    for context in contexts:
        engine.end(context)
    engine.tier._staging._liveness.heard(f"tcp://localhost:{peer.port}")
    named = engine.begin("named", hint(KEYS, f"tcp://LocalHost.:{peer.port}"))
    job = engine.load(KEYS, range(4), named)
    engine.finish(job)
    assert job.arrived == KEYS
    engine.end(named)


def test_loads_from_dead_ports_leave_the_pool_free(pair: tuple[Engine, Any]) -> None:
    engine, peer = pair
    engine.probe.set_operation_timeout(0.3)
    engine.probe.set_pull_timeout(0.3)
    room = engine.probe.landing_room
    for wave in range(2):
        jobs = []
        for number in range(8):
            keys = make_keys(1, f"{wave}/{number}")
            value = make_hint(free_port(), keys)
            context = engine.begin(f"{wave}/{number}", value)
            engine.lookup_all(keys, context)
            jobs.append(engine.load(keys, [4 + number], context))
        engine.finish(*jobs)
        assert not any(job.arrived for job in jobs)
    engine.run_until(lambda: not engine.probe.unstopped, 10, "the operations")
    assert engine.probe.landing_room == room
    engine.probe.set_operation_timeout(20.0)
    engine.probe.set_pull_timeout(20.0)
    assert engine.pull(peer.port, KEYS, range(4), "after").arrived == KEYS
