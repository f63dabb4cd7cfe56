# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The kvcr tier: vLLM's secondary-tier protocol on top of KVCR.

Threading: every method runs on the thread that drives vLLM's offloading manager, or
under that manager's lock. KVCR's callbacks run inside the calls made here, except
while KVCR closes after a failure, when nothing calls it any more.

Failure model: the constructor raises and leaves nothing half-open behind. Afterwards
no exception leaves a method: it becomes a miss, a failed job, a counter and one log
line, and the engine recomputes.
"""

import mmap
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

# Imported first: if kvcr is absent, this says what to install.
from vllm.v1.kv_offload.tiering.kvcr.compat import shims

# isort: split
from kvcr import KVCR
from kvcr.control_channels import ZmqPeerControlChannel
from kvcr.types import CacheTier, QueryStatus

from vllm.logger import init_logger
from vllm.v1.kv_offload.base import (
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
from vllm.v1.kv_offload.tiering.kvcr.assembly import Assembly
from vllm.v1.kv_offload.tiering.kvcr.backend.start import Natives
from vllm.v1.kv_offload.tiering.kvcr.compat.environment import check_environment
from vllm.v1.kv_offload.tiering.kvcr.compat.vocabulary import LOOKUPS
from vllm.v1.kv_offload.tiering.kvcr.config import telemetry_enabled
from vllm.v1.kv_offload.tiering.kvcr.draining import wait_until_unused
from vllm.v1.kv_offload.tiering.kvcr.peers.liveness import FILES
from vllm.v1.kv_offload.tiering.kvcr.reports.health import Reason
from vllm.v1.kv_offload.tiering.kvcr.reports.losses import Lost
from vllm.v1.kv_offload.tiering.kvcr.reports.metrics import definitions
from vllm.v1.kv_offload.tiering.kvcr.reports.traffic import DISK, PEER, PLACES

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
        OffloadingConnectorStats,
    )
    from vllm.v1.kv_offload.base import OffloadingSpec

logger = init_logger(__name__)

_RETAINED_NATIVE_BUFFERS: list[Any] = []
"""Buffers that native code may still touch; kept mapped until the process ends."""

# Whatever can finish has finished by then, and a container that is being stopped does
# not get much more time.
_LONGEST_DRAIN_S = 10.0

_REST_S = 0.01
"""How long KVCR is not polled while nothing is in progress. vLLM's thread asks every
millisecond, and a poll takes some 30 µs on a processor that was asleep."""
_ATTENTIVE_S = 0.05
"""How long there is no rest after a peer's message. Must exceed the time that KVCR's
thread needs to read it and to queue what it asks for."""

# Bound to names here, since accessing an enum's member takes a tenth of a whole lookup.
_HIT, _MISS = QueryStatus.HIT, QueryStatus.MISS
_FETCHABLE, _FETCHING = QueryStatus.FETCHABLE, QueryStatus.FETCHING
_REMOTE = CacheTier.REMOTE_G2
_LOOKUP_HIT, _LOOKUP_MISS = LookupResult.HIT, LookupResult.MISS
_HIT_SOURCES = dict(zip(PLACES, shims.HIT_SOURCES, strict=True))


class KVCRSecondaryTierManager(SecondaryTierManager):
    """KVCR as a secondary tier.

    Args:
        offloading_spec: vLLM's offloading spec. It may be partial; see ``keys``.
        primary_kv_view: The primary tier, shape ``(num_chunks, row_stride_bytes)``.
        tier_type: The name that the tier is registered by.
        backpressure_detector: vLLM's, made from the option ``backpressure``.
        options: The tier's options; see ``config.TierConfig``.

    Raises:
        ValueError, TypeError: an option, or the primary view, cannot be used.
        RuntimeError: KVCR or NIXL could not start.
    """

    # True on each tier that gains from being polled between two steps.
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
        parts = Assembly(
            Natives(KVCR, ZmqPeerControlChannel, mmap.mmap, _RETAINED_NATIVE_BUFFERS),
            offloading_spec,
            primary_kv_view,
            options,
            uncounted_pins=getattr(self, "_bp_detector", None) is not None,
        )
        self._config = config = parts.config
        self.locality = parts.locality
        self._primary_base_addr = parts.primary.address
        self._primary_row_stride = parts.primary.row_bytes
        self._prefix = parts.prefix
        self._backend = parts.backend
        self._kvcr = parts.kvcr
        self._health = parts.health
        self._losses = parts.losses
        self._traffic = parts.traffic
        self._report = parts.report
        self._idle_reports = parts.idle_reports
        self._quarantine = parts.quarantine
        self._inventory = parts.inventory
        self._disk = parts.disk
        self._pins = parts.pins
        self._backoff = parts.backoff
        self._hints = parts.hints
        self._hinted = parts.hints.requests
        self._staging = parts.staging
        self._results = parts.results
        self._transfers = parts.transfers
        self._recency = parts.recency
        self._query: Any = self._kvcr.query
        self._usable = True
        self._shut_down = False
        self._rests_until = 0.0
        self._channel = parts.backend.peer_channel
        # If nothing can wake a sleeping engine for a peer, the engine must not sleep.
        self._steps_for_peers = config.serves_peers and not shims.HAS_TIER_POLL_THREAD
        # Peers wait for answers. Stores wait for KVCR, which makes room in a full pool
        # by writing blocks to files, one block a poll.
        if config.serves_peers or config.g3 is not None:
            self.tolerates_off_thread_polling = True  # type: ignore[misc]

    # --- lookups and requests --------------------------------------------------------

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        request_id = req_context.req_id
        try:
            ((status, tier),) = self._query((self._prefix + key,), request_id)
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
            self._traffic.dram_hits += 1
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
            self._guarded(self._hints.accept, req_context)
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: ReqContext) -> None:
        self._backoff.finish(req_context.req_id)
        self._guarded(self._hints.finish, req_context.req_id)

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        if self._recency is not None and self._usable:
            self._guarded(self._recency.used, keys)

    # --- transfers -------------------------------------------------------------------

    def submit_load(self, job_metadata: TransferJob) -> None:
        self._rests_until = 0.0
        if not self._usable:
            self._results.answer(job_metadata, success=False)
        else:
            self._submit(self._transfers.submit_load, job_metadata)

    def submit_store(self, job_metadata: TransferJob) -> None:
        self._rests_until = 0.0
        if not self._usable:
            self._results.answer(job_metadata, success=False)
        elif not self._config.has_own_storage:
            self._results.answer(job_metadata, success=True)
        else:
            if self._recency is not None:
                self._recency.stored(len(job_metadata.keys))
            self._submit(self._transfers.submit_store, job_metadata)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        if self._rests_until and self._may_rest():
            return ()
        self._poll()
        self._idle_reports.poll()
        results = self._results.take()
        if self._pins.has_results:
            results = [*results, *self._pins.take_results()]
        return results

    def has_pending_work(self) -> bool:
        return bool(
            self._results.outstanding
            or self._results
            or self._staging.introducing
            or self._pins.pending
            or self._inventory.pending
            or self._idle_reports.due
            or (self._steps_for_peers and self._usable)
        )

    # --- peers -----------------------------------------------------------------------

    def serve_external_requests(self, parent: ParentManager) -> None:
        if self._usable and self._pins.serve(parent):
            # So that KVCR takes the answers now and not in the next step.
            self._poll()

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        if self._staging.has_wanted:
            # Start the introduction now: the request that wants it, and carries the
            # hint, may end with this step.
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
        return tuple(shims.config_info())

    def config_info(self) -> Mapping[str, str]:
        return shims.config_info()

    def get_stats(self) -> "OffloadingConnectorStats | None":
        if not self._config.enable_telemetry:
            return None
        stats: Any | None = None
        try:
            stats = self._kvcr.get_stats() if self._usable else None
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

    def _look_up_elsewhere(
        self, key: OffloadKey, request_id: str, tier: CacheTier | None
    ) -> LookupResult:
        """Decide whether to ask a hinted peer, or a file, which may have the block."""
        block_key = self._prefix + key
        if tier is _REMOTE:
            place, reason = PEER, self._why_not_at_peer(key, block_key, request_id)
        else:
            place = DISK
            reason = self._staging.why_not(FILES, block_key, request_id)
        if reason is not None:
            return self._refuse(reason)
        self._traffic.hit_elsewhere(place)
        return _LOOKUP_HIT

    def _why_not_at_peer(
        self, key: OffloadKey, block_key: bytes, request_id: str
    ) -> Lost | None:
        source = self._hints.endpoint(request_id)
        if source is None:
            return None
        reason = self._hints.why_not(request_id) or self._staging.why_not(
            source, block_key, request_id
        )
        if reason is None and not self._hints.claim_pull(request_id, key):
            return Lost.PULL_LIMIT
        return reason

    def _refuse(self, reason: Lost) -> LookupResult:
        """Count a block that is somewhere, and is a miss all the same."""
        self._traffic.refused += 1
        self._losses.add(reason)
        return _LOOKUP_MISS

    def _submit(
        self, submit: Callable[[TransferJob], None], job_metadata: TransferJob
    ) -> None:
        failed = not self._guarded(submit, job_metadata)
        if failed and not self._results.knows(job_metadata.job_id):
            self._results.answer(job_metadata, success=False)

    def _guarded(self, call: Callable[..., None], *arguments: object) -> bool:
        """Make a call that may call KVCR; false, and the tier has failed, if it raises.

        Calls on the hot path are guarded where they are made.
        """
        try:
            call(*arguments)
        except Exception as error:
            self._fail(error)
            return False
        return True

    def _may_rest(self) -> bool:
        channel, now = self._channel, time.monotonic()
        quiet = channel is None or now - channel.heard_at > _ATTENTIVE_S
        return quiet and now < self._rests_until

    def _rest(self) -> None:
        """Poll less often until a job or a peer's message arrives, if none is here."""
        # A stand-in for the channel cannot tell of messages.
        deaf = self._channel is None and self._config.serves_peers
        busy = (
            deaf
            or self._results.outstanding
            or self._results
            or self._staging.busy
            or self._pins.pending
        )
        self._rests_until = 0.0 if busy else time.monotonic() + _REST_S

    def _poll(self) -> None:
        """Take what KVCR has finished, and start whatever there is room for."""
        if self._shut_down:
            return
        if not self._usable:
            if self._backend.quiescent:
                self._native_stopped()
            return
        transfers = self._transfers
        try:
            for handle, entries in self._kvcr.poll_completed():
                # Guarded on its own: if one fails, none of the others are lost.
                try:
                    transfers.complete(handle, entries)
                except Exception as error:
                    self._fail(error)
            if not self._usable:
                return
            if self._disk is not None and self._disk.unjudged:
                self._disk.judge(stores_time_out=transfers.stores_time_out())
            transfers.pump()
        except Exception as error:
            self._fail(error)
        if transfers.corrupt and self._config.serves_peers:
            blocks, transfers.corrupt = transfers.corrupt, 0
            detail = f"{blocks} blocks read from g3 files are damaged"
            self._health.degrade(Reason.CORRUPT_BLOCKS, detail)
        self._rest()

    def _drain(self, give_up_after_s: float | None) -> bool:
        return wait_until_unused(
            self._poll,
            results=self._results,
            pins=self._pins,
            health=self._health,
            backend=self._backend,
            patience_s=self._config.abandon_timeout / 1000,
            give_up_after_s=give_up_after_s,
        )

    def _fail(self, error: BaseException) -> None:
        """Stop using KVCR for good. Its native code may still run; see ``Backend``."""
        if not self._usable:
            return
        self._health.fail(error)
        self._give_up()
        self._backend.start_closing()

    def _give_up(self) -> None:
        """End whatever can be ended, and answer as if KVCR held nothing."""
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
