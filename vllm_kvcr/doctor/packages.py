# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What is wrong with the packages that pip left behind, and how to repair it.

Reads package metadata and imports neither kvcr nor NIXL. Whatever cannot be determined,
for example for a package built from source, is not held against a package.
"""

import importlib.util
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import Distribution
from types import ModuleType

from packaging.specifiers import SpecifierSet

from vllm.v1.kv_offload.tiering.kvcr.compat.environment import (
    NIXL_WHEELS,
    VLLM_BUILDS,
    Fault,
    find,
    fits,
    installed,
    pin_of,
    upgrade,
)

_NIXL_MODULES = ("nixl_cu13", "nixl_cu12", "nixl_rocm")
_PLACEHOLDER = "nvidia-kvcr"


@dataclass
class Found:
    """What is installed, according to package metadata."""

    versions: dict[str, str] = field(default_factory=dict)
    """By distribution; ``vllm`` stands for whichever build of it is installed."""

    nixl_pin: SpecifierSet | None = None
    """The versions of nixl that the installed kvcr requires."""

    cuda: int | None = None
    """The CUDA major version that torch was built for."""

    overwritten: tuple[str, ...] = ()
    """Files that two NIXL wheels contain with different contents."""

    importable: set[str] = field(default_factory=set)
    """Which of kvcr, nixl and the modules behind nixl Python can find."""

    def named(self, name: str) -> str:
        version = self.versions.get(name)
        if version is not None:
            return f"{name} {version}"
        if name in self.importable:
            return f"{name} of unknown version"
        return f"{name} not installed"

    def __str__(self) -> str:
        """Every package that matters and its version, on one line."""
        names = ["vllm", "kvcr"]
        if _PLACEHOLDER in self.versions:
            names.append(_PLACEHOLDER)
        names += ["nixl", *reversed(NIXL_WHEELS), "torch"]
        cuda = f" for CUDA {self.cuda}" if self.cuda is not None else ""
        return ", ".join(self.named(name) for name in names) + cuda


# --- what is installed ---------------------------------------------------------------


def look_around(path: Sequence[str] | None = None) -> Found:
    """Read the metadata of the installed packages.

    Args:
        path: Where to look instead of on ``sys.path``. Modules that are already
            imported are then not considered.
    """
    found = Found()
    wheels: list[Distribution] = []
    for name in (*VLLM_BUILDS, "kvcr", _PLACEHOLDER, "nixl", *NIXL_WHEELS, "torch"):
        distribution = find(name, path)
        if distribution is None:
            continue
        key = "vllm" if name in VLLM_BUILDS else name
        found.versions.setdefault(key, distribution.version)
        if name == "kvcr":
            found.nixl_pin = pin_of("nixl", distribution.requires or ())
        if name in ("nixl", *NIXL_WHEELS):
            wheels.append(distribution)
    found.overwritten = _claimed_twice(wheels)
    modules = ("kvcr", "nixl", *_NIXL_MODULES)
    if path is None:
        found.versions = installed() | found.versions
        found.importable = {name for name in modules if _can_be_imported(name)}
    else:
        names = {name.replace("-", "_") for name in found.versions}
        found.importable = names.intersection(modules)
    torch = sys.modules.get("torch") if path is None else None
    found.cuda = _cuda_of(torch, found.versions.get("torch", ""))
    return found


def _can_be_imported(name: str) -> bool:
    if name in sys.modules:
        return sys.modules[name] is not None
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return False
    # Without an origin it may be any folder of that name.
    return spec is not None and spec.origin is not None


def _cuda_of(torch: ModuleType | None, version: str) -> int | None:
    # NIXL asks torch the same question when it chooses a wheel.
    built_for = getattr(getattr(torch, "version", None), "cuda", None)
    if torch is not None:
        return int(built_for.split(".")[0]) if built_for else None
    # For example 2.14.0+cu130. Other builds are known only once torch is imported.
    local = version.partition("+")[2]
    digits = local.removeprefix("cu")
    return int(digits[:2]) if local.startswith("cu") and digits[:2].isdigit() else None


def _claimed_twice(distributions: Iterable[Distribution]) -> tuple[str, ...]:
    claims: dict[str, str] = {}
    twice = []
    for distribution in distributions:
        for line in (distribution.read_text("RECORD") or "").splitlines():
            file, _, rest = line.partition(",")
            if not file.endswith((".py", ".so")) or file.startswith(".."):
                continue
            if claims.setdefault(file, rest) != rest:
                twice.append(file)
    return tuple(twice)


# --- what is wrong -------------------------------------------------------------------


def package_fault(found: Found) -> Fault | None:
    """The first thing that is wrong according to metadata."""
    if "kvcr" not in found.importable:
        return _kvcr_absent(found)
    if "nixl" not in found.importable:
        nixl = _exactly("nixl", found.nixl_pin)
        text = f"NIXL is not installed, but {found.named('kvcr')} requires {nixl}"
        return Fault(text, f"pip install '{nixl}'", "nixl", absent=True)
    return _nixl_fault(found)


def _kvcr_absent(found: Found) -> Fault:
    version = found.versions.get("kvcr")
    if version is not None:
        text = f"kvcr {version} is installed, but its files are missing"
        command = f"pip install --force-reinstall --no-deps kvcr=={version}"
        return Fault(text, command, "kvcr", absent=True)
    command = upgrade("kvcr")
    if _PLACEHOLDER not in found.versions:
        return Fault("kvcr is not installed", command, "kvcr", absent=True)
    text = f"kvcr is not installed, only {_PLACEHOLDER}, which is a placeholder"
    command = f"pip uninstall -y {_PLACEHOLDER} && {command}"
    return Fault(text, command, "kvcr", absent=True)


def _nixl_fault(found: Found) -> Fault | None:
    pin = found.nixl_pin
    nixl = found.versions.get("nixl")
    wheels = {n: found.versions[n] for n in NIXL_WHEELS if n in found.versions}
    # NIXL loads the wheel for torch's CUDA version or, if torch has none, the first
    # one.
    used = next(iter(wheels), NIXL_WHEELS[0])
    if found.cuda is not None:
        used = f"nixl-cu{found.cuda}"
    module = used.replace("-", "_")
    both = f"{_exactly('nixl', pin)} {_exactly(used, pin)}"
    reinstall = f"pip install --force-reinstall --no-deps {both}"

    if pin is not None and nixl is not None and not fits(nixl, pin):
        text = f"nixl is {nixl}, but {found.named('kvcr')} requires nixl{pin}"
        return Fault(text, reinstall, "nixl")
    if found.overwritten:
        text = (
            f"{' and '.join(sorted(wheels))} have overwritten each other's files, "
            f"including {', '.join(found.overwritten[:3])}"
        )
        remove = f"pip uninstall -y nixl {' '.join(sorted(wheels))}"
        return Fault(text, f"{remove} && {reinstall}", "nixl")
    if used in wheels and module not in found.importable:
        text = f"{used} {wheels[used]} is installed, but its files are missing"
        return Fault(text, reinstall, used, absent=True)
    backends = found.importable.intersection(_NIXL_MODULES)
    if nixl is not None and (
        module not in backends if found.cuda is not None else not backends
    ):
        text = f"nixl {nixl} needs {used}, which is not installed"
        if found.cuda is not None:
            text += f"; torch is built for CUDA {found.cuda}"
        return Fault(text, reinstall, used, absent=True)
    version = wheels.get(used)
    if version is None:
        return None
    if nixl is not None and version != nixl:
        text = f"nixl is {nixl}, but {used}, which it loads, is {version}"
        return Fault(text, reinstall, used)
    if nixl is None and pin is not None and not fits(version, pin):
        text = f"{used} is {version}, but {found.named('kvcr')} requires nixl{pin}"
        return Fault(text, reinstall, used)
    return None


def _exactly(name: str, pin: SpecifierSet | None) -> str:
    return name if pin is None else f"{name}{pin}"
