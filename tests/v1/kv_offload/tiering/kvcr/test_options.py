# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The tier's options, as operators write them: read right, or refused by name."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvcr import ROUTER_HINT_CAPABILITIES

from tests.v1.kv_offload.tiering.kvcr.json_values import JSON_VALUES
from vllm.v1.kv_offload.tiering.kvcr.config import (
    G3Config,
    OptionError,
    TierConfig,
    parse_options,
    telemetry_enabled,
)

PEERS: dict[str, Any] = {"control_ports": [7001]}
POOL: dict[str, Any] = {"secondary_g2_slots": 64}
G3: dict[str, Any] = {"paths": ["g3.data"], "capacity_bytes_per_file": 1 << 20}
CAPABILITIES = sorted(ROUTER_HINT_CAPABILITIES)


def parse(**options: Any) -> TierConfig:
    return parse_options(options)


def test_every_documented_option_exists() -> None:
    documented = {
        "router_capabilities",
        "control_host",
        "control_ports",
        "control_advertise_host",
        "eager_ctrl_connect",
        "opportunistic_query",
        "enable_telemetry",
        "operation_timeout_ms",
        "abandon_timeout_ms",
        "metadata_retry_interval_ms",
        "secondary_g2_slots",
        "kvcr_service_socket_path",
        "compatibility_digest",
        "policy",
        "g3",
        "local_dram_backend",
        "remote_fw_dram_backend",
    }
    assert documented <= TierConfig.model_fields.keys()
    assert {"paths", "capacity_bytes_per_file", "backend", "backend_options"} == (
        G3Config.model_fields.keys()
    )


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ({"control_ports": ["7001"]}, {"control_ports": [7001]}),
        ({"control_ports": 7001}, {"control_ports": [7001]}),
        ({"control_ports": "7001"}, {"control_ports": [7001]}),
        ({"control_ports": "7001, 7002"}, {"control_ports": [7001, 7002]}),
        ({"secondary_g2_bytes": "64KiB"}, {"secondary_g2_bytes": 65536}),
        (
            PEERS | {"router_capabilities": CAPABILITIES[0]},
            PEERS | {"router_capabilities": CAPABILITIES[:1]},
        ),
        (
            PEERS | {"allowed_peers": " Peer.Example. "},
            PEERS | {"allowed_peers": ["peer.example"]},
        ),
        ({"secondary_g2_slots": "64"}, POOL),
        (POOL | {"enable_telemetry": "false"}, POOL | {"enable_telemetry": False}),
        (POOL | {"enable_telemetry": "true"}, POOL | {"enable_telemetry": True}),
        (POOL | {"g3": G3 | {"paths": "g3.data"}}, POOL | {"g3": G3}),
        (POOL | {"operation_timeout_ms": "700"}, POOL | {"operation_timeout_ms": 700}),
    ],
)
def test_loose_spellings_mean_the_same(
    written: dict[str, Any], meant: dict[str, Any]
) -> None:
    assert parse(**written) == parse(**meant)


def test_g3_paths_become_paths() -> None:
    config = parse(**POOL, g3=G3 | {"paths": ["a", "b/c"], "backend": "POSIX"})
    assert config.g3 is not None
    assert config.g3.paths == (Path("a"), Path("b/c"))
    assert config.g3.backend == "POSIX"


def test_abandon_timeout_follows_the_operation_timeout() -> None:
    assert parse(**PEERS, operation_timeout_ms=5000).abandon_timeout >= 10_000
    assert parse(**PEERS, operation_timeout_ms=9000).abandon_timeout >= 18_000
    assert parse(**PEERS, abandon_timeout_ms=2000).abandon_timeout == 2000


@pytest.mark.parametrize("locality", ["LOCAL", "REMOTE"])
def test_vllms_locality_is_taken(locality: str) -> None:
    assert parse(**PEERS, locality=locality).locality == locality


@pytest.mark.parametrize("host", ["cache-7.example", "10.0.0.5", "node_1", "a.b"])
def test_hosts_that_peers_can_dial_are_taken(host: str) -> None:
    advertised = parse(**PEERS, control_advertise_host=host).control_advertise_host
    assert advertised is not None
    assert host in advertised


