# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The registry of secondary tiers: each type resolves, and lazily."""

import json
import os
import subprocess
import sys

import pytest

from tests.v1.kv_offload.tiering.kvcr.conftest import CHECKOUT, TIER_PACKAGE
from vllm.v1.kv_offload.tiering.base import SecondaryTierManager
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory


@pytest.mark.parametrize("tier_type", sorted(SecondaryTierFactory._registry))
def test_every_registered_tier_can_be_imported(tier_type: str) -> None:
    tier_class = SecondaryTierFactory.get_tier_class({"type": tier_type})
    assert issubclass(tier_class, SecondaryTierManager)


def test_kvcr_is_registered_under_the_agreed_names() -> None:
    from vllm.v1.kv_offload.tiering.kvcr import manager

    tier_class = SecondaryTierFactory.get_tier_class({"type": "kvcr"})
    assert tier_class is manager.KVCRSecondaryTierManager
    assert manager.__name__ == f"{TIER_PACKAGE}.manager"


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


def test_without_kvcr_only_naming_it_fails_and_says_what_to_install() -> None:
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
    seen = json.loads(done.stdout.splitlines()[-1])
    expected = CHECKOUT.joinpath(*TIER_PACKAGE.split("."), "__init__.py")
    assert seen["package"] == str(expected)
    assert seen["imported early"] == []
    ((tier_type, (is_import_error, text)),) = seen["errors"].items()
    assert tier_type == "kvcr"
    assert is_import_error
    assert "pip install" in text
    assert "kvcr" in text
