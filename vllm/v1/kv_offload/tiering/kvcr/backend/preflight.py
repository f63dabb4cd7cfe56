# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Checks files, ports, NIXL's plugins and the environment before KVCR starts.

Failure model: a configuration that cannot work is refused with an ``OptionError``, and
one that may not work as intended gets a warning. A check that cannot be made is
skipped.
"""

import errno
import ipaddress
import os
import resource
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
from kvcr import KVCR

from vllm.logger import init_logger
from vllm.v1.kv_offload.tiering.kvcr.backend import files, setup
from vllm.v1.kv_offload.tiering.kvcr.compat.nixl import Nixl
from vllm.v1.kv_offload.tiering.kvcr.config import OptionError, TierConfig

logger = init_logger(__name__)

_RDMA = Path("/sys/class/infiniband")
# Measured over TCP: UCX takes 2 s to open 20 interfaces and, for 60, more than the 30 s
# that KVCR waits. With more than about 120 it fails with NIXL_ERR_BACKEND.
MANY_INTERFACES = 24


def check(
    kvcr: Any,
    config: TierConfig,
    options: Mapping[str, Any],
    primary: setup.Primary,
    port: int | None,
    publishes: bool,
) -> tuple[TierConfig, list[Path]]:
    """Refuse what cannot work, and warn of what may not, before anything native starts.

    Args:
        kvcr: The class that will be started. Nothing is checked for a stand-in.
        options: As the operator wrote them, which is how routers read them.
        publishes: Whether vLLM's KV events are on.

    Returns:
        The options, completed by choices that were made here, and the files that were
        made for this start, for ``files.remove`` if it fails.
    """
    if kvcr is not KVCR:
        return config, []
    for warning in warnings(config, options, primary, publishes):
        logger.warning_once("kvcr tier: %s", warning)
    has_service = config.kvcr_service_socket_path is not None
    if port is not None and not has_service:
        check_port(config.control_host, port)
    config = check_plugins(config, Nixl())
    if config.g3 is None or not config.has_own_storage:
        return config, []
    size = setup.g3_file_bytes(config.g3, primary)
    return config, files.prepare(config.g3.paths, size, kept=has_service)


def check_port(host: str, port: int) -> None:
    """Refuse a port that KVCR could not listen on, by listening on it for a moment."""
    try:
        socket.create_server((host, port)).close()
    except OSError as error:
        text = f"control_ports: port {port} on {host} "
        if error.errno == errno.EADDRINUSE:
            text += "is in use; give another, or end the process that listens there"
        elif error.errno == errno.EACCES:
            text += "may not be used by this user; give one above 1023"
        else:
            text = (
                f"control_host = {host!r}: this machine cannot listen there "
                f"({error.strerror or error}); give an address of this machine, or "
                "leave it out to listen on all of them"
            )
        raise OptionError(f"kvcr tier: {text}") from error


def check_plugins(config: TierConfig, nixl: Nixl) -> TierConfig:
    """Refuse plugins that this NIXL does not have, and choose one for files."""
    if config.has_own_pool and config.kvcr_service_socket_path is None:
        _check_plugin("local_dram_backend", config.local_dram_backend, "DRAM_SEG", nixl)
    if config.serves_peers:
        name = config.remote_fw_dram_backend
        _check_plugin("remote_fw_dram_backend", name, "DRAM_SEG", nixl)
    if config.g3 is None:
        return config
    if config.g3.backend is not None:
        _check_plugin("g3.backend", config.g3.backend, "FILE_SEG", nixl)
        return config
    reason = nixl.why_unusable("GDS_MT", config.g3.backend_options)
    if reason is None:
        return config
    logger.warning_once(
        "kvcr tier: g3.backend is not set and GDS_MT cannot be used here (%s), so "
        "POSIX reads and writes the files. To silence this warning, set g3.backend to "
        "POSIX, or install GPUDirect Storage",
        reason,
    )
    g3 = config.g3.model_copy(update={"backend": "POSIX"})
    return config.model_copy(update={"g3": g3})


def _check_plugin(option: str, name: str, kind: str, nixl: Nixl) -> None:
    kinds, names = nixl.memory(name), nixl.names
    if kinds is None or names is None or kind in kinds:
        return
    if name not in names:
        reason = "this NIXL has no such plugin"
    elif not kinds:
        reason = (
            "this plugin cannot be loaded, because something that it needs is missing"
        )
    else:
        reason = "this plugin cannot be used for this"
    usable = [each for each in names if kind in (nixl.memory(each) or ())]
    raise OptionError(
        f"kvcr tier: {option} = {name!r}: {reason}; usable here: "
        f"{', '.join(usable) or 'none'}"
    )


def warnings(
    config: TierConfig,
    options: Mapping[str, Any],
    primary: setup.Primary,
    publishes: bool,
) -> list[str]:
    """List what does not prevent a start but may not work as intended."""
    peers = _peer_warnings(config, options, publishes) if config.serves_peers else ()
    uses_ucx = "UCX" in (config.local_dram_backend, config.remote_fw_dram_backend)
    found = [
        *peers,
        _locked_memory_warning(config, primary),
        interfaces_warning() if uses_ucx else None,
    ]
    return [warning for warning in found if warning is not None]


def _peer_warnings(
    config: TierConfig, options: Mapping[str, Any], publishes: bool
) -> Iterator[str]:
    if os.getenv("PYTHONHASHSEED") is None:
        yield (
            "peers are served but PYTHONHASHSEED is not set: with a non-cryptographic "
            "hash algorithm (xxhash) every engine hashes the same block differently, "
            "and peers' blocks are never found. Set it to the same value in all engines"
        )
    if os.getenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "1").strip() == "0":
        yield (
            "VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES is 0, so KV events carry block hashes "
            "as bytes, but KVCR's hints take only 64-bit integers and will not match. "
            "Unset it"
        )
    host = config.control_advertise_host
    if host is not None and _is_loopback(host):
        yield (
            f"control_advertise_host = {host!r} is a loopback address: a peer on "
            "another machine that dials it reaches its own machine. Give an address of "
            "this machine that peers can reach"
        )
    unlisted = [
        name
        for name in ("control_ports", "router_capabilities")
        if not isinstance(options.get(name), (list, tuple))
    ]
    if publishes and unlisted:
        yield (
            f"KV events are on and peers are served, but {' and '.join(unlisted)} "
            f"{'is' if len(unlisted) == 1 else 'are'} not given as a list. Dynamo's "
            "router reads both from the tier's options and sends no hints to an engine "
            'without them. Give "router_capabilities": ["router_hint"] and '
            "control_ports as lists"
        )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost" or host.lower().startswith("localhost.")


def _locked_memory_warning(config: TierConfig, primary: setup.Primary) -> str | None:
    """RDMA locks the memory that it registers; TCP and shared memory do not."""
    try:
        limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        if limit == resource.RLIM_INFINITY or not any(_RDMA.iterdir()):
            return None
    except OSError:
        return None
    slots, _ = setup.pool_slots(config, primary)
    needed = (primary.rows + slots) * primary.row_bytes
    if needed <= limit:
        return None
    return (
        f"RDMA has to lock the primary tier and the pool, {needed:,} bytes, but this "
        f"process may lock only {limit:,} (memlock). Raise the limit with ulimit -l "
        "unlimited, --ulimit memlock=-1, or the capability IPC_LOCK"
    )


def interfaces_warning() -> str | None:
    """Warn if UCX may need too long to open all network interfaces."""
    if os.getenv("UCX_NET_DEVICES") is not None:
        return None
    try:
        up = [name for name, state in psutil.net_if_stats().items() if state.isup]
    except Exception:
        return None
    if len(up) <= MANY_INTERFACES:
        return None
    return (
        f"this machine has {len(up)} network interfaces, and UCX opens all of them, "
        "which can take longer than KVCR waits at start. Name the ones to use in "
        "UCX_NET_DEVICES, for example UCX_NET_DEVICES=eth0"
    )
