# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""``register()``: what it changes in vLLM, what it says, and that it never raises."""

import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest.mock import Mock

import pytest

from tests.distribution.clean_env import REPOSITORY, TIER_FOLDER, clean_environ
from vllm_kvcr import __version__, plugin

OURS = TIER_FOLDER.parent


class Factory:
    """vLLM's registry, as far as the plugin may use it."""

    def __init__(self, *known: str) -> None:
        self.tiers: dict[str, tuple[str, ...]] = dict.fromkeys(known, ("vLLM's",))

    def register_tier(self, tier_type: str, module_path: str, class_name: str) -> None:
        if tier_type in self.tiers:
            raise ValueError(f"Tier '{tier_type}' is already registered.")
        self.tiers[tier_type] = (module_path, class_name)


class StandInVllm:
    """The two vLLM modules that the plugin touches, and a folder of vLLM's."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.own_tier = folder / "kvcr"
        self.own_tier.mkdir(parents=True)
        (self.own_tier / "__init__.py").touch()
        self.factory = Factory("fs", "kvcr")
        self.tiering = ModuleType(plugin.TIERING_PACKAGE)
        self.tiering.__path__ = [str(folder)]
        self.factory_module = ModuleType(f"{plugin.TIERING_PACKAGE}.factory")
        self.factory_module.SecondaryTierFactory = self.factory
        for module in (self.tiering, self.factory_module):
            monkeypatch.setitem(sys.modules, module.__name__, module)
        monkeypatch.delitem(sys.modules, plugin.TIER_PACKAGE, raising=False)

    def import_tier_from(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        package = ModuleType(plugin.TIER_PACKAGE)
        package.__path__ = [str(folder)]
        monkeypatch.setitem(sys.modules, plugin.TIER_PACKAGE, package)


@pytest.fixture
def vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StandInVllm:
    return StandInVllm(tmp_path / "tiering", monkeypatch)


@pytest.fixture
def records(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[logging.LogRecord]]:
    """What the plugin logs from here on, as in a process that has said nothing."""
    seen: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = seen.append
    level = plugin.logger.level
    monkeypatch.setattr(plugin, "_last_line", "")
    plugin.logger.addHandler(handler)
    plugin.logger.setLevel(logging.INFO)
    yield seen
    plugin.logger.setLevel(level)
    plugin.logger.removeHandler(handler)


def test_our_folder_goes_first_and_a_line_says_so_and_what_it_replaces(vllm, records):
    plugin.register()
    assert vllm.tiering.__path__ == [str(OURS), str(vllm.folder)]
    found = PathFinder.find_spec(plugin.TIER_PACKAGE, vllm.tiering.__path__)
    assert found.origin == str(TIER_FOLDER / "__init__.py")
    assert vllm.factory.tiers["kvcr"] == ("vLLM's",)
    (record,) = records
    assert record.levelno == logging.INFO
    assert f"vllm-kvcr {__version__}" in record.getMessage()
    assert str(TIER_FOLDER) in record.getMessage()
    assert f"in place of the adapter in {vllm.own_tier}" in record.getMessage()


def test_nothing_is_said_to_be_replaced_where_vllm_has_no_adapter(vllm, records):
    (vllm.own_tier / "__init__.py").unlink()
    vllm.own_tier.rmdir()
    plugin.register()
    (record,) = records
    assert "in place of" not in record.getMessage()


@pytest.mark.parametrize("undone", [False, True])
def test_a_second_call_repairs_what_was_undone_and_says_nothing(vllm, records, undone):
    plugin.register()
    tiers = dict(vllm.factory.tiers)
    if undone:
        vllm.tiering.__path__ = [str(vllm.folder)]
    plugin.register()
    assert vllm.tiering.__path__ == [str(OURS), str(vllm.folder)]
    assert vllm.factory.tiers == tiers
    assert len(records) == 1


def test_our_folder_is_moved_to_the_front(vllm, records):
    vllm.tiering.__path__ = [str(vllm.folder), str(OURS)]
    plugin.register()
    assert vllm.tiering.__path__ == [str(OURS), str(vllm.folder)]


def test_the_type_is_registered_where_vllm_lacks_it(vllm, records):
    del vllm.factory.tiers["kvcr"]
    plugin.register()
    assert vllm.factory.tiers["kvcr"] == (
        "vllm.v1.kv_offload.tiering.kvcr.manager",
        "KVCRSecondaryTierManager",
    )


def _nothing_is_imported(monkeypatch: pytest.MonkeyPatch, absent: str) -> None:
    missing = ModuleNotFoundError(f"No module named '{absent}'", name=absent)
    stand_in = SimpleNamespace(import_module=Mock(side_effect=missing))
    monkeypatch.setattr(plugin, "importlib", stand_in)


@pytest.mark.parametrize("absent", ["vllm.v1.kv_offload.tiering", "vllm"])
def test_a_vllm_without_tiers_gets_one_warning(absent, records, monkeypatch):
    _nothing_is_imported(monkeypatch, absent)
    plugin.register()
    plugin.register()
    (record,) = records
    assert record.levelno == logging.WARNING
    assert f"no {absent};" in record.getMessage()
    assert not record.exc_info


def _factory_refuses(vllm: StandInVllm, monkeypatch: pytest.MonkeyPatch) -> None:
    vllm.factory.register_tier = Mock(side_effect=RuntimeError("broken on purpose"))


def _factory_is_gone(vllm: StandInVllm, monkeypatch: pytest.MonkeyPatch) -> None:
    del vllm.factory_module.SecondaryTierFactory


def _tiering_does_not_import(
    vllm: StandInVllm, monkeypatch: pytest.MonkeyPatch
) -> None:
    _nothing_is_imported(monkeypatch, "torch")


def _our_folder_is_gone(vllm: StandInVllm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin, "__file__", str(vllm.folder / "x" / "plugin.py"))


@pytest.mark.parametrize(
    "fault",
    [_factory_refuses, _factory_is_gone, _tiering_does_not_import, _our_folder_is_gone],
)
def test_a_fault_is_logged_and_leaves_vllm_as_it_was(fault, vllm, records, monkeypatch):
    fault(vllm, monkeypatch)
    plugin.register()
    plugin.register()
    (record,) = records
    assert record.levelno == logging.ERROR
    assert record.exc_info
    assert vllm.tiering.__path__ == [str(vllm.folder)]
    assert vllm.factory.tiers["kvcr"] == ("vLLM's",)


def test_an_adapter_imported_earlier_stays_and_is_named(vllm, records, monkeypatch):
    vllm.import_tier_from(vllm.own_tier, monkeypatch)
    plugin.register()
    (record,) = records
    assert record.levelno == logging.WARNING
    assert str(vllm.own_tier) in record.getMessage()
    assert "imported before" in record.getMessage()
    assert vllm.tiering.__path__ == [str(vllm.folder)]


def test_our_own_adapter_may_have_been_imported_earlier(vllm, records, monkeypatch):
    vllm.import_tier_from(TIER_FOLDER, monkeypatch)
    plugin.register()
    (record,) = records
    assert record.levelno == logging.INFO
    assert vllm.tiering.__path__ == [str(OURS), str(vllm.folder)]


_WITH_REAL_VLLM = """
import json, logging, sys
logging.basicConfig(level=logging.INFO)
from vllm_kvcr.plugin import register
register()
register()
import vllm.v1.kv_offload.tiering as tiering
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory
print(json.dumps({
    "first": tiering.__path__[0],
    "imported": [name for name in sys.modules
                 if name.split(".")[0] in ("kvcr", "nixl", "nixl_cu12", "nixl_cu13")
                 or name.startswith("vllm.v1.kv_offload.tiering.kvcr")],
    "registered": "kvcr" in SecondaryTierFactory._registry,
}))
"""


def test_on_the_installed_vllm_it_imports_neither_tier_nor_kvcr():
    done = subprocess.run(
        [sys.executable, "-c", _WITH_REAL_VLLM],
        capture_output=True,
        text=True,
        cwd=REPOSITORY,
        env=clean_environ(VLLM_LOGGING_LEVEL="INFO"),
        timeout=240,
        check=True,
    )

    seen = json.loads(done.stdout.splitlines()[-1])
    assert seen == {"first": str(OURS), "imported": [], "registered": True}
    said = [line for line in (done.stdout + done.stderr).splitlines() if "KVCR" in line]
    assert len(said) == 1
    assert str(TIER_FOLDER) in said[0]
