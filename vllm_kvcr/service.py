# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The KVCR service with a NIXL thread that sleeps; ``vllm-kvcr guard`` starts it.

The service has NIXL agents of its own, whose threads otherwise take a whole core. All
arguments but the delay are the service's. vLLM is not imported, since the service needs
nothing of it.
"""

import argparse
import importlib.util
import sys
from types import ModuleType

from kvcr import kvcr_service

from vllm_kvcr.plugin import TIER_TYPE, packaged_tiering_folder


def main() -> None:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--nixl-progress-delay-ms", type=int, required=True)
    given, sys.argv[1:] = parser.parse_known_args()
    with _tiers_nixl().sleeping(given.nixl_progress_delay_ms):
        kvcr_service.main()


def _tiers_nixl() -> ModuleType:
    """The tier's module, without the packages around it, which import vLLM."""
    path = packaged_tiering_folder() / TIER_TYPE / "compat" / "nixl.py"
    spec = importlib.util.spec_from_file_location("vllm_kvcr_nixl", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    main()
