# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Checks the KVCR service: whether it answers, its digest, its guards and its pools.

The service is asked for a guard that no service has. Its refusal tells whether the
digests agree and how many guards it has, and changes nothing.
"""

import argparse
import re
import socket
import struct
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import psutil

from vllm_kvcr.doctor.finding import Finding, fail, ok, size, warn
from vllm_kvcr.doctor.setting import Setting

if TYPE_CHECKING:
    from vllm.v1.kv_offload.tiering.kvcr.config import TierConfig

_NO_GUARD = (1 << 31) - 1
_CONNECT_S = 3.0


def check(setting: Setting) -> Iterator[Finding]:
    used = False
    for _, config in setting.valid:
        if config.kvcr_service_socket_path is not None:
            used = True
            yield from _check(config, setting.chunk_bytes)
    if not used:
        yield ok("no kvcr_service_socket_path: no service is used")


def _check(config: "TierConfig", chunk_bytes: int | None) -> Iterator[Finding]:
    path = config.kvcr_service_socket_path or ""
    start = "start it with: vllm-kvcr guard --config ..."
    try:
        pid = service_pid(path, strict=True)
    except OSError as error:
        reason = error.strerror or error
        yield fail(f"no service answers on {path}: {reason}", start, socket=path)
        return
    started = _started_with(pid)
    yield ok(f"a service answers on {path} (process {pid})", socket=path, **started)
    ranks = len(config.control_ports or ())
    yield from _check_claim(config, ranks, started)
    sizes = started.get("pool_bytes")
    if sizes and chunk_bytes is not None:
        slots = sum(sizes) // chunk_bytes
        if slots:
            yield ok(f"each guard's pool holds {slots} chunks", slots=slots)
        else:
            yield fail(
                f"each guard's pool, {size(sum(sizes))}, is smaller than one chunk",
                "start the service with a larger pool",
            )


def _check_claim(
    config: "TierConfig", ranks: int, started: dict[str, Any]
) -> Iterator[Finding]:
    digest = digest_of(config)
    if digest is None:
        theirs = started.get("digest")
        yield warn(
            "compatibility_digest is 'auto', which only an engine with its model can "
            "derive" + (f"; the service was started with {theirs!r}" if theirs else ""),
            "an engine with another digest is refused and quotes its own in the error",
        )
        return
    refusal = _refusal(config.kvcr_service_socket_path or "", digest)
    guards = re.search(r"out of range \[0, (\d+)\)", refusal)
    if guards is not None and int(guards[1]) >= ranks:
        yield ok(
            f"the digests agree, and {guards[1]} guards serve {ranks} local ranks",
            digest=digest,
            guards=int(guards[1]),
        )
    elif guards is not None:
        yield fail(
            f"the service has {guards[1]} guards, but there are {ranks} local ranks",
            f"start the service with --guard-count {ranks}",
            digest=digest,
            guards=int(guards[1]),
        )
    elif "digest" in refusal:
        theirs = started.get("digest", "another")
        yield fail(
            f"compatibility_digest is {digest!r}, but the service's is {theirs!r}",
            "start both with the same digest; another one stands for other bytes",
            digest=digest,
        )
    else:
        yield warn(
            f"the service gave an unexpected answer: {refusal}",
            "check that it runs the same release of kvcr as the engine",
        )


def digest_of(config: "TierConfig") -> str | None:
    """The digest that an engine with these options would use.

    ``None`` if it is derived from the model, which is not known here.
    """
    from vllm.v1.kv_offload.tiering.kvcr.keys import is_derived, make_codec

    if not config.derives_digest:
        return config.compatibility_digest
    if is_derived(config.namespace):
        return None
    return make_codec(config.namespace, None, 0).digest or None


def service_pid(path: str, *, strict: bool = False) -> int | None:
    """The process behind a service's socket.

    Raises:
        OSError: nothing answers there, and ``strict`` is set.
    """
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(_CONNECT_S)
        try:
            connection.connect(path)
            size = struct.calcsize("3i")
            credentials = connection.getsockopt(
                socket.SOL_SOCKET, socket.SO_PEERCRED, size
            )
        except OSError:
            if strict:
                raise
            return None
    return int(struct.unpack("3i", credentials)[0])


def _started_with(pid: int | None) -> dict[str, Any]:
    """What the service's command line says; empty if it cannot be read."""
    parser = argparse.ArgumentParser(add_help=False, exit_on_error=False)
    parser.add_argument("--pool-sizes-gb", default="")
    parser.add_argument("--compatibility-digest")
    parser.add_argument("--guard-count", type=int)
    try:
        given, _ = parser.parse_known_args(psutil.Process(pid).cmdline())
        sizes = [int(float(n) * (1 << 30)) for n in given.pool_sizes_gb.split(",") if n]
    except (argparse.ArgumentError, psutil.Error, ValueError, TypeError):
        return {}
    if given.compatibility_digest is None:
        return {}
    return {
        "digest": given.compatibility_digest,
        "guards": given.guard_count,
        "pool_bytes": sizes,
    }


def _refusal(path: str, digest: str) -> str:
    from kvcr import KVCRServiceError
    from kvcr.guard_protocol import KVCRClient

    try:
        hold = KVCRClient(path).claim(
            _NO_GUARD, [("", 4096)], digest, ("127.0.0.1", 1), None
        )
    except KVCRServiceError as error:
        return str(error)
    hold.release(activated=False)
    return "it granted a guard that it should not have"
