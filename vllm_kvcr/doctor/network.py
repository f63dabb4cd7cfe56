# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Checks that ports are free, and that the host that peers dial is right."""

import contextlib
import errno
import ipaddress
import socket
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import psutil

from vllm_kvcr.doctor.finding import Finding, fail, ok, warn
from vllm_kvcr.doctor.setting import Setting

if TYPE_CHECKING:
    from vllm.v1.kv_offload.tiering.kvcr.config import TierConfig

_DIAL_S = 3.0
_BOUND = ("*", "::", "ipc://", "inproc://")


def check(setting: Setting) -> Iterator[Finding]:
    for _, config in setting.valid:
        if config.control_ports is None:
            yield ok("no control_ports: nothing listens for peers")
            continue
        yield from _check_peers(config)
    if setting.events_on:
        yield from _check_events(setting)
    if not setting.valid and not setting.events_on:
        yield warn("no port or host to check without a valid configuration")


def _check_peers(config: "TierConfig") -> Iterator[Finding]:
    from vllm.v1.kv_offload.tiering.kvcr.backend.setup import advertise_host

    listeners: list[socket.socket] = []
    with contextlib.ExitStack() as stack:
        for port in config.control_ports or ():
            try:
                listener = listen(config.control_host, port)
            except OSError as error:
                yield _refused(config, port, error)
                continue
            listeners.append(stack.enter_context(listener))
            yield ok(f"port {port} on {config.control_host} is free", port=port)
        ports = config.control_ports or ()
        yield from _check_host(
            advertise_host(config),
            config.control_advertise_host is None,
            listeners[0].getsockname()[1] if listeners else ports[0],
        )


def _refused(config: "TierConfig", port: int, error: OSError) -> Finding:
    where = f"port {port} on {config.control_host}"
    if error.errno != errno.EADDRINUSE:
        return fail(
            f"this engine cannot listen on {where}: {error.strerror or error}",
            "set control_host to an address of this machine, or 0.0.0.0",
            port=port,
        )
    holder = listener_of(port)
    if config.kvcr_service_socket_path is not None and _is_service(holder, config):
        return ok(f"{where} is held by the KVCR service, as it should be", port=port)
    return fail(
        f"{where} is in use by {_name(holder)}",
        "stop that process, or set control_ports to free ports",
        port=port,
        pid=holder,
    )


def listen(host: str, port: int) -> socket.socket:
    """Make a socket that listens there.

    Raises:
        OSError: the host is unknown, or the port is taken.
    """
    family, _, _, _, address = socket.getaddrinfo(
        host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    return socket.create_server(address[:2], family=family)


def listener_of(port: int) -> int | None:
    """The process that listens on a port, if this user may see it."""
    with contextlib.suppress(psutil.Error, OSError):
        for connection in psutil.net_connections("tcp"):
            if (
                connection.status == psutil.CONN_LISTEN
                and connection.laddr
                and connection.laddr.port == port
            ):
                return connection.pid
    return None


def _is_service(pid: int | None, config: "TierConfig") -> bool:
    from vllm_kvcr.doctor.guard import service_pid

    return pid is not None and pid == service_pid(config.kvcr_service_socket_path or "")


def _name(pid: int | None) -> str:
    if pid is None:
        return "a process that this user may not see"
    try:
        return f"{psutil.Process(pid).name()} (process {pid})"
    except psutil.Error:
        return f"process {pid}"


def _check_host(host: str, is_default: bool, port: int) -> Iterator[Finding]:
    origin = "this machine's name" if is_default else "control_advertise_host"
    remedy = "set control_advertise_host to an address by which peers reach this host"
    try:
        found = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)
    except OSError as error:
        reason = error.strerror or error
        yield fail(f"{host} ({origin}) cannot be resolved: {reason}", remedy, host=host)
        return
    addresses = list(dict.fromkeys(str(entry[4][0]) for entry in found))
    known: dict[str, Any] = {"host": host, "addresses": addresses}
    refusal: OSError | None = None
    for family, kind, protocol, _, address in found:
        with socket.socket(family, kind, protocol) as dialling:
            dialling.settimeout(_DIAL_S)
            try:
                dialling.connect(address)
            except OSError as error:
                refusal = refusal or error
                continue
        refusal = None
        break
    if refusal is not None:
        yield fail(
            f"{host} ({origin}, {', '.join(addresses)}) cannot be dialled on port "
            f"{port}: {refusal.strerror or refusal}",
            remedy + "; control_host must include that address",
            **known,
        )
    elif all(ipaddress.ip_address(a.partition("%")[0]).is_loopback for a in addresses):
        yield warn(
            f"{host} ({origin}) is {', '.join(addresses)}: only this host can dial it",
            remedy,
            **known,
        )
    else:
        yield ok(
            f"{host} ({origin}, {', '.join(addresses)}) can be dialled from here",
            **known,
        )


def _check_events(setting: Setting) -> Iterator[Finding]:
    if setting.events.get("publisher", "zmq") != "zmq":
        yield warn(
            f"the events' publisher is {setting.events['publisher']!r}, so routers "
            "learn of no block",
            'set "publisher": "zmq" in --kv-events-config',
        )
        return
    endpoint = str(setting.events.get("endpoint", "tcp://*:5557"))
    if not any(mark in endpoint for mark in _BOUND):
        yield warn(
            f"vLLM connects to the events' endpoint {endpoint} instead of listening on "
            "it; unless a subscriber binds there, routers learn of no block",
            'to listen, set "endpoint": "tcp://*:5557" in --kv-events-config',
            endpoint=endpoint,
        )
        return
    port = endpoint.rpartition(":")[2]
    if not endpoint.startswith("tcp://") or not port.isdigit() or port == "0":
        yield ok(f"events are published on {endpoint}", endpoint=endpoint)
        return
    try:
        listen("0.0.0.0", int(port)).close()
    except OSError:
        holder = listener_of(int(port))
        yield fail(
            f"port {port} of the events' endpoint is in use by {_name(holder)}",
            "stop that process, or set another endpoint in --kv-events-config",
            endpoint=endpoint,
            pid=holder,
        )
    else:
        yield ok(f"port {port} for events is free", endpoint=endpoint)
