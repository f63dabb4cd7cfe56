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
from tests.v1.kv_offload.tiering.kvcr.rig import ROW_BYTES, StandinRig, wait_until
from vllm.v1.kv_offload.base import Locality, ReqContext
from vllm.v1.kv_offload.tiering.base import TransferJob
from vllm.v1.kv_offload.tiering.kvcr import manager
from vllm.v1.kv_offload.tiering.kvcr.compat import shims

SERVICE = {
    "kvcr_service_socket_path": "/run/kvcr.sock",
    "compatibility_digest": "v1",
    "control_ports": [7001],
}
G3 = {"paths": "g3.data", "capacity_bytes_per_file": 10 * ROW_BYTES}


# --- how KVCR is set up ----------------------------------------------------------


def test_kvcr_gets_its_four_arguments_positionally() -> None:
    rig = StandinRig(secondary_g2_slots=4)
    (arguments,) = rig.made
    assert len(arguments) == 4
    assert arguments[3] is None


def test_the_pool_layout_is_one_unnamed_pool_of_the_primary_rows() -> None:
    rig = StandinRig(secondary_g2_slots=4, row_bytes=3 * ROW_BYTES)
    assert rig.kvcr.config.pool_layouts == [("", 3 * ROW_BYTES)]
    (memory,) = rig.mmap.made
    assert len(memory) == 4 * 3 * ROW_BYTES
    ((name, address, size),) = rig.kvcr.backend_configs.local_dram.pools
    assert (name, size) == ("", len(memory))
    assert address == rig.tier._backend._pool.address


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


def test_files_reach_kvcr() -> None:
    rig = StandinRig(g3=G3 | {"backend": "POSIX", "backend_options": {"ios": 8}})
    files = rig.kvcr.backend_configs.g3
    assert files.paths == (Path("g3.data"),)
    assert files.capacity_bytes_per_file == G3["capacity_bytes_per_file"]
    assert (files.backend, files.backend_options) == ("POSIX", {"ios": "8"})


def test_work_on_files_is_not_cancelled_soon() -> None:
    """NIXL may crash the process over a file operation that is cancelled."""
    config = StandinRig(g3=G3, operation_timeout_ms=700).kvcr.config
    assert config.operation_timeout_ms >= 60_000
    assert config.abandon_timeout_ms >= 2 * config.operation_timeout_ms


def test_each_tier_has_an_agent_name_of_its_own() -> None:
    names = {StandinRig().kvcr.config.nixl_agent_name for _ in range(3)}
    assert len(names) == 3


class Refusing:
    """Takes KVCR's place, and refuses files without a pool as KVCR does."""

    def __init__(self, config: Any, bindings: Any, backends: Any, guard: Any) -> None:
        if backends.g3 is not None and backends.local_dram is None:
            raise ValueError("G3 requires configured local DRAM")


@pytest.mark.parametrize("more", [{}, {"control_ports": [7001]}])
def test_files_without_a_pool_are_kvcrs_to_refuse(more: dict[str, Any]) -> None:
    """The options are translated first, and the refusal is then told in our words."""
    with pytest.raises(ValueError, match=r"kvcr tier: g3 needs a pool") as refused:
        StandinRig(kvcr=Refusing, secondary_g2_slots=0, g3=G3, **more)
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


def test_a_pool_that_holds_no_chunk_is_refused() -> None:
    with pytest.raises(ValueError, match=rf"secondary_g2_bytes = 4000: .*{ROW_BYTES}"):
        StandinRig(secondary_g2_slots=0, secondary_g2_bytes="4kB")


@pytest.mark.parametrize(
    "paths", ["/nvme/kv-{rank}", ["/nvme/kv-{rank}"], [["/nvme/kv-0"], ["/nvme/kv-1"]]]
)
@pytest.mark.parametrize("rank", [0, 1])
def test_each_local_rank_has_files_of_its_own(paths: Any, rank: int) -> None:
    rig = StandinRig(spec=make_spec(local_rank=rank), g3=G3 | {"paths": paths})
    assert rig.kvcr.backend_configs.g3.paths == (Path(f"/nvme/kv-{rank}"),)


