# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Makes the parts of a tier and connects them to each other and to KVCR."""

import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from vllm.logger import init_logger
from vllm.v1.kv_offload.base import Locality
from vllm.v1.kv_offload.tiering.kvcr.backend import preflight, setup
from vllm.v1.kv_offload.tiering.kvcr.backend.policy import (
    choose_policy,
    follows_order,
    observe,
)
from vllm.v1.kv_offload.tiering.kvcr.backend.start import Backend, Natives
from vllm.v1.kv_offload.tiering.kvcr.compat import shims
from vllm.v1.kv_offload.tiering.kvcr.config import TierConfig, parse_options
from vllm.v1.kv_offload.tiering.kvcr.keys import KeyCodec
from vllm.v1.kv_offload.tiering.kvcr.namespace import Namespace, make_namespace
from vllm.v1.kv_offload.tiering.kvcr.peers.endpoints import AllowedPeers
from vllm.v1.kv_offload.tiering.kvcr.peers.hints import Hints, own_endpoints
from vllm.v1.kv_offload.tiering.kvcr.peers.liveness import Liveness
from vllm.v1.kv_offload.tiering.kvcr.peers.pins import Pins
from vllm.v1.kv_offload.tiering.kvcr.reports.disk import DiskWatch
from vllm.v1.kv_offload.tiering.kvcr.reports.events import Inventory, Sink, sink_of
from vllm.v1.kv_offload.tiering.kvcr.reports.health import Health
from vllm.v1.kv_offload.tiering.kvcr.reports.idle import IdleReports
from vllm.v1.kv_offload.tiering.kvcr.reports.metrics import Losses
from vllm.v1.kv_offload.tiering.kvcr.reports.quarantine import Quarantine
from vllm.v1.kv_offload.tiering.kvcr.transfers.backoff import Backoff
from vllm.v1.kv_offload.tiering.kvcr.transfers.checksums import BlockSums
from vllm.v1.kv_offload.tiering.kvcr.transfers.recency import Recency
from vllm.v1.kv_offload.tiering.kvcr.transfers.residency import Residency
from vllm.v1.kv_offload.tiering.kvcr.transfers.staging import Staging
from vllm.v1.kv_offload.tiering.kvcr.transfers.transfers import Transfers

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import OffloadingSpec

logger = init_logger(__name__)

# Without the prefix: a 32-byte hash and a 4-byte group. A hash algorithm with shorter
# hashes only costs the name of the field that differs.
_OFFLOAD_KEY_BYTES = 36


@dataclass(frozen=True)
class Parts:
    """A tier's parts; KVCR is running."""

    config: TierConfig
    primary: setup.Primary
    prefix: bytes
    locality: Locality | None
    backend: Backend
    health: Health
    losses: Losses
    idle_reports: IdleReports
    quarantine: Quarantine
    inventory: Inventory
    disk: DiskWatch | None
    pins: Pins
    backoff: Backoff
    hints: Hints
    staging: Staging
    transfers: Transfers
    recency: Recency | None


