# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What the tier checks before KVCR starts, and how it sets KVCR up."""

import socket
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from kvcr.policy import FIFOPolicy, G3FIFOPolicy, G3LRUPolicy, LRUPolicy

from tests.v1.kv_offload.tiering.kvcr.builders import key, keys, make_spec
from tests.v1.kv_offload.tiering.kvcr.conftest import LogLines
from tests.v1.kv_offload.tiering.kvcr.rig import ROW_BYTES, Rig, StandinRig
from vllm.v1.kv_offload.base import Locality
from vllm.v1.kv_offload.tiering.kvcr import manager
from vllm.v1.kv_offload.tiering.kvcr.backend import pool
from vllm.v1.kv_offload.tiering.kvcr.compat import shims

SERVICE = {
    "kvcr_service_socket_path": "/run/kvcr.sock",
    "compatibility_digest": "v1",
    "control_ports": [7001],
}
G3 = {"paths": "g3.data", "capacity_bytes_per_file": 10 * ROW_BYTES}


# --- how KVCR is set up ----------------------------------------------------------


def test_the_pool_layout_is_one_unnamed_pool_of_the_primary_rows() -> None:
    rig = StandinRig(secondary_g2_slots=4, row_bytes=3 * ROW_BYTES)
    assert rig.kvcr.config.pool_layouts == [("", 3 * ROW_BYTES)]
    (memory,) = rig.mmap.made
    assert len(memory) == 4 * 3 * ROW_BYTES
    ((name, address, size),) = rig.kvcr.backend_configs.local_dram.pools
    assert (name, size) == ("", len(memory))
    assert address == pool.address_of(memory)


def test_the_primary_tier_is_registered_as_it_lies() -> None:
    rig = StandinRig(rows=5)
    address = rig.memory.ctypes.data
    assert rig.tier._primary_base_addr == address
    assert rig.tier._primary_row_stride == ROW_BYTES
    for name, value in shims.primary_region(address, ROW_BYTES, 5).items():
        assert getattr(rig.kvcr.backend_configs, name) == value


def test_options_reach_kvcr() -> None:
    rig = StandinRig(
        secondary_g2_slots=4,
        control_ports=[7001],
        operation_timeout_ms=700,
        abandon_timeout_ms=1500,
        enable_telemetry=True,
        eager_ctrl_connect=False,
        opportunistic_query=True,
        metadata_retry_interval_ms=40,
        local_dram_backend="LOCAL",
        remote_fw_dram_backend="REMOTE",
    )
    config, backends = rig.kvcr.config, rig.kvcr.backend_configs
    assert config.operation_timeout_ms == 700
    assert config.abandon_timeout_ms == 1500
    assert config.enable_telemetry is True
    assert backends.local_dram.backend == "LOCAL"
    remote = backends.remote_fw_dram
    assert (remote.eager_ctrl_connect, remote.opportunistic_query) == (False, True)
    assert (remote.metadata_retry_interval_ms, remote.backend) == (40, "REMOTE")
    assert backends.g3 is None


def test_files_reach_kvcr_cut_to_whole_chunks() -> None:
    more = {"backend": "POSIX", "backend_options": {"ios": 8}}
    g3 = G3 | more | {"capacity_bytes_per_file": 3 * ROW_BYTES + 1}
    files = StandinRig(g3=g3).kvcr.backend_configs.g3
    assert files.paths == (Path("g3.data"),)
    assert files.capacity_bytes_per_file == 3 * ROW_BYTES
    assert (files.backend, files.backend_options) == ("POSIX", {"ios": "8"})


def test_work_on_files_is_not_cancelled_soon() -> None:
    """NIXL may crash the process over a file operation that is cancelled."""
    config = StandinRig(g3=G3, operation_timeout_ms=700).kvcr.config
    assert config.operation_timeout_ms >= 60_000
    assert config.abandon_timeout_ms >= 2 * config.operation_timeout_ms


def test_each_tier_has_an_agent_name_of_its_own() -> None:
    names = {StandinRig().kvcr.config.nixl_agent_name for _ in range(3)}
    assert len(names) == 3


