# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The tier's options, as operators write them: read right, or refused by name."""

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
SERVICE = {"kvcr_service_socket_path": "/s", "compatibility_digest": "d"}
G3: dict[str, Any] = {"paths": ["g3.data"], "capacity_bytes_per_file": 1 << 20}
CAPABILITIES = sorted(ROUTER_HINT_CAPABILITIES)


def parse(**options: Any) -> TierConfig:
    return parse_options(options)


@pytest.mark.parametrize(
    ("option", "written", "meant"),
    [
        ("control_ports", ["7001"], [7001]),
        ("control_ports", 7001, [7001]),
        ("control_ports", "7001", [7001]),
        ("control_ports", "7001, 7002", [7001, 7002]),
        ("secondary_g2_bytes", "64KiB", 65536),
        ("router_capabilities", CAPABILITIES[0], CAPABILITIES[:1]),
        ("allowed_peers", " Peer.Example. ", ["peer.example"]),
        ("secondary_g2_slots", "64", 64),
        ("enable_telemetry", "false", False),
        ("enable_telemetry", "true", True),
        ("g3", G3 | {"paths": "g3.data"}, G3),
        ("operation_timeout_ms", "700", 700),
    ],
)
def test_loose_spellings_mean_the_same(option: str, written: Any, meant: Any) -> None:
    assert parse(**PEERS | {option: written}) == parse(**PEERS | {option: meant})


def test_abandon_timeout_follows_the_operation_timeout() -> None:
    assert parse(**PEERS, operation_timeout_ms=5000).abandon_timeout >= 10_000
    assert parse(**PEERS, operation_timeout_ms=9000).abandon_timeout >= 18_000
    assert parse(**PEERS, abandon_timeout_ms=2000).abandon_timeout == 2000


@pytest.mark.parametrize("host", ["cache-7.example", "10.0.0.5", "node_1", "a.b"])
def test_hosts_that_peers_can_dial_are_taken(host: str) -> None:
    assert parse(**PEERS, control_advertise_host=host).control_advertise_host == host


def in_g3(**changes: Any) -> dict[str, Any]:
    return {"g3": G3 | changes}


