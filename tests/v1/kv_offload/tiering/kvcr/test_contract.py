# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The contract, over the stand-in and over the real KVCR and NIXL."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.v1.kv_offload.tiering.kvcr.builders import (
    endpoint_of,
    make_hint,
    peer_options,
    request,
)
from tests.v1.kv_offload.tiering.kvcr.contract import (
    BlockContract,
    Contract,
    PullContract,
    Pulled,
    SourceContract,
    TierContract,
)
from tests.v1.kv_offload.tiering.kvcr.faults.harness.files import g3
from tests.v1.kv_offload.tiering.kvcr.rig import (
    ROW_BYTES,
    Keys,
    Rig,
    StandinRig,
    wait_until,
)
from tests.v1.kv_offload.tiering.kvcr.service import Service
from tests.v1.kv_offload.tiering.kvcr.standin import KeepingStandin, RecordingParent
from vllm.v1.kv_offload.base import ReqContext

# Not to be mistaken for a dead KVCR where other work takes the processors.
PATIENT = {"operation_timeout_ms": 10_000}


def real_rig(contract: type[Contract], **options: Any) -> Rig:
    return Rig(rows=contract.rows, **PATIENT, **options)


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

    def pull(self, source: Rig, parent: RecordingParent, wanted: Keys) -> Pulled:
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
        return real_rig(cls, secondary_g2_slots=cls.pool_slots, **options)


class TestPoolAndFiles(TierContract):
    """The pool, and files below it through NIXL's POSIX backend."""

    file_slots = 12
    capacity = 2 * file_slots + TierContract.pool_slots

    @classmethod
    def make(cls, disk: Path, **options: Any) -> Rig:
        files = g3([disk / "a.data", disk / "b.data"], cls.file_slots, ROW_BYTES)
        return real_rig(cls, secondary_g2_slots=cls.pool_slots, g3=files, **options)


class RealPeers(PullContract):
    """Pulls with a second tier, over the control channel and NIXL."""

    sink: Rig

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def peer(cls) -> Iterator[None]:
        cls.sink = real_rig(cls, **peer_options(max_pull_blocks=cls.rows))
        yield
        cls.sink.close()

    def pull(self, source: Rig, parent: RecordingParent, wanted: Keys) -> Pulled:
        (port,) = source.tier._config.control_ports or ()
        context = request("pull", make_hint(port, wanted))
        self.sink.know(endpoint_of(port))
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
        return real_rig(
            cls, **peer_options(secondary_g2_slots=cls.pool_slots, **options)
        )


class ServedRig(Rig):
    """A tier with a KVCR service of its own."""

    def __init__(self, service: Service, **options: Any) -> None:
        self.service = service
        own = peer_options(service.port, **service.options(), **PATIENT)
        super().__init__(**own, **options)

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


class TestPeersOnly(SourceContract, RealPeers):
    """Peers, and no storage of its own."""

    @classmethod
    def make(cls, disk: Path, **options: Any) -> Rig:
        return real_rig(cls, **peer_options(**options))


class TestPeersStraightToThePrimary(SourceContract, RealPeers):
    """A peer's blocks land in the primary tier, not in a pool."""

    @classmethod
    def make(cls, disk: Path, **options: Any) -> Rig:
        return real_rig(cls, **peer_options(remote_landing="primary", **options))
