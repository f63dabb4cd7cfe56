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
from collections.abc import Collection, Iterable, Mapping
from itertools import islice
from typing import TYPE_CHECKING, Any, ClassVar

# First: where kvcr is absent, this says what to install.
from vllm.v1.kv_offload.tiering.kvcr.compat import shims

# isort: split
import numpy as np
from kvcr import KVCR, KVCRBindings
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
from vllm.v1.kv_offload.tiering.kvcr.backend import (
    files,
    preflight,
    setup,
    start_errors,
    waiting,
)
from vllm.v1.kv_offload.tiering.kvcr.backend.closing import Closer
from vllm.v1.kv_offload.tiering.kvcr.backend.policy import choose_policy
from vllm.v1.kv_offload.tiering.kvcr.backend.pool import PoolMemory
from vllm.v1.kv_offload.tiering.kvcr.compat.environment import check_environment
from vllm.v1.kv_offload.tiering.kvcr.compat.vocabulary import LOOKUPS
from vllm.v1.kv_offload.tiering.kvcr.config import (
    parse_options,
    telemetry_enabled,
)
from vllm.v1.kv_offload.tiering.kvcr.decline import StoreDecliner
from vllm.v1.kv_offload.tiering.kvcr.keys import KeyCodec
from vllm.v1.kv_offload.tiering.kvcr.namespace import Namespace, make_namespace
from vllm.v1.kv_offload.tiering.kvcr.peers.hints import Hints, own_endpoints
from vllm.v1.kv_offload.tiering.kvcr.peers.liveness import Peers
from vllm.v1.kv_offload.tiering.kvcr.peers.pins import Pins
from vllm.v1.kv_offload.tiering.kvcr.reports.events import Inventory
from vllm.v1.kv_offload.tiering.kvcr.reports.health import Health, Reason
from vllm.v1.kv_offload.tiering.kvcr.reports.metrics import (
    KvcrStats,
    Losses,
    Lost,
    add_own,
    definitions,
)
from vllm.v1.kv_offload.tiering.kvcr.reports.quarantine import Resilience
from vllm.v1.kv_offload.tiering.kvcr.transfers.backoff import Backoff
from vllm.v1.kv_offload.tiering.kvcr.transfers.checksums import BlockSums
from vllm.v1.kv_offload.tiering.kvcr.transfers.transfers import Transfers

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
        OffloadingConnectorStats,
    )
    from vllm.v1.kv_offload.base import OffloadingSpec

logger = init_logger(__name__)

_RETAINED_NATIVE_BUFFERS: list[Any] = []
"""What native code may still touch, kept mapped until the process ends."""

_DECLINER = StoreDecliner()
_POLL_INTERVAL_S = 0.001
_WAIT_WARNING_S = 5.0
_MAX_TOUCHED = 4096  # about 10 ms; a prefix is evicted from its end
_LONGEST_DRAIN_S = 30.0
_CLOSE_TIMEOUT_S = 20.0  # KVCR gives its operations 5 s and its thread 10 s

