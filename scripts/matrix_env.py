# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Environments for every pair of releases, built once, sharing what they share.

Below the matrix' folder lie

- ``pip``: a virtual environment that only serves to install into the others;
- ``base``: a virtual environment with torch for the CPU and all that vLLM and this
  project need, but with neither vLLM nor kvcr;
- ``vllm-X``, ``kvcr-Y``, ``project``: folders with that one distribution and what it
  needs otherwise than ``base`` has it;
- ``pair-X-Y``: a virtual environment that is only a ``.pth`` file naming those
  folders, in the order in which Python shall search them;
- ``tree-X``: vLLM's files with the tier's folder copied over vLLM's own.

A folder counts only once its stamp is written, so that an interrupted build is built
anew. Uses pip only: other installers fetch torch's CUDA build.
"""

import json
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterable, Mapping
from email.parser import HeaderParser
from pathlib import Path

from scripts import cpu_engine, upstream_tree
from scripts.pip import ENV, pip
from scripts.setup_env import ROOT
from scripts.versions import NEWEST_CPU_BUILD, TORCH_COMPANIONS, VLLM

TIER_FOLDER = Path("vllm/v1/kv_offload/tiering/kvcr")
SITE_PACKAGES = f"lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages"


# What the CUDA build requires on top of that and the tier does not: kernels, loaders
# and decoders for GPUs. Gigabytes, and none loads without a GPU.
_FOR_GPUS = {
    "apache-tvm-ffi",
    "fastsafetensors",
    "flashinfer-python",
    "humming-kernels",
    "instanttensor",
    "nvidia-cudnn-frontend",
    "nvidia-cutlass-dsl",
    "nvtx",
    "pynvvideocodec",
    "quack-kernels",
    "tilelang",
    "tokenspeed-mla",
}

# Builds for CUDA, which do not load beside the CPU torch; nothing here needs them.
_LEFT_OUT = set(TORCH_COMPANIONS)

_CHECK = """
import importlib.metadata, importlib.util, json, sys
versions, folders, plugins = {}, {}, []
for name in json.loads(sys.argv[1]):
    versions[name] = importlib.metadata.version(name)
for module in ("kvcr", "nixl", "torch", "vllm"):
    folders[module] = importlib.util.find_spec(module).origin
for entry in importlib.metadata.entry_points(group="vllm.general_plugins", name="kvcr"):
    plugins.append(entry.value)
