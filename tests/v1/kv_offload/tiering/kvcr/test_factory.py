# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The registry of secondary tiers: each type resolves, and lazily."""

import ast
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from vllm.v1.kv_offload.tiering.base import SecondaryTierManager
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

TIER_PACKAGE = "vllm.v1.kv_offload.tiering.kvcr"
CHECKOUT = Path(__file__).resolve().parents[5]

# Optional: vLLM starts, and every other tier works, without the package kvcr.
OPTIONAL = {"kvcr": "kvcr"}


@pytest.mark.parametrize("tier_type", sorted(SecondaryTierFactory._registry))
def test_every_registered_tier_can_be_imported(tier_type: str) -> None:
    package = OPTIONAL.get(tier_type)
    if package is not None and importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is optional and not installed")
    tier_class = SecondaryTierFactory.get_tier_class({"type": tier_type})
    assert issubclass(tier_class, SecondaryTierManager)


def test_kvcr_is_registered_under_the_agreed_names() -> None:
    from vllm.v1.kv_offload.tiering.kvcr import manager

    tier_class = SecondaryTierFactory.get_tier_class({"type": "kvcr"})
    assert tier_class is manager.KVCRSecondaryTierManager
    assert manager.__name__ == f"{TIER_PACKAGE}.manager"


def test_the_packages_init_imports_nothing() -> None:
    spec = importlib.util.find_spec(TIER_PACKAGE)
    assert spec is not None
    assert spec.origin is not None
    (only,) = ast.parse(Path(spec.origin).read_text()).body
    assert isinstance(only, ast.Expr)
    assert isinstance(only.value, ast.Constant)


# One process that answers everything, because importing vLLM takes seconds.
WITHOUT_KVCR = """
import importlib.metadata, json, sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("kvcr", "nixl"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

def distribution(name, installed=importlib.metadata.distribution):
    if name in ("kvcr", "nixl"):
        raise importlib.metadata.PackageNotFoundError(name)
    return installed(name)

sys.meta_path.insert(0, Absent())
importlib.metadata.distribution = distribution
try:
    from vllm_kvcr.plugin import register
except ModuleNotFoundError:
    pass
else:
    register()
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory
import vllm.v1.kv_offload.tiering.kvcr as package

seen = {"package": package.__file__}
seen["imported early"] = sorted(
    name for name in sys.modules
    if name.startswith(package.__name__ + ".") or name.partition(".")[0] == "kvcr"
)
seen["errors"] = {}
for tier_type in SecondaryTierFactory._registry:
    try:
        SecondaryTierFactory.get_tier_class({"type": tier_type})
    except BaseException as error:
        seen["errors"][tier_type] = [isinstance(error, ImportError), str(error)]
print("\\n" + json.dumps(seen))
"""


@pytest.fixture(scope="module")
def without_kvcr() -> dict[str, Any]:
    """What a process sees in which kvcr cannot be imported."""
    path = os.pathsep.join(filter(None, [str(CHECKOUT), os.getenv("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_KVCR],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_nothing_of_the_tier_is_imported_until_it_is_named(
    without_kvcr: dict[str, Any],
) -> None:
    expected = CHECKOUT.joinpath(*TIER_PACKAGE.split("."), "__init__.py")
    assert without_kvcr["package"] == str(expected)
    assert without_kvcr["imported early"] == []


def test_without_kvcr_every_other_tier_works(without_kvcr: dict[str, Any]) -> None:
    assert set(without_kvcr["errors"]) <= {"kvcr"}


def test_without_kvcr_naming_it_is_one_error_that_says_what_to_install(
    without_kvcr: dict[str, Any],
) -> None:
    is_import_error, text = without_kvcr["errors"]["kvcr"]
    assert is_import_error
    assert "pip install" in text
    assert "kvcr" in text
