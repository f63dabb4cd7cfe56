# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Builds what a tier is given: an offloading spec, ports, keys, hints, requests."""

import contextlib
import random
import socket
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

from vllm.v1.core.kv_cache_utils import BlockHash, maybe_convert_block_hash
from vllm.v1.kv_offload.base import (
    OffloadingKVEventsConfig,
    OffloadKey,
    ReqContext,
    get_offload_block_hash,
    make_offload_key,
)

LOCALHOST = "127.0.0.1"


def make_spec(
    model: str | None = None,
    *,
    local_rank: int | None = None,
    events: bool = False,
    described: bool = False,
    **differing: Any,
) -> Any:
    """An offloading spec with only what the tier reads.

    Args:
        model: The model's name; without one the tier has no namespace.
        differing: ``dtype``, ``tokens_per_block`` or ``tp_size``, to tell two engines
            of one model apart.
    """
    parallel = SimpleNamespace(data_parallel_rank_local=local_rank)
    config = SimpleNamespace(parallel=parallel)
    if model is not None:
        dtype = differing.get("dtype", "bfloat16")
        config.model = SimpleNamespace(name=model, dtype=dtype)
        tokens = differing.get("tokens_per_block", 16)
        config.groups = (SimpleNamespace(tokens_per_block=tokens),)
        parallel.tp_size = differing.get("tp_size", 1)
    events_config = OffloadingKVEventsConfig(events, described)
    return SimpleNamespace(config=config, kv_events_config=events_config)


def free_port() -> int:
    """A port below the range from which the system, and so NIXL, picks ports."""
    for port in random.SystemRandom().sample(range(10_000, 32_000), 100):
        with contextlib.suppress(OSError), socket.create_server((LOCALHOST, port)):
            return port
    raise OSError("no free port")


def endpoint_of(port: int) -> str:
    return f"tcp://{LOCALHOST}:{port}"


def peer_options(port: int | None = None, **further: Any) -> dict[str, Any]:
    """The options of a tier that serves peers on ``port``, by default a free one."""
    return {
        "control_ports": [port or free_port()],
        "control_host": LOCALHOST,
        "control_advertise_host": LOCALHOST,
        # By default 256 MiB, which take a while to populate.
        "landing_slots": 64,
        **further,
    }


def key(number: int, group: int = 0) -> OffloadKey:
    return make_offload_key(number.to_bytes(32, "big"), group)


def keys(count: int, first: int = 0) -> list[OffloadKey]:
    return [key(number) for number in range(first, first + count)]


def router_hash(offload_key: OffloadKey) -> int | bytes:
    """The block hash that a router knows a key by."""
    return maybe_convert_block_hash(BlockHash(get_offload_block_hash(offload_key)))


def fetch_action(payload: Any, kind: Any = "kv.fetch") -> dict[str, Any]:
    known = {"action_id": "a", "action_type": kind, "action_version": "1.0"}
    return known | {"payload": payload}


def hint_of(actions: Any) -> dict[str, Any]:
    return {"protocol_version": "0.1", "message_id": "m", "actions": actions}


def hint(
    hinted: Iterable[OffloadKey] = (), endpoint: str = "tcp://10.9.9.9:7001"
) -> dict[str, Any]:
    """A router's hint: these blocks are at that engine."""
    payload = {
        "source_control_endpoint": endpoint,
        "block_hashes": [router_hash(each) for each in hinted] or [1],
    }
    return hint_of([fetch_action(payload)])


def make_hint(port: int, hinted: Iterable[OffloadKey]) -> dict[str, Any]:
    """A router's hint: these blocks are at the engine on ``port``."""
    return hint(hinted, endpoint_of(port))


def request(request_id: str, value: object | None = None) -> ReqContext:
    """A request, with its hint in the field that all releases have."""
    if value is None:
        return ReqContext(request_id)
    return ReqContext(request_id, {"kv_hint": value})
