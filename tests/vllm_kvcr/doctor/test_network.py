# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What the doctor says of ports and of the host that peers dial, with real sockets."""

import contextlib
import os
import socket

import pytest

from tests.vllm_kvcr.doctor.asking import PEERS, ask, failures, setting
from vllm_kvcr.doctor.finding import Status
from vllm_kvcr.ports import free_ports

LOOPBACK = {"control_host": "127.0.0.1", "control_advertise_host": "127.0.0.1"}


def peers(port: int, **more: object) -> dict[str, object]:
    return PEERS | LOOPBACK | {"control_ports": [port]} | more


def test_a_free_port_is_good_and_given_back():
    (port,) = free_ports(1)
    for _ in range(2):
        free, host = ask("network", setting(peers(port)))
        assert free.status is Status.OK
        # A loopback is advertised.
        assert host.status is Status.WARN
        assert host.data["addresses"] == ["127.0.0.1"]
    socket.create_server(("127.0.0.1", port)).close()


def test_a_port_in_use_names_who_has_it():
    (port,) = free_ports(1)
    with socket.create_server(("127.0.0.1", port)):
        (text,) = failures("network", setting(peers(port)))
    assert f"port {port}" in text
    assert f"process {os.getpid()}" in text


@pytest.mark.parametrize(
    ("away", "part"),
    [
        ({"control_host": "192.0.2.1"}, "cannot listen on"),
        (
            {"control_advertise_host": "no-such-host.invalid"},
            "no-such-host.invalid (control_advertise_host) cannot be resolved",
        ),
        # Nothing of this engine listens there.
        ({"control_advertise_host": "127.0.0.2"}, "cannot be dialled"),
    ],
)
def test_a_host_at_which_peers_would_not_find_this_engine_fails(away, part):
    (port,) = free_ports(1)
    found = failures("network", setting(peers(port, **away)))
    assert any(part in text for text in found), found


def test_a_host_that_is_not_loopback_and_answers_is_good(monkeypatch):
    (port,) = free_ports(1)
    real = socket.getaddrinfo

    def resolve(host, *arguments, **keywords):
        if host != "worker-0":
            return real(host, *arguments, **keywords)
        [(family, kind, protocol, name, _)] = real("127.0.0.1", *arguments, **keywords)
        return [(family, kind, protocol, name, ("10.0.0.5", port))]

    dialled = []

    def connect(self, address):
        dialled.append(address)

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    monkeypatch.setattr(socket.socket, "connect", connect)
    told = ask("network", setting(peers(port, control_advertise_host="worker-0")))[-1]
    assert told.status is Status.OK
    assert dialled == [("10.0.0.5", port)]


@pytest.mark.parametrize(
    ("events", "status"),
    [
        ({"endpoint": "tcp://*:{free}"}, Status.OK),
        ({"endpoint": "tcp://*:{taken}"}, Status.FAIL),
        ({"endpoint": "tcp://127.0.0.1:{free}"}, Status.WARN),
        ({"endpoint": "ipc:///tmp/events"}, Status.OK),
        ({"publisher": "null"}, Status.WARN),
    ],
)
def test_the_events_endpoint_must_be_one_that_vllm_listens_on(events, status):
    (free,) = free_ports(1)
    with contextlib.closing(socket.create_server(("0.0.0.0", free_ports(1)[0]))) as one:
        taken = one.getsockname()[1]
        given = {k: v.format(free=free, taken=taken) for k, v in events.items()}
        given["enable_kv_cache_events"] = True
        about = setting({"secondary_g2_slots": 1}, events=given)
        assert ask("network", about)[-1].status is status