# Options, beside those of ``PEERS``, and what the refusal names.
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "abandoned before twice the timeout": (
        {"operation_timeout_ms": 5000, "abandon_timeout_ms": 6000},
        "operation_timeout_ms, abandon_timeout_ms, twice",
    ),
    "a delay of over a second": (
        {"nixl_progress_delay_ms": 1001},
        "nixl_progress_delay_ms, 1001, 1000",
    ),
    "a port that is a boolean": ({"control_ports": [True]}, "control_ports"),
    "port 0": ({"control_ports": [0]}, "control_ports"),
    "a port over 65535": ({"control_ports": [65536]}, "control_ports"),
    "no port at all": ({"control_ports": []}, "control_ports"),
    "a shared port": ({"control_ports": [7001, "7001"]}, "control_ports, share"),
    "a comma too many": ({"control_ports": "24990,,24991"}, "control_ports"),
    "capabilities that lack what hints need": (
        {"router_capabilities": []},
        f"router_capabilities, {', '.join(CAPABILITIES)}",
    ),
    "a pool that is a boolean": ({"secondary_g2_slots": True}, "secondary_g2_slots"),
    "a negative pool": ({"secondary_g2_slots": -1}, "secondary_g2_slots"),
    "half a slot": ({"secondary_g2_slots": 0.5}, "secondary_g2_slots"),
    "no timeout": ({"operation_timeout_ms": 0}, "operation_timeout_ms"),
    "a misspelt option": (
        {"secondary_g2_slot": 64},
        "unknown, secondary_g2_slot, did you mean secondary_g2_slots",
    ),
    "an option like no other": ({"zzz": 1}, "unknown, zzz"),
    "a wildcard to dial": (
        {"control_advertise_host": "0.0.0.0"},
        "control_advertise_host, dial",
    ),
    "another wildcard": (
        {"control_advertise_host": "::"},
        "control_advertise_host, dial",
    ),
    "a URL for a host": (
        {"control_advertise_host": "tcp://10.0.0.5:7001"},
        "control_advertise_host, only the host",
    ),
    "a digest without a socket": (
        {"compatibility_digest": "d"},
        "kvcr_service_socket_path, compatibility_digest, configured together",
    ),
    "g3 as text": ({"g3": "/nvme/kv"}, "g3, paths"),
    "a misspelt option of g3": (in_g3(path=["g3.data"]), "g3.path, g3.paths"),
    "g3 without a path": (in_g3(paths=[]), "g3.paths"),
    "g3 without a size": ({"g3": {"paths": ["a"]}}, "g3.capacity_bytes_per_file"),
    "a peer with its port": (
        {"allowed_peers": ["10.0.0.6:7001"]},
        "allowed_peers, 10.0.0.6:7001, without scheme or port",
    ),
    "an IPv6 network of peers": (
        {"allowed_peers": ["fd00::/8"]},
        "allowed_peers, fd00::/8, IPv4 network",
    ),
    "a network that is an address": (
        {"allowed_peers": "10.0.0.6/8"},
        "allowed_peers, 10.0.0.6/8, host bits",
    ),
    "no peer at all": ({"allowed_peers": []}, "allowed_peers"),
    "a secret that the service does not know": (
        SERVICE | {"control_secret_file": "/secret"},
        "control_secret_file, kvcr_service_socket_path",
    ),
    "a pool by two sizes": (
        POOL | {"secondary_g2_bytes": "1GiB"},
        "secondary_g2_slots, secondary_g2_bytes, one",
    ),
    "a negative size": ({"secondary_g2_bytes": "-1GiB"}, "secondary_g2_bytes"),
    "a size in no unit": ({"secondary_g2_bytes": "8GiBs"}, "secondary_g2_bytes"),
    "a boolean size": ({"secondary_g2_bytes": True}, "secondary_g2_bytes, boolean"),
    "half a byte": ({"secondary_g2_bytes": 0.5}, "secondary_g2_bytes"),
    "a file of no bytes": (
        in_g3(capacity_bytes_per_file="0GiB"),
        "g3.capacity_bytes_per_file",
    ),
    "a path twice": (in_g3(paths=["a", "a"]), "g3.paths, twice"),
    "a path for two ranks": (in_g3(paths=[["a"], ["a"]]), "g3.paths, twice"),
    "paths and lists of them": (in_g3(paths=["a", ["b"]]), "g3.paths, either"),
    "another place in a path": (in_g3(paths="/nvme/{node}/kv"), "g3.paths, {rank}"),
    "a URL for a file": (
        in_g3(paths="file:///nvme/kv"),
        "g3.paths, 'file:///nvme/kv', URL",
    ),
    "a home folder": (in_g3(paths=["/a", "~/kv"]), "g3.paths, '~/kv', not expanded"),
    "a plugin's option that is none": (
        in_g3(backend_options={"use_uring": None}),
        "g3.backend_options, use_uring",
    ),
    "fs' folder": ({"root_dir": "/kv"}, 'root_dir, "fs", g3.paths'),
    "fs' size": (
        {"max_disk_gib": 100},
        'max_disk_gib, "fs", g3.capacity_bytes_per_file',
    ),
    "fs' folder in g3": (in_g3(root_dir="/kv"), 'g3.root_dir, "fs", g3.paths'),
    "IPv6 to listen on": ({"control_host": "::"}, "control_host, IPv4"),
    "IPv6 to dial": (
        {"control_advertise_host": "[fe80::1]"},
        "control_advertise_host, '[fe80::1]', IPv4",
    ),
    "an address out of range": (
        {"control_advertise_host": "10.0.0.256"},
        "control_advertise_host, not an IPv4 address",
    ),
    "any address to listen on": ({"control_host": "*"}, "control_host, 0.0.0.0"),
    "a port in the address to listen on": (
        {"control_host": "0.0.0.0:24990"},
        "control_host, only the host",
    ),
    "nothing to do": ({"control_ports": None}, "secondary_g2_slots, control_ports"),
    "an unknown locality": ({"locality": "NEAR"}, "locality"),
}


def with_text(option: str, text: str) -> dict[str, Any]:
    """A configuration in which ``option`` has that text."""
    if option.startswith("g3."):
        return PEERS | in_g3(**{option.removeprefix("g3."): text})
    return PEERS | (SERVICE if option in SERVICE else {}) | {option: text}


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
def test_refused_by_name(options: dict[str, Any], names: str) -> None:
    with pytest.raises(OptionError) as refused:
        parse_options(PEERS | options)
    for name in names.split(", "):
        assert name in str(refused.value)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("secondary_g2_slots", [64]),
        ("control_ports", [None]),
        ("enable_telemetry", []),
        ("g3", 7),
        ("policy", 7.5 + 1j),
    ],
)
def test_a_wrong_type_is_a_type_error_too(option: str, value: Any) -> None:
    with pytest.raises(TypeError, match=option):
        parse(**{option: value})


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


@given(name=st.sampled_from(sorted(TierConfig.model_fields)), value=JSON_VALUES)
def test_any_value_is_taken_or_refused_by_its_options_name(
    name: str, value: Any
) -> None:
    config, refusal = outcome(PEERS | POOL | {name: value})
    if config is None:
        assert name in refusal
        assert len(refusal.splitlines()) == 1
    else:
        assert name not in SERVICE or value is None, "it cannot be had alone"
        assert config.abandon_timeout >= 2 * config.operation_timeout


@given(name=st.sampled_from(sorted(G3Config.model_fields)), value=JSON_VALUES)
def test_any_value_of_g3_is_taken_or_refused_by_its_options_name(
    name: str, value: Any
) -> None:
    config, refusal = outcome(POOL | in_g3(**{name: value}))
    assert config is not None or f"g3.{name}" in refusal


@given(
    name=st.text(min_size=1).filter(lambda name: name not in TierConfig.model_fields)
)
def test_any_unknown_option_is_refused_by_its_name(name: str) -> None:
    with pytest.raises(OptionError, match=r"unknown option| is an? ") as refused:
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