@pytest.mark.parametrize(
    ("paths", "rank", "names"),
    [
        ("/nvme/kv", 1, ["g3.paths", "rank 1", "'/nvme/kv'", "{rank}"]),
        (["/nvme/kv-{rank}", "/b"], 1, ["g3.paths", "rank 1", "'/b'"]),
        ([["/nvme/0"]], 1, ["g3.paths", "rank 1", "at least 2"]),
        ([["/nvme/0"], ["/nvme/1"]], None, ["g3.paths", "2 lists"]),
    ],
)
def test_a_rank_without_files_of_its_own_is_refused(
    paths: Any, rank: int | None, names: list[str]
) -> None:
    with pytest.raises(ValueError, match="kvcr tier") as refused:
        StandinRig(spec=make_spec(local_rank=rank), g3=G3 | {"paths": paths})
    for name in names:
        assert name in str(refused.value)


def test_the_first_of_several_ranks_does_not_take_files_that_all_would() -> None:
    with pytest.raises(ValueError, match=r"rank 0 would share '/nvme/kv'"):
        StandinRig(
            spec=make_spec(local_rank=0),
            control_ports=[7001, 7002],
            secondary_g2_slots=4,
            g3=G3 | {"paths": "/nvme/kv"},
        )


def test_without_ranks_the_place_for_one_is_zero() -> None:
    rig = StandinRig(g3=G3 | {"paths": "/nvme/{rank}/kv"})
    assert rig.kvcr.backend_configs.g3.paths == (Path("/nvme/0/kv"),)


def test_files_are_cut_to_whole_chunks() -> None:
    rig = StandinRig(g3=G3 | {"capacity_bytes_per_file": 3 * ROW_BYTES + 1})
    assert rig.kvcr.backend_configs.g3.capacity_bytes_per_file == 3 * ROW_BYTES


def test_the_channel_gets_host_port_and_the_host_name_to_advertise() -> None:
    rig = StandinRig(control_ports=[7001], control_host="127.0.0.1")
    (channel,) = rig.channels
    assert channel.arguments == ("127.0.0.1", 7001, socket.gethostname())
    assert rig.kvcr.bindings.framework_control is channel


def test_the_advertised_host_can_be_given() -> None:
    rig = StandinRig(control_ports=[7001], control_advertise_host="10.0.0.5")
    assert rig.channels[0].arguments[2] == "10.0.0.5"


def test_a_secret_that_cannot_be_read_is_refused_before_anything_starts(
    tmp_path: Path,
) -> None:
    file = tmp_path / "absent"
    with pytest.raises(
        ValueError, match=r"control_secret_file.*absent.*cannot be read"
    ):
        StandinRig(control_ports=[7001], control_secret_file=str(file))


def test_without_control_ports_there_is_no_channel() -> None:
    rig = StandinRig(secondary_g2_slots=4)
    assert rig.channels == []
    assert rig.kvcr.bindings.framework_control is None


@pytest.mark.parametrize("rank", [0, 1])
def test_the_local_rank_picks_the_port_and_the_guard(rank: int) -> None:
    options = SERVICE | {"control_ports": [7001, 7002]}
    rig = StandinRig(spec=make_spec(local_rank=rank), **options)
    assert rig.channels[0].arguments[1] == [7001, 7002][rank]
    guard = rig.kvcr.guard_config
    assert guard.guard_index == rank
    assert guard.kvcr_service_socket_path == "/run/kvcr.sock"
    assert guard.compatibility_digest == "v1"


def test_without_a_rank_the_guard_is_the_first() -> None:
    assert StandinRig(**SERVICE).kvcr.guard_config.guard_index == 0


def test_a_rank_without_a_port_is_refused() -> None:
    with pytest.raises(ValueError, match=r"control_ports.*rank 1"):
        StandinRig(spec=make_spec(local_rank=1), control_ports=[7001])


