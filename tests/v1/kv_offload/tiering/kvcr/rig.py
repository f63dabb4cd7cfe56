# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A kvcr tier with a primary tier's memory under it, ready to be driven by a test."""

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any
from unittest import mock

import numpy as np
from kvcr.types import OpEntryStatus

from tests.v1.kv_offload.tiering.kvcr.builders import make_spec
from tests.v1.kv_offload.tiering.kvcr.standin import (
    ChannelStandin,
    KvcrStandin,
    MmapStandin,
)
from vllm.v1.kv_offload.base import LookupResult, OffloadKey, ReqContext
from vllm.v1.kv_offload.tiering.base import JobResult, TransferJob
from vllm.v1.kv_offload.tiering.kvcr import manager
from vllm.v1.kv_offload.tiering.kvcr.reports.metrics import IGNORED_HINTS, LOST_BLOCKS

Keys = Sequence[OffloadKey]

ROW_BYTES = 4096
PATIENCE_S = 30.0


class Clock:
    """A clock that stands still until a test moves it."""

    def __init__(self, now: float | None = None) -> None:
        self.now = time.monotonic() if now is None else now

    def __call__(self) -> float:
        return self.now


def wait_until(done: Callable[[], Any], what: str) -> Any:
    """Poll ``done``, which drives what is waited for, until it says something."""
    deadline = time.monotonic() + PATIENCE_S
    while not (outcome := done()):
        assert time.monotonic() < deadline, f"still waiting for {what}"
        time.sleep(0.001)
    return outcome


def samples(stats: Any) -> dict[str, dict[tuple[str, ...], Any]]:
    """Metric name -> label values -> what was recorded."""
    return {} if stats is None else dict(stats.data["data"])


class Rig:
    """A tier, the memory of its primary tier, and the jobs given to it."""

    def __init__(
        self,
        *,
        rows: int = 16,
        row_bytes: int = ROW_BYTES,
        flat: bool = False,
        spec: Any = None,
        detector: Any = None,
        **options: Any,
    ) -> None:
        self.memory = np.zeros(row_bytes if flat else (rows, row_bytes), np.uint8)
        self.view = memoryview(self.memory)
        self.tier = manager.KVCRSecondaryTierManager(
            spec or make_spec(), self.view, "kvcr", detector, **options
        )
        self.given: list[int] = []
        self.finished: dict[int, JobResult] = {}

    def fill(self, chunks: Iterable[int], seed: int = 0) -> np.ndarray:
        """Put other bytes into each chunk, and return a copy of them."""
        chosen = list(chunks)
        generator = np.random.default_rng([seed, *chosen])
        shape = (len(chosen), self.memory.shape[1])
        self.memory[chosen] = generator.integers(0, 256, shape, np.uint8)
        return self.memory[chosen].copy()

    def lookup(self, offload_key: OffloadKey, request_id: str = "r") -> LookupResult:
        # vLLM announces each request first; here that is left out where it has no hint.
        self.tier._backoff.begin(request_id)
        return self.tier.lookup(offload_key, ReqContext(request_id))

    def hits(self, chosen: Iterable[OffloadKey], request_id: str = "r") -> list[Any]:
        return [k for k in chosen if self.lookup(k, request_id) is LookupResult.HIT]

    def load(self, chosen: Keys, chunks: Iterable[int], request_id: str = "r") -> int:
        return self._submit(chosen, chunks, request_id, True)

    def store(self, chosen: Keys, chunks: Iterable[int], request_id: str = "r") -> int:
        return self._submit(chosen, chunks, request_id, False)

    def poll(self) -> list[JobResult]:
        """One step's results, each of them checked against what was given."""
        results = list(self.tier.get_finished_jobs())
        for result in results:
            assert result.job_id not in self.finished, f"twice: {result}"
            self.finished[result.job_id] = result
        return results

    def result_of(self, job_id: int) -> JobResult:
        """Step until a job is over."""

        def done() -> bool:
            self.poll()
            return job_id in self.finished

        wait_until(done, f"job {job_id}")
        return self.finished[job_id]

    def close(self) -> None:
        """Shut the tier down; raises if something still refers to the memory."""
        self.tier.shutdown()
        self.view.release()

    def losses(self) -> dict[str, int]:
        """Lost blocks by reason, since the last report; needs telemetry."""
        return _by_label(samples(self.tier.get_stats()).get(LOST_BLOCKS, {}))

    def ignored_hints(self) -> dict[str, int]:
        """Ignored hints by reason, since the last report; needs telemetry."""
        return _by_label(samples(self.tier.get_stats()).get(IGNORED_HINTS, {}))

    def know(self, endpoint: str) -> None:
        """Count a peer as introduced, where first contact is not what is tested."""
        self.tier._staging._liveness.heard(endpoint)

    def introduce(self, offload_key: OffloadKey, request_id: str = "r") -> None:
        """Have the peer that a request is hinted at answer for the first time."""
        assert self.lookup(offload_key, request_id) is LookupResult.MISS
        self.poll()
        introduction = self.kvcr.last
        assert introduction.kind == "fetch"
        self.kvcr.complete(introduction.handle, {offload_key: OpEntryStatus.SUCCESS})
        self.poll()
        assert self.lookup(offload_key, request_id) is LookupResult.HIT

    def staging_tables(self) -> dict[str, int]:
        """How much is still staged; all zero when nothing is under way."""
        staging = self.tier._staging
        return {
            "fetches": len(staging._fetches),
            "in_pool": sum(lane.in_pool for lane in staging._lanes.values()),
            "waiting": sum(len(lane.waiting) for lane in staging._lanes.values()),
            "peers_in_pool": staging._peers_in_pool,
            "introductions": staging._introductions,
        }

    def _submit(
        self, chosen: Keys, chunks: Iterable[int], request_id: str, is_load: bool
    ) -> int:
        self.tier._backoff.begin(request_id)
        job_id = len(self.given)
        self.given.append(job_id)
        ids = np.array(list(chunks), dtype=np.int32)
        job = TransferJob(job_id, chosen, ids, is_load, ReqContext(request_id))
        submit = self.tier.submit_load if is_load else self.tier.submit_store
        submit(job)
        return job_id


class StandinRig(Rig):
    """A rig whose KVCR, control channel and memory are stand-ins."""

    kvcr: Any

    def __init__(
        self,
        *,
        kvcr: Callable[..., Any] = KvcrStandin,
        channel: Callable[..., Any] = ChannelStandin,
        **options: Any,
    ) -> None:
        self.mmap = MmapStandin()
        self.channels: list[Any] = []
        self.made: list[Any] = []

        def make_kvcr(*arguments: Any) -> Any:
            self.made.append(arguments)
            self.kvcr = kvcr(*arguments)
            return self.kvcr

        def make_channel(*arguments: Any) -> Any:
            self.channels.append(channel(*arguments))
            return self.channels[-1]

        if not {"secondary_g2_slots", "control_ports"} & options.keys():
            options["secondary_g2_slots"] = 64
        with mock.patch.multiple(
            manager, KVCR=make_kvcr, ZmqPeerControlChannel=make_channel, mmap=self.mmap
        ):
            super().__init__(**options)


def _by_label(values: dict[tuple[str, ...], int]) -> dict[str, int]:
    return {label: value for (label,), value in values.items() if value}
