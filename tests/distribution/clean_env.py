# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Clean environments in which an install of this project can be tried, cheaply.

``CleanEnv`` is a new virtual environment that sees the packages of the one which
runs the tests (vLLM, torch, kvcr: gigabytes) through links, without copying them
and without this project, however it is installed there.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
TIER_FOLDER = REPOSITORY / "vllm/v1/kv_offload/tiering/kvcr"
INSTALLED = Path(sysconfig.get_path("purelib"))
_OFFLINE = ("--no-deps", "--no-index", "--no-build-isolation")
_SECONDS = 280


@dataclass(frozen=True)
class CleanEnv:
    """A virtual environment; ``shared`` holds the links to the parent's packages."""

    root: Path

    @classmethod
    def create(cls, root: Path, *, folder_in_vllm: bool = False) -> "CleanEnv":
        """Make one at ``root``; ``folder_in_vllm`` copies our tier into its vLLM."""
        venv.EnvBuilder(with_pip=False, symlinks=True).create(root)
        env = cls(root)
        env.shared.mkdir()
        _link_installed_packages(env.shared)
        if folder_in_vllm:
            (env.shared / "vllm").unlink()
            _link_vllm_with_our_folder(env.shared)
        # Behind the environment's own packages; .pth files in there are not run.
        (env.site_packages / "shared.pth").write_text(f"{env.shared}\n")
        return env

    @property
    def python(self) -> Path:
        return self.root / "bin" / "python"

    @property
    def shared(self) -> Path:
        return self.root / "shared"

    @property
    def site_packages(self) -> Path:
        scheme = {"base": str(self.root), "platbase": str(self.root)}
        return Path(sysconfig.get_path("purelib", "venv", scheme))

    def install(self, *what: str | Path) -> None:
        """pip install, without dependencies: those are linked in already."""
        self._pip("install", *_OFFLINE, *map(str, what))

    def uninstall(self) -> None:
        self._pip("uninstall", "--yes", "vllm-kvcr")

    def run(self, code: str, **extra_environ: str) -> subprocess.CompletedProcess[str]:
        """Run Python ``code`` there, away from the repository."""
        return subprocess.run(
            [self.python, "-c", code],
            capture_output=True,
            text=True,
            cwd=self.root,
            env=clean_environ(**extra_environ),
            timeout=_SECONDS,
        )

    def _pip(self, *arguments: str) -> None:
        _checked([sys.executable, "-m", "pip", "--python", self.python, *arguments])


def clean_environ(**extra: str) -> dict[str, str]:
    """This process' environment variables, less those that alter imports."""
    kept = {
        k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")
    }
    return {**kept, **extra}


def build_wheel(target: Path) -> Path:
    """Build this project's wheel into the empty folder ``target``."""
    pip = (sys.executable, "-m", "pip")
    _checked([*pip, "wheel", *_OFFLINE, "-w", target, REPOSITORY])
    (wheel,) = target.glob("*.whl")
    return wheel


def _link_installed_packages(target: Path) -> None:
    """Link all that is installed beside the running Python, save this project."""
    for entry in INSTALLED.iterdir():
        if "vllm_kvcr" not in entry.name.replace("-", "_"):
            (target / entry.name).symlink_to(entry)


def _link_vllm_with_our_folder(target: Path) -> None:
    """Make ``target/vllm``: the installed vLLM, with our ``kvcr`` folder copied in.

    Only the folders on the way down to ``tiering`` are real ones; all else is links.
    """
    way_down = ("v1", "kv_offload", "tiering", "kvcr")
    source, copy = INSTALLED / "vllm", target / "vllm"
    for step in way_down:
        copy.mkdir()
        for entry in source.iterdir():
            if entry.name not in (step, "__pycache__"):
                (copy / entry.name).symlink_to(entry)
        source, copy = source / step, copy / step
    shutil.copytree(TIER_FOLDER, copy, ignore=shutil.ignore_patterns("__pycache__"))


def _checked(command: list[str | os.PathLike[str]]) -> None:
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        env=clean_environ(PIP_DISABLE_PIP_VERSION_CHECK="1"),
        timeout=_SECONDS,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