def test_the_services_pool_goes_before_an_own_one(tier_log: LogLines) -> None:
    rig = StandinRig(**SERVICE, secondary_g2_slots=4)
    assert rig.mmap.made == []
    assert rig.kvcr.backend_configs.local_dram is None
    assert any("secondary_g2_slots" in text for text in tier_log.texts())


def test_a_derived_digest_needs_something_to_derive_it_from() -> None:
    with pytest.raises(ValueError, match="compatibility_digest"):
        StandinRig(**SERVICE | {"compatibility_digest": "auto"})
    rig = StandinRig(**SERVICE | {"compatibility_digest": "Auto"}, namespace="prod")
    assert rig.kvcr.guard_config.compatibility_digest not in ("", "auto")


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("fifo", FIFOPolicy),
        ("lru", LRUPolicy),
        ("g3_fifo", G3FIFOPolicy),
        ("g3_lru", G3LRUPolicy),
        ("kvcr.policy.LRUPolicy", LRUPolicy),
    ],
)
def test_policies_by_name(name: str, kind: type) -> None:
    assert type(StandinRig(policy=name).kvcr.bindings.policy) is kind


def test_without_a_policy_kvcr_chooses() -> None:
    assert StandinRig().kvcr.bindings.policy is None


@pytest.mark.parametrize("locality", list(Locality))
def test_the_locality_is_the_tiers(locality: Locality) -> None:
    assert StandinRig(locality=locality.value).tier.locality is locality
    assert StandinRig().tier.locality is None


# --- policies that cannot be had -------------------------------------------------


def test_an_unknown_policy_is_refused_with_what_there_is() -> None:
    with pytest.raises(ValueError, match="policy") as refused:
        StandinRig(policy="lfu")
    for known in ("fifo", "lru", "g3_fifo", "g3_lru", "module.Class"):
        assert known in str(refused.value)


@pytest.mark.parametrize(
    ("name", "missing"),
    [
        ("no_such_module.Policy", "no_such_module"),
        ("kvcr.policy.NoSuchPolicy", "NoSuchPolicy"),
        ("..Policy", "Policy"),
        ("kvcr..policy", "policy"),
        (".", "."),
        ("lru.", "lru."),
    ],
)
def test_an_unresolvable_policy_is_refused_with_what_is_missing(
    name: str, missing: str
) -> None:
    with pytest.raises(ValueError, match="policy") as refused:
        StandinRig(policy=name)
    assert missing in str(refused.value)


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

OWNED = [{"secondary_g2_slots": 4}, {"secondary_g2_slots": 4, "g3": G3}, SERVICE]


@pytest.mark.parametrize("options", OWNED)
def test_events_of_owned_blocks_have_to_describe_themselves(
    options: dict[str, Any],
) -> None:
    with pytest.raises(ValueError, match="self_describing_kv_events"):
        StandinRig(spec=make_spec(events=True), **options)
    rig = StandinRig(spec=make_spec(events=True, described=True), **options)
    assert rig.kvcr.bindings.inventory_sink is not None


@pytest.mark.parametrize("options", OWNED)
def test_with_events_off_a_warning_says_what_is_not_published(
    options: dict[str, Any], tier_log: LogLines
) -> None:
    rig = StandinRig(spec=make_spec(events=False), **options)
    rig.kvcr.publish(key(1))
    assert not rig.tier.take_events()
    assert any("KV events are off" in text for text in tier_log.texts())


def test_a_tier_that_owns_nothing_has_nothing_to_describe(tier_log: LogLines) -> None:
    StandinRig(spec=make_spec(events=True), control_ports=[7001])
    StandinRig(spec=make_spec(events=False), control_ports=[7001])
    assert tier_log.texts() == []


# --- the primary tier's view -----------------------------------------------------


def build_on(view: memoryview) -> Any:
    with mock.patch.object(manager, "KVCR") as kvcr:
        tier = manager.KVCRSecondaryTierManager(
            make_spec(), view, "kvcr", secondary_g2_slots=1
        )
    assert kvcr.called
    return tier


