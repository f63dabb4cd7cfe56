# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What the doctor says of ports and of the host that peers dial, with real sockets."""

import contextlib
import os
import socket

import pytest

from tests.vllm_kvcr.doctor.asking import PEERS, ask, failures, setting, the_only
from vllm_kvcr.doctor.finding import Status
from vllm_kvcr.ports import free_ports

LOOPBACK = {"control_host": "127.0.0.1", "control_advertise_host": "127.0.0.1"}


@pytest.fixture
def taken():
    """A port that this process listens on."""
    with socket.create_server(("127.0.0.1", free_ports(1)[0])) as listener:
        yield listener.getsockname()[1]


def peers(port: int, **more: object) -> dict[str, object]:
    return PEERS | LOOPBACK | {"control_ports": [port]} | more


def test_without_peers_there_is_nothing_to_check():
    assert the_only("network", setting({"secondary_g2_slots": 1})).status is Status.OK


def test_a_free_port_is_good_and_given_back():
    (port,) = free_ports(1)
    for _ in range(2):
        free, host = ask("network", setting(peers(port)))
        assert free.status is Status.OK
        assert host.data["addresses"] == ["127.0.0.1"]
    socket.create_server(("127.0.0.1", port)).close()


def test_a_port_in_use_names_who_has_it(taken):
    (text,) = failures("network", setting(peers(taken)))
    assert f"port {taken}" in text
    assert f"process {os.getpid()}" in text


def test_an_address_of_another_machine_cannot_be_listened_on():
    (port,) = free_ports(1)
    away = peers(port, control_host="192.0.2.1")
    assert any("cannot listen on" in t for t in failures("network", setting(away)))


def test_a_loopback_that_is_advertised_is_a_warning():
    (port,) = free_ports(1)
    assert ask("network", setting(peers(port)))[-1].status is Status.WARN


def test_a_host_that_cannot_be_resolved_fails():
    (port,) = free_ports(1)
    nowhere = peers(port, control_advertise_host="no-such-host.invalid")
    (text,) = failures("network", setting(nowhere))
    assert "no-such-host.invalid" in text
    assert "resolved" in text


def test_a_host_at_which_nothing_of_this_engine_listens_fails():
    (port,) = free_ports(1)
    elsewhere = peers(port, control_advertise_host="127.0.0.2")
    (text,) = failures("network", setting(elsewhere))
    assert "cannot be dialled" in text


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
        told = ask(
            "network",
            setting(
                {"secondary_g2_slots": 1},
                events={"enable_kv_cache_events": True} | given,
            ),
        )[-1]
    assert told.status is status