REFUSED: dict[str, tuple[dict[str, Any], list[str]]] = {
    "abandoned before twice the timeout": (
        PEERS | {"operation_timeout_ms": 5000, "abandon_timeout_ms": 6000},
        ["operation_timeout_ms", "abandon_timeout_ms", "twice"],
    ),
    "a port that is a boolean": ({"control_ports": [True]}, ["control_ports"]),
    "port 0": ({"control_ports": [0]}, ["control_ports"]),
    "a port over 65535": ({"control_ports": [65536]}, ["control_ports"]),
    "no port at all": ({"control_ports": []}, ["control_ports"]),
    "one port for two ranks": (
        {"control_ports": [7001, 7001]},
        ["control_ports", "share"],
    ),
    "one port for two ranks, spelt differently": (
        {"control_ports": [7001, "7001"]},
        ["control_ports", "share"],
    ),
    "capabilities that lack what hints need": (
        PEERS | {"router_capabilities": []},
        ["router_capabilities", *CAPABILITIES],
    ),
    "a pool that is a boolean": ({"secondary_g2_slots": True}, ["secondary_g2_slots"]),
    "a negative pool": ({"secondary_g2_slots": -1}, ["secondary_g2_slots"]),
    "half a slot": ({"secondary_g2_slots": 0.5}, ["secondary_g2_slots"]),
    "no timeout": (PEERS | {"operation_timeout_ms": 0}, ["operation_timeout_ms"]),
    "a misspelt option": (
        {"secondary_g2_slot": 64},
        ["unknown", "secondary_g2_slot", "did you mean secondary_g2_slots"],
    ),
    "an option like no other": (POOL | {"zzz": 1}, ["unknown", "zzz"]),
    "a wildcard to dial": (
        PEERS | {"control_advertise_host": "0.0.0.0"},
        ["control_advertise_host", "dial"],
    ),
    "another wildcard": (
        PEERS | {"control_advertise_host": "::"},
        ["control_advertise_host", "dial"],
    ),
    "a URL for a host": (
        PEERS | {"control_advertise_host": "tcp://10.0.0.5:7001"},
        ["control_advertise_host", "only the host"],
    ),
    "a host with its port": (
        PEERS | {"control_advertise_host": "10.0.0.5:7001"},
        ["control_advertise_host", "only the host"],
    ),
    "a digest without a socket": (
        PEERS | {"compatibility_digest": "d"},
        ["kvcr_service_socket_path", "compatibility_digest", "configured together"],
    ),
    "a socket without a digest": (
        PEERS | {"kvcr_service_socket_path": "/s"},
        ["kvcr_service_socket_path", "compatibility_digest", "configured together"],
    ),
    "a misspelt option of g3": (
        POOL | {"g3": {"path": ["g3.data"], "capacity_bytes_per_file": 1 << 20}},
        ["g3.path", "g3.paths"],
    ),
    "g3 without a path": (POOL | {"g3": G3 | {"paths": []}}, ["g3.paths"]),
    "g3 without a size": (
        POOL | {"g3": {"paths": ["g3.data"]}},
        ["g3.capacity_bytes_per_file"],
    ),
    "a peer with its port": (
        PEERS | {"allowed_peers": ["10.0.0.6:7001"]},
        ["allowed_peers", "10.0.0.6:7001", "without scheme or port"],
    ),
    "an IPv6 network of peers": (
        PEERS | {"allowed_peers": ["fd00::/8"]},
        ["allowed_peers", "fd00::/8", "IPv4 network"],
    ),
    "a network that is an address": (
        PEERS | {"allowed_peers": "10.0.0.6/8"},
        ["allowed_peers", "10.0.0.6/8", "host bits"],
    ),
    "no peer at all": (PEERS | {"allowed_peers": []}, ["allowed_peers"]),
    "a secret that the service does not know": (
        PEERS
        | {"kvcr_service_socket_path": "/s", "compatibility_digest": "d"}
        | {"control_secret_file": "/secret"},
        ["control_secret_file", "kvcr_service_socket_path"],
    ),
    "g3 as text": (POOL | {"g3": "/nvme/kv"}, ["g3", "paths"]),
    "a pool by two sizes": (
        POOL | {"secondary_g2_bytes": "1GiB"},
        ["secondary_g2_slots", "secondary_g2_bytes", "one"],
    ),
    "a negative size": ({"secondary_g2_bytes": "-1GiB"}, ["secondary_g2_bytes"]),
    "a size in no unit": ({"secondary_g2_bytes": "8GiBs"}, ["secondary_g2_bytes"]),
    "a size that is a boolean": (
        {"secondary_g2_bytes": True},
        ["secondary_g2_bytes", "boolean"],
    ),
    "half a byte": ({"secondary_g2_bytes": 0.5}, ["secondary_g2_bytes"]),
    "a file of no bytes": (
        POOL | {"g3": G3 | {"capacity_bytes_per_file": "0GiB"}},
        ["g3.capacity_bytes_per_file"],
    ),
    "a port too many commas": ({"control_ports": "24990,,24991"}, ["control_ports"]),
    "a path twice": (POOL | {"g3": G3 | {"paths": ["a", "a"]}}, ["g3.paths", "twice"]),
    "a path for two ranks": (
        POOL | {"g3": G3 | {"paths": [["a"], ["a"]]}},
        ["g3.paths", "twice"],
    ),
    "paths and lists of them": (
        POOL | {"g3": G3 | {"paths": ["a", ["b"]]}},
        ["g3.paths", "either"],
    ),
    "another place in a path": (
        POOL | {"g3": G3 | {"paths": "/nvme/{node}/kv"}},
        ["g3.paths", "{rank}"],
    ),
    "a URL for a file": (
        POOL | {"g3": G3 | {"paths": "file:///nvme/kv"}},
        ["g3.paths", "'file:///nvme/kv'", "URL"],
    ),
    "a home folder": (
        POOL | {"g3": G3 | {"paths": ["/a", "~/kv"]}},
        ["g3.paths", "'~/kv'", "not expanded"],
    ),
    "a plugin's option that is none": (
        POOL | {"g3": G3 | {"backend_options": {"use_uring": None}}},
        ["g3.backend_options", "use_uring"],
    ),
    "fs' folder": (POOL | {"root_dir": "/kv"}, ["root_dir", '"fs"', "g3.paths"]),
    "fs' size": (
        POOL | {"max_disk_gib": 100},
        ["max_disk_gib", '"fs"', "g3.capacity_bytes_per_file"],
    ),
    "fs' folder in g3": (
        POOL | {"g3": G3 | {"root_dir": "/kv"}},
        ["g3.root_dir", '"fs"', "g3.paths"],
    ),
    "IPv6 to listen on": (PEERS | {"control_host": "::"}, ["control_host", "IPv4"]),
    "IPv6 to dial": (
        PEERS | {"control_advertise_host": "::1"},
        ["control_advertise_host", "'::1'", "IPv4"],
    ),
    "IPv6 in brackets": (
        PEERS | {"control_advertise_host": "[fe80::1]"},
        ["control_advertise_host", "IPv4"],
    ),
    "an address out of range": (
        PEERS | {"control_advertise_host": "10.0.0.256"},
        ["control_advertise_host", "not an IPv4 address"],
    ),
    "any address to listen on": (
        PEERS | {"control_host": "*"},
        ["control_host", "0.0.0.0"],
    ),
    "a port in the address to listen on": (
        PEERS | {"control_host": "0.0.0.0:24990"},
        ["control_host", "only the host"],
    ),
    "nothing to do": ({}, ["secondary_g2_slots", "control_ports"]),
    "an unknown locality": (POOL | {"locality": "NEAR"}, ["locality"]),
}