def array(rows: int = 4, row_bytes: int = ROW_BYTES) -> np.ndarray:
    return np.zeros((rows, row_bytes), np.uint8)


@pytest.mark.parametrize("kind", [np.uint8, np.int8])
def test_any_view_of_whole_rows_will_do(kind: Any) -> None:
    memory = array().view(kind)
    tier = build_on(memoryview(memory))
    assert tier._primary_base_addr == memory.ctypes.data


def test_wider_elements_have_a_wider_stride() -> None:
    memory = array().view(np.int32)
    assert build_on(memoryview(memory))._primary_row_stride == ROW_BYTES


def test_a_flat_view_has_an_element_for_each_chunk() -> None:
    memory = np.zeros(4096, np.uint8)
    tier = build_on(memoryview(memory))
    assert tier._primary_base_addr == memory.ctypes.data
    assert tier._primary_row_stride == 1
    assert build_on(memoryview(memory.view(np.int32)))._primary_row_stride == 4


def test_one_byte_a_chunk_goes_there_and_back_on_the_real_kvcr() -> None:
    memory = np.arange(64, dtype=np.uint8)
    view = memoryview(memory)
    tier = manager.KVCRSecondaryTierManager(
        make_spec(), view, "kvcr", secondary_g2_slots=8
    )

    def run(job_id: int, chunks: list[int], is_load: bool) -> Any:
        indices = np.array(chunks, dtype=np.int32)
        job = TransferJob(job_id, keys(3), indices, is_load, ReqContext("r"))
        (tier.submit_load if is_load else tier.submit_store)(job)
        (result,) = wait_until(lambda: list(tier.get_finished_jobs()), "the job")
        return result.success

    assert run(1, [1, 5, 9], False)
    assert run(2, [40, 41, 42], True)
    assert memory[40:43].tolist() == [1, 5, 9]
    assert memory[[39, 43]].tolist() == [39, 43]
    tier.shutdown()
    view.release()


def read_only() -> memoryview:
    memory = array()
    memory.flags.writeable = False
    return memoryview(memory)


@pytest.mark.parametrize(
    "view",
    [
        read_only(),
        memoryview(array()[:, : ROW_BYTES // 2]),
        memoryview(array()[::2]),
        memoryview(array()[::-1]),
        memoryview(array().T),
        memoryview(np.asfortranarray(array())),
        memoryview(array().reshape(2, 2, ROW_BYTES)),
        memoryview(array(rows=0)),
        memoryview(array(row_bytes=0)),
    ],
    ids=[
        "read-only",
        "half of each row",
        "every other row",
        "backwards",
        "on its side",
        "in Fortran's order",
        "three dimensions",
        "no rows",
        "empty rows",
    ],
)
def test_a_view_that_would_give_wrong_addresses_is_refused(view: memoryview) -> None:
    with (
        mock.patch.object(manager, "KVCR") as kvcr,
        pytest.raises(ValueError, match="primary tier"),
    ):
        manager.KVCRSecondaryTierManager(
            make_spec(), view, "kvcr", secondary_g2_slots=1
        )
    assert not kvcr.called


@pytest.mark.parametrize("capacity", [1, ROW_BYTES - 1])
def test_files_that_hold_no_chunk_are_refused(capacity: int) -> None:
    with pytest.raises(ValueError, match=r"g3\.capacity_bytes_per_file"):
        StandinRig(g3=G3 | {"capacity_bytes_per_file": capacity})


def test_files_of_chunks_that_are_no_whole_pages_are_refused() -> None:
    with pytest.raises(ValueError, match="g3"):
        StandinRig(row_bytes=ROW_BYTES + 8, g3=G3)


def test_a_pool_that_cannot_fit_is_refused_with_both_sizes() -> None:
    slots = 1 << 40
    with pytest.raises(ValueError, match="secondary_g2_slots") as refused:
        StandinRig(secondary_g2_slots=slots)
    assert f"{slots * ROW_BYTES:,}" in str(refused.value)
