# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Tells operators what a start waits for, and why it failed."""

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from kvcr import KVCRServiceError
from kvcr.config import KVCRGuardConfig

from vllm.logger import init_logger
from vllm.v1.kv_offload.tiering.kvcr.backend import files, setup
from vllm.v1.kv_offload.tiering.kvcr.backend.preflight import interfaces_warning
from vllm.v1.kv_offload.tiering.kvcr.config import OptionError, TierConfig

logger = init_logger(__name__)

_FIRST_S = 5.0
_THEN_S = 15.0
_NIXL = ("NIXL_ERR", "initialization timed out")


@contextmanager
def announced(what: str) -> Iterator[None]:
    """Log a line after some seconds, and again every few, while the block runs."""
    over = threading.Event()
    began = time.monotonic()

    def tell() -> None:
        pause_s = _FIRST_S
        while not over.wait(pause_s):
            waited_s = time.monotonic() - began
            logger.warning(
                "kvcr tier: after %.0f s still waiting for %s", waited_s, what
            )
            pause_s = _THEN_S

    thread = threading.Thread(target=tell, name="kvcr-tier-wait", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def what_answers(guard: KVCRGuardConfig | None) -> str:
    """Say what a start waits for; completes "waiting for ..."."""
    if guard is None:
        return "NIXL to start its backends"
    return (
        f"the KVCR service behind kvcr_service_socket_path = "
        f"{guard.kvcr_service_socket_path!r} to grant the pool of guard "
        f"{guard.guard_index}, and for NIXL (a service that hangs accepts the "
        "connection but does not answer: look at its log, or restart it)"
    )


def explain(
    error: BaseException,
    config: TierConfig,
    primary: setup.Primary,
    guard: KVCRGuardConfig | None,
) -> Exception | None:
    """What to raise from ``error``, which KVCR's start raised; ``None`` for itself."""
    if isinstance(error, KVCRServiceError) and guard is not None:
        return RuntimeError(
            f"kvcr tier: the KVCR service did not grant a pool: {error}. This engine "
            f"asked kvcr_service_socket_path = {guard.kvcr_service_socket_path!r} for "
            f"guard {guard.guard_index} with compatibility_digest = "
            f"{guard.compatibility_digest!r}. A service must listen there, with more "
            "guards (--guard-count) than this index and the same "
            "--compatibility-digest, and no other engine may hold that guard"
        )
    if isinstance(error, ValueError):
        if config.g3 is not None and not config.has_own_storage:
            return OptionError(
                "kvcr tier: g3 needs a pool, because files hold the blocks that the "
                "pool evicts; give secondary_g2_slots, secondary_g2_bytes or "
                f"kvcr_service_socket_path (KVCR: {error})"
            )
        if config.policy is not None and "requires configured" in str(error):
            return OptionError(
                f"kvcr tier: policy = {config.policy!r}: needs storage that is not "
                f"configured; give g3, or another policy (KVCR: {error})"
            )
    refusal = None
    if isinstance(error, OSError) and config.g3 is not None:
        size = setup.g3_file_bytes(config.g3, primary)
        refusal = files.explain(error, config.g3.paths, size)
    return refusal or _nixl_failed(config, error)


def _nixl_failed(config: TierConfig, error: BaseException) -> RuntimeError | None:
    at: BaseException | None = error
    while at is not None and not any(mark in str(at) for mark in _NIXL):
        at = at.__cause__
    if at is None or not isinstance(error, Exception):
        return None
    backends = [f"local_dram_backend = {config.local_dram_backend}"]
    if config.serves_peers:
        backends.append(f"remote_fw_dram_backend = {config.remote_fw_dram_backend}")
    advice = [
        "see which part failed in the lines above, which UCX and NIXL wrote to stderr",
        "in UCX_TLS and UCX_NET_DEVICES, name only what this machine has (ucx_info -d)",
    ]
    if config.g3 is not None:
        given = config.g3.backend or "KVCR's default"
        backends.append(f"g3.backend = {given} {dict(config.g3.backend_options)}")
        advice.append(
            "if the container blocks asynchronous I/O, or fs.aio-max-nr is used up, "
            'set g3.backend_options to {"use_uring": true} or {"use_posix_aio": true}'
        )
    if many := interfaces_warning():
        advice.append(many)
    variables = [
        f"{name}={value}"
        for name, value in sorted(os.environ.items())
        if name.startswith(("UCX_", "NIXL_"))
    ]
    return RuntimeError(
        f"kvcr tier: NIXL could not be started: {error} ({', '.join(backends)}; "
        f"environment: {' '.join(variables) or 'no UCX_* or NIXL_* variables'}). "
        f"What to do: {'; '.join(advice)}"
    )
