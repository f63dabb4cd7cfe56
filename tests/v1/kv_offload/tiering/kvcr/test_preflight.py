# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What is looked at before KVCR starts, and how a start that fails is told."""

import contextlib
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.v1.kv_offload.tiering.kvcr.builders import LOCALHOST, free_port, key
from tests.v1.kv_offload.tiering.kvcr.conftest import LogLines
from tests.v1.kv_offload.tiering.kvcr.rig import ROW_BYTES, Rig, StandinRig
from vllm.v1.kv_offload.tiering.kvcr.backend import preflight, setup, start_messages
from vllm.v1.kv_offload.tiering.kvcr.compat.nixl import Nixl
from vllm.v1.kv_offload.tiering.kvcr.config import (
    OptionError,
    TierConfig,
    parse_options,
)

PRIMARY = setup.Primary(0, ROW_BYTES, 16)
POOL: dict[str, Any] = {"secondary_g2_slots": 8}
G3 = {"paths": "/nvme/kv", "capacity_bytes_per_file": "1MiB"}
PEERS = POOL | {"control_ports": [24990], "router_capabilities": ["router_hint"]}


def parse(**options: Any) -> TierConfig:
    return parse_options(POOL | options)


def warnings(publishes: bool = False, **options: Any) -> list[str]:
    return preflight.warnings(parse_options(options), options, PRIMARY, publishes)


# --- ports -----------------------------------------------------------------------


def test_a_port_in_use_is_refused_by_name() -> None:
    port = free_port()
    with (
        socket.create_server((LOCALHOST, port)),
        pytest.raises(OptionError, match=rf"control_ports: port {port} on .*use"),
    ):
        Rig(**POOL, control_ports=[port], control_host=LOCALHOST)
    preflight.check_port(LOCALHOST, port)


@pytest.mark.parametrize("host", ["192.0.2.1", "no-such-host.invalid"])
def test_an_address_of_another_machine_is_refused_by_name(host: str) -> None:
    with pytest.raises(OptionError, match=rf"control_host = '{host}'.*this machine"):
        preflight.check_port(host, free_port())


def test_of_a_stand_in_nothing_outside_is_looked_at(tier_log: LogLines) -> None:
    port = free_port()
    with socket.create_server((LOCALHOST, port)):
        rig = StandinRig(
            **POOL, control_ports=[port], g3=G3 | {"paths": "/no/such/folder/kv"}
        )
    assert rig.kvcr.backend_configs.g3.backend == "GDS_MT"


# --- plugins ---------------------------------------------------------------------


class SomeNixl(Nixl):
    """A NIXL with these plugins; what is made of ``broken`` fails."""

    def __init__(self, broken: str | None = None, **plugins: tuple[str, ...]) -> None:
        self._plugins = plugins
        self._broken = broken
        self.names = tuple(plugins)

    def memory(self, name: str) -> tuple[str, ...] | None:
        return self._plugins.get(name, ())

    def why_unusable(self, name: str, options: Any) -> str | None:
        return "nixlBackendError: no" if name == self._broken else None


DRAM, FILE = "DRAM_SEG", "FILE_SEG"


@pytest.mark.parametrize(
    ("options", "option", "usable"),
    [
        ({"g3": G3 | {"backend": "HF3FS"}}, "g3.backend = 'HF3FS'", "POSIX"),
        ({"g3": G3 | {"backend": "ucx"}}, "g3.backend = 'UCX'", "POSIX"),
        ({"local_dram_backend": "Mine"}, "local_dram_backend = 'Mine'", "UCX"),
        (
            {"control_ports": 1, "remote_fw_dram_backend": "UCCL"},
            "remote_fw_dram_backend = 'UCCL'",
            "UCX",
        ),
    ],
)
def test_a_named_plugin_that_is_not_there_is_refused_with_what_is(
    options: dict[str, Any], option: str, usable: str
) -> None:
    nixl = SomeNixl(UCX=(DRAM,), POSIX=(DRAM, FILE), GDS=())
    with pytest.raises(OptionError) as refused:
        preflight.check_plugins(parse(**options), nixl)
    assert option in str(refused.value)
    assert usable in str(refused.value).partition("usable here: ")[2]


