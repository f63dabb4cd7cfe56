# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Explains to operators why KVCR did not start."""

import os
from collections.abc import Iterator

from kvcr.config import KVCRGuardConfig

from vllm.v1.kv_offload.tiering.kvcr.backend import files, setup
from vllm.v1.kv_offload.tiering.kvcr.backend.preflight import interfaces_warning
from vllm.v1.kv_offload.tiering.kvcr.config import TierConfig

_NIXL = ("NIXL_ERR", "initialization timed out")


def explain(
    error: BaseException,
    config: TierConfig,
    primary: setup.Primary,
    guard: KVCRGuardConfig | None,
) -> Exception | None:
    """What to raise from ``error``, which KVCR's start raised; ``None`` for itself."""
    refusal = setup.service_refused(guard, error) or setup.files_refused(config, error)
    if refusal is None and config.g3 is not None and isinstance(error, OSError):
        size = setup.g3_file_bytes(config.g3, primary)
        refusal = files.explain(error, config.g3.paths, size)
    return refusal or _nixl_failed(config, error)


def _nixl_failed(config: TierConfig, error: BaseException) -> RuntimeError | None:
    if not isinstance(error, Exception):
        return None
    if not any(mark in str(each) for each in _chain(error) for mark in _NIXL):
        return None
    backends = [f"local_dram_backend = {config.local_dram_backend}"]
    if config.serves_peers:
        backends.append(f"remote_fw_dram_backend = {config.remote_fw_dram_backend}")
    if config.g3 is not None:
        given = config.g3.backend or "KVCR's default"
        backends.append(f"g3.backend = {given} {dict(config.g3.backend_options)}")
    variables = [
        f"{name}={value}"
        for name, value in sorted(os.environ.items())
        if name.startswith(("UCX_", "NIXL_"))
    ]
    advice = [
        "see which part failed in the lines above, which UCX and NIXL wrote to stderr",
        "in UCX_TLS and UCX_NET_DEVICES, name only what this machine has (ucx_info -d)",
    ]
    if config.g3 is not None:
        advice.append(
            "if the container blocks asynchronous I/O, or fs.aio-max-nr is used up, "
            'set g3.backend_options to {"use_uring": true} or {"use_posix_aio": true}'
        )
    many = interfaces_warning()
    if many is not None:
        advice.append(many)
    return RuntimeError(
        f"kvcr tier: NIXL could not be started: {error} ({', '.join(backends)}; "
        f"environment: {' '.join(variables) or 'no UCX_* or NIXL_* variables'}). "
        f"What to do: {'; '.join(advice)}"
    )


def _chain(error: BaseException) -> Iterator[BaseException]:
    at: BaseException | None = error
    while at is not None:
        yield at
        at = at.__cause__