@pytest.mark.parametrize("more", [{}, {"control_ports": [7001]}])
def test_files_without_a_pool_are_kvcrs_to_refuse(more: dict[str, Any]) -> None:
    """The options are translated first, and the refusal is then told in our words."""
    kvcr = mock.Mock(side_effect=ValueError("G3 requires configured local DRAM"))
    with pytest.raises(ValueError, match=r"kvcr tier: g3 needs a pool") as refused:
        StandinRig(kvcr=kvcr, secondary_g2_slots=0, g3=G3, **more)
    assert kvcr.call_args.args[2].local_dram is None
    assert "secondary_g2_bytes" in str(refused.value)
    assert "G3 requires configured local DRAM" in str(refused.value)


def test_a_policy_for_files_without_files_is_refused_in_our_words() -> None:
    error = ValueError("G3LRUPolicy requires configured g3")
    with pytest.raises(ValueError, match=r"policy = 'g3_lru'.*give g3"):
        StandinRig(kvcr=mock.Mock(side_effect=error), policy="g3_lru")


@pytest.mark.parametrize(
    ("size", "slots"), [(4 * ROW_BYTES, 4), ("16KiB", 4), ("20k", 4), ("0.5MiB", 128)]
)
def test_a_pool_by_its_size(size: Any, slots: int) -> None:
    rig = StandinRig(secondary_g2_slots=0, secondary_g2_bytes=size)
    ((_, _, length),) = rig.kvcr.backend_configs.local_dram.pools
    assert length == slots * ROW_BYTES


@pytest.mark.parametrize(
    ("paths", "rank"),
    [
        ("/nvme/kv-{rank}", None),
        ("/nvme/kv-{rank}", 1),
        (["/nvme/kv-{rank}"], 1),
        ([["/nvme/kv-0"], ["/nvme/kv-1"]], 0),
        ([["/nvme/kv-0"], ["/nvme/kv-1"]], 1),
    ],
)
def test_each_local_rank_has_files_of_its_own(paths: Any, rank: int | None) -> None:
    rig = StandinRig(spec=make_spec(local_rank=rank), g3=G3 | {"paths": paths})
    assert rig.kvcr.backend_configs.g3.paths == (Path(f"/nvme/kv-{rank or 0}"),)


@pytest.mark.parametrize("given", [None, "10.0.0.5"])
def test_the_channel_gets_host_port_and_the_host_to_advertise(given: Any) -> None:
    rig = StandinRig(
        control_ports=[7001], control_host="127.0.0.1", control_advertise_host=given
    )
    (channel,) = rig.channels
    assert channel.arguments == ("127.0.0.1", 7001, given or socket.gethostname())
    assert rig.kvcr.bindings.framework_control is channel


def test_without_control_ports_there_is_no_channel() -> None:
    rig = StandinRig(secondary_g2_slots=4)
    assert rig.channels == []
    assert rig.kvcr.bindings.framework_control is None
    assert rig.kvcr.guard_config is None


@pytest.mark.parametrize(("rank", "ports"), [(0, [7001, 7002]), (1, [7000, 7001])])
def test_the_local_rank_picks_the_port_and_the_guard(rank: int, ports: Any) -> None:
    options = SERVICE | {"control_ports": ports}
    rig = StandinRig(spec=make_spec(local_rank=rank), **options)
    assert rig.channels[0].arguments[1] == 7001
    guard = rig.kvcr.guard_config
    assert guard.guard_index == rank
    assert guard.kvcr_service_socket_path == "/run/kvcr.sock"
    assert guard.compatibility_digest == "v1"


def test_the_services_pool_goes_before_an_own_one(tier_log: LogLines) -> None:
    rig = StandinRig(**SERVICE, secondary_g2_slots=4)
    assert rig.kvcr.guard_config.guard_index == 0
    assert rig.mmap.made == []
    assert rig.kvcr.backend_configs.local_dram is None
    assert any("secondary_g2_slots" in text for text in tier_log.texts())


