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

CUDA_VERSIONS = {"12": "12.9.1", "13": "13.0.2"}

# As the real `nixl` does: whichever wheel fits the CUDA of the image, and no other.
NIXL_SOURCE = (
    "import importlib, os\n"
    "major = os.environ['CUDA_VERSION'].split('.')[0]\n"
    "importlib.import_module(f'nixl_cu{major}')\n"
)


def nixl_index(version: str) -> dict:
    return {
        "nixl": {
            version: {
                "requires": [f"nixl-cu12=={version}", f"nixl-cu13=={version}"],
                "modules": {"nixl": NIXL_SOURCE},
            }
        },
        "nixl-cu12": {version: {"requires": [], "modules": {"nixl_cu12": ""}}},
        "nixl-cu13": {version: {"requires": [], "modules": {"nixl_cu13": ""}}},
    }


def make_index() -> dict:
    index = nixl_index("1.5.0")
    for name, releases in nixl_index("1.3.2").items():
        index[name].update(releases)
    index["kvcr"] = {
        "0.1.0": {
            "requires": ["nixl==1.3.2"],
            "modules": {"kvcr": "import nixl, msgspec\n"},
        },
        "0.1.1": {
            "requires": [
                "msgspec<1,>=0.21.0",
                "nixl==1.5.0",
                'nixl==7.0.0; extra == "other"',
                'pytest; extra == "test"',
            ],
            "modules": {"kvcr": "import nixl, msgspec\n"},
            "description": "No header, but text:\nRequires-Dist: nixl==6.6.6\n",
        },
    }
    index["msgspec"] = {
        version: {"requires": [], "modules": {"msgspec": ""}}
        for version in ("0.20.0", "0.21.1", "0.23.0")
    }
    index["unrelated"] = {
        version: {"requires": [], "modules": {"unrelated": ""}}
        for version in ("1.0", "2.0")
    }
    return index


class Image:
    def __init__(self, root: Path) -> None:
        self.root = root
        self.index = make_index()
        venv.create(root / "venv", symlinks=True)
        self.python = root / "venv/bin/python3"
        (self.site,) = (root / "venv/lib").glob("python*/site-packages")
        (self.site / "packaging").symlink_to(Path(packaging.__file__).parent)
        self.bin = root / "bin"
        self.bin.mkdir()
        self.working_dir = root / "tests"
        self.working_dir.mkdir()
        uv = self.bin / "uv"
        uv.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{STAND_IN_UV}" "$@"\n')
        uv.chmod(0o755)

    @property
    def calls_file(self) -> Path:
        return self.root / "calls.jsonl"

    def environ(self, cuda_version: str | None) -> dict[str, str]:
        index_file = self.root / "index.json"
        index_file.write_text(json.dumps(self.index))
        environ = {
            "PATH": f"{self.bin}:{self.python.parent}",
            # So that what is found on disk is what `uv` has put there.
            "PYTHONDONTWRITEBYTECODE": "1",
            "STAND_IN_UV_CALLS": str(self.calls_file),
            "STAND_IN_UV_INDEX": str(index_file),
        }
        if cuda_version is not None:
            environ["CUDA_VERSION"] = cuda_version
        return environ

    def preinstall(self, *requirements: str) -> None:
        subprocess.run(
            [str(self.bin / "uv"), *self.install_call("--no-deps", *requirements)],
            env=self.environ(None),
            check=True,
        )
        self.calls_file.unlink()

    def run_script(self, cuda_version: str | None) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [shutil.which("bash") or "bash", SCRIPT],
            env=self.environ(cuda_version),
            cwd=self.working_dir,
            capture_output=True,
            text=True,
            timeout=60,
        )

    def uv_calls(self) -> list[list[str]]:
        if not self.calls_file.exists():
            return []
        return [json.loads(line) for line in self.calls_file.read_text().splitlines()]

    def install_call(self, *arguments: str) -> list[str]:
        return ["pip", "install", "--python", str(self.python), *arguments]

    def installed(self) -> dict[str, str]:
        return {
            found.name: found.version
            for found in metadata.distributions(path=[str(self.site)])
        }

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
    shutil.rmtree(image.bin)
    shutil.rmtree(image.python.parent)

    result = image.run_script(cuda_version)

    assert result.returncode == 0
    assert "CUDA_VERSION is empty" in result.stdout
    assert len(result.stdout.splitlines()) == 1
    assert result.stderr == ""


