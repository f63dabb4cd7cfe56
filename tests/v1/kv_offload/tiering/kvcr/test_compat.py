# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What the tier says about the installed releases, and the next vLLM's jobs."""

import importlib.util
import json
import re
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.v1.kv_offload.tiering.kvcr.builders import (
    keys,
    make_spec,
)
from tests.v1.kv_offload.tiering.kvcr.conftest import LogLines
from tests.v1.kv_offload.tiering.kvcr.rig import Rig, StandinRig
from tests.v1.kv_offload.tiering.kvcr.standin import KeepingStandin, RecordingParent
from vllm.v1.kv_offload.base import LookupResult, OffloadKey, ReqContext
from vllm.v1.kv_offload.tiering.base import SecondaryTierManager
from vllm.v1.kv_offload.tiering.kvcr import manager
from vllm.v1.kv_offload.tiering.kvcr.compat import environment, shims

# --- what is said about it -------------------------------------------------------


def test_capabilities_are_those_that_are_documented(
    record_testsuite_property: Callable[[str, object], None],
) -> None:
    capabilities = shims.capabilities()
    # The matrix reads them from here.
    record_testsuite_property("capabilities", json.dumps(capabilities))
    assert list(capabilities) == [
        "off_thread_polling",
        "backpressure",
        "transfer_sizes",
        "kv_hints",
        "config_info",
        "sequence_alignment",
        "retained_startup_buffers",
        "memory_owners",
    ]
    assert set(map(type, capabilities.values())) == {bool}


def test_use_is_said_to_be_reported_where_vllms_scheduler_reports_it() -> None:
    name = "vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler"
    found = importlib.util.find_spec(name)
    assert found is not None
    assert found.origin is not None
    calls = "manager.touch(" in Path(found.origin).read_text()
    assert calls is shims.REPORTS_USE
    says = shims.capabilities()["sequence_alignment"]
    assert says is (calls and shims.HAS_SEQUENCE_ALIGNMENT)


def test_the_start_is_announced_in_one_line(tier_log: LogLines) -> None:
    StandinRig()
    (line,) = [text for text in tier_log.texts(0) if "; on: " in text]
    versions = environment.installed()
    assert f"kvcr {versions['kvcr']}, nixl {versions['nixl']}" in line
    on, off = re.search(r"; on: (.*); off: (.*)$", line).groups()  # type: ignore[union-attr]
    said = dict.fromkeys(on.split(", "), True) | dict.fromkeys(off.split(", "), False)
    said.pop("-", None)
    assert said == shims.capabilities()


def test_vllms_configuration_metric_gets_versions_and_capabilities() -> None:
    names = manager.KVCRSecondaryTierManager.config_info_keys({})
    info = StandinRig().tier.config_info()
    assert tuple(info) == names
    assert info["kvcr_version"] == environment.installed()["kvcr"]
    on = [name for name, has in shims.capabilities().items() if has]
    assert info["kvcr_capabilities"] == ",".join(on)
    assert all(isinstance(value, str) for value in info.values())


def test_the_check_comes_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse() -> None:
        raise ImportError("does not fit")

    monkeypatch.setattr(manager, "check_environment", refuse)
    made: list[Any] = []
    with pytest.raises(ImportError, match="does not fit"):
        StandinRig(kvcr=lambda *arguments: made.append(arguments))
    assert made == []


# --- the next vLLM's jobs --------------------------------------------------------


@dataclass
class NextTransferJob:
    """A transfer job whose keys and chunks lie behind properties."""

    job_id: int
    _keys: Collection[OffloadKey]
    _chunk_ids: np.ndarray
    is_promotion: bool
    req_context: ReqContext
    submit_time: float = field(default_factory=time.monotonic)

    @property
    def keys(self) -> Collection[OffloadKey]:
        return self._keys

    @property
    def chunk_ids(self) -> np.ndarray:
        return self._chunk_ids


class NextParent(RecordingParent):
    def create_store_job(
        self, keys: Collection[OffloadKey], req_context: ReqContext
    ) -> Any:
        job = super().create_store_job(keys, req_context)
        return NextTransferJob(
            job.job_id, job.keys, job.chunk_ids, job.is_promotion, job.req_context
        )


def next_job(
    job_id: int, chosen: Sequence[OffloadKey], chunks: Sequence[int], is_load: bool
) -> Any:
    ids = np.array(chunks, dtype=np.int32)
    return NextTransferJob(job_id, chosen, ids, is_load, ReqContext("r"))


def real_rig() -> Rig:
    return Rig(secondary_g2_slots=8, operation_timeout_ms=10_000)


def keeping_rig() -> Rig:
    rig = StandinRig(kvcr=KeepingStandin, secondary_g2_slots=8)
    rig.kvcr.keep(rig.memory)
    return rig


@pytest.mark.parametrize("make", [real_rig, keeping_rig])
def test_the_next_vllms_jobs_are_stored_and_loaded(make: Callable[[], Rig]) -> None:
    rig = make()
    stored = rig.fill(range(4))
    rig.tier.submit_store(next_job(1, keys(4), range(4), is_load=False))
    assert rig.result_of(1).success
    rig.memory[:] = 0
    assert rig.hits(keys(4)) == keys(4)
    rig.tier.submit_load(next_job(2, keys(4), [9, 8, 7, 6], is_load=True))
    assert rig.result_of(2).success
    assert np.array_equal(rig.memory[[9, 8, 7, 6]], stored)
    rig.tier.shutdown()


def test_the_next_vllms_jobs_pin_blocks_for_a_peer() -> None:
    rig = StandinRig(control_ports=[7001])
    prefix = rig.tier._prefix
    parent = NextParent(dict(zip(keys(2), (5, 6), strict=True)))
    rig.kvcr.want(*(prefix + each for each in keys(2)))
    rig.poll()
    rig.tier.serve_external_requests(parent)
    ((handle, blocks),) = rig.kvcr.pin_answers.values()
    assert handle == f"kvcr-job-{parent.jobs[0].job_id}"
    refs = shims.block_refs_factory(
        rig.kvcr.config.nixl_agent_name, rig.tier._primary_base_addr, 4096
    )
    assert list(blocks.values()) == [refs(5), refs(6)]


def test_vllms_base_class_is_left_to_itself() -> None:
    """What the tier overrides exists there, or is one of the probed additions."""
    probed = {"bp_detector", "cache_hit_source", "config_info", "config_info_keys"}
    added = {"tolerates_off_thread_polling"}
    own = {
        name
        for name in vars(manager.KVCRSecondaryTierManager)
        if not name.startswith("_") and name not in probed | added
    }
    assert own <= set(dir(SecondaryTierManager))
    assert StandinRig(spec=make_spec()).lookup(keys(1)[0]) is LookupResult.MISS