def test_a_digest_can_be_derived() -> None:
    rig = StandinRig(**SERVICE | {"compatibility_digest": "Auto"}, namespace="prod")
    assert rig.kvcr.guard_config.compatibility_digest not in ("", "auto")


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        (None, type(None)),  # KVCR chooses
        ("fifo", FIFOPolicy),
        ("lru", LRUPolicy),
        ("g3_fifo", G3FIFOPolicy),
        ("g3_lru", G3LRUPolicy),
        ("kvcr.policy.LRUPolicy", LRUPolicy),
    ],
)
def test_policies_by_name(name: str | None, kind: type) -> None:
    assert type(StandinRig(policy=name).kvcr.bindings.policy) is kind


@pytest.mark.parametrize("locality", list(Locality))
def test_the_locality_is_the_tiers(locality: Locality) -> None:
    assert StandinRig(locality=locality.value).tier.locality is locality
    assert StandinRig().tier.locality is None


# --- what is refused by name -----------------------------------------------------

RANK_0, RANK_1 = make_spec(local_rank=0), make_spec(local_rank=1)
REFUSED: dict[str, tuple[dict[str, Any], list[str]]] = {
    "a pool that holds no chunk": (
        {"secondary_g2_slots": 0, "secondary_g2_bytes": "4kB"},
        ["secondary_g2_bytes = 4000: ", f"{ROW_BYTES}"],
    ),
    "a pool that cannot fit": (
        {"secondary_g2_slots": 1 << 40},
        ["secondary_g2_slots", f"{ROW_BYTES << 40:,}"],
    ),
    "files that hold no chunk": (
        {"g3": G3 | {"capacity_bytes_per_file": ROW_BYTES - 1}},
        ["g3.capacity_bytes_per_file"],
    ),
    "chunks that are no whole pages": (
        {"row_bytes": ROW_BYTES + 8, "g3": G3},
        ["g3 needs chunks of whole"],
    ),
    "a path for two ranks": (
        {"spec": RANK_1, "g3": G3 | {"paths": "/nvme/kv"}},
        ["g3.paths", "rank 1", "'/nvme/kv'", "{rank}"],
    ),
    "another path for two ranks": (
        {"spec": RANK_1, "g3": G3 | {"paths": ["/nvme/kv-{rank}", "/b"]}},
        ["g3.paths", "rank 1", "'/b'"],
    ),
    "a path for the first of two ranks": (
        {
            "spec": RANK_0,
            "control_ports": [7001, 7002],
            "secondary_g2_slots": 4,
            "g3": G3 | {"paths": "/nvme/kv"},
        },
        ["rank 0 would share '/nvme/kv'"],
    ),
    "too few lists of paths": (
        {"spec": RANK_1, "g3": G3 | {"paths": [["/nvme/0"]]}},
        ["g3.paths", "rank 1", "at least 2"],
    ),
    "too many lists of paths": (
        {"g3": G3 | {"paths": [["/nvme/0"], ["/nvme/1"]]}},
        ["g3.paths", "2 lists"],
    ),
    "a rank without a port": (
        {"spec": RANK_1, "control_ports": [7001]},
        ["control_ports", "rank 1"],
    ),
    "a secret that cannot be read": (
        {"control_ports": [7001], "control_secret_file": "/absent"},
        ["control_secret_file", "/absent", "cannot be read"],
    ),
    "a digest of nothing": (
        SERVICE | {"compatibility_digest": "auto"},
        ["compatibility_digest"],
    ),
    "an unknown policy": (
        {"policy": "lfu"},
        ["policy", "fifo", "lru", "g3_fifo", "g3_lru", "module.Class"],
    ),
    "a policy of no module": (
        {"policy": "no_such_module.Policy"},
        ["policy", "'no_such_module' could not be imported"],
    ),
    "a policy that its module lacks": (
        {"policy": "kvcr.policy.NoSuchPolicy"},
        ["policy", "no class 'NoSuchPolicy'"],
    ),
    "no name before the dot": ({"policy": "..Policy"}, ["policy", "..Policy"]),
    "no name after the dot": ({"policy": "lru."}, ["policy", "lru."]),
}


@pytest.mark.parametrize(("options", "parts"), REFUSED.values(), ids=REFUSED.keys())
def test_refused_by_name(options: dict[str, Any], parts: list[str]) -> None:
    with pytest.raises(ValueError) as refused:  # noqa: PT011 parts are checked below
        StandinRig(**options)
    for part in parts:
        assert part in str(refused.value)