def with_text(option: str, text: str) -> dict[str, Any]:
    """A configuration in which ``option`` has that text."""
    if option.startswith("g3."):
        return POOL | {"g3": G3 | {option.removeprefix("g3."): text}}
    if option in ("kvcr_service_socket_path", "compatibility_digest"):
        service = {"kvcr_service_socket_path": "/s", "compatibility_digest": "d"}
        return PEERS | service | {option: text}
    return PEERS | {option: text}


HOSTS_AND_PATHS = [
    "control_host",
    "control_advertise_host",
    "kvcr_service_socket_path",
    "g3.paths",
]
TEXTS = ["compatibility_digest", "namespace", "policy", "remote_fw_dram_backend"]


@pytest.mark.parametrize(
    "text", ["$(POD_IP)", "${POD_IP}", "$KV_DIR/kv", "/a/$X", "{{ .Values.host }}"]
)
@pytest.mark.parametrize("option", [*HOSTS_AND_PATHS, *TEXTS])
def test_a_variable_that_nothing_expanded_is_refused(option: str, text: str) -> None:
    with pytest.raises(OptionError, match="which was not expanded") as refused:
        parse_options(with_text(option, text))
    assert f"{option} = {text!r}" in str(refused.value)


@pytest.mark.parametrize("text", ["", " ", " a", "a ", "a\n", "\ta", "a\0b"])
@pytest.mark.parametrize("option", HOSTS_AND_PATHS)
def test_text_that_is_not_as_it_looks_is_refused(option: str, text: str) -> None:
    with pytest.raises(OptionError) as refused:
        parse_options(with_text(option, text))
    assert f"{option} = {text!r}" in str(refused.value)


def test_a_dollar_alone_is_no_variable() -> None:
    assert parse(**PEERS, namespace="us$ 5").namespace == "us$ 5"


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("8GiB", 8 << 30),
        ("8Gi", 8 << 30),
        ("8 gib", 8 << 30),
        (" 10G ", 10**10),
        ("10GB", 10**10),
        ("1.5KiB", 1536),
        ("4096", 4096),
        ("4096B", 4096),
        ("2T", 2 * 10**12),
        (1e9, 10**9),
    ],
)
def test_sizes_are_bytes_or_text(text: Any, size: int) -> None:
    assert parse(secondary_g2_bytes=text).secondary_g2_bytes == size
    config = parse(**POOL, max_operation_bytes=text, g3=G3)
    assert config.max_operation_bytes == size


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("posix", "POSIX"),
        ("Posix", "POSIX"),
        (" POSIX ", "POSIX"),
        ("gds_mt", "GDS_MT"),
        ("mooncake", "Mooncake"),
        ("MyOwn", "MyOwn"),
    ],
)
def test_plugins_are_known_in_any_case(written: str, meant: str) -> None:
    config = parse(**POOL, g3=G3 | {"backend": written}, local_dram_backend=written)
    assert config.g3 is not None
    assert (config.g3.backend, config.local_dram_backend) == (meant, meant)