# Looking an enum's member up costs a tenth of a lookup.
_HIT, _MISS = QueryStatus.HIT, QueryStatus.MISS
_FETCHABLE, _REMOTE = QueryStatus.FETCHABLE, CacheTier.REMOTE_G2
_LOOKUP_HIT, _LOOKUP_MISS = LookupResult.HIT, LookupResult.MISS


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
        warning = setup.check_events(config, events)
        if warning is not None:
            logger.warning("kvcr tier: %s", warning)
        if config.kvcr_service_socket_path is not None and config.has_own_pool:
            logger.warning(
                "kvcr tier: the service's pool is used; secondary_g2_slots and "
                "secondary_g2_bytes are ignored"
            )
        port = config.control_port(local_rank)
        namespace = make_namespace(config.namespace, offloading_spec, primary.row_bytes)
        guard = setup.guard_config(config, local_rank, namespace)
        policy = choose_policy(config.policy, has_files=config.g3 is not None)

        agent = f"vllm-{uuid.uuid4().hex}"
        block_refs = shims.block_refs_factory(agent, primary.address, primary.row_bytes)
        codec = KeyCodec(namespace.prefix)
        self._prefix = namespace.prefix
        self._health = Health()
        self._losses = Losses()
        self._inventory = Inventory(codec, self.locality)
        self._pins = self._make_pins(codec, namespace, block_refs, agent)
        # Counted here and not in ``Losses``: a miss is as frequent as a lookup.
        self._missed = self._missed_hinted = 0
        self._resilience = Resilience(self._health, self._pins, config.serves_peers)
        self._shut_down = False
        self._usable = True
        publishes = config.owns_inventory and events.enable_kv_cache_events

        slots, option = setup.pool_slots(config, primary)
        self._pool: PoolMemory | None = None
        channel: Any | None = None
        advertised = setup.advertise_host(config)
        config, made_files = preflight.check(
            KVCR, config, options, primary, port, events.enable_kv_cache_events
        )
        self._config = config
        try:
            pool = None
            if slots:
                self._pool = PoolMemory(
                    mmap.mmap, slots * primary.row_bytes, option, config.populate_pool
                )
                pool = (self._pool.address, self._pool.size)
            if port is not None:
                channel = ZmqPeerControlChannel(config.control_host, port, advertised)
            bindings = KVCRBindings(
                request_pin=self._pins.request_pin,
                poll_pin_results=self._pins.poll_pin_results,
                release_pin=self._pins.release_pin,
                cancel_pin_request=self._pins.cancel_pin_request,
                framework_control=channel,
                key_adapter=codec,
                inventory_sink=self._inventory.report if publishes else None,
                stats_factory=KvcrStats if config.enable_telemetry else None,
                policy=policy,
                on_resilience_event=self._resilience.report,
            )
            with waiting.told(setup.what_answers(guard)):
                self._kvcr = KVCR(
                    setup.kvcr_config(config, primary, agent),
                    bindings,
                    setup.backend_configs(config, primary, pool),
                    guard,
                )
        except BaseException as error:
            self._undo_start(error, channel)
            files.remove(made_files)
            refused = start_errors.explain(error, config, primary, guard)
            if refused is not None:
                raise refused from error
            raise

        if guard is not None:
            slots = (shims.service_pool_bytes(self._kvcr) or 0) // primary.row_bytes

        logger.info("kvcr tier: %s", shims.describe_start())
        peers = Peers()
        self._backoff = Backoff()
        endpoints = None
        if port is not None:
            endpoints = own_endpoints(config.control_host, advertised, port)
        self._hints = Hints(
            self._kvcr,
            peers,
            self._losses,
            endpoints,
            setup.max_pull_blocks(config, primary),
            self._fail,
        )
        self._hinted = self._hints.requests
        sums: BlockSums | None = None
        if config.g3 is not None and config.verify_blocks:
            known = 2 * (slots + setup.g3_slots(config, primary))
            rows = np.asarray(primary_kv_view)
            sums = BlockSums(rows, known, strict=guard is None)
        self._transfers = Transfers(
            self._kvcr,
            block_refs,
            namespace.prefix,
            setup.limits_of(config, primary, slots),
            self._hints,
            peers,
            self._backoff,
            self._losses,
            self._fail,
            has_files=config.g3 is not None,
            peers_land_in_pool=config.remote_landing == "pool",
            sums=sums,
            block_bytes=primary.row_bytes if config.enable_telemetry else None,
        )
        self._resilience.transfers = self._transfers
        self._closer = Closer(self._kvcr)
        self._query: Any = self._kvcr.query
        self._align = getattr(self._kvcr, "align_sequence", None)
        if not config.has_own_storage:
            self._align = None
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
            self._missed += 1
            if self._hinted and request_id in self._hinted:
                self._missed_hinted += 1
            return _LOOKUP_MISS
        if self._backoff.active and self._backoff.blocks(key, request_id):
            self._losses.add(Lost.BACKING_OFF)
            return _LOOKUP_MISS
        if status is _HIT:
            return _LOOKUP_HIT
        if tier is _REMOTE and status is _FETCHABLE:
            return self._look_up_remote(request_id)
        return LOOKUPS.get(status, _LOOKUP_MISS)

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        if self._usable:
            self._hints.accept(req_context)
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: ReqContext) -> None:
        self._hints.finish(req_context.req_id)
        self._backoff.finish(req_context.req_id)

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        if self._align is None or not self._usable:
            return
        prefix = self._prefix
        first = islice(keys, _MAX_TOUCHED)
        try:
            self._align([prefix + key for key in first], True)
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
            self._submit(self._transfers.submit_store, job_metadata)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        self._poll()
        results = self._transfers.take_results()
        if self._pins.has_results:
            results = [*results, *self._pins.take_results()]
        return results

    def has_pending_work(self) -> bool:
        return bool(
            self._transfers.outstanding
            or self._transfers.has_results
            or self._pins.pending
            or self._inventory.pending
            or (self._steps_for_peers and self._usable)
        )

    @property
    def bp_detector(self) -> Any | None:
        given = getattr(self, "_bp_detector", None)
        if given is None and not (self._usable and self._config.has_own_storage):
            return _DECLINER
        return given

    # --- peers -----------------------------------------------------------------------

    def serve_external_requests(self, parent: ParentManager) -> None:
        if not self._usable:
            return
        if self._pins.serve(parent):
            # KVCR takes the answers now, not in the next step.
            self._poll()

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        self._losses.log()

    # --- reports ---------------------------------------------------------------------

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
        self._losses.add_misses(self._missed, self._missed_hinted)
        self._missed = self._missed_hinted = 0
        return add_own(stats, self._losses, self._health.take_changes())

    # --- the end ---------------------------------------------------------------------

    def drain_jobs(self) -> None:
        self._drain(None)

    def shutdown(self) -> None:
        if self._shut_down:
            return
        self._drain(min(2 * self._config.abandon_timeout / 1000, _LONGEST_DRAIN_S))
        self._shut_down = True
        self._usable = False
        self._query = _misses
        self._transfers.abandon()
        self._pins.abandon()
        free = self._closer.wait(_CLOSE_TIMEOUT_S)
        self._transfers.close()
        if free:
            self._transfers.native_stopped()
            self._pins.native_stopped()
            if self._pool is not None:
                self._pool.free()
        else:
            self._retain_buffers()
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
            lambda key: namespace.difference(key, size),
            request_prefix=f"kvcr-pin-{agent}-",
            uncounted=getattr(self, "_bp_detector", None) is not None,
        )

    def _look_up_remote(self, request_id: str) -> LookupResult:
        """A hinted peer may have it; whether it is worth asking is said here."""
        landings = self._transfers.landings
        if self._hints.peer_is_down(request_id):
            reason = Lost.PEER_DOWN
        elif landings is not None and landings.room <= 0:
            reason = Lost.LANDING_FULL
        elif not self._hints.claim_pull(request_id):
            reason = Lost.PULL_LIMIT
        else:
            return LookupResult.HIT
        self._losses.add(reason)
        return LookupResult.MISS

    def _submit(self, submit: Any, job_metadata: TransferJob) -> None:
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
            if self._closer.quiescent:
                self._transfers.native_stopped()
                self._pins.native_stopped()
            return
        try:
            for handle, entries in self._kvcr.poll_completed():
                self._transfers.complete(handle, entries)
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
                waited > give_up_after_s or self._closer.quiescent is False
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
        self._usable = False
        self._health.fail(error)
        self._query = _misses
        self._transfers.abandon()
        self._pins.abandon()
        self._closer.start()

    def _undo_start(self, error: BaseException, channel: Any | None) -> None:
        """After a failed start: close what was opened, or keep what must be kept."""
        native_alive = shims.native_alive_after(error) or not isinstance(
            error, Exception
        )
        if native_alive:
            self._retain_buffers()
            return
        if channel is not None:
            channel.close()
        if self._pool is not None:
            self._pool.free()
            self._pool = None

    def _retain_buffers(self) -> None:
        # Not the view, which vLLM releases, but what it is a view of.
        _RETAINED_NATIVE_BUFFERS.append(self._primary_kv_view.obj)
        if self._pool is not None:
            _RETAINED_NATIVE_BUFFERS.append(self._pool.buffer)


def _misses(keys: Collection[bytes], request_id: str | None) -> list[Any]:
    """What KVCR would answer if it held nothing."""
    return [(QueryStatus.MISS, None) for _ in keys]
