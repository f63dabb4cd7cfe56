# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What the tier says about the installed releases, and the next vLLM's jobs."""

import importlib.util
import json
import re
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from tests.v1.kv_offload.tiering.kvcr.builders import keys
from tests.v1.kv_offload.tiering.kvcr.conftest import LogLines
from tests.v1.kv_offload.tiering.kvcr.rig import ROW_BYTES, StandinRig
from tests.v1.kv_offload.tiering.kvcr.standin import KeepingStandin, RecordingParent
from vllm.v1.kv_offload.base import OffloadKey, ReqContext
from vllm.v1.kv_offload.tiering.base import SecondaryTierManager, TransferJob
from vllm.v1.kv_offload.tiering.kvcr import manager
from vllm.v1.kv_offload.tiering.kvcr.compat import environment, shims


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


def test_the_check_comes_before_any_start(monkeypatch: pytest.MonkeyPatch) -> None:
    kvcr, check = mock.Mock(), mock.Mock(side_effect=ImportError("does not fit"))
    monkeypatch.setattr(manager, "check_environment", check)
    with pytest.raises(ImportError, match="does not fit"):
        StandinRig(kvcr=kvcr)
    assert not kvcr.called


class NextTransferJob:
    """A transfer job whose keys and chunks lie behind properties."""

    def __init__(self, job: TransferJob) -> None:
        self._job = job
        self.job_id, self.is_promotion = job.job_id, job.is_promotion
        self.req_context = job.req_context

    @property
    def keys(self) -> Collection[OffloadKey]:
        return self._job.keys

    @property
    def chunk_ids(self) -> np.ndarray:
        return self._job.chunk_ids


class NextParent(RecordingParent):
    def create_store_job(self, keys: Any, req_context: ReqContext) -> Any:
        return NextTransferJob(super().create_store_job(keys, req_context))


def test_the_next_vllms_jobs_are_stored_and_loaded() -> None:
    rig = StandinRig(kvcr=KeepingStandin, secondary_g2_slots=8)
    rig.kvcr.keep(rig.memory)
    tier: Any = rig.tier
    store, load = tier.submit_store, tier.submit_load
    tier.submit_store = lambda job: store(NextTransferJob(job))
    tier.submit_load = lambda job: load(NextTransferJob(job))
    stored = rig.fill(range(4))
    assert rig.result_of(rig.store(keys(4), range(4))).success
    rig.memory[:] = 0
    assert rig.result_of(rig.load(keys(4), [9, 8, 7, 6])).success
    assert np.array_equal(rig.memory[[9, 8, 7, 6]], stored)


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
        rig.kvcr.config.nixl_agent_name, rig.tier._primary_base_addr, ROW_BYTES
    )
    assert list(blocks.values()) == [refs(5), refs(6)]


def test_vllms_base_class_is_left_to_itself() -> None:
    """What the tier overrides exists there, or is one of the probed additions."""
    probed = {"bp_detector", "cache_hit_source", "config_info", "config_info_keys"}
    added = {"tolerates_off_thread_polling"}
    own = {n for n in vars(manager.KVCRSecondaryTierManager) if not n.startswith("_")}
    assert own - probed - added <= set(dir(SecondaryTierManager))
