# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The CI pieces as files: the script is clean, the step names what exists."""

import shlex
import shutil
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
INSTALL_SCRIPT = ROOT / ".buildkite/scripts/install-kv-offload.sh"
TIERING_TESTS = ROOT / "tests/v1/kv_offload/tiering"

# Where the checkout lies in the images of vLLM's CI.
WORKSPACE = Path("/vllm-workspace")


def in_checkout(path: Path) -> Path:
    return ROOT / path.relative_to(WORKSPACE)


@pytest.fixture(scope="module")
def step() -> dict[str, Any]:
    text = (ROOT / ".buildkite/test_areas/misc.yaml").read_text()
    (found,) = (
        each
        for each in yaml.safe_load(text)["steps"]
        if each["label"] == "V1 KV Offload"
    )
    return found


@pytest.fixture(scope="module")
def commands(step: dict[str, Any]) -> list[list[str]]:
    return [shlex.split(command) for command in step["commands"]]


def test_script_is_shellcheck_clean() -> None:
    places = sysconfig.get_path("scripts")
    shellcheck = shutil.which("shellcheck", path=places) or shutil.which("shellcheck")
    assert shellcheck, "shellcheck is missing: install the `dev` extra"

    result = subprocess.run(
        [shellcheck, INSTALL_SCRIPT], capture_output=True, text=True
    )

    assert result.returncode == 0, result.stdout + result.stderr


def test_step_installs_before_it_tests(commands: list[list[str]]) -> None:
    programs = [words[0] for words in commands]
    script = Path(commands[programs.index("bash")][1])

    assert in_checkout(script) == INSTALL_SCRIPT
    assert INSTALL_SCRIPT.is_file()
    assert programs.index("bash") < programs.index("pytest")


def test_step_runs_existing_folders(
    step: dict[str, Any], commands: list[list[str]]
) -> None:
    working_dir = in_checkout(Path(step["working_dir"]))
    folders = [
        working_dir / word.removeprefix("--ignore=")
        for words in commands
        if words[0] == "pytest"
        for word in words[1:]
        if "/" in word
    ]

    assert TIERING_TESTS in folders
    assert [folder for folder in folders if not folder.is_dir()] == []


def test_step_is_triggered_by_what_it_tests(step: dict[str, Any]) -> None:
    sources = [ROOT / source for source in step["source_file_dependencies"]]
    tier = ROOT / "vllm/v1/kv_offload/tiering/kvcr/manager.py"

    for tested in (INSTALL_SCRIPT, TIERING_TESTS, tier):
        assert any(tested.is_relative_to(source) for source in sources), tested
