# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Pins blocks in the primary tier while peers read them.

KVCR asks for pins through callbacks inside its poll, when vLLM's manager cannot be
called. So requests are queued, and ``serve`` answers them when the manager can be
called. One store job pins those of the blocks that are in the primary tier, and ends
when KVCR releases the pin.

Failure model: nothing raises. A request that fails gets an empty answer, and a job that
was already created for it ends as failed. While a block is on its way into the primary
tier, its request waits until KVCR gives up.
"""

import time
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable
from itertools import count
from typing import NamedTuple

from kvcr.types import BlockKey, PinHandle, PinRequestId, PinResult

from vllm.v1.kv_offload.base import LookupResult, OffloadKey, ReqContext
from vllm.v1.kv_offload.tiering.base import JobId, JobResult, ParentManager, TransferJob
from vllm.v1.kv_offload.tiering.kvcr.compat import shims
from vllm.v1.kv_offload.tiering.kvcr.keys import KeyCodec
from vllm.v1.kv_offload.tiering.kvcr.reports.losses import Losses, Lost
from vllm.v1.kv_offload.tiering.kvcr.reports.quarantine import Quarantine

MAX_KEYS_PER_SERVE = 2048
"""Bounds an engine step's time for peers; other requests wait for the next step."""
MAX_RETRIES_PER_SERVE = 16
"""Requests waiting for a block that are tried again in one step; others wait on."""

_Keys = tuple[BlockKey, ...]
_Requests = OrderedDict[PinRequestId, _Keys]


class _Pin(NamedTuple):
    job_id: JobId
    keys: frozenset[BlockKey]
    since: float