def test_plugins_options_become_the_text_that_nixl_takes() -> None:
    """NIXL compares with ``true``, and takes anything else for false."""
    written = {"a": True, "b": False, "c": "True", "d": "FALSE", "e": 8, "f": "X"}
    config = parse(**POOL, g3=G3 | {"backend_options": written})
    assert config.g3 is not None
    read = config.g3.backend_options
    assert list(read.values()) == ["true", "false", "true", "false", "8", "X"]


@pytest.mark.parametrize(("options", "names"), REFUSED.values(), ids=REFUSED.keys())
def test_refused_by_name(options: dict[str, Any], names: list[str]) -> None:
    with pytest.raises(ValueError) as refused:  # noqa: PT011 the names are checked below
        parse_options(options)
    for name in names:
        assert name in str(refused.value)


@pytest.mark.parametrize(
    "options",
    [
        {"secondary_g2_slots": [64]},
        {"control_ports": [None]},
        POOL | {"enable_telemetry": []},
        POOL | {"g3": 7},
        POOL | {"policy": 7.5 + 1j},
    ],
)
def test_a_wrong_type_is_a_type_error_too(options: dict[str, Any]) -> None:
    with pytest.raises(TypeError) as refused:
        parse_options(options)
    assert list(options)[-1] in str(refused.value)


def test_several_faults_are_told_at_once() -> None:
    with pytest.raises(ValueError, match=r"(?s)operation_timeout_ms.*abandon_timeout"):
        parse(**PEERS, operation_timeout_ms=-1, abandon_timeout_ms="soon")


@pytest.mark.parametrize(("ports", "rank"), [([7001], 1), ([7001, 7002], 5)])
def test_a_rank_without_a_port_is_told_how_many_are_needed(
    ports: list[int], rank: int
) -> None:
    with pytest.raises(ValueError, match=rf"control_ports.*rank {rank}.*{rank + 1} po"):
        parse(control_ports=ports).control_port(rank)


def test_without_ranks_there_is_exactly_one_port() -> None:
    assert parse(control_ports=[7001]).control_port(None) == 7001
    with pytest.raises(ValueError, match=r"control_ports.*exactly one"):
        parse(control_ports=[7001, 7002]).control_port(None)


def test_capabilities_do_not_matter_where_no_peers_are_served() -> None:
    assert not parse(**POOL, router_capabilities=[]).serves_peers


def outcome(options: dict[str, Any]) -> tuple[TierConfig | None, str]:
    """What was read, or why it was refused."""
    try:
        return parse_options(options), ""
    except OptionError as error:
        return None, str(error)


# Neither of them can be had alone.
TOGETHER = {"kvcr_service_socket_path", "compatibility_digest"}


@given(name=st.sampled_from(sorted(TierConfig.model_fields)), value=JSON_VALUES)
def test_any_value_is_taken_or_refused_by_its_options_name(
    name: str, value: Any
) -> None:
    config, refusal = outcome(PEERS | POOL | {name: value})
    if config is None:
        assert name in refusal
        assert len(refusal.splitlines()) == 1
    else:
        assert name not in TOGETHER or value is None
        assert config.abandon_timeout >= 2 * config.operation_timeout


@given(name=st.sampled_from(sorted(G3Config.model_fields)), value=JSON_VALUES)
def test_any_value_of_g3_is_taken_or_refused_by_its_options_name(
    name: str, value: Any
) -> None:
    config, refusal = outcome(POOL | {"g3": G3 | {name: value}})
    assert config is not None or f"g3.{name}" in refusal


@given(
    name=st.text(min_size=1).filter(lambda name: name not in TierConfig.model_fields)
)
def test_any_unknown_option_is_refused_by_its_name(name: str) -> None:
    with pytest.raises(OptionError, match="unknown option") as refused:
        parse_options(POOL | {name: 1})
    text = str(refused.value)
    assert name in text or repr(name) in text


@given(value=JSON_VALUES)
def test_telemetry_before_the_tier_reads_the_option_the_same_way(value: Any) -> None:
    options = POOL | {"enable_telemetry": value}
    config, _ = outcome(options)
    if config is None:
        with pytest.raises(OptionError, match="enable_telemetry"):
            telemetry_enabled(options)
    else:
        assert telemetry_enabled(options) is config.enable_telemetry
