# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What the doctor says of options, hashes, memory and versions."""

import resource
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from tests.vllm_kvcr.doctor.asking import (
    PEERS,
    ask,
    failures,
    setting,
    the_only,
    transfer,
)
from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_offload.tiering.kvcr.backend import pool
from vllm_kvcr.doctor import memory, packages, versions
from vllm_kvcr.doctor.finding import Status
from vllm_kvcr.doctor.setting import Setting

MIB = 1 << 20
POOL = {"secondary_g2_slots": 8}


# --- options -------------------------------------------------------------------------


@pytest.mark.parametrize("check", ["options", "files", "network", "guard"])
def test_a_pool_alone_is_good_and_needs_nothing_else(check):
    assert the_only(check, setting(POOL)).status is Status.OK


def test_tiers_inside_a_multi_connector_are_found():
    several = {
        "kv_connector": "MultiConnector",
        "kv_connector_extra_config": {"connectors": [transfer(POOL), transfer(PEERS)]},
    }
    assert len(Setting(several).tiers) == 2


@pytest.mark.parametrize(
    ("config", "part"),
    [
        (transfer({"secondary_g2_slot": 8}), "did you mean secondary_g2_slots"),
        (transfer(POOL | {"policy": "no.Such"}), "policy"),
        (transfer(), "no 'kvcr'"),
        (transfer(POOL, spec_name=None), "spec_name"),
        (transfer(POOL, spec_name="CPUOffloadingSpec"), "CPUOffloadingSpec"),
        (transfer(POOL, cpu_bytes_to_use=0), "cpu_bytes_to_use"),
        (transfer(POOL) | {"kv_role": "kv_producer"}, "kv_producer"),
        ({"kv_connector": "NixlConnector"}, "NixlConnector"),
    ],
)
def test_what_vllm_or_the_tier_would_refuse_or_ignore_fails(config, part):
    assert any(part in text for text in failures("options", Setting(config)))


def test_events_that_cannot_describe_blocks_fail():
    events = {"enable_kv_cache_events": True}
    (text,) = failures("options", setting(POOL, events=events))
    assert "self_describing_kv_events" in text
    described = transfer(POOL, self_describing_kv_events=True)
    assert failures("options", Setting(described, events)) == []


def test_a_missing_configuration_is_a_warning_of_each_check_that_needs_one():
    for check in ("options", "network", "memory"):
        assert ask(check, Setting())[0].status is Status.WARN


# --- hashes --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tier", "seed", "has_default", "status"),
    [
        (POOL, None, False, Status.OK),
        (PEERS, "7", False, Status.OK),
        (PEERS, None, True, Status.OK),
        (PEERS, None, False, Status.WARN),
    ],
)
def test_engines_that_share_blocks_need_one_seed_or_vllms_default(
    monkeypatch, tier, seed, has_default, status
):
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    if seed is not None:
        monkeypatch.setenv("PYTHONHASHSEED", seed)
    name = "DEFAULT_NONE_HASH_SEED"
    monkeypatch.delattr(kv_cache_utils, name, raising=False)
    if has_default:
        monkeypatch.setattr(kv_cache_utils, name, "x", raising=False)
    told = the_only("hashing", setting(tier))
    assert told.status is status
    assert told.data.get("seed") == seed


def test_hashes_that_are_no_numbers_are_a_warning(monkeypatch):
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "0")
    found = ask("hashing", setting(PEERS))
    assert [f.status for f in found] == [Status.OK, Status.WARN]


# --- memory --------------------------------------------------------------------------


def lines(about: Setting) -> dict[str, Any]:
    """Findings by the resource that they are about."""
    found = {}
    for finding in ask("memory", about):
        assert "could not run" not in finding.text
        kinds = {"free": "shm", "available": "host", "limit": "memlock"}
        kind = next((k for key, k in kinds.items() if key in finding.data), "size")
        found[kind] = finding
    return found


@pytest.mark.parametrize(
    ("ports", "ranks"), [({}, 1), ({"control_ports": [24990, 24991]}, 2)]
)
def test_each_local_rank_has_a_pool_that_has_to_fit(monkeypatch, ports, ranks):
    about = setting(POOL | ports, chunk_bytes=MIB)
    for available, status in ((100 * MIB, Status.OK), (8 * MIB, Status.FAIL)):
        monkeypatch.setattr(pool, "available_memory", lambda free=available: free)
        found = lines(about)
        assert found["shm"].status is Status.OK
        assert found["host"].status is status
        assert found["host"].data["pools"] == ranks * 8 * MIB
        assert found["host"].data["primary"] == ranks * MIB


def test_a_primary_tier_that_does_not_fit_in_shared_memory_fails(monkeypatch):
    usage = SimpleNamespace(free=MIB - 1)
    monkeypatch.setattr(memory.shutil, "disk_usage", lambda path: usage)
    assert lines(setting(POOL))["shm"].status is Status.FAIL


def test_a_pool_counted_in_chunks_of_unknown_size_is_said_to_be_unchecked():
    found = lines(setting(POOL))
    assert found["size"].status is Status.WARN
    assert "--chunk-bytes" in found["size"].remedy


@pytest.mark.parametrize(
    ("limit", "rdma", "status"),
    [
        (resource.RLIM_INFINITY, True, Status.OK),
        (64 * MIB, True, Status.OK),
        (MIB, False, Status.WARN),
        (MIB, True, Status.FAIL),
    ],
)
def test_memlock_matters_where_there_is_rdma(
    limit, rdma, status, monkeypatch, tmp_path
):
    monkeypatch.setattr(memory, "INFINIBAND", tmp_path)
    if rdma:
        (tmp_path / "mlx5_0").mkdir()
    monkeypatch.setattr(memory.resource, "getrlimit", lambda which: (limit, limit))
    assert lines(setting(POOL, chunk_bytes=MIB))["memlock"].status is status


# --- versions ------------------------------------------------------------------------


def test_the_releases_here_fit_together():
    told = the_only("versions", Setting())
    assert told.status is Status.OK
    assert told.data["versions"]["kvcr"]
    assert told.data["capabilities"]


@pytest.mark.parametrize(
    ("package", "version", "status", "remedy"),
    [
        ("nixl", "0.9.0", Status.FAIL, "pip install"),
        ("vllm", "0.99.0", Status.WARN, ""),
    ],
)
def test_releases_that_do_not_fit_fail_and_untested_ones_are_a_warning(
    monkeypatch, package, version, status, remedy
):
    found = packages.look_around()
    found.versions[package] = version
    monkeypatch.setattr(packages, "look_around", lambda: found)
    told = the_only("versions", Setting())
    assert told.status is status
    assert version in told.text
    assert told.remedy.startswith(remedy)


def test_an_absent_vllm_is_a_failure_and_no_crash(monkeypatch):
    monkeypatch.setattr(versions, "register", lambda: None)
    monkeypatch.setitem(sys.modules, "vllm.v1.kv_offload.tiering.kvcr.compat", None)
    told = the_only("versions", Setting())
    assert told.status is Status.FAIL
    assert "pip install" in told.remedy
