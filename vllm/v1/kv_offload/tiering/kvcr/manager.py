# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The kvcr tier: vLLM's secondary-tier protocol, and the wiring of its parts.

Threading: every method runs on the thread that drives vLLM's offloading manager, or
under that manager's lock. KVCR's callbacks run inside calls made from here; the one
exception is closing after a failure, when there is nothing left to drive.

Failure model: the constructor raises, with nothing half-open left behind. Afterwards
no exception leaves a method: it becomes a miss, a failed job, a counter and one line
in the log, and the engine recomputes.
"""

import mmap
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

# First: where kvcr is absent, this says what to install.
from vllm.v1.kv_offload.tiering.kvcr.compat import shims

# isort: split
import numpy as np
from kvcr import KVCR
from kvcr.control_channels import ZmqPeerControlChannel
from kvcr.types import CacheTier, QueryStatus

from vllm.logger import init_logger
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    OffloadingEvent,
    OffloadingMetricMetadata,
    OffloadKey,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
)
from vllm.v1.kv_offload.tiering.base import (
    JobResult,
    ParentManager,
    SecondaryTierManager,
    TransferJob,
)
from vllm.v1.kv_offload.tiering.kvcr.backend import preflight, setup
from vllm.v1.kv_offload.tiering.kvcr.backend.policy import (
    choose_policy,
    follows_order,
    observe,
)
from vllm.v1.kv_offload.tiering.kvcr.backend.start import Backend, Natives
from vllm.v1.kv_offload.tiering.kvcr.compat.environment import check_environment
from vllm.v1.kv_offload.tiering.kvcr.compat.vocabulary import LOOKUPS
from vllm.v1.kv_offload.tiering.kvcr.config import parse_options, telemetry_enabled
from vllm.v1.kv_offload.tiering.kvcr.keys import KeyCodec
from vllm.v1.kv_offload.tiering.kvcr.namespace import Namespace, make_namespace
from vllm.v1.kv_offload.tiering.kvcr.peers.endpoints import AllowedPeers
from vllm.v1.kv_offload.tiering.kvcr.peers.hints import Hints, own_endpoints
from vllm.v1.kv_offload.tiering.kvcr.peers.liveness import FILES, Liveness, Standing
from vllm.v1.kv_offload.tiering.kvcr.peers.pins import Pins
from vllm.v1.kv_offload.tiering.kvcr.reports.disk import DiskWatch
from vllm.v1.kv_offload.tiering.kvcr.reports.events import Inventory, Sink, sink_of
from vllm.v1.kv_offload.tiering.kvcr.reports.gauges import Gauges, label_among_tiers
from vllm.v1.kv_offload.tiering.kvcr.reports.health import Health, Reason
from vllm.v1.kv_offload.tiering.kvcr.reports.idle import IdleReports
from vllm.v1.kv_offload.tiering.kvcr.reports.losses import Losses, Lost
from vllm.v1.kv_offload.tiering.kvcr.reports.metrics import definitions
from vllm.v1.kv_offload.tiering.kvcr.reports.quarantine import Quarantine
from vllm.v1.kv_offload.tiering.kvcr.reports.report import Report
from vllm.v1.kv_offload.tiering.kvcr.reports.traffic import Place, Traffic
from vllm.v1.kv_offload.tiering.kvcr.transfers.backoff import Backoff
from vllm.v1.kv_offload.tiering.kvcr.transfers.checksums import BlockSums
from vllm.v1.kv_offload.tiering.kvcr.transfers.recency import Recency
from vllm.v1.kv_offload.tiering.kvcr.transfers.residency import Residency
from vllm.v1.kv_offload.tiering.kvcr.transfers.staging import Staging
from vllm.v1.kv_offload.tiering.kvcr.transfers.transfers import Transfers

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
        OffloadingConnectorStats,
    )
    from vllm.v1.kv_offload.base import OffloadingSpec

logger = init_logger(__name__)

_RETAINED_NATIVE_BUFFERS: list[Any] = []
"""What native code may still touch, kept mapped until the process ends."""

_POLL_INTERVAL_S = 0.001
_WAIT_WARNING_S = 5.0
# What can end has ended by then; a stopping container has not much more time.
_LONGEST_DRAIN_S = 10.0

# Looking an enum's member up costs a tenth of a lookup.
_HIT, _MISS = QueryStatus.HIT, QueryStatus.MISS
_FETCHABLE, _FETCHING = QueryStatus.FETCHABLE, QueryStatus.FETCHING
_REMOTE = CacheTier.REMOTE_G2
_LOOKUP_HIT, _LOOKUP_MISS = LookupResult.HIT, LookupResult.MISS
_DRAM = Place.DRAM
_HIT_SOURCES = dict(zip(Place, shims.HIT_SOURCES, strict=True))


class KVCRSecondaryTierManager(SecondaryTierManager):
    """KVCR as a secondary tier.

    Args:
        offloading_spec: vLLM's spec. A partial one will do; see ``namespace``.
        primary_kv_view: The primary tier, shape ``(num_chunks, row_stride_bytes)``.
        tier_type: As registered.
        backpressure_detector: vLLM's, from the option ``backpressure``.
        options: The tier's options; see ``config.TierConfig``.

    Raises:
        ValueError, TypeError: an option or the primary view cannot be used.
        RuntimeError: KVCR or NIXL could not start.
    """

    # Set on each tier that has a use for being polled between two steps.
    tolerates_off_thread_polling: ClassVar[bool] = False

    def __init__(
        self,
        offloading_spec: "OffloadingSpec",
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any | None = None,
        **options: Any,
    ) -> None:
        super().__init__(
            offloading_spec,
            primary_kv_view,
            tier_type,
            **shims.base_arguments(backpressure_detector),
        )
        check_environment()
        local_rank = offloading_spec.config.parallel.data_parallel_rank_local
        config = parse_options(options).for_rank(local_rank)
        self._config = config
        self.locality = Locality(config.locality) if config.locality else None
        primary = setup.primary_of(primary_kv_view)
        self._primary_base_addr = primary.address
        self._primary_row_stride = primary.row_bytes
        events = offloading_spec.kv_events_config
        for warning in setup.warnings(config, events):
            logger.warning("kvcr tier: %s", warning)
        port = config.control_port(local_rank)
        namespace = make_namespace(config.namespace, offloading_spec, primary.row_bytes)
        self._prefix = namespace.prefix
        codec = KeyCodec(namespace.prefix)
        agent = f"vllm-{uuid.uuid4().hex}"
        block_refs = shims.block_refs_factory(agent, primary.address, primary.row_bytes)

        # What KVCR's callbacks write to exists before KVCR does.
        self._health = Health()
        self._losses = Losses()
        self._liveness = Liveness()
        telemetry = config.enable_telemetry
        self._traffic = Traffic(timed=telemetry)
        self._quarantine = Quarantine(self._health, config.serves_peers)
        publishes = config.owns_inventory and events.enable_kv_cache_events
        self._inventory = Inventory(codec, self.locality)
        self._pins = self._make_pins(codec, namespace, block_refs, agent)
        gauges = Gauges(
            label_among_tiers(offloading_spec),
            primary.row_bytes,
            self._health,
            self._quarantine,
            self._pins,
            self._liveness,
        )
        self._report = Report(self._traffic, self._losses, gauges, primary.row_bytes)
        self._idle_reports = IdleReports(self._report, telemetry)
        guard = setup.guard_config(config, local_rank, namespace)
        policy = choose_policy(config.policy, has_files=config.g3 is not None)
        self._backoff = Backoff(len(namespace.prefix))
        sinks: list[Sink] = [self._inventory.report] if publishes else []
        disk: DiskWatch | None = None
        residency: Residency | None = None
        if config.g3 is not None:
            disk = DiskWatch(self._health, self._losses, config.g3.paths)
            sinks += [disk.report, self._backoff.report, self._traffic.report]
            if config.verify_blocks:
                residency = Residency()
                sinks.append(residency.report)
            assert policy is not None
            ingested = None if residency is None else residency.ingested
            observe(policy, ingested, disk.placement_failed)
        self._disk = disk
        config, made_files = preflight.check(
            KVCR, config, options, primary, port, events.enable_kv_cache_events
        )
        self._backend = Backend.start(
            Natives(KVCR, ZmqPeerControlChannel, mmap.mmap, _RETAINED_NATIVE_BUFFERS),
            config,
            primary,
            # Not the view, which vLLM releases, but what it is a view of.
            primary_buffer=primary_kv_view.obj,
            agent=agent,
            port=port,
            guard=guard,
            made_files=made_files,
            bindings={
                "request_pin": self._pins.request_pin,
                "poll_pin_results": self._pins.poll_pin_results,
                "release_pin": self._pins.release_pin,
                "cancel_pin_request": self._pins.cancel_pin_request,
                "key_adapter": codec,
                "inventory_sink": sink_of(sinks),
                "stats_factory": self._idle_reports.new_stats if telemetry else None,
                "policy": policy,
                "on_resilience_event": self._quarantine.report,
            },
        )
        logger.info("kvcr tier: %s", shims.describe_start())

        self._kvcr = kvcr = self._backend.kvcr
        self._usable = True
        self._shut_down = False
        endpoints = None
        if port is not None:
            advertised = setup.advertise_host(config)
            endpoints = own_endpoints(config.control_host, advertised, port)
        self._hints = Hints(
            kvcr,
            self._liveness,
            self._losses,
            own_endpoints=endpoints,
            max_pull_blocks=setup.max_pull_blocks(config, primary),
            allowed=AllowedPeers(config.allowed_peers),
            is_incompatible=self._backend.is_incompatible,
        )
        self._hinted = self._hints.requests
        # Stand-ins for KVCR in vLLM's tests deliver, and do not fetch.
        stages = hasattr(kvcr, "fetch")
        limits = setup.limits_of(config, primary, self._backend.slots, stages=stages)
        self._stages = stages
        self._staging = Staging(
            kvcr,
            limits=limits,
            liveness=self._liveness,
            quarantine=self._quarantine,
            health=self._health,
            hinted=self._hinted,
            disk=disk,
        )
        sums: BlockSums | None = None
        if residency is not None:
            sums = BlockSums(np.asarray(primary_kv_view), residency)
        self._transfers = Transfers(
            kvcr,
            prefix=namespace.prefix,
            block_refs=block_refs,
            limits=limits,
            staging=self._staging,
            hints=self._hints,
            liveness=self._liveness,
            quarantine=self._quarantine,
            backoff=self._backoff,
            losses=self._losses,
            traffic=self._traffic,
            sums=sums,
            block_bytes=primary.row_bytes if telemetry else None,
        )
        self._query: Any = kvcr.query
        self._recency: Recency | None = None
        align = getattr(kvcr, "align_sequence", None)
        if align is not None and config.has_own_storage and follows_order(policy):
            self._recency = Recency(align, namespace.prefix, self._backend.slots)
        # Where nothing wakes a sleeping engine for a peer, it must not sleep.
        self._steps_for_peers = config.serves_peers and not shims.HAS_TIER_POLL_THREAD
        # Peers wait for answers, and stores for KVCR, which frees room in a full pool
        # by writing one block to a file from one poll to the next.
        if config.serves_peers or config.g3 is not None:
            self.tolerates_off_thread_polling = True  # type: ignore[misc]

    # --- lookups and requests --------------------------------------------------------

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        request_id = req_context.req_id
        try:
            status, tier = self._query((self._prefix + key,), request_id)[0]
        except Exception as error:
            self._fail(error)
            return _LOOKUP_MISS
        if status is _MISS:
            self._traffic.misses += 1
            if self._hinted and request_id in self._hinted:
                self._traffic.hinted_misses += 1
            return _LOOKUP_MISS
        if self._backoff.active and self._backoff.blocks(key, request_id):
            return self._refuse(Lost.BACKING_OFF)
        if status is _HIT:
            traffic = self._traffic
            traffic.dram_hits += 1
            traffic.last_hit = _DRAM
            return _LOOKUP_HIT
        if status is _FETCHABLE:
            return self._look_up_elsewhere(key, request_id, tier)
        if status is _FETCHING and self._prefix + key in self._staging.unawaited:
            return self._refuse(Lost.UNAWAITED)
        self._traffic.deferred += 1
        return LOOKUPS.get(status, _LOOKUP_MISS)

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        if self._usable:
            self._backoff.begin(req_context.req_id)
            try:
                self._hints.accept(req_context)
            except Exception as error:
                self._fail(error)
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: ReqContext) -> None:
        self._backoff.finish(req_context.req_id)
        try:
            self._hints.finish(req_context.req_id)
        except Exception as error:
            self._fail(error)

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        if self._recency is None or not self._usable:
            return
        try:
            self._recency.used(keys)
        except Exception as error:
            self._fail(error)

    # --- transfers -------------------------------------------------------------------

    def submit_load(self, job_metadata: TransferJob) -> None:
        if not self._usable:
            self._transfers.end_at_once(job_metadata, success=False)
        else:
            self._submit(self._transfers.submit_load, job_metadata)

    def submit_store(self, job_metadata: TransferJob) -> None:
        if not self._usable:
            self._transfers.end_at_once(job_metadata, success=False)
        elif not self._config.has_own_storage:
            self._transfers.end_at_once(job_metadata, success=True)
        else:
            if self._recency is not None:
                self._recency.stored(len(job_metadata.keys))
            self._submit(self._transfers.submit_store, job_metadata)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        self._poll()
        self._idle_reports.poll()
        results = self._transfers.take_results()
        if self._pins.has_results:
            results = [*results, *self._pins.take_results()]
        return results

    def has_pending_work(self) -> bool:
        return bool(
            self._transfers.outstanding
            or self._transfers.has_results
            or self._staging.introducing
            or self._pins.pending
            or self._inventory.pending
            or self._idle_reports.due
            or (self._steps_for_peers and self._usable)
        )

    # --- peers -----------------------------------------------------------------------

    def serve_external_requests(self, parent: ParentManager) -> None:
        if not self._usable:
            return
        if self._pins.serve(parent):
            # KVCR takes the answers now, not in the next step.
            self._poll()

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        if self._staging.has_wanted:
            # Now: the request that wants it, and has the hint, may end with this step.
            self._poll()
        self._losses.log()
        self._idle_reports.step()

    # --- reports ---------------------------------------------------------------------

    @property
    def cache_hit_source(self) -> Any:
        """Where the block was that was found last: vLLM asks right after a lookup."""
        return _HIT_SOURCES[self._traffic.last_hit]

    def take_events(self) -> Iterable[OffloadingEvent]:
        return self._inventory.take()

    @classmethod
    def build_metric_definitions(
        cls, extra_config: dict[str, Any]
    ) -> dict[str, OffloadingMetricMetadata]:
        return definitions() if telemetry_enabled(extra_config) else {}

    @classmethod
    def config_info_keys(cls, tier_config: dict[str, Any]) -> tuple[str, ...]:
        return shims.CONFIG_INFO_KEYS

    def config_info(self) -> Mapping[str, str]:
        return shims.config_info()

    def get_stats(self) -> "OffloadingConnectorStats | None":
        if not self._config.enable_telemetry:
            return None
        stats: Any | None = None
        if self._usable:
            try:
                stats = self._kvcr.get_stats()
            except Exception as error:
                self._fail(error)
        return self._report.add_to(stats)

    # --- the end ---------------------------------------------------------------------

    def drain_jobs(self) -> None:
        self._drain(None)

    def shutdown(self) -> None:
        if self._shut_down:
            return
        self._drain(min(2 * self._config.abandon_timeout / 1000, _LONGEST_DRAIN_S))
        self._shut_down = True
        self._give_up()
        free = self._backend.stop()
        self._transfers.close()
        if free:
            self._native_stopped()
        self._losses.log()

    # --- inside ----------------------------------------------------------------------

    def _make_pins(
        self, codec: KeyCodec, namespace: Namespace, block_refs: Any, agent: str
    ) -> Pins:
        # An own key is the prefix, a 32-byte hash and a 4-byte group; a shorter hash
        # only costs the name of the field that differs.
        size = len(namespace.prefix) + 36
        return Pins(
            codec,
            block_refs,
            self._losses,
            self._quarantine,
            lambda key: namespace.difference(key, size),
            request_prefix=f"kvcr-pin-{agent}-",
            uncounted=getattr(self, "_bp_detector", None) is not None,
        )

    def _look_up_elsewhere(
        self, key: OffloadKey, request_id: str, tier: CacheTier | None
    ) -> LookupResult:
        """A hinted peer or a file may have it; whether to ask is decided here."""
        reason: Lost | None = None
        if tier is _REMOTE:
            source = self._hints.endpoint(request_id)
            if source is None:
                return self._found_elsewhere(None)
            reason = self._hints.why_not(request_id)
        else:
            source = FILES
            if self._liveness.is_down(FILES):
                reason = Lost.DISK_STALLED
        if reason is None and self._stages:
            reason = self._why_not_staged(key, request_id, source)
        if reason is None:
            if source is FILES or self._hints.claim_pull(request_id, key):
                return self._found_elsewhere(source)
            reason = Lost.PULL_LIMIT
        return self._refuse(reason)

    def _found_elsewhere(self, source: str | None) -> LookupResult:
        if source is FILES:
            self._traffic.disk_hits += 1
            self._traffic.last_hit = Place.DISK
        else:
            self._traffic.peer_hits += 1
            self._traffic.last_hit = Place.PEER
        return _LOOKUP_HIT

    def _refuse(self, reason: Lost) -> LookupResult:
        """A block that is somewhere is a miss all the same."""
        self._traffic.refused += 1
        self._losses.add(reason)
        return _LOOKUP_MISS

    def _why_not_staged(
        self, key: OffloadKey, request_id: str, source: str
    ) -> Lost | None:
        """Why a block cannot be staged from a source that is not cooling down."""
        if self._liveness.standing(source) is not Standing.USABLE:
            self._staging.introduce(source, self._prefix + key, request_id)
            return Lost.DISK_STALLED if source is FILES else Lost.INTRODUCING
        needs_room = source is not FILES and self._config.remote_landing == "pool"
        full = needs_room and self._staging.peer_room <= 0
        return Lost.LANDING_FULL if full else None

    def _submit(
        self, submit: Callable[[TransferJob], None], job_metadata: TransferJob
    ) -> None:
        try:
            submit(job_metadata)
        except Exception as error:
            self._fail(error)
            if not self._transfers.knows(job_metadata.job_id):
                self._transfers.end_at_once(job_metadata, success=False)

    def _poll(self) -> None:
        """Take what KVCR has finished, and start what there is room for."""
        if self._shut_down:
            return
        if not self._usable:
            if self._backend.closer.quiescent:
                self._native_stopped()
            return
        try:
            completed = self._kvcr.poll_completed()
        except Exception as error:
            self._fail(error)
            return
        # Each by itself: what was finished is not lost with one that fails.
        for handle, entries in completed:
            try:
                self._transfers.complete(handle, entries)
            except Exception as error:
                self._fail(error)
        if not self._usable:
            return
        if self._disk is not None and self._disk.unjudged:
            self._disk.judge(stores_time_out=self._transfers.stores_time_out())
        try:
            self._transfers.pump()
        except Exception as error:
            self._fail(error)
        if self._transfers.corrupt and self._config.serves_peers:
            blocks, self._transfers.corrupt = self._transfers.corrupt, 0
            self._health.degrade(Reason.CORRUPT_BLOCKS, f"{blocks} blocks")

    def _drain(self, give_up_after_s: float | None) -> bool:
        """Poll until nothing of ours touches the primary tier."""
        started = warned = time.monotonic()
        # For a peer that may still read from the primary.
        patience_s = self._config.abandon_timeout / 1000
        while True:
            self._poll()
            jobs, pins = self._transfers.outstanding, self._pins.outstanding
            if not jobs and not pins:
                return True
            now = time.monotonic()
            waited = now - started
            if not jobs and self._pins.only_refused and waited > patience_s:
                count = self._pins.let_go_of_refused()
                logger.warning(
                    "kvcr tier: gave %d pins back although a peer that hangs or died "
                    "may still read their blocks; it no longer takes them for valid",
                    count,
                )
                continue
            if give_up_after_s is not None and (
                waited > give_up_after_s or self._backend.closer.quiescent is False
            ):
                return False
            if now - warned >= _WAIT_WARNING_S:
                warned = now
                logger.warning(
                    "kvcr tier: waiting for %d jobs and %d pins for %.0f s (%s, %s)",
                    jobs,
                    pins,
                    waited,
                    self._health.state.value,
                    self._health.reason.label,
                )
            time.sleep(_POLL_INTERVAL_S)

    def _fail(self, error: BaseException) -> None:
        """KVCR can no longer be used. Native code may still run: see ``Closer``."""
        if not self._usable:
            return
        self._health.fail(error)
        self._give_up()
        self._backend.closer.start()

    def _give_up(self) -> None:
        """End what can be ended, and answer as if KVCR held nothing."""
        self._usable = False
        self._query = _misses
        self._transfers.abandon()
        self._pins.abandon()

    def _native_stopped(self) -> None:
        self._quarantine.native_stopped()
        self._transfers.native_stopped()
        self._pins.native_stopped()


def _misses(keys: Collection[bytes], request_id: str | None) -> list[Any]:
    """What KVCR would answer if it held nothing."""
    return [(QueryStatus.MISS, None) for _ in keys]
