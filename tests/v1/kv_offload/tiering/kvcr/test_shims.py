# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The shims between releases: each does its work, and none stays when it may go."""

import ast
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import kvcr
import pytest
from packaging.version import Version

from tests.v1.kv_offload.tiering.kvcr.builders import (
    endpoint_of,
    free_port,
    peer_options,
)
from tests.v1.kv_offload.tiering.kvcr.conftest import TIER_PACKAGE
from tests.v1.kv_offload.tiering.kvcr.rig import Rig, StandinRig
from vllm.v1.kv_offload.base import ReqContext
from vllm.v1.kv_offload.tiering.kvcr.compat import environment, required, shims

PACKAGE = Path(shims.__file__).parents[1]
SOURCES = sorted(PACKAGE.rglob("*.py"))
VERSIONED = {"shims.py", "environment.py"}

SHIMS = {
    ("kvcr", "0.1.0"): {
        *("KVCRStartupError", "HAS_SEQUENCE_ALIGNMENT", "_HAS_REGIONS"),
        *("_HAS_MEMORY_OWNERS", "writes_primary", "primary_source_keys"),
        *("unstopped_starts", "native_alive_after"),
    },
    ("vllm", "0.30"): {
        *("HAS_BACKPRESSURE", "_HAS_TRANSFER_BYTES", "_HAS_KV_HINTS"),
        *("request_hints", "REPORTS_USE"),
    },
    ("vllm", "0.31"): {"HIT_SOURCES"},
    ("vllm", "0.32"): {"HAS_TIER_POLL_THREAD", "_HAS_CONFIG_INFO"},
}
"""The names in shims.py that releases up to these need."""
# Not for a release: for what no release of kvcr offers yet.
UNTIL_OFFERED = {"is_quiescent", "peer_forgetter", "service_pool_bytes"}


def is_native(name: str) -> bool | None:
    """Whether the installed release does without a shim; none if that does not show."""
    value = getattr(shims, name)
    if name == "KVCRStartupError":
        return value is not None
    if name == "REPORTS_USE":
        return not value
    if name == "HIT_SOURCES":
        return value[0] is not None
    return value if isinstance(value, bool) else None


def outdates(version: str, served: str) -> bool:
    """Whether a release is newer than the last that a shim serves."""
    parts = len(Version(served).release)
    return Version(version).release[:parts] > Version(served).release


# --- when a shim can go ----------------------------------------------------------


@pytest.mark.parametrize(("package", "served"), SHIMS)
def test_the_oldest_supported_release_needs_the_shims(
    package: str, served: str
) -> None:
    oldest, _ = environment.TESTED[package]
    names = SHIMS[package, served]
    assert not outdates(oldest, served), f"{package} is {oldest} or later: drop {names}"


@pytest.mark.parametrize(("package", "served"), SHIMS)
def test_a_shim_is_in_use_where_it_says_that_it_is(package: str, served: str) -> None:
    """Over the matrix, this proves the release that each shim names."""
    installed = environment.installed()[package]
    for name in SHIMS[package, served]:
        assert is_native(name) in (outdates(installed, served), None), name


@pytest.mark.parametrize("asked", ["quiescent", "pool", "forget", "endpoint"])
def test_kvcr_has_no_public_way_to_ask_yet(asked: str) -> None:
    public = [name for name in dir(kvcr.KVCR) if not name.startswith("_")]
    assert not [name for name in public if asked in name]


def test_a_kvcr_without_a_service_tells_no_pool() -> None:
    assert shims.service_pool_bytes(StandinRig().kvcr) is None


def test_all_that_kvcr_keeps_by_endpoint_is_forgotten() -> None:
    rig = Rig(**peer_options(free_port()))
    backend = rig.tier._kvcr._core._remote_fw_dram
    holders = (backend, backend._dangling_ops)

    def naming(endpoint: str) -> list[str]:
        return [
            name
            for holder in holders
            for name, table in vars(holder).items()
            if isinstance(table, (dict, set)) and endpoint in table
        ]

    peer = endpoint_of(free_port())
    backend._metadata_acked_sources.add(peer)
    backend._metadata_retry_after[peer] = 1.0
    backend._dangling_ops.sources[peer] = "incarnation"
    assert len(naming(peer)) == 3
    shims.peer_forgetter(rig.tier._kvcr)(peer)
    assert naming(peer) == []
    rig.close()


def test_a_kvcr_without_one_of_these_tables_forgets_the_others() -> None:
    sources = {"peer": "incarnation"}
    backend = SimpleNamespace(_dangling_ops=SimpleNamespace(sources=sources))
    core = SimpleNamespace(_remote_fw_dram=backend)
    shims.peer_forgetter(SimpleNamespace(_core=core))("peer")
    assert sources == {}


def test_every_shim_in_compat_is_listed_here() -> None:
    """Flags that probe the packages, and functions that say when they can go."""
    found = set()
    for node in ast.parse(Path(shims.__file__).read_text()).body:
        if isinstance(node, (ast.Assign, ast.AnnAssign)):
            (target,) = node.targets if isinstance(node, ast.Assign) else [node.target]
            assert isinstance(target, ast.Name)
            code = ast.unparse(node)
            if (
                "attr(" in code
                or "__dataclass_fields__" in code
                or "signature(" in code
            ):
                found.add(target.id)
        elif isinstance(node, ast.FunctionDef) and re.search(
            r"\bcan go\b", ast.get_docstring(node) or "", re.IGNORECASE
        ):
            found.add(node.name)
    assert found == UNTIL_OFFERED.union(*SHIMS.values())


