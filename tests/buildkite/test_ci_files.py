# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The CI step names what exists. `make lint` checks the script."""

import shlex
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]
INSTALL_SCRIPT = ROOT / ".buildkite/scripts/install-kv-offload.sh"
TIERING_TESTS = ROOT / "tests/v1/kv_offload/tiering"
MANAGER = ROOT / "vllm/v1/kv_offload/tiering/kvcr/manager.py"


def in_checkout(path: str) -> Path:
    """From where the checkout lies in the images of vLLM's CI."""
    return ROOT / Path(path).relative_to("/vllm-workspace")


def test_the_step_installs_before_it_tests_what_triggers_it() -> None:
    steps = yaml.safe_load((ROOT / ".buildkite/test_areas/misc.yaml").read_text())
    (step,) = (s for s in steps["steps"] if s["label"] == "V1 KV Offload")
    commands = [shlex.split(command) for command in step["commands"]]
    programs = [words[0] for words in commands]
    install = programs.index("bash")
    assert in_checkout(commands[install][1]) == INSTALL_SCRIPT
    assert install < programs.index("pytest")

    working_dir = in_checkout(step["working_dir"])
    folders = [
        working_dir / word.removeprefix("--ignore=")
        for words in commands
        if words[0] == "pytest"
        for word in words[1:]
        if "/" in word
    ]
    assert TIERING_TESTS in folders
    assert [folder for folder in folders if not folder.is_dir()] == []

    sources = [ROOT / source for source in step["source_file_dependencies"]]
    for tested in (INSTALL_SCRIPT, TIERING_TESTS, MANAGER):
        assert any(tested.is_relative_to(source) for source in sources), tested
