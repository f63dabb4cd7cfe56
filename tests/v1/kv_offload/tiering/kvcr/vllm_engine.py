# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""vLLM's own offloading manager over kvcr tiers, stepped as a scheduler would."""

import dataclasses
import uuid
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from tests.v1.kv_offload.tiering.kvcr.rig import ROW_BYTES, samples, wait_until
from vllm.v1.kv_offload.base import (
    LookupResult,
    OffloadKey,
    ReqContext,
    ScheduleEndContext,
)
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

Tier = dict[str, Any]

UNDECIDED = (LookupResult.HIT_PENDING, LookupResult.RETRY)
END_OF_STEP = ScheduleEndContext([], [])

ONE_RANK: dict[str, object] = {
    "rank": 0,
    "world_size": 1,
    "tp_size": 1,
    "pp_size": 1,
    "pcp_size": 1,
    "dcp_size": 1,
    "data_parallel_index": 0,
    "data_parallel_size": 1,
    "data_parallel_rank_local": None,
    "is_parallelism_agnostic": False,
}


def offloading_config(tiers: Sequence[Tier], chunks: int, events: bool) -> Any:
    return _with_known_fields(
        OffloadingConfig,
        groups=(OffloadingGroupConfig(16, ("layer",), 0),),
        worker_kv_bytes_per_block=ROW_BYTES,
        enable_kv_cache_events=events,
        extra_config={
            "cpu_bytes_to_use": chunks * ROW_BYTES,
            "secondary_tiers": [{"type": "kvcr", **tier} for tier in tiers],
            "self_describing_kv_events": events,
        },
        engine_id=f"test-{uuid.uuid4()}",
        model=OffloadingModelConfig(name="org/model", dtype="bfloat16"),
        cache=OffloadingCacheConfig(tokens_per_hash=16, blocks_per_chunk=1),
        parallel=_with_known_fields(OffloadingParallelConfig, **ONE_RANK),
    )


def _with_known_fields(kind: Any, **values: Any) -> Any:
    known = {field.name for field in dataclasses.fields(kind)}
    return kind(**{name: value for name, value in values.items() if name in known})


class _Held:
    """The manager's lock, where it has one, for the one thread that schedules."""

    def __init__(self, lock: Any | None) -> None:
        self._lock = lock
        self._depth = 0

    def __enter__(self) -> None:
        if self._lock is not None and not self._depth:
            self._lock.acquire()
        self._depth += 1

    def __exit__(self, *raised: object) -> None:
        self._depth -= 1
        if self._lock is not None and not self._depth:
            self._lock.release()


class Engine:
    """A primary tier of a few chunks, kvcr tiers below it, and the scheduler's part.

    What a GPU would hold is a dictionary here: ``put`` offloads blocks, ``get`` has
    them loaded and returns their bytes. Whoever calls ``manager`` or a tier directly
    holds ``lock``.
    """

    def __init__(self, *tiers: Tier, chunks: int = 8, events: bool = False) -> None:
        self.spec = TieringOffloadingSpec(offloading_config(tiers, chunks, events))
        self.manager: Any = self.spec.get_manager()
        self.lock = _Held(getattr(self.manager, "lock", None))
        self.tiers = self.manager.secondary_tiers
        self.memory = np.asarray(self.manager.primary_tier.get_kv_memoryview())
        self.memory = self.memory.view(np.uint8)

    def begin(self, context: ReqContext) -> ReqContext:
        with self.lock:
            self.manager.on_new_request(context)
        return context

    def end(self, context: ReqContext) -> None:
        with self.lock:
            self.manager.on_request_finished(context)

    def step(self) -> None:
        with self.lock:
            self.manager.on_schedule_end(END_OF_STEP)

    def settle(self) -> None:
        """Step until no job is under way."""

        def idle() -> bool:
            self.step()
            return not self.manager._transfer_jobs

        wait_until(idle, "idleness")

    def put(self, context: ReqContext, blocks: dict[OffloadKey, np.ndarray]) -> None:
        """Offload blocks; those that the primary tier has already are left alone."""
        with self.lock:
            output = self.manager.prepare_store(list(blocks), context)
            assert output is not None, "the primary tier is full"
            chunks = output.store_spec.chunk_ids.tolist()
            for each, chunk in zip(output.keys_to_store, chunks, strict=True):
                self.memory[chunk] = blocks[each]
            if output.keys_to_store:
                self.manager.complete_store(output.keys_to_store, context)

    def ask(self, context: ReqContext, wanted: Iterable[OffloadKey]) -> list[Any]:
        """Look blocks up once, as one step does."""
        with self.lock:
            return [self.manager.lookup(each, context) for each in wanted]

    def look_up(self, context: ReqContext, wanted: Iterable[OffloadKey]) -> list[Any]:
        """Step until it is decided which blocks can be had: hits and misses."""
        chosen = list(wanted)

        def decided() -> list[Any]:
            results = self.ask(context, chosen)
            self.step()
            return [] if set(results) & set(UNDECIDED) else results

        return wait_until(decided, "lookups") if chosen else []

    def get(
        self, context: ReqContext, wanted: Sequence[OffloadKey]
    ) -> dict[OffloadKey, np.ndarray]:
        """The blocks that can be had, promoted to the primary tier if need be."""
        results = self.look_up(context, wanted)
        with self.lock:
            answers = zip(wanted, results, strict=True)
            found = [each for each, result in answers if result is LookupResult.HIT]
            if not found:
                return {}
            chunks = self.manager.prepare_load(found, context).chunk_ids.tolist()
            contents = dict(zip(found, self.memory[chunks], strict=True))
            self.manager.complete_load(found, context)
        return contents

    def stats(self) -> dict[str, dict[tuple[str, ...], Any]]:
        with self.lock:
            return samples(self.manager.get_stats())

    def events(self) -> list[Any]:
        with self.lock:
            return list(self.manager.take_events())

    def shutdown(self) -> None:
        del self.memory
        self.manager.shutdown()