def test_the_installed_nixl_says_what_it_has() -> None:
    nixl = Nixl()
    assert nixl.names is not None
    assert {"UCX", "POSIX"} <= set(nixl.names)
    assert FILE in (nixl.memory("POSIX") or ())
    assert FILE not in (nixl.memory("UCX") or ())
    assert nixl.memory("no such plugin") == ()
    assert nixl.why_unusable("POSIX", {}) is None
    assert nixl.why_unusable("no such plugin", {})
    with pytest.raises(OptionError, match=r"g3\.backend = 'HF3FS': .*POSIX"):
        preflight.check_plugins(parse(g3=G3 | {"backend": "HF3FS"}), nixl)


def test_a_nixl_that_cannot_be_asked_speaks_against_nothing() -> None:
    nixl = Nixl()
    nixl.names = nixl._agent = None
    config = parse(g3=G3, local_dram_backend="Mine")
    assert preflight.check_plugins(config, nixl) is config


def test_without_gpudirect_files_go_through_posix_and_it_is_said_once(
    tier_log: LogLines,
) -> None:
    nixl = SomeNixl("GDS_MT", UCX=(DRAM,), POSIX=(DRAM, FILE))
    for _ in range(2):
        config = preflight.check_plugins(parse(g3=G3), nixl)
        assert config.g3 is not None
        assert config.g3.backend == "POSIX"
    (line,) = [text for text in tier_log.texts() if "nixlBackendError: no" in text]
    assert "GDS_MT" in line
    assert "POSIX" in line


def test_with_gpudirect_kvcr_chooses() -> None:
    nixl = SomeNixl(UCX=(DRAM,), GDS_MT=(DRAM, FILE))
    config = preflight.check_plugins(parse(g3=G3), nixl)
    assert config.g3 is not None
    assert config.g3.backend is None


def test_g3_works_without_naming_a_backend(disk: Path) -> None:
    g3 = {"paths": disk / "unnamed", "capacity_bytes_per_file": "64KiB"}
    with contextlib.closing(Rig(**POOL, g3=g3)) as rig:
        rig.fill(range(8))
        assert rig.result_of(rig.store([key(n) for n in range(8)], range(8))).success


# --- warnings --------------------------------------------------------------------


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """An environment that there is nothing to say about."""
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    monkeypatch.setenv("UCX_NET_DEVICES", "lo")
    monkeypatch.delenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", raising=False)
    return monkeypatch


def test_there_is_nothing_to_warn_of(quiet: Any) -> None:
    assert warnings(**POOL) == []
    assert warnings(True, **PEERS, control_advertise_host="10.0.0.5") == []


def test_a_hash_seed_matters_to_peers(quiet: pytest.MonkeyPatch) -> None:
    quiet.delenv("PYTHONHASHSEED")
    assert warnings(**POOL) == []
    (warning,) = warnings(**PEERS)
    assert "PYTHONHASHSEED" in warning


def test_hashes_that_hints_cannot_carry(quiet: pytest.MonkeyPatch) -> None:
    quiet.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "0")
    assert warnings(**POOL) == []
    (warning,) = warnings(**PEERS)
    assert "VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES" in warning


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.1.1", "localhost"])
def test_a_loopback_address_is_no_use_to_peers(quiet: Any, host: str) -> None:
    (warning,) = warnings(**PEERS, control_advertise_host=host)
    assert f"control_advertise_host = '{host}'" in warning


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"control_ports": [1]}, "router_capabilities is"),
        ({"control_ports": 1}, "control_ports and router_capabilities are"),
        (
            {"control_ports": "1", "router_capabilities": ["router_hint"]},
            "control_ports is",
        ),
        (
            {"control_ports": [1], "router_capabilities": "router_hint"},
            "router_capabilities is",
        ),
    ],
)
def test_a_router_reads_lists(quiet: Any, options: dict[str, Any], named: str) -> None:
    assert warnings(False, **options) == []
    (warning,) = warnings(True, **options)
    assert f" but {named} not given as a list" in warning