@pytest.mark.parametrize(
    "source", [s for s in SOURCES if s.name not in VERSIONED], ids=lambda s: s.name
)
def test_nothing_else_tells_versions_apart(source: Path) -> None:
    asks = r'__version__|\bpackaging\b|importlib.metadata|"[<>=]*\d+(\.\d+){1,2}"'
    assert not re.search(asks, source.read_text())


# --- the names that are needed ---------------------------------------------------


def imported_names(source: Path) -> set[tuple[str, str]]:
    """(module, name) of all that a file of the package takes from vLLM and kvcr."""
    found = set()
    for node in ast.walk(ast.parse(source.read_text())):
        match node:
            case ast.Attribute(ast.Name("kvcr"), name) if name.isupper():
                found.add(("kvcr", name))
        if not isinstance(node, ast.ImportFrom) or node.module is None:
            continue
        root = node.module.partition(".")[0]
        if root in ("vllm", "kvcr") and not node.module.startswith(TIER_PACKAGE):
            found.update((node.module, alias.name) for alias in node.names)
    return found


def test_the_required_names_are_those_that_are_imported() -> None:
    used = set().union(*map(imported_names, SOURCES))
    listed = {
        (module, name.partition(".")[0])
        for module, names in required.REQUIRED_NAMES.items()
        for name in names
    }
    assert listed == used


def test_the_required_methods_of_kvcr_are_those_that_are_called() -> None:
    code = "".join(source.read_text() for source in SOURCES)
    called = set(re.findall(r"\bself\._?kvcr\.(\w+)\b", code))
    public = {name for name in vars(kvcr.KVCR) if not name.startswith("_")}
    optional = {"align_sequence"}
    listed = {
        name.partition(".")[2]
        for name in required.REQUIRED_NAMES["kvcr"]
        if name.startswith("KVCR.")
    }
    assert listed == (called & public) - optional


# --- what the shims do -----------------------------------------------------------


def test_a_chunk_is_described_in_this_kvcrs_words() -> None:
    (ref,) = shims.block_refs_factory("me", 1 << 20, 4096)(3)
    if shims._HAS_REGIONS:
        assert (ref.end_point_name, ref.element_index) == ("me", 3)
    else:
        described = (ref.end_point_name, ref.mem_type, ref.addr, ref.size)
        assert described == ("me", "DRAM", (1 << 20) + 3 * 4096, 4096)


def test_the_primary_tier_is_described_in_this_kvcrs_words() -> None:
    ((name, value),) = shims.primary_region(1 << 20, 4096, 8).items()
    if shims._HAS_REGIONS:
        assert name == "framework_regions"
        (region,) = value
        assert (region.addr, region.size, region.count) == (1 << 20, 4096, 8)
    else:
        assert name == "framework_dram"
        assert (value.address, value.length) == (1 << 20, 8 * 4096)


def test_hints_are_found_on_either_carrier() -> None:
    hint, other = {"a": 1}, {"b": 2}
    params = {kvcr.ROUTER_HINT_KEY: hint}
    assert shims.request_hints(ReqContext("r")) is None
    assert shims.request_hints(ReqContext("r", params)) is hint
    assert shims.request_hints(ReqContext("r", {"else": 1})) is None
    both: Any = SimpleNamespace(kv_hints=other, kv_transfer_params=params)
    assert shims.request_hints(both) is other


@pytest.mark.parametrize(
    ("error", "primary"),
    [
        ({"destination_owner": "framework", "op_handle": -1}, True),
        ({"destination_owner": "kvcr", "op_handle": 1}, False),
        # As kvcr reports that names no owner.
        ({"op_handle": 1}, True),
        ({"op_handle": -1}, False),
    ],
)
def test_whose_memory_a_late_write_goes_to(
    error: dict[str, Any], primary: bool
) -> None:
    report: Any = SimpleNamespace(**error)
    assert shims.writes_primary(report) is primary


def test_whose_memory_a_late_read_comes_from() -> None:
    blocks = {b"a": [], b"b": []}
    named: Any = SimpleNamespace(
        source_blocks=blocks, source_owners={b"a": "framework", b"b": "kvcr"}
    )
    assert shims.primary_source_keys(named) == {b"a"}
    unnamed: Any = SimpleNamespace(source_blocks=blocks)
    assert shims.primary_source_keys(unnamed) == {b"a", b"b"}
    assert shims.primary_source_keys(SimpleNamespace(source_blocks=None)) == set()  # type: ignore[arg-type]


def test_native_code_left_by_a_failed_start_is_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    left = "_NONQUIESCENT_STARTUP_RESOURCES"
    before = shims.unstopped_starts()
    assert not shims.native_alive_after(RuntimeError("x"), before)
    if shims.KVCRStartupError is not None:
        assert shims.native_alive_after(shims.KVCRStartupError("x"), before)
        monkeypatch.setattr(shims, "KVCRStartupError", None)
    assert hasattr(kvcr.api, left)
    monkeypatch.setattr(kvcr.api, left, [(object(), None)])
    assert shims.native_alive_after(RuntimeError("x"), 0)
    # One of an earlier start keeps nothing of this one.
    assert not shims.native_alive_after(RuntimeError("x"), 1)


@pytest.mark.parametrize(
    ("core", "quiescent"),
    [
        (SimpleNamespace(is_quiescent=lambda: True), True),
        (SimpleNamespace(is_quiescent=lambda: False), False),
        (SimpleNamespace(is_quiescent=lambda: 1 / 0), False),
        (SimpleNamespace(), False),
        (None, False),
    ],
)
def test_quiescence_counts_only_where_it_is_proved(core: Any, quiescent: bool) -> None:
    assert shims.is_quiescent(SimpleNamespace(_core=core)) is quiescent  # type: ignore[arg-type]
