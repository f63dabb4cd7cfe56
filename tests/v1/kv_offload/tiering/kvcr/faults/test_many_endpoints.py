# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Hints that name ever other endpoints: none takes more than a few sockets.

Whoever may send a request may send a hint. What this opens is bounded, and a live peer
is pulled from afterwards as before.
"""

import os
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import psutil
import pytest
import zmq

from tests.v1.kv_offload.tiering.kvcr.builders import (
    endpoint_of,
    free_port,
    make_hint,
    peer_options,
    router_hash,
)
from tests.v1.kv_offload.tiering.kvcr.faults.harness.blocks import make_keys
from tests.v1.kv_offload.tiering.kvcr.faults.harness.engine import Engine
from vllm.v1.kv_offload.base import LookupResult
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
    "dead hosts": lambda n, port: f"tcp://127.1.{n // 250}.{n % 250 + 1}:9",
    "hosts that do not answer": lambda n, port: (
        f"tcp://192.0.2.{n % 250 + 1}:{n // 250 + 1}"
    ),
    "names that are none": lambda n, port: f"tcp://n{n}.invalid:24990",
    "ways to the live peer": lambda n, port: (
        f"tcp://127.2.{n // 250}.{n % 250 + 1}:{port}"
    ),
    "spellings of the live peer": lambda n, port: (
        f"tcp://{_mixed_case('localhost', n)}:{port:05}"
    ),
    "decimal addresses": lambda n, port: f"tcp://{2_130_706_433 + n}:{port}",
}


def _mixed_case(name: str, number: int) -> str:
    return "".join(
        letter.upper() if number >> index & 1 else letter
        for index, letter in enumerate(name)
    )


def hint_at(endpoint: str) -> Any:
    value = make_hint(9, KEYS)
    value["actions"][0]["payload"]["source_control_endpoint"] = endpoint
    return value


@pytest.fixture
def pair(peers: Any, engines: Any) -> tuple[Engine, Any]:
    # The live peer listens on every address of this machine.
    peer = peers({"operation_timeout_ms": 20_000, "control_host": "0.0.0.0"}, rows=4)
    peer.call("hold", KEYS)
    options = peer_options(free_port()) | {"operation_timeout_ms": 20_000}
    engine: Engine = engines(options, rows=16)
    return engine, peer


def pull(engine: Engine, peer: Any, name: str) -> None:
    context = engine.begin(name, make_hint(peer.port, KEYS))
    assert set(engine.lookup_all(KEYS, context)) == {LookupResult.HIT}
    job = engine.load(KEYS, range(4), context)
    engine.finish(job, timeout_s=20)
    assert job.arrived == KEYS
    engine.end(context)


def remembered(engine: Engine) -> int:
    """Endpoints that KVCR itself keeps something of."""
    backend = engine.tier._kvcr._core._remote_fw_dram
    return len(
        backend._metadata_acked_sources
        | set(backend._metadata_retry_after)
        | set(backend._dangling_ops.sources)
    )


@pytest.mark.parametrize("flood", FLOODS.values(), ids=FLOODS.keys())
@pytest.mark.parametrize("early", [True, False], ids=["running", "finished"])
def test_a_flood_takes_few_sockets_and_a_live_peer_still_serves(
    pair: tuple[Engine, Any], flood: Callable[[int, int], str], early: bool
) -> None:
    engine, peer = pair
    pull(engine, peer, "before")
    fds = psutil.Process().num_fds()
    most_fds = most_remembered = 0
    contexts = []
    for number in range(HINTS):
        context = engine.begin(f"r{number}", hint_at(flood(number, peer.port)))
        if early:
            contexts.append(context)
        else:
            engine.end(context)
        if number % 20 == 0:
            engine.step()
            most_fds = max(most_fds, psutil.Process().num_fds() - fds)
            most_remembered = max(most_remembered, remembered(engine))
    for context in contexts[1:]:
        engine.end(context)
    engine.run_for(0.5)
    most_fds = max(most_fds, psutil.Process().num_fds() - fds)
    most_remembered = max(most_remembered, remembered(engine))
    assert most_fds < MOST_FDS
    assert most_remembered <= MAX_CONNECTIONS + 1

    zmq.Context.instance().socket(zmq.PUSH).close()
    os.close(os.dup(0))
    pull(engine, peer, "after")
    assert engine.probe.state == "healthy"


def test_what_cannot_be_hinted_at_is_counted(pair: tuple[Engine, Any]) -> None:
    engine, peer = pair
    for number in range(100):
        engine.begin(f"r{number}", hint_at(FLOODS["dead hosts"](number, peer.port)))
    engine.begin("v6", hint_at("tcp://[::1]:9"))
    engine.begin("decimal", hint_at("tcp://2130706433:9"))
    ignored = engine.probe.ignored_hints()
    assert ignored == {"too_many_peers": 36, "ipv6": 1, "bad_endpoint": 1}


def test_loads_from_dead_ports_leave_the_landing_pool_free(
    pair: tuple[Engine, Any],
) -> None:
    engine, peer = pair
    engine.probe.set_operation_timeout(0.3)
    engine.probe.set_pull_timeout(0.3)
    room = engine.probe.landing_room
    for wave in range(3):
        jobs = []
        for number in range(8):
            keys = make_keys(1, f"{wave}/{number}")
            value = make_hint(free_port(), keys)
            context = engine.begin(f"{wave}/{number}", value)
            engine.lookup_all(keys, context)
            jobs.append(engine.load(keys, [4 + number], context))
        engine.finish(*jobs)
        assert not any(job.arrived for job in jobs)
    engine.run_for(1.0)
    assert engine.probe.landing_room == room
    assert not engine.probe.unstopped
    engine.probe.set_operation_timeout(20.0)
    engine.probe.set_pull_timeout(20.0)
    pull(engine, peer, "after")


def test_a_name_server_that_hangs_holds_up_no_pull(
    pair: tuple[Engine, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, peer = pair
    hangs = threading.Event()
    resolve = socket.getaddrinfo

    def slow(host: Any, *arguments: Any) -> Any:
        if str(host).endswith(".slow"):
            hangs.wait(60)
            raise socket.gaierror
        return resolve(host, *arguments)

    monkeypatch.setattr(socket, "getaddrinfo", slow)
    for number in range(300):
        engine.end(engine.begin(f"r{number}", hint_at(f"tcp://n{number}.slow:9")))
    started = time.monotonic()
    pull(engine, peer, "meanwhile")
    assert time.monotonic() - started < 5
    hangs.set()


def test_a_peer_outside_of_allowed_peers_is_never_dialled(engines: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as outside:
        outside.setblocking(False)
        options = peer_options(free_port()) | {"allowed_peers": ["10.0.0.0/8"]}
        engine: Engine = engines(options, rows=4)
        value = make_hint(outside.getsockname()[1], KEYS)
        context = engine.begin("r", value)
        assert set(engine.lookup_all(KEYS, context)) == {LookupResult.MISS}
        engine.run_for(0.5)
        with pytest.raises(BlockingIOError):
            outside.accept()
        assert engine.probe.ignored_hints() == {"not_allowed": 1}
        engine.end(context)


def test_a_pull_by_name(pair: tuple[Engine, Any]) -> None:
    engine, peer = pair
    value = hint_at(endpoint_of(peer.port).replace("127.0.0.1", "LocalHost."))
    engine.tier._staging._liveness.heard(
        endpoint_of(peer.port).replace("127.0.0.1", "localhost")
    )
    context = engine.begin("r", value)
    payload = value["actions"][0]["payload"]
    assert payload["block_hashes"] == [router_hash(key) for key in KEYS]
    job = engine.load(KEYS, range(4), context)
    engine.finish(job, timeout_s=20)
    assert job.arrived == KEYS
    engine.end(context)