def assemble(
    natives: Natives,
    spec: "OffloadingSpec",
    view: memoryview,
    options: dict[str, Any],
    *,
    uncounted_pins: bool,
) -> Parts:
    """Start KVCR and make everything around it.

    Args:
        spec: vLLM's offloading spec, which may be partial.
        view: The primary tier's memory.
        uncounted_pins: See ``Pins``.

    Raises:
        Exception: what ``KVCRSecondaryTierManager`` raises.
    """
    local_rank = spec.config.parallel.data_parallel_rank_local
    config = parse_options(options).for_rank(local_rank)
    primary = setup.primary_of(view)
    events = spec.kv_events_config
    for warning in setup.warnings(config, events):
        logger.warning("kvcr tier: %s", warning)
    port = config.control_port(local_rank)
    namespace = make_namespace(config.namespace, spec, primary.row_bytes)
    codec = KeyCodec(namespace.prefix)
    locality = Locality(config.locality) if config.locality else None
    agent = f"vllm-{uuid.uuid4().hex}"
    block_refs = shims.block_refs_factory(agent, primary.address, primary.row_bytes)

    # Everything that KVCR's callbacks write to exists before KVCR does.
    health = Health()
    losses = Losses()
    telemetry = config.enable_telemetry
    idle_reports = IdleReports(losses, health, telemetry)
    quarantine = Quarantine(health, config.serves_peers)
    inventory = Inventory(codec, locality)
    pins = Pins(
        codec,
        block_refs,
        losses,
        quarantine,
        _explain_foreign(namespace),
        request_prefix=f"kvcr-pin-{agent}-",
        uncounted=uncounted_pins,
    )
    guard = setup.guard_config(config, local_rank, namespace)
    policy = choose_policy(config.policy, has_files=config.g3 is not None)
    backoff = Backoff(len(namespace.prefix))
    publishes = config.owns_inventory and events.enable_kv_cache_events
    sinks: list[Sink] = [inventory.report] if publishes else []
    disk: DiskWatch | None = None
    residency: Residency | None = None
    if config.g3 is not None:
        disk = DiskWatch(health, losses, config.g3.paths)
        sinks += [disk.report, backoff.report]
        if config.verify_blocks:
            residency = Residency()
            sinks.append(residency.report)
        assert policy is not None
        ingested = None if residency is None else residency.ingested
        observe(policy, ingested, disk.placement_failed)
    config, made_files = preflight.check(
        natives.kvcr, config, options, primary, port, events.enable_kv_cache_events
    )
    backend = Backend.start(
        natives,
        config,
        primary,
        # Not the view, which vLLM releases, but the buffer behind it.
        primary_buffer=view.obj,
        agent=agent,
        port=port,
        guard=guard,
        made_files=made_files,
        bindings={
            "request_pin": pins.request_pin,
            "poll_pin_results": pins.poll_pin_results,
            "release_pin": pins.release_pin,
            "cancel_pin_request": pins.cancel_pin_request,
            "key_adapter": codec,
            "inventory_sink": sink_of(sinks),
            "stats_factory": idle_reports.new_stats if telemetry else None,
            "policy": policy,
            "on_resilience_event": quarantine.report,
        },
    )
    logger.info("kvcr tier: %s", shims.describe_start())

    kvcr = backend.kvcr
    liveness = Liveness()
    hints = Hints(
        kvcr,
        liveness,
        losses,
        own_endpoints=_own_endpoints(config, port),
        max_pull_blocks=setup.max_pull_blocks(config, primary),
        allowed=AllowedPeers(config.allowed_peers),
        is_incompatible=backend.is_incompatible,
    )
    # The stand-ins for KVCR in vLLM's tests can deliver but not fetch.
    stages = hasattr(kvcr, "fetch")
    limits = setup.limits_of(config, primary, backend.slots, stages=stages)
    staging = Staging(
        kvcr,
        limits=limits,
        liveness=liveness,
        quarantine=quarantine,
        health=health,
        hinted=hints.requests,
        disk=disk,
    )
    transfers = Transfers(
        kvcr,
        prefix=namespace.prefix,
        block_refs=block_refs,
        limits=limits,
        staging=staging,
        hints=hints,
        liveness=liveness,
        quarantine=quarantine,
        backoff=backoff,
        losses=losses,
        sums=None if residency is None else BlockSums(np.asarray(view), residency),
        block_bytes=primary.row_bytes if telemetry else None,
    )
    align = getattr(kvcr, "align_sequence", None)
    recency: Recency | None = None
    if align is not None and config.has_own_storage and follows_order(policy):
        recency = Recency(align, namespace.prefix, backend.slots)
    return Parts(
        config=config,
        primary=primary,
        prefix=namespace.prefix,
        locality=locality,
        backend=backend,
        health=health,
        losses=losses,
        idle_reports=idle_reports,
        quarantine=quarantine,
        inventory=inventory,
        disk=disk,
        pins=pins,
        backoff=backoff,
        hints=hints,
        staging=staging,
        transfers=transfers,
        recency=recency,
    )


def _explain_foreign(namespace: Namespace) -> Callable[[bytes], str]:
    own_bytes = len(namespace.prefix) + _OFFLOAD_KEY_BYTES
    return lambda key: namespace.difference(key, own_bytes)


def _own_endpoints(config: TierConfig, port: int | None) -> frozenset[str] | None:
    if port is None:
        return None
    return own_endpoints(config.control_host, setup.advertise_host(config), port)
