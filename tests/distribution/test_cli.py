# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The command `vllm-kvcr`: it hands over, and says what it cannot find."""

import sys
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from vllm_kvcr import __version__, cli


def test_arguments_and_exit_status_are_handed_over(monkeypatch):
    demo = Mock(return_value=3)
    monkeypatch.setitem(sys.modules, "vllm_kvcr.demo", SimpleNamespace(main=demo))
    assert cli.main(["demo", "--blocks", "4"]) == 3
    demo.assert_called_once_with(["--blocks", "4"])


def test_a_missing_package_is_named_with_its_remedy(monkeypatch, capsys):
    missing = ModuleNotFoundError("No module named 'rich'", name="rich")
    monkeypatch.setattr(cli.importlib, "import_module", Mock(side_effect=missing))
    assert cli.main(["demo"]) == 1
    said = capsys.readouterr().err
    assert "'rich'" in said
    assert "pip install" in said


@pytest.mark.parametrize("argv", [[], ["no-such-command"]])
def test_no_or_an_unknown_command_is_a_usage_error(argv, capsys):
    with pytest.raises(SystemExit) as exit_:
        cli.main(argv)
    assert exit_.value.code == 2
    assert "usage: vllm-kvcr" in capsys.readouterr().err


SUMMARIES = [command.summary for command in cli.COMMANDS.values()]


@pytest.mark.parametrize(
    ("option", "told"),
    [("--help", [*cli.COMMANDS, *SUMMARIES]), ("--version", [__version__])],
)
def test_commands_and_version_are_told(option, told, capsys):
    with pytest.raises(SystemExit):
        cli.main([option])
    shown = capsys.readouterr().out
    assert all(part in shown for part in told)
