# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The command `vllm-kvcr`: it hands over, and says what it cannot find."""

import sys
from types import ModuleType

import pytest

from vllm_kvcr import __version__, cli


@pytest.fixture
def demo(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """What the demo was called with; it says 3."""
    calls: list[list[str]] = []
    module = ModuleType("vllm_kvcr.demo")
    module.main = lambda argv: calls.append(argv) or 3
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return calls


def test_arguments_and_exit_status_are_handed_over(demo):
    assert cli.main(["demo", "--blocks", "4"]) == 3
    assert demo == [["--blocks", "4"]]


def test_a_missing_package_is_named_with_its_remedy(monkeypatch, capsys):
    def import_module(name: str) -> ModuleType:
        raise ModuleNotFoundError("No module named 'rich'", name="rich")

    monkeypatch.setattr(cli.importlib, "import_module", import_module)

    assert cli.main(["demo"]) == 1
    assert "'rich'" in capsys.readouterr().err


@pytest.mark.parametrize("argv", [[], ["no-such-command"]])
def test_no_or_an_unknown_command_is_a_usage_error(argv, capsys):
    with pytest.raises(SystemExit) as exit_:
        cli.main(argv)

    assert exit_.value.code == 2
    assert "usage: vllm-kvcr" in capsys.readouterr().err


def test_help_lists_each_command(capsys):
    with pytest.raises(SystemExit):
        cli.main(["--help"])

    shown = capsys.readouterr().out
    for name, command in cli.COMMANDS.items():
        assert name in shown
        assert command.summary in shown


def test_version(capsys):
    with pytest.raises(SystemExit):
        cli.main(["--version"])

    assert capsys.readouterr().out.strip() == __version__
