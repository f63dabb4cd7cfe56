# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""`install-kv-offload.sh`, run on small environments with a stand-in for `uv`.

Each test stages an image: a real virtual environment whose `python3` is the first on
PATH, holding whatever the image under test would hold already.
"""

import json
import shutil
import subprocess
import sys
import venv
from importlib import metadata
from pathlib import Path

import packaging
import pytest

SCRIPT = Path(__file__).parents[2] / ".buildkite/scripts/install-kv-offload.sh"
STAND_IN_UV = Path(__file__).with_name("stand_in_uv.py")

CUDA_12, CUDA_13 = "12.9.1", "13.0.2"

# As the real `nixl` does: whichever wheel fits the CUDA of the image, and no other.
NIXL_SOURCE = (
    "import importlib, os\n"
    "major = os.environ['CUDA_VERSION'].split('.')[0]\n"
    "importlib.import_module(f'nixl_cu{major}')\n"
)
KVCR_REQUIRES = [
    "msgspec<1,>=0.21.0",
    "nixl==1.5.0",
    'nixl==7.0.0; extra == "other"',
    'pytest; extra == "test"',
]


def release(module: str, *requires: str, source: str = "") -> dict:
    return {"requires": list(requires), "modules": {module: source}}


def make_index() -> dict:
    kvcr = "import nixl, msgspec\n"
    index: dict = {
        "kvcr": {
            "0.1.0": release("kvcr", "nixl==1.3.2", source=kvcr),
            "0.1.1": release("kvcr", *KVCR_REQUIRES, source=kvcr)
            | {"description": "No header, but text:\nRequires-Dist: nixl==6.6.6\n"},
        },
        "msgspec": {v: release("msgspec") for v in ("0.20.0", "0.21.1", "0.23.0")},
        "unrelated": {v: release("unrelated") for v in ("1.0", "2.0")},
        "nixl": {},
        "nixl-cu12": {},
        "nixl-cu13": {},
    }
    for version in ("1.3.2", "1.5.0"):
        wheels = f"nixl-cu12=={version}", f"nixl-cu13=={version}"
        index["nixl"][version] = release("nixl", *wheels, source=NIXL_SOURCE)
        for cuda in ("12", "13"):
            index[f"nixl-cu{cuda}"][version] = release(f"nixl_cu{cuda}")
    return index


class Image:
    def __init__(self, root: Path) -> None:
        self.root = root
        self.index = make_index()
        venv.create(root / "venv", symlinks=True)
        self.python = root / "venv/bin/python3"
        (self.site,) = (root / "venv/lib").glob("python*/site-packages")
        (self.site / "packaging").symlink_to(Path(packaging.__file__).parent)
        self.calls_file = root / "calls.jsonl"
        self.working_dir = root / "tests"
        self.working_dir.mkdir()
        self.uv = root / "bin/uv"
        self.uv.parent.mkdir()
        self.uv.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{STAND_IN_UV}" "$@"\n')
        self.uv.chmod(0o755)

    def environ(self) -> dict[str, str]:
        index_file = self.root / "index.json"
        index_file.write_text(json.dumps(self.index))
        return {
            "PATH": f"{self.uv.parent}:{self.python.parent}",
            # So that what is found on disk is what `uv` has put there.
            "PYTHONDONTWRITEBYTECODE": "1",
            "STAND_IN_UV_CALLS": str(self.calls_file),
            "STAND_IN_UV_INDEX": str(index_file),
        }

    def preinstall(self, *requirements: str) -> None:
        command = [self.uv, *self.install_call("--no-deps", *requirements)]
        subprocess.run(command, env=self.environ(), check=True)
        self.calls_file.unlink()

    def run_script(self, cuda_version: str | None) -> subprocess.CompletedProcess[str]:
        cuda = {} if cuda_version is None else {"CUDA_VERSION": cuda_version}
        return subprocess.run(
            [shutil.which("bash") or "bash", SCRIPT],
            env=self.environ() | cuda,
            cwd=self.working_dir,
            capture_output=True,
            text=True,
            timeout=60,
        )

    def make_ready(self, cuda_version: str = CUDA_12) -> None:
        result = self.run_script(cuda_version)
        assert result.returncode == 0, result.stderr

    def refusal(self, cuda_version: str = CUDA_12) -> str:
        result = self.run_script(cuda_version)
        assert result.returncode != 0
        assert "is ready" not in result.stdout
        return result.stderr

    def uv_calls(self) -> list[list[str]]:
        if not self.calls_file.exists():
            return []
        return [json.loads(line) for line in self.calls_file.read_text().splitlines()]

    def install_call(self, *arguments: str) -> list[str]:
        return ["pip", "install", "--python", str(self.python), *arguments]

    def installed(self) -> dict[str, str]:
        found = metadata.distributions(path=[str(self.site)])
        return {each.name: each.version for each in found}

    def fingerprints(self, *patterns: str) -> dict[Path, tuple[int, int]]:
        """What tells a file that was written anew from the one that lay there."""
        return {
            path: (path.stat().st_ino, path.stat().st_mtime_ns)
            for pattern in patterns
            for path in self.site.glob(f"{pattern}*/*")
        }


@pytest.fixture
def image(tmp_path: Path) -> Image:
    return Image(tmp_path)


@pytest.mark.parametrize("cuda_version", [None, ""])
def test_without_cuda_nothing_is_done(image: Image, cuda_version: str | None) -> None:
    shutil.rmtree(image.uv.parent)
    shutil.rmtree(image.python.parent)
    result = image.run_script(cuda_version)
    assert result.returncode == 0
    assert "CUDA_VERSION is empty" in result.stdout
    assert len(result.stdout.splitlines()) == 1
    assert result.stderr == ""


@pytest.mark.parametrize(
    ("cuda_version", "installed_majors", "installed_nixl_version"),
    [
        (CUDA_12, [], ""),
        (CUDA_13, ["12"], "1.3.2"),
        (CUDA_12, ["12"], "1.3.2"),
        (CUDA_12, ["12", "13"], "1.3.2"),
        (CUDA_13, ["12", "13"], "1.5.0"),
    ],
)
def test_cuda_image_gets_its_one_wheel(
    image: Image,
    cuda_version: str,
    installed_majors: list[str],
    installed_nixl_version: str,
) -> None:
    wheels = {f"nixl-cu{each}": installed_nixl_version for each in installed_majors}
    before = {"unrelated": "1.0", "msgspec": "0.21.1", **wheels}
    if wheels:
        before["nixl"] = installed_nixl_version
    image.preinstall(*(f"{name}=={version}" for name, version in before.items()))
    major, other_major = ("12", "13") if cuda_version == CUDA_12 else ("13", "12")
    not_ours = ("unrelated", "msgspec", f"nixl_cu{other_major}")
    untouched = image.fingerprints(*not_ours)

    image.make_ready(cuda_version)

    assert image.uv_calls() == [
        image.install_call("--no-deps", "kvcr==0.1.1"),
        image.install_call("--no-deps", "nixl==1.5.0", f"nixl-cu{major}==1.5.0"),
        image.install_call("msgspec<1,>=0.21.0"),
    ]
    after = {"kvcr": "0.1.1", "nixl": "1.5.0", f"nixl-cu{major}": "1.5.0"}
    assert image.installed() == before | after
    assert image.fingerprints(*not_ours) == untouched


def test_what_is_too_old_is_replaced_and_a_second_run_changes_nothing(
    image: Image,
) -> None:
    old = ("kvcr==0.1.0", "nixl==1.3.2", "nixl-cu12==1.3.2", "msgspec==0.20.0")
    image.preinstall(*old)
    image.make_ready()
    assert image.installed() == {
        "kvcr": "0.1.1",
        "nixl": "1.5.0",
        "nixl-cu12": "1.5.0",
        "msgspec": "0.23.0",
    }
    first = image.fingerprints("")
    image.make_ready()
    assert image.fingerprints("") == first


def test_kvcr_without_other_requirements(image: Image) -> None:
    kvcr = release("kvcr", "nixl==1.5.0", source="import nixl\n")
    image.index["kvcr"]["0.1.1"] = kvcr
    image.make_ready()
    wheels = ("nixl==1.5.0", "nixl-cu12==1.5.0")
    assert image.uv_calls()[-1] == image.install_call("--no-deps", *wheels)


@pytest.mark.parametrize("cuda_version", ["11.8.0", "130", "cpu"])
def test_unsupported_cuda_is_refused(image: Image, cuda_version: str) -> None:
    assert f"CUDA_VERSION={cuda_version}" in image.refusal(cuda_version)
    assert image.uv_calls() == []


@pytest.mark.parametrize(
    "requires",
    [[], ["nixl>=1.5.0"], ["nixl==1.5.*"], ["nixl==1.5.0", "nixl==1.3.2"]],
)
def test_kvcr_must_require_one_exact_nixl(image: Image, requires: list[str]) -> None:
    image.index["kvcr"]["0.1.1"]["requires"] = requires
    assert "one exact nixl" in image.refusal()
    assert len(image.uv_calls()) == 1


@pytest.mark.parametrize("package", ["kvcr", "nixl"])
def test_unimportable_package_fails(image: Image, package: str) -> None:
    for each in image.index[package].values():
        each["modules"][package] = "raise ImportError('libucp.so is missing')\n"
    said = image.refusal()
    assert "libucp.so is missing" in said
    assert f"{package} cannot be imported" in said


def test_folder_of_the_working_directory_is_no_package(image: Image) -> None:
    (image.working_dir / "kvcr").mkdir()
    (image.working_dir / "kvcr/__init__.py").touch()
    image.index["kvcr"]["0.1.1"]["modules"] = {}
    assert "kvcr cannot be imported" in image.refusal()


@pytest.mark.parametrize("package", ["kvcr", "nixl-cu12", "msgspec"])
def test_failed_installation_fails(image: Image, package: str) -> None:
    image.index[package] = {}
    assert "could not install" in image.refusal()


@pytest.mark.parametrize("tool", ["uv", "python3"])
def test_missing_tool_is_named(image: Image, tool: str) -> None:
    (image.python if tool == "python3" else image.uv).unlink()
    assert f"{tool} is not on PATH" in image.refusal()
    assert image.uv_calls() == []