def test_rdma_needs_locked_memory(quiet: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "mlx5_0").touch()
    quiet.setattr(preflight, "_RDMA", tmp_path)
    limit = 24 * ROW_BYTES
    quiet.setattr(preflight.resource, "getrlimit", lambda _: (limit, limit))
    assert warnings(**POOL) == []
    (warning,) = warnings(secondary_g2_slots=9)
    assert "memlock" in warning
    assert f"{25 * ROW_BYTES:,}" in warning
    quiet.setattr(preflight, "_RDMA", tmp_path / "absent")
    assert warnings(secondary_g2_slots=9) == []


def test_many_interfaces_slow_ucx_down(quiet: pytest.MonkeyPatch) -> None:
    class Up:
        isup = True

    count = preflight.MANY_INTERFACES + 1
    stats = {f"veth{n}": Up() for n in range(count)}
    quiet.setattr(preflight.psutil, "net_if_stats", lambda: stats)
    assert warnings(**POOL) == []
    quiet.delenv("UCX_NET_DEVICES")
    (warning,) = warnings(**POOL)
    assert f"{count} network interfaces" in warning
    assert "UCX_NET_DEVICES" in warning


def test_a_warning_is_said_once(tier_log: LogLines) -> None:
    host = "127.77.66.55"  # in no other test, of which it could have been said
    for _ in range(2):
        peer = {"control_ports": [free_port()], "control_host": LOCALHOST}
        Rig(**POOL, **peer, control_advertise_host=host).close()
    assert len([text for text in tier_log.texts() if host in text]) == 1


# --- a start that fails ----------------------------------------------------------


@pytest.mark.parametrize("variable", ["UCX_TLS", "UCX_NET_DEVICES"])
def test_a_nixl_that_cannot_start_is_told_with_backend_and_variables(
    monkeypatch: pytest.MonkeyPatch, retained: list[Any], variable: str
) -> None:
    monkeypatch.setenv(variable, "nonsense0")
    with pytest.raises(RuntimeError) as failed:
        Rig(**POOL)
    for part in (
        "NIXL_ERR_BACKEND",
        "local_dram_backend = UCX",
        f"{variable}=nonsense0",
        "ucx_info -d",
    ):
        assert part in str(failed.value)
    assert failed.value.__cause__ is not None


def test_a_mute_service_is_told_while_it_is_waited_for(
    tmp_path: Path, tier_log: LogLines, monkeypatch: pytest.MonkeyPatch
) -> None:
    import kvcr.control_channels

    monkeypatch.setattr(kvcr.control_channels, "_TIMEOUT_SECONDS", 1.0)
    monkeypatch.setattr(start_messages, "_FIRST_S", 0.2)
    path = str(tmp_path / "s")
    with socket.socket(socket.AF_UNIX) as mute:
        mute.bind(path)
        mute.listen()
        with pytest.raises(RuntimeError, match="the KVCR service did not grant a pool"):
            Rig(
                kvcr_service_socket_path=path,
                compatibility_digest="d",
                control_ports=[free_port()],
                control_host=LOCALHOST,
            )
    (line,) = [text for text in tier_log.texts() if "waiting for" in text]
    assert path in line
    assert "guard 0" in line


def test_what_is_quick_is_not_told(
    tier_log: LogLines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(start_messages, "_FIRST_S", 0.05)
    monkeypatch.setattr(start_messages, "_THEN_S", 0.05)
    with start_messages.announced("nothing"):
        pass
    with start_messages.announced("paint to dry"):
        time.sleep(0.3)
    lines = [text for text in tier_log.texts() if "waiting for" in text]
    assert len(lines) > 1
    assert all("paint to dry" in line for line in lines)
    names = {thread.name for thread in threading.enumerate()}
    assert "kvcr-tier-wait" not in names


@pytest.mark.parametrize("name", ["lru", "fifo", "kvcr.policy.LRUPolicy"])
def test_a_policy_that_never_uses_the_files_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"policy = .*g3_lru"):
        StandinRig(policy=name, secondary_g2_slots=4, g3=G3)