@pytest.mark.parametrize(
    "name", ["collections.OrderedDict", "os.getcwd", "kvcr.policy.logger"]
)
def test_what_is_no_policy_is_refused(name: str) -> None:
    with pytest.raises(TypeError, match="policy"):
        StandinRig(policy=name)


def test_a_module_that_fails_to_import_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_kvcr_policy.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match=r"policy.*broken_kvcr_policy"):
        StandinRig(policy="broken_kvcr_policy.Policy")


# --- KV events -------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [{"secondary_g2_slots": 4}, {"secondary_g2_slots": 4, "g3": G3}, SERVICE],
)
def test_events_of_owned_blocks_describe_themselves_or_are_off(
    options: dict[str, Any], tier_log: LogLines
) -> None:
    with pytest.raises(ValueError, match="self_describing_kv_events"):
        StandinRig(spec=make_spec(events=True), **options)
    rig = StandinRig(spec=make_spec(events=True, described=True), **options)
    assert rig.kvcr.bindings.inventory_sink is not None
    rig = StandinRig(spec=make_spec(events=False), **options)
    rig.kvcr.publish(key(1))
    assert not rig.tier.take_events()
    assert any("KV events are off" in text for text in tier_log.texts())


def test_a_tier_that_owns_nothing_has_nothing_to_describe(tier_log: LogLines) -> None:
    StandinRig(spec=make_spec(events=True), control_ports=[7001])
    StandinRig(spec=make_spec(events=False), control_ports=[7001])
    assert tier_log.texts() == []


# --- the primary tier's view -----------------------------------------------------


def build_on(view: memoryview, **kvcr: Any) -> Any:
    with mock.patch.object(manager, "KVCR", **kvcr):
        return manager.KVCRSecondaryTierManager(
            make_spec(), view, "kvcr", secondary_g2_slots=1
        )


def array(rows: int = 4, row_bytes: int = ROW_BYTES) -> np.ndarray:
    return np.zeros((rows, row_bytes), np.uint8)


@pytest.mark.parametrize(
    ("memory", "stride"),
    [
        (array(), ROW_BYTES),
        (array().view(np.int8), ROW_BYTES),
        (array().view(np.int32), ROW_BYTES),
        # Flat, with an element for each chunk.
        (array().ravel(), 1),
        (array().ravel().view(np.int32), 4),
    ],
)
def test_any_view_of_whole_rows_or_elements_will_do(
    memory: np.ndarray, stride: int
) -> None:
    tier = build_on(memoryview(memory))
    assert tier._primary_base_addr == memory.ctypes.data
    assert tier._primary_row_stride == stride


def test_one_byte_a_chunk_goes_there_and_back_on_the_real_kvcr() -> None:
    rig = Rig(rows=64, row_bytes=1, secondary_g2_slots=8)
    rig.memory[:, 0] = range(64)
    assert rig.result_of(rig.store(keys(3), [1, 5, 9])).success
    assert rig.result_of(rig.load(keys(3), [40, 41, 42])).success
    assert rig.memory[39:44, 0].tolist() == [39, 1, 5, 9, 43]
    rig.close()


WRONG_VIEWS = {
    "read-only": memoryview(array()).toreadonly(),
    "half of each row": memoryview(array()[:, : ROW_BYTES // 2]),
    "every other row": memoryview(array()[::2]),
    "backwards": memoryview(array()[::-1]),
    "on its side": memoryview(array().T),
    "in Fortran's order": memoryview(np.asfortranarray(array())),
    "three dimensions": memoryview(array().reshape(2, 2, ROW_BYTES)),
    "no rows": memoryview(array(rows=0)),
    "empty rows": memoryview(array(row_bytes=0)),
}


@pytest.mark.parametrize("view", WRONG_VIEWS.values(), ids=WRONG_VIEWS.keys())
def test_a_view_that_would_give_wrong_addresses_is_refused(view: memoryview) -> None:
    with pytest.raises(ValueError, match="primary tier"):
        build_on(view, side_effect=AssertionError("started"))
