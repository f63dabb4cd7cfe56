# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The contract, over the stand-in and over the real KVCR and NIXL."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.v1.kv_offload.tiering.kvcr.builders import (
    LOCALHOST,
    free_port,
    hint,
    keys,
    request,
)
from tests.v1.kv_offload.tiering.kvcr.contract import (
    BlockContract,
    PullContract,
    SourceContract,
    TierContract,
)
from tests.v1.kv_offload.tiering.kvcr.rig import ROW_BYTES, Rig, StandinRig, wait_until
from tests.v1.kv_offload.tiering.kvcr.service import Service
from tests.v1.kv_offload.tiering.kvcr.standin import KeepingStandin, RecordingParent
from vllm.v1.kv_offload.base import OffloadKey, ReqContext

# Not to be mistaken for a dead KVCR where other work takes the processors.
PATIENT = {"operation_timeout_ms": 10_000}
PEER = {"control_host": LOCALHOST, "control_advertise_host": LOCALHOST}


class TestStandin(TierContract, SourceContract):
    @classmethod
    def make(cls, disk: Path, **options: Any) -> StandinRig:
        rig = StandinRig(
            kvcr=KeepingStandin,
            rows=cls.rows,
            secondary_g2_slots=cls.pool_slots,
            control_ports=[7001],
            **options,
        )
        rig.kvcr.keep(rig.memory)
        return rig

    def pull(
        self, source: Rig, parent: RecordingParent, wanted: Sequence[OffloadKey]
    ) -> dict[OffloadKey, bytes | None]:
        assert isinstance(source, StandinRig)
        source.kvcr.want(*wanted)
        source.poll()
        source.tier.serve_external_requests(parent)
        (answer,) = source.kvcr.pin_answers.values()
        source.kvcr.pin_answers.clear()
        if answer is None:
            return dict.fromkeys(wanted)
        handle, blocks = answer
        source.kvcr.unpin(handle)
        return {each: source.kvcr.read(ref) for each, ref in blocks.items()}


class TestPool(TierContract):
    """KVCR's own pool in host memory."""

    @classmethod
    def make(cls, disk: Path, **options: Any) -> Rig:
        return Rig(
            rows=cls.rows, secondary_g2_slots=cls.pool_slots, **PATIENT, **options
        )


class TestPoolAndFiles(TierContract):
    """The pool, and files below it through NIXL's POSIX backend."""

    file_slots = 12
    capacity = 2 * file_slots + TierContract.pool_slots

    @classmethod
    def make(cls, disk: Path, **options: Any) -> Rig:
        g3 = {
            "paths": [disk / "a.data", disk / "b.data"],
            "capacity_bytes_per_file": cls.file_slots * ROW_BYTES,
            "backend": "POSIX",
        }
        return Rig(
            rows=cls.rows,
            secondary_g2_slots=cls.pool_slots,
            g3=g3,
            **PATIENT,
            **options,
        )


class RealPeers(PullContract):
    """Pulls with a second tier, over the control channel and NIXL."""

    sink: Rig

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def peer(cls) -> Iterator[None]:
        cls.sink = Rig(
            rows=cls.rows,
            control_ports=[free_port()],
            max_pull_blocks=cls.rows,
            **PEER,
            **PATIENT,
        )
        yield
        cls.sink.close()

    def pull(
        self, source: Rig, parent: RecordingParent, wanted: Sequence[OffloadKey]
    ) -> dict[OffloadKey, bytes | None]:
        (port,) = source.tier._config.control_ports or ()
        endpoint = f"tcp://{LOCALHOST}:{port}"
        context = request("pull", hint(wanted, endpoint))
        self.sink.know(endpoint)
        self.sink.tier.on_new_request(context)
        assert self.sink.hits(wanted, "pull") == list(wanted)
        job = self.sink.load(wanted, range(len(wanted)), "pull")

        def step() -> bool:
            source.poll()
            source.tier.serve_external_requests(parent)
            self.sink.poll()
            return job in self.sink.finished

        wait_until(step, "the pull")
        self.sink.tier.on_request_finished(ReqContext("pull"))
        result = self.sink.finished[job]
        arrived = wanted if result.success else result.successful_keys or ()
        return {
            each: self.sink.memory[row].tobytes() if each in arrived else None
            for row, each in enumerate(wanted)
        }


class TestPeersAndPool(TierContract, SourceContract, RealPeers):
    """A pool, and peers."""

    @classmethod
    def make(cls, disk: Path, **options: Any) -> Rig:
        return Rig(
            rows=cls.rows,
            secondary_g2_slots=cls.pool_slots,
            control_ports=[free_port()],
            **PEER,
            **PATIENT,
            **options,
        )


class ServedRig(Rig):
    """A tier with a KVCR service of its own."""

    def __init__(self, service: Service, **options: Any) -> None:
        self.service = service
        super().__init__(
            control_ports=[service.port],
            **service.options(),
            **PEER,
            **PATIENT,
            **options,
        )

    def close(self) -> None:
        super().close()
        # At once: between two engines it serves peers, which takes a processor.
        self.service.close()


class TestService(BlockContract, RealPeers):
    """The pool of the KVCR service, which has a process of its own, and peers."""

    @classmethod
    def make(cls, disk: Path, **options: Any) -> ServedRig:
        service = Service(disk, slots=cls.pool_slots)
        try:
            return ServedRig(service, rows=cls.rows, **options)
        except BaseException:
            service.close()
            raise

    def test_the_next_engine_finds_what_the_last_one_stored(self, rigs: Any) -> None:
        first = rigs()
        stored = self.fresh(4)
        written = first.fill(range(4))
        job = first.store(stored, range(4))
        # Under way still: a shutdown finishes it.
        first.tier.shutdown()
        assert first.result_of(job).success
        second = ServedRig(first.service, rows=self.rows)
        try:
            assert second.hits(stored) == stored
            assert second.result_of(second.load(stored, range(8, 12))).success
            assert np.array_equal(second.memory[8:12], written)
        finally:
            second.close()


class TestPeersOnly(SourceContract, RealPeers):
    """Peers, and no storage of its own."""

    @classmethod
    def make(cls, disk: Path, **options: Any) -> Rig:
        return Rig(
            rows=cls.rows, control_ports=[free_port()], **PEER, **PATIENT, **options
        )

    def test_a_hundred_stores_succeed_and_copy_nothing(self, rigs: Any) -> None:
        rig = rigs(enable_telemetry=True)
        for number, each in enumerate(keys(100)):
            assert rig.result_of(rig.store([each], [number % self.rows])).success
        stats = rig.tier.get_stats()
        assert not any("transfer" in name for name in stats.data["data"])
        assert not any("lost" in name for name in stats.data["data"])
        assert rig.hits(keys(100)) == []


class TestPeersStraightToThePrimary(SourceContract, RealPeers):
    """A peer's blocks land in the primary tier, not in a pool."""

    @classmethod
    def make(cls, disk: Path, **options: Any) -> Rig:
        return Rig(
            rows=cls.rows,
            control_ports=[free_port()],
            remote_landing="primary",
            **PEER,
            **PATIENT,
            **options,
        )