@pytest.mark.parametrize(
    ("installed_majors", "installed_nixl_version"),
    [
        ((), ""),
        (("12",), "1.3.2"),
        (("13",), "1.3.2"),
        (("12", "13"), "1.3.2"),
        (("12", "13"), "1.5.0"),
    ],
)
@pytest.mark.parametrize("major", ["12", "13"])
def test_cuda_image_gets_its_one_wheel(
    image: Image,
    major: str,
    installed_majors: tuple[str, ...],
    installed_nixl_version: str,
) -> None:
    wheels = {f"nixl-cu{each}": installed_nixl_version for each in installed_majors}
    before = {"unrelated": "1.0", "msgspec": "0.21.1", **wheels}
    if wheels:
        before["nixl"] = installed_nixl_version
    image.preinstall(*(f"{name}=={version}" for name, version in before.items()))
    other_wheel = f"nixl_cu{'13' if major == '12' else '12'}"
    untouched = image.fingerprints("unrelated", "msgspec", other_wheel)

    result = image.run_script(CUDA_VERSIONS[major])

    assert result.returncode == 0, result.stderr
    assert image.uv_calls() == [
        image.install_call("--no-deps", "kvcr==0.1.1"),
        image.install_call("--no-deps", "nixl==1.5.0", f"nixl-cu{major}==1.5.0"),
        image.install_call("msgspec<1,>=0.21.0"),
    ]
    after = {"kvcr": "0.1.1", "nixl": "1.5.0", f"nixl-cu{major}": "1.5.0"}
    assert image.installed() == before | after
    assert image.fingerprints("unrelated", "msgspec", other_wheel) == untouched


def test_older_kvcr_is_replaced_by_the_pinned_one(image: Image) -> None:
    image.preinstall("kvcr==0.1.0", "nixl==1.3.2", "nixl-cu12==1.3.2")

    result = image.run_script("12.9.1")

    assert result.returncode == 0, result.stderr
    assert image.installed() == {
        "kvcr": "0.1.1",
        "nixl": "1.5.0",
        "nixl-cu12": "1.5.0",
        "msgspec": "0.23.0",
    }


def test_too_old_dependency_is_raised(image: Image) -> None:
    image.preinstall("msgspec==0.20.0")

    result = image.run_script("12.9.1")

    assert result.returncode == 0, result.stderr
    assert image.installed()["msgspec"] == "0.23.0"


def test_second_run_changes_nothing(image: Image) -> None:
    assert image.run_script("13.0.2").returncode == 0
    first = image.fingerprints("")

    assert image.run_script("13.0.2").returncode == 0
    assert image.fingerprints("") == first


def test_kvcr_without_other_requirements(image: Image) -> None:
    image.index["kvcr"]["0.1.1"] = {
        "requires": ["nixl==1.5.0"],
        "modules": {"kvcr": "import nixl\n"},
    }

    result = image.run_script("12.9.1")

    assert result.returncode == 0, result.stderr
    assert image.uv_calls()[-1] == image.install_call(
        "--no-deps", "nixl==1.5.0", "nixl-cu12==1.5.0"
    )


@pytest.mark.parametrize("cuda_version", ["11.8.0", "14.0.0", "130", "cpu"])
def test_unsupported_cuda_is_refused(image: Image, cuda_version: str) -> None:
    result = image.run_script(cuda_version)

    assert result.returncode != 0
    assert f"CUDA_VERSION={cuda_version}" in result.stderr
    assert image.uv_calls() == []


@pytest.mark.parametrize(
    "requires",
    [[], ["nixl"], ["nixl>=1.5.0"], ["nixl==1.5.*"], ["nixl==1.5.0", "nixl==1.3.2"]],
)
def test_kvcr_must_require_one_exact_nixl(image: Image, requires: list[str]) -> None:
    image.index["kvcr"]["0.1.1"]["requires"] = requires

    result = image.run_script("12.9.1")

    assert result.returncode != 0
    assert "one exact nixl" in result.stderr
    assert len(image.uv_calls()) == 1


@pytest.mark.parametrize("package", ["kvcr", "nixl"])
def test_unimportable_package_fails(image: Image, package: str) -> None:
    for release in image.index[package].values():
        release["modules"][package] = "raise ImportError('libucp.so is missing')\n"

    result = image.run_script("12.9.1")

    assert result.returncode != 0
    assert "libucp.so is missing" in result.stderr
    assert f"{package} cannot be imported" in result.stderr
    assert "is ready" not in result.stdout


def test_folder_of_the_working_directory_is_no_package(image: Image) -> None:
    (image.working_dir / "kvcr").mkdir()
    (image.working_dir / "kvcr/__init__.py").touch()
    image.index["kvcr"]["0.1.1"]["modules"] = {}

    result = image.run_script("12.9.1")

    assert result.returncode != 0
    assert "kvcr cannot be imported" in result.stderr


@pytest.mark.parametrize("package", ["kvcr", "nixl", "nixl-cu12", "msgspec"])
def test_failed_installation_fails(image: Image, package: str) -> None:
    image.index[package] = {}

    result = image.run_script("12.9.1")

    assert result.returncode != 0
    assert "could not install" in result.stderr
    assert "is ready" not in result.stdout


@pytest.mark.parametrize("tool", ["uv", "python3"])
def test_missing_tool_is_named(image: Image, tool: str) -> None:
    (image.python if tool == "python3" else image.bin / tool).unlink()

    result = image.run_script("12.9.1")

    assert result.returncode != 0
    assert f"{tool} is not on PATH" in result.stderr
    assert image.uv_calls() == []