print(json.dumps({"versions": versions, "folders": folders, "plugins": plugins}))
"""


class WrongEnvironment(Exception):
    """An environment was built and does not hold what it should."""


class Environments:
    """Builds the environments below ``folder``, or finds them there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log = folder / "set-up.log"

    def pair(self, vllm: VLLM, kvcr: str, in_tree: bool = False) -> Path:
        """The Python of the environment for one pair.

        Args:
            in_tree: The tier lies in vLLM's own tree; there is no plugin.
        """
        self.folder.mkdir(exist_ok=True)
        paths = [self._vllm(vllm), self.kvcr(kvcr), self._base()]
        if in_tree:
            paths.insert(0, self.tree(vllm))
        else:
            # Last, and without an `__init__.py` in its `vllm/`: the installed one wins.
            paths += [self._project(), ROOT]
        name = f"{'tree' if in_tree else 'pair'}-{vllm.version}-{kvcr}"
        lines = "".join(f"{path}\n" for path in paths)

        def make(folder: Path) -> None:
            _make_venv(folder, "--without-pip")
            (folder / SITE_PACKAGES / "pair.pth").write_text(lines)
            self._check(folder / "bin" / "python", vllm, kvcr, paths, in_tree)

        return self._built(name, {"paths": lines}, make) / "bin" / "python"

    def tree(self, vllm: VLLM) -> Path:
        """vLLM's tree with the tier's folder, as it is now, in place of its own."""
        original = self._vllm(vllm) / "vllm"
        skipped = original / TIER_FOLDER.relative_to("vllm").parent

        def ignore(folder: str, names: list[str]) -> Iterable[str]:
            return {"kvcr"} if Path(folder) == skipped else ()

        def make(folder: Path) -> None:
            shutil.copytree(
                original, folder / "vllm", copy_function=os.link, ignore=ignore
            )

        tree = self._built(f"vllm-{vllm.version}-with-tier", {}, make)
        upstream_tree.copy_into(tree)
        return tree

    def nixl_of(self, kvcr: str) -> str:
        """The release of NIXL that a release of kvcr requires."""
        (nixl,) = (r for r in _requires(self.kvcr(kvcr)) if _name(r) == "nixl")
        return nixl.partition("==")[2]

    # --- the parts -------------------------------------------------------------------

    def _base(self) -> Path:
        requirements = [
            line
            for line in [
                *_requires(self._vllm(NEWEST_CPU_BUILD)),
                *_project_requirements(),
            ]
            if _name(line) not in _LEFT_OUT and _name(line) != "kvcr"
        ]

        def make(folder: Path) -> None:
            # Where it is there, only what has changed is installed.
            _make_venv(folder, "--without-pip")
            title = "installing what all of them share"
            self._pip(title, "--python", str(folder), "install", *requirements)

        self._built("base", {"requirements": requirements}, make, in_place=True)
        return self.folder / "base" / SITE_PACKAGES

    def _vllm(self, vllm: VLLM) -> Path:
        pin = f"{vllm.distribution}=={vllm.version}"

        def make(folder: Path) -> None:
            if vllm.has_cpu_build:
                # Its byte code is left to the first import: most is never imported.
                self._install(f"installing {pin}", folder, [pin], "--no-compile")
            else:
                cpu_build = self._vllm(NEWEST_CPU_BUILD)
                cpu_engine.build(folder, vllm.version, cpu_build, self._pip)

        recipe = {"pin": pin}
        if not vllm.has_cpu_build:
            recipe["over"] = NEWEST_CPU_BUILD.version
        folder = self._built(f"vllm-{vllm.version}", recipe, make)
        if vllm != NEWEST_CPU_BUILD:
            # Only to build vLLM, setuptools is pinned.
            unwanted = _LEFT_OUT | _FOR_GPUS | {"setuptools", "torch"}
            self._add_missing(folder, unwanted)
        return folder

    def kvcr(self, version: str) -> Path:
        """The folder with that kvcr and the NIXL that it requires."""
        pin = f"kvcr=={version}"

        def make(folder: Path) -> None:
            self._install(f"installing {pin}", folder, [pin])
            (nixl,) = (line for line in _requires(folder) if _name(line) == "nixl")
            self._install(f"installing {nixl}", folder, [nixl])
            wheels = _requires(folder, "nixl")
            self._install(f"installing {' and '.join(wheels)}", folder, wheels)

        folder = self._built(f"kvcr-{version}", {"pin": pin}, make)
        self._add_missing(folder, {"nixl"})
        return folder

    def _project(self) -> Path:
        recipe = {"pyproject": (ROOT / "pyproject.toml").read_text()}

        def make(folder: Path) -> None:
            # Run in `base`, which has what builds the project.
            title = "installing this project, editable"
            python = ["--python", str(self._base().parents[2])]
            self._pip(
                title,
                *(*python, "install", "--no-deps", "--no-build-isolation"),
                *("--target", str(folder), "--editable", str(ROOT)),
            )
            # Copies of what the checkout has; only the metadata is of use.
            shutil.rmtree(folder / "vllm_kvcr", ignore_errors=True)

        return self._built("project", recipe, make)

    def _add_missing(self, folder: Path, unwanted: set[str]) -> None:
        """Add what the distribution in ``folder`` requires and ``base`` lacks."""
        self._base()
        wanted = [line for line in _requires(folder) if _name(line) not in unwanted]
        done = folder / "missing.json"
        if done.exists() and json.loads(done.read_text()) == wanted:
            return
        report = self.folder / "missing.json"
        self._pip(
            f"looking for what {folder.name} needs besides",
            *("--python", str(self.folder / "base"), "install", "--dry-run"),
            *("--report", str(report), *wanted),
        )
        missing = [
            f"{item['metadata']['name']}=={item['metadata']['version']}"
            for item in json.loads(report.read_text())["install"]
        ]
        if missing:
            self._install(f"adding {' '.join(missing)}", folder, missing)
        done.write_text(json.dumps(wanted))

    # --- helpers ---------------------------------------------------------------------

    def _built(
        self,
        name: str,
        recipe: Mapping[str, object],
        make: Callable[[Path], None],
        *,
        in_place: bool = False,
    ) -> Path:
        """The folder ``name``, made by ``make`` unless it is there as wanted.

        Args:
            in_place: A complete one by another recipe is changed, not thrown away.
        """
        folder = self.folder / name
        stamp = folder / "ready.json"
        wanted = {"python": f"{sys.executable} {sys.version}", **recipe}
        try:
            stamped = json.loads(stamp.read_text())
        except (OSError, ValueError):
            stamped = {}
        if stamped == wanted:
            return folder
        if not in_place or stamped.get("python") != wanted["python"]:
            shutil.rmtree(folder, ignore_errors=True)
        stamp.unlink(missing_ok=True)
        folder.mkdir(exist_ok=True)
        make(folder)
        stamp.write_text(json.dumps(wanted, indent=2) + "\n")
        return folder

    def _install(
        self, title: str, folder: Path, what: Iterable[str], *options: str
    ) -> None:
        """Install into a folder that is no environment, without dependencies."""
        target = ["--no-deps", "--upgrade", "--target", str(folder)]
        self._pip(title, "install", *options, *target, *what)

    def _pip(self, title: str, *arguments: str) -> None:
        python = self._built("pip", {}, _make_venv) / "bin" / "python"
        pip(python, self.log, title, *arguments, "--progress-bar", "off")

    def _check(
        self, python: Path, vllm: VLLM, kvcr: str, paths: list[Path], in_tree: bool
    ) -> None:
        """Versions, places and the plugin are as this environment's name says."""
        versions = {
            vllm.distribution: vllm.version + ("" if vllm.has_cpu_build else "+cpu"),
            "kvcr": kvcr,
            "nixl": self.nixl_of(kvcr),
        }
        answer = subprocess.run(
            [python, "-c", _CHECK, json.dumps(list(versions))],
            check=True,
            env=ENV,
            stdout=subprocess.PIPE,
            text=True,
        )
        found = json.loads(answer.stdout)
        homes = {
            "kvcr": self.kvcr(kvcr),
            "nixl": self.kvcr(kvcr),
            "torch": self._base(),
            "vllm": paths[0],
        }
        wanted = {
            "versions": versions,
            "folders": {
                module: str(home / module / "__init__.py")
                for module, home in homes.items()
            },
            "plugins": [] if in_tree else ["vllm_kvcr.plugin:register"],
        }
        if found != wanted:
            raise WrongEnvironment(f"{python}: found {found}, wanted {wanted}")


def _make_venv(folder: Path, *options: str) -> None:
    command = [sys.executable, "-m", "venv", *options, str(folder)]
    subprocess.run(command, check=True, env=ENV)


def _requires(folder: Path, distribution: str | None = None) -> list[str]:
    """The requirements of the distribution that ``folder`` is named after.

    Args:
        distribution: Another one in that folder.
    """
    prefix = distribution or folder.name.partition("-")[0]
    (metadata,) = (
        path
        for path in folder.glob("*.dist-info/METADATA")
        if path.parent.name.startswith((f"{prefix}-", f"{prefix}_cpu-"))
    )
    lines = HeaderParser().parsestr(metadata.read_text()).get_all("Requires-Dist")
    return sorted(line for line in lines or [] if "extra ==" not in line)


def _name(requirement: str) -> str:
    """The normalised name in a requirement."""
    end = next(
        (i for i, c in enumerate(requirement) if not (c.isalnum() or c in "-_.")),
        len(requirement),
    )
    return requirement[:end].lower().replace("_", "-").replace(".", "-")


def _project_requirements() -> list[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    return [*project["dependencies"], *extras["demo"], *extras["dev"]]
