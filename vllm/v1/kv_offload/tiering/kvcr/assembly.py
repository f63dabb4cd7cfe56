# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Makes the parts of a tier and connects them to each other and to KVCR."""

import uuid
from typing import Any

import numpy as np

from vllm.logger import init_logger
from vllm.v1.kv_offload.base import Locality, OffloadingSpec
from vllm.v1.kv_offload.tiering.kvcr.backend import policy, preflight, setup
from vllm.v1.kv_offload.tiering.kvcr.backend.start import Backend, Natives
from vllm.v1.kv_offload.tiering.kvcr.compat import shims
from vllm.v1.kv_offload.tiering.kvcr.config import parse_options
from vllm.v1.kv_offload.tiering.kvcr.keys import make_codec
from vllm.v1.kv_offload.tiering.kvcr.peers.endpoints import AllowedPeers
from vllm.v1.kv_offload.tiering.kvcr.peers.hints import Hints, own_endpoints
from vllm.v1.kv_offload.tiering.kvcr.peers.liveness import Liveness
from vllm.v1.kv_offload.tiering.kvcr.peers.pins import Pins
from vllm.v1.kv_offload.tiering.kvcr.reports.disk import DiskWatch
from vllm.v1.kv_offload.tiering.kvcr.reports.events import Inventory, Sink, sink_of
from vllm.v1.kv_offload.tiering.kvcr.reports.gauges import Gauges, label_among_tiers
from vllm.v1.kv_offload.tiering.kvcr.reports.health import Health
from vllm.v1.kv_offload.tiering.kvcr.reports.idle import IdleReports
from vllm.v1.kv_offload.tiering.kvcr.reports.losses import Losses
from vllm.v1.kv_offload.tiering.kvcr.reports.quarantine import Quarantine
from vllm.v1.kv_offload.tiering.kvcr.reports.report import Report
from vllm.v1.kv_offload.tiering.kvcr.reports.traffic import Traffic
from vllm.v1.kv_offload.tiering.kvcr.transfers.backoff import Backoff
from vllm.v1.kv_offload.tiering.kvcr.transfers.checksums import BlockSums
from vllm.v1.kv_offload.tiering.kvcr.transfers.recency import Recency
from vllm.v1.kv_offload.tiering.kvcr.transfers.residency import Residency
from vllm.v1.kv_offload.tiering.kvcr.transfers.results import Results
from vllm.v1.kv_offload.tiering.kvcr.transfers.staging import Staging
from vllm.v1.kv_offload.tiering.kvcr.transfers.transfers import Transfers

logger = init_logger(__name__)


class Assembly:
    """A tier's parts, with KVCR running. The manager documents the arguments."""

    def __init__(
        self,
        natives: Natives,
        spec: OffloadingSpec,
        view: memoryview,
        options: dict[str, Any],
        *,
        uncounted_pins: bool,
    ) -> None:
        local_rank = spec.config.parallel.data_parallel_rank_local
        config = parse_options(options).for_rank(local_rank)
        self.primary = primary = setup.primary_of(view)
        row_bytes = primary.row_bytes
        events = spec.kv_events_config
        for warning in setup.warnings(config, events):
            logger.warning("kvcr tier: %s", warning)
        port = config.control_port(local_rank)
        codec = make_codec(config.namespace, spec, row_bytes)
        self.prefix = prefix = codec.prefix
        self.locality = Locality(config.locality) if config.locality else None
        agent = f"vllm-{uuid.uuid4().hex}"
        block_refs = shims.block_refs_factory(agent, primary.address, row_bytes)

        # Everything that KVCR's callbacks write to exists before KVCR does.
        self.health = health = Health()
        self.losses = losses = Losses()
        telemetry = config.enable_telemetry
        self.traffic = traffic = Traffic(timed=telemetry)
        self.quarantine = quarantine = Quarantine(health, config.serves_peers)
        self.inventory = Inventory(codec, self.locality)
        self.pins = pins = Pins(
            codec,
            block_refs,
            losses,
            quarantine,
            codec.difference,
            request_prefix=f"kvcr-pin-{agent}-",
            uncounted=uncounted_pins,
        )
        liveness = Liveness()
        gauges = Gauges(
            label_among_tiers(spec),
            row_bytes,
            health,
            quarantine,
            lambda: (pins.outstanding, pins.oldest_age()),
            liveness.count,
        )
        self.report = Report(traffic, losses, gauges, row_bytes)
        self.idle_reports = IdleReports(self.report, telemetry)
        guard = setup.guard_config(config, local_rank, codec)
        kv_policy = policy.choose_policy(config.policy, has_files=config.g3 is not None)
        self.backoff = backoff = Backoff(len(prefix))
        publishes = config.owns_inventory and events.enable_kv_cache_events
        sinks: list[Sink] = [self.inventory.report] if publishes else []
        self.disk: DiskWatch | None = None
        residency: Residency | None = None
        if config.g3 is not None:
            self.disk = disk = DiskWatch(health, losses, config.g3.paths)
            sinks += [disk.report, backoff.report, traffic.report]
            assert kv_policy is not None
            policy.observe(
                kv_policy,
                "decide_recovery",
                lambda meta, failure: disk.placement_failed(failure),
            )
            if config.verify_blocks:
                residency = Residency()
                sinks.append(residency.report)
                policy.observe(kv_policy, "on_ingest", residency.ingested)
        config, made_files = preflight.check(
            natives.kvcr, config, options, primary, port, events.enable_kv_cache_events
        )
        self.config = config
        self.backend = backend = Backend(
            natives,
            config,
            primary,
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
                "stats_factory": self.idle_reports.new_stats if telemetry else None,
                "policy": kv_policy,
                "on_resilience_event": quarantine.report,
            },
        )
        logger.info("kvcr tier: %s", shims.describe_start())

        self.kvcr = kvcr = backend.kvcr
        host = setup.advertise_host(config)
        self.hints = hints = Hints(
            kvcr,
            liveness,
            losses,
            own_endpoints=own_endpoints(config.control_host, host, port),
            max_pull_blocks=config.max_pull_blocks or max(1, primary.rows // 2),
            allowed=AllowedPeers(config.allowed_peers),
            is_incompatible=backend.is_incompatible,
        )
        # The stand-ins for KVCR in vLLM's tests can deliver but not fetch.
        stages = hasattr(kvcr, "fetch")
        limits = setup.limits_of(config, primary, backend.slots, stages=stages)
        self.staging = Staging(
            kvcr,
            liveness,
            quarantine,
            limits,
            hinted=hints.requests,
            health=health,
            disk=self.disk,
            is_lost=backend.is_lost,
        )
        sums = None if residency is None else BlockSums(np.asarray(view), residency)
        self.results = Results(
            prefix=prefix,
            backoff=backoff,
            losses=losses,
            traffic=traffic,
            block_bytes=row_bytes if telemetry else None,
        )
        self.transfers = Transfers(
            kvcr,
            prefix=prefix,
            block_refs=block_refs,
            limits=limits,
            staging=self.staging,
            hints=hints,
            liveness=liveness,
            quarantine=quarantine,
            results=self.results,
            losses=losses,
            traffic=traffic,
            sums=sums,
        )
        self.recency: Recency | None = None
        align = getattr(kvcr, "align_sequence", None)
        ordered = config.has_own_storage and policy.follows_order(kv_policy)
        if align is not None and ordered:
            self.recency = Recency(align, prefix, backend.slots)
