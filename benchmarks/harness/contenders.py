# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The contenders' names, and how the tiers among them are configured."""

import importlib.util
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm_kvcr.ports import LOCALHOST

OURS = "this adapter"
SHIPPED = "vLLM's adapter"
BARE = "bare KVCR"
COPY = "copy"
FS_MEMORY = "fs (shm)"
FS_DISK = "fs (disk)"

# Long enough for a busy machine: an operation that was given up has no speed.
PATIENT = {"operation_timeout_ms": 20_000, "abandon_timeout_ms": 40_000}


@dataclass(frozen=True)
class Contender:
    """How to make what moves blocks.

    Args:
        kind: ``tier``, ``bare`` or ``copy``.
        slots: Blocks in the pool.
        options: Of a tier.
        folder: Where it puts files: a tier's ``root_dir`` or KVCR's file.
        file_blocks: Blocks in KVCR's file; none without.
        populate: Whether bare KVCR's pool is backed by memory beforehand.
    """

    kind: str
    slots: int = 0
    options: dict[str, Any] = field(default_factory=dict)
    folder: Path | None = None
    file_blocks: int = 0
    populate: bool = True


def ours(**options: Any) -> dict[str, Any]:
    """Without peers, unless ``control_ports`` is among the options."""
    return {"type": "kvcr", **options}


def shipped(port: int, **options: Any) -> dict[str, Any]:
    """The adapter that the installed vLLM ships; it always serves peers."""
    return {
        "type": "kvcr",
        "router_capabilities": ["router_hint"],
        **peering(port),
        **options,
    }


def adapters() -> list[str]:
    """This one and, where the installed vLLM has one, that of vLLM."""
    vllm = importlib.util.find_spec("vllm")
    origin = vllm.origin if vllm is not None else None
    if origin is None:
        raise ModuleNotFoundError("vLLM is not installed")
    manager = "v1/kv_offload/tiering/kvcr/manager.py"
    has_one = (Path(origin).parent / manager).exists()
    return [OURS, SHIPPED] if has_one else [OURS]


def peering(port: int) -> dict[str, Any]:
    return {
        "control_host": LOCALHOST,
        "control_ports": [port],
        "control_advertise_host": LOCALHOST,
    }
