# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""One end of the loopback transfer: a process with a primary tier and a real kvcr tier.

The source holds blocks and keeps stepping, so that they can be pulled. The receiver
pulls them like a hinted request, and compares every byte.
"""

import mmap
import select
import sys
import time
from collections.abc import Collection, Iterable
from types import SimpleNamespace
from typing import Any

from vllm_kvcr.doctor.child import answer, arguments
from vllm_kvcr.plugin import register
from vllm_kvcr.ports import LOCALHOST

register()

import numpy as np  # noqa: E402

from vllm.v1.core.kv_cache_utils import (  # noqa: E402
    BlockHash,
    maybe_convert_block_hash,
)
from vllm.v1.kv_offload.base import (  # noqa: E402
    LookupResult,
    OffloadingKVEventsConfig,
    OffloadKey,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
    get_offload_block_hash,
    make_offload_key,
)
from vllm.v1.kv_offload.tiering.base import ParentManager, TransferJob  # noqa: E402
from vllm.v1.kv_offload.tiering.kvcr.manager import (  # noqa: E402
    KVCRSecondaryTierManager,
)

_FIRST_CONTACT_S = 30.0
_STEP_S = 0.0002


def key(number: int) -> OffloadKey:
    return make_offload_key(number.to_bytes(32, "big"), 0)


def contents(number: int, size: int) -> np.ndarray:
    """The bytes of block ``number``, which differ between blocks and positions."""
    return np.random.default_rng(number).integers(0, 256, size, np.uint8)


class End(ParentManager):
    """The part of a primary tier that a secondary tier uses."""

    def __init__(self, rows: int, row_bytes: int, options: dict[str, Any]) -> None:
        pages = mmap.mmap(-1, rows * row_bytes)
        whole: np.ndarray = np.frombuffer(pages, np.uint8)
        self.memory = whole.reshape(rows, row_bytes)
        self.memory.fill(1)  # backed by real pages from the start
        self.held: dict[OffloadKey, int] = {}
        self._jobs = 0
        spec: Any = SimpleNamespace(
            config=SimpleNamespace(
                parallel=SimpleNamespace(data_parallel_rank_local=None)
            ),
            kv_events_config=OffloadingKVEventsConfig(False, False),
        )
        view: Any = self.memory  # mypy does not know that this is a buffer
        self.tier = KVCRSecondaryTierManager(
            spec, memoryview(view), "kvcr", None, **options
        )

    def job(
        self, keys: Collection[OffloadKey], rows: list[int], context: ReqContext
    ) -> TransferJob:
        self._jobs += 1
        return TransferJob(
            job_id=self._jobs,
            keys=list(keys),
            chunk_ids=np.array(rows, np.int32),
            is_promotion=not self.held,
            req_context=context,
        )

    def step(self) -> list[Any]:
        results = list(self.tier.get_finished_jobs())
        self.tier.serve_external_requests(self)
        self.tier.on_schedule_end(
            ScheduleEndContext(new_req_ids=(), preempted_req_ids=())
        )
        return results

    # --- ParentManager ---------------------------------------------------------------

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        return RequestOffloadingContext()

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        return LookupResult.HIT if key in self.held else LookupResult.MISS

    def create_store_job(
        self, keys: Collection[OffloadKey], req_context: ReqContext
    ) -> TransferJob:
        return self.job(keys, [self.held[key] for key in keys], req_context)

    def on_request_finished(self, req_context: ReqContext) -> None:
        pass


def hint(port: int, keys: Iterable[OffloadKey]) -> dict[str, Any]:
    hashes = [
        maybe_convert_block_hash(BlockHash(get_offload_block_hash(key))) for key in keys
    ]
    action = {
        "action_id": "loopback",
        "action_type": "kv.fetch",
        "action_version": "1.0",
        "payload": {
            "source_control_endpoint": f"tcp://{LOCALHOST}:{port}",
            "block_hashes": hashes,
        },
    }
    return {"protocol_version": "0.1", "message_id": "loopback", "actions": [action]}


def serve(end: End) -> None:
    """Hold blocks until standard input closes."""
    for number, row in enumerate(end.memory):
        row[:] = contents(number, row.nbytes)
        end.held[key(number)] = number
    answer("ready")
    while not select.select([sys.stdin], [], [], 0)[0]:
        end.step()
        time.sleep(_STEP_S)


def pull(end: End, port: int, numbers: range) -> dict[str, Any]:
    """Run one request that is hinted at the source, and measure what arrives."""
    keys = [key(number) for number in numbers]
    # The first request only causes the first contact; a later one is served.
    deadline = time.monotonic() + _FIRST_CONTACT_S
    while True:
        context = ReqContext(
            req_id=f"loopback-{numbers.start}",
            kv_transfer_params={"kv_hint": hint(port, keys)},
        )
        end.tier.on_new_request(context)
        found = [k for k in keys if end.tier.lookup(k, context) is LookupResult.HIT]
        if found or time.monotonic() >= deadline:
            break
        end.step()
        end.tier.on_request_finished(context)
        time.sleep(_STEP_S)
    seconds, arrived = 0.0, 0
    if found:
        started = time.perf_counter()
        end.tier.submit_load(end.job(found, list(range(len(found))), context))
        while not (results := end.step()):
            time.sleep(_STEP_S)
        seconds = time.perf_counter() - started
        whole = results[0].success
        successful = set(found if whole else results[0].successful_keys or ())
        arrived = len(successful)
    size = end.memory.shape[1]
    wrong = sum(
        not np.array_equal(end.memory[row], contents(number, size))
        for row, number in enumerate(numbers)
        if found and key(number) in successful
    )
    end.tier.on_request_finished(context)
    return {
        "asked": len(keys),
        "found": len(found),
        "arrived": arrived,
        "wrong": wrong,
        "bytes": arrived * size,
        "seconds": seconds,
    }


def receive(end: End, port: int) -> None:
    """Pull the blocks that standard input asks for, until it closes."""
    answer("ready")
    for line in sys.stdin:
        first, last = line.strip().strip("[]").split(",")
        answer(pull(end, port, range(int(first), int(last))))


def main() -> None:
    given = arguments()
    end = End(given["rows"], given["row_bytes"], given["options"])
    try:
        if given["role"] == "source":
            serve(end)
        else:
            receive(end, given["source_port"])
    finally:
        end.tier.shutdown()


if __name__ == "__main__":
    main()