class Pins:
    """The pins that are requested, answered and held. Driven by one thread.

    Args:
        block_refs: Describes a chunk of the primary tier to KVCR.
        explain_foreign: Says in which fields a key of another namespace differs.
        uncounted: Whether results have a size of zero bytes, so that vLLM's
            backpressure does not mistake a pin that a peer holds for a slow store.
    """

    def __init__(
        self,
        codec: KeyCodec,
        block_refs: Callable[[int], shims.BlockRefs],
        losses: Losses,
        quarantine: Quarantine,
        explain_foreign: Callable[[BlockKey], str],
        *,
        request_prefix: str,
        uncounted: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._codec = codec
        self._block_refs = block_refs
        self._losses = losses
        self._quarantine = quarantine
        self._explain_foreign = explain_foreign
        self._request_prefix = request_prefix
        self._result_bytes = 0 if uncounted else None
        self._clock = clock
        self._ids = map(PinRequestId, count(1))
        self._asked: _Requests = OrderedDict()
        self._waiting: _Requests = OrderedDict()
        self._answers: list[tuple[PinRequestId, PinResult]] = []
        self._held: dict[PinHandle, _Pin] = {}
        self._refused: set[PinHandle] = set()
        # The thread that closes KVCR appends to it, too.
        self._results: deque[JobResult] = deque()

    @property
    def outstanding(self) -> int:
        """Pins whose job has not ended, because KVCR may still read their blocks."""
        return len(self._held)

    def oldest_age(self) -> float:
        """Seconds that the oldest of them is held."""
        oldest = next(iter(self._held.values()), None)
        return 0.0 if oldest is None else self._clock() - oldest.since

    @property
    def has_results(self) -> bool:
        return bool(self._results)

    @property
    def pending(self) -> bool:
        """Whether anything is requested, answered, held or to be reported."""
        return bool(
            self._asked or self._waiting or self._answers or self._held or self._results
        )

    # KVCR's callbacks.

    def request_pin(self, keys: Collection[BlockKey]) -> PinRequestId:
        request_id = next(self._ids)
        self._asked[request_id] = tuple(keys)
        return request_id

    def poll_pin_results(self) -> Iterable[tuple[PinRequestId, PinResult]]:
        answers, self._answers = self._answers, []
        return answers

    def cancel_pin_request(self, request_id: PinRequestId) -> None:
        """Forget a request. If it was answered before, KVCR releases the answer."""
        self._asked.pop(request_id, None)
        self._waiting.pop(request_id, None)

    def release_pin(self, handle: PinHandle) -> bool:
        """Release a pin; false while a write to a peer may still read its blocks."""
        pin = self._held.get(handle)
        if pin is None:
            return True
        if self._quarantine.may_read(pin.keys):
            self._refused.add(handle)
            return False
        self._let_go(handle, success=True)
        return True

    @property
    def only_refused(self) -> bool:
        """Whether only pins are held that KVCR wanted to release before it was safe."""
        return len(self._held) == len(self._refused)

    def let_go_of_refused(self) -> int:
        """Release pins although a write may still read their blocks, and count them.

        Nobody gets wrong bytes because of it: KVCR reports a source as uncertain only
        long after the peer has given up the same pull and no longer uses what arrives.
        """
        refused = list(self._refused)
        for handle in refused:
            self._let_go(handle, success=False)
        return len(refused)

    def take_results(self) -> list[JobResult]:
        return [self._results.popleft() for _ in range(len(self._results))]

    def serve(self, parent: ParentManager) -> bool:
        """Answer the requests that can be answered; true if KVCR has answers to take.

        The cost does not grow with the number of requests that wait.
        """
        budget = MAX_KEYS_PER_SERVE
        again = min(len(self._waiting), MAX_RETRIES_PER_SERVE)
        while (self._asked or again) and budget > 0:
            if self._asked:
                request_id, keys = self._asked.popitem(last=False)
            else:
                request_id, keys = self._waiting.popitem(last=False)
                again -= 1
            budget -= len(keys)
            if not self._answer(parent, request_id, keys):
                self._waiting[request_id] = keys
        return bool(self._answers)

    def abandon(self) -> None:
        """Forget all requests: KVCR is gone, so nobody waits for answers."""
        self._asked.clear()
        self._waiting.clear()
        self._answers.clear()

    def native_stopped(self) -> None:
        """Release every pin: native code has let go. Tell the quarantine first."""
        for handle in list(self._held):
            self.release_pin(handle)

    def _answer(
        self, parent: ParentManager, request_id: PinRequestId, keys: _Keys
    ) -> bool:
        """Pin the blocks that are there; false if it has to wait for one on its way."""
        context = ReqContext(req_id=f"{self._request_prefix}{request_id}")
        job: TransferJob | None = None
        answer: PinResult = None
        try:
            try:
                parent.on_new_request(context)
                present = self._look_up(parent, keys, context)
                if present is None:
                    return False
                if present:
                    job = parent.create_store_job(list(present.values()), context)
                    chunks = dict(zip(present, job.chunk_ids.tolist(), strict=True))
                    refs = {k: self._block_refs(i) for k, i in chunks.items()}
            finally:
                parent.on_request_finished(context)
        except Exception as error:
            self._losses.add(Lost.PIN_FAILED, len(keys), repr(error))
            if job is not None:
                self._end(job.job_id, success=False)
        else:
            if job is not None:
                handle = f"kvcr-job-{job.job_id}"
                answer = handle, {key: refs.get(key) for key in keys}
                self._held[handle] = _Pin(job.job_id, frozenset(refs), self._clock())
        self._answers.append((request_id, answer))
        return True

    def _look_up(
        self, parent: ParentManager, keys: _Keys, context: ReqContext
    ) -> dict[BlockKey, OffloadKey] | None:
        """The keys that are there; ``None`` while one of them is on its way."""
        present: dict[BlockKey, OffloadKey] = {}
        foreign: list[BlockKey] = []
        missing = 0
        on_its_way = False
        for key in keys:
            offload_key = self._codec.offload_key(key)
            if offload_key is None:
                foreign.append(key)
                continue
            result = parent.lookup(offload_key, context)
            if result is LookupResult.HIT:
                present[key] = offload_key
            elif result is LookupResult.MISS:
                missing += 1
            else:
                on_its_way = True
        if on_its_way:
            return None
        if foreign:
            differs = f"differs in {self._explain_foreign(foreign[0])}"
            self._losses.add(Lost.FOREIGN, len(foreign), differs)
        if missing:
            self._losses.add(Lost.NOT_PINNED, missing)
        return present

    def _let_go(self, handle: PinHandle, *, success: bool) -> None:
        self._refused.discard(handle)
        self._end(self._held.pop(handle).job_id, success=success)

    def _end(self, job_id: JobId, *, success: bool) -> None:
        self._results.append(
            shims.job_result(job_id, success, transfer_bytes=self._result_bytes)
        )
