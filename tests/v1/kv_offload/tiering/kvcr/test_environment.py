# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What the kvcr tier says when it cannot run with what is installed."""

import importlib
import re
import sys
from collections.abc import Iterator
from types import ModuleType

import kvcr.types
import pytest
from packaging.specifiers import SpecifierSet

import vllm.v1.kv_offload.base
from tests.v1.kv_offload.tiering.kvcr.conftest import TIER_PACKAGE, LogLines
from vllm.v1.kv_offload.tiering.kvcr.compat import environment


@pytest.fixture(autouse=True)
def unchecked() -> Iterator[None]:
    environment.check_environment.cache_clear()
    yield
    environment.check_environment.cache_clear()


@pytest.fixture
def versions(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The installed versions, which a test may change."""
    versions = dict(environment.installed())
    monkeypatch.setattr(environment, "installed", lambda: versions)
    return versions


def test_packages_without_metadata_are_not_refused(versions: dict[str, str]) -> None:
    """Packages that were built in place, as in a container."""
    versions.clear()
    assert environment.nixl_fault() is None
    assert environment.untested(versions) is None


@pytest.mark.parametrize("package", ["nixl", "loaded"])
def test_another_nixl_than_kvcr_requires(
    versions: dict[str, str], package: str
) -> None:
    required = versions["nixl"]
    if package == "loaded":
        package = sys.modules["nixl"]._pkg.__name__.replace("_", "-")
    versions[package] = "0.9.0"
    with pytest.raises(ImportError, match=f"{package} is 0.9.0, but kvcr") as info:
        environment.check_environment()
    text = str(info.value)
    assert f"requires nixl=={required}" in text
    assert f"'{package}=={required}'" in line_of(text, "to fix")
    assert f"{package} 0.9.0" in line_of(text, "found")


def test_a_nixl_wheel_that_is_not_loaded_does_no_harm(
    versions: dict[str, str],
) -> None:
    loaded = sys.modules["nixl"]._pkg.__name__.replace("_", "-")
    (other,) = set(environment.NIXL_WHEELS) - {loaded}
    versions[other] = "0.9.0"
    environment.check_environment()


@pytest.mark.parametrize(
    ("requirements", "pin"),
    [
        (["msgspec>=0.21", "nixl==1.5.0"], SpecifierSet("==1.5.0")),
        (["nixl==1.5.0; extra == 'test'"], None),
        (["no requirement!", "nixl<2"], SpecifierSet("<2")),
        ([], None),
    ],
)
def test_what_a_distribution_requires(
    requirements: list[str], pin: SpecifierSet | None
) -> None:
    assert environment.pin_of("nixl", requirements) == pin


@pytest.mark.parametrize(
    ("module", "name", "package"),
    [
        (kvcr.types, "QueryStatus", "kvcr"),
        (kvcr.KVCR, "poll_completed", "kvcr"),
        (vllm.v1.kv_offload.base, "LookupResult", "vllm"),
    ],
)
def test_a_name_that_is_gone(
    monkeypatch: pytest.MonkeyPatch, module: ModuleType, name: str, package: str
) -> None:
    monkeypatch.delattr(module, name)
    with pytest.raises(ImportError, match="is too old or too new: it lacks") as info:
        environment.check_names()
    text = str(info.value)
    assert f"{package} {environment.installed()[package]} is too old" in text
    assert name in text
    assert line_of(text, "to fix").startswith(f"pip install '{package}")


def test_a_name_that_stands_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kvcr.types, "QueryStatus", None)
    with pytest.raises(ImportError, match=r"it lacks kvcr\.types\.QueryStatus"):
        environment.check_names()


def test_a_module_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kvcr.policy", None)
    with pytest.raises(ImportError, match=r"it lacks kvcr\.policy"):
        environment.check_names()


def test_an_error_inside_vllm_is_not_taken_for_a_missing_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Broken:
        def find_spec(self, name: str, path: object, target: object = None) -> None:
            if name == "vllm.v1.core.kv_cache_utils":
                raise ModuleNotFoundError("no torch", name="torch")

    monkeypatch.delitem(sys.modules, "vllm.v1.core.kv_cache_utils")
    monkeypatch.setattr(sys, "meta_path", [Broken(), *sys.meta_path])
    with pytest.raises(ModuleNotFoundError, match="no torch"):
        environment.check_names()


@pytest.mark.parametrize("module", ["compat.shims", "manager"])
def test_without_kvcr_the_import_says_so(
    monkeypatch: pytest.MonkeyPatch, module: str
) -> None:
    package = importlib.import_module(TIER_PACKAGE)
    compat = importlib.import_module(f"{TIER_PACKAGE}.compat")
    for parent, name in ((compat, "shims"), (package, "manager")):
        monkeypatch.delitem(sys.modules, f"{parent.__name__}.{name}", raising=False)
        monkeypatch.delattr(parent, name, raising=False)
    monkeypatch.setitem(sys.modules, "kvcr", None)
    with pytest.raises(ModuleNotFoundError, match='The "kvcr" tier cannot run') as info:
        importlib.import_module(f"{TIER_PACKAGE}.{module}")
    assert info.value.name == "kvcr"
    assert "kvcr is not installed" in str(info.value)
    fix = line_of(str(info.value), "to fix")
    assert fix == "pip install 'kvcr>=0.1.0,<=0.1.1'"


def test_an_import_that_fails_for_another_reason_is_passed_on() -> None:
    reason = ImportError("libucp.so.0: cannot open shared object file")
    text = str(environment.explain(reason))
    assert "cannot be imported: libucp.so.0: cannot open" in text
    assert line_of(text, "to fix") == "pip install --force-reinstall kvcr==0.1.1"


# --- releases that were not tested ---------------------------------------------------


@pytest.mark.parametrize(
    ("package", "version"),
    [("vllm", "0.34.0"), ("vllm", "0.33.1.dev7+gabc"), ("kvcr", "0.2.0")],
)
def test_a_newer_release_is_named_in_the_warning(
    versions: dict[str, str], tier_log: LogLines, package: str, version: str
) -> None:
    versions[package] = version
    environment.check_environment()
    environment.check_environment()
    (line,) = tier_log.texts()
    assert f"not tested with {package} {version} (tested: " in line


@pytest.mark.parametrize("version", ["0.30.0", "0.31.1", "0.33.0+cu130", "no version"])
def test_tested_releases_give_no_warning(version: str) -> None:
    assert environment.untested({"vllm": version, "kvcr": "0.1.1"}) is None


def line_of(text: str, label: str) -> str:
    (line,) = re.findall(rf"^  {label}: +(.*)$", text, re.MULTILINE)
    return line
