# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What a tier is constructed with: vLLM's offloading spec, ports, hints."""

import contextlib
import random
import socket
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

from tests.v1.kv_offload.tiering.kvcr.faults.harness.blocks import router_hash
from vllm.v1.kv_offload.base import OffloadingKVEventsConfig, OffloadKey, ReqContext

LOCALHOST = "127.0.0.1"


def make_spec(model: str | None = None, **differing: Any) -> Any:
    """An offloading spec with what the tier reads of it.

    Args:
        model: The model's name; without one the tier has no namespace.
        differing: ``dtype``, ``tokens_per_block`` or ``tp_size``, to tell two engines
            of one model apart.
    """
    config = SimpleNamespace(parallel=SimpleNamespace(data_parallel_rank_local=None))
    if model is not None:
        config.model = SimpleNamespace(
            name=model, dtype=differing.get("dtype", "bfloat16")
        )
        tokens = differing.get("tokens_per_block", 16)
        config.groups = (SimpleNamespace(tokens_per_block=tokens),)
        config.parallel.tp_size = differing.get("tp_size", 1)
    events = OffloadingKVEventsConfig(
        enable_kv_cache_events=False, self_describing_kv_events=False
    )
    return SimpleNamespace(config=config, kv_events_config=events)


def free_port() -> int:
    """A port of this machine that nobody listens on, nor will by chance.

    Below the range from which the system, and so NIXL, takes ports for itself.
    """
    while True:
        port = random.SystemRandom().randrange(10_000, 30_000)
        with socket.socket() as server, contextlib.suppress(OSError):
            server.bind((LOCALHOST, port))
            return port


def peer_options(port: int) -> dict[str, Any]:
    """The options of a tier that serves peers on ``port``."""
    return {
        "control_ports": [port],
        "control_host": LOCALHOST,
        "control_advertise_host": LOCALHOST,
        # By default 256 MiB, which take a while to populate.
        "landing_slots": 64,
    }


def endpoint_of(port: int) -> str:
    return f"tcp://{LOCALHOST}:{port}"


def make_hint(port: int, keys: Iterable[OffloadKey]) -> dict[str, Any]:
    """A router's hint: these blocks are at the engine on ``port``."""
    payload = {
        "source_control_endpoint": endpoint_of(port),
        "block_hashes": [router_hash(key) for key in keys],
    }
    action = {
        "action_id": "fetch",
        "action_type": "kv.fetch",
        "action_version": "1.0",
        "payload": payload,
    }
    return {"protocol_version": "0.1", "message_id": "m", "actions": [action]}


def request(request_id: str, hint: object | None = None) -> ReqContext:
    """A request as the tier sees it, with its hint on the older carrier."""
    if hint is None:
        return ReqContext(req_id=request_id)
    return ReqContext(req_id=request_id, kv_transfer_params={"kv_hint": hint})
