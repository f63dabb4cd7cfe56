# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Asks vLLM, in a fresh process, which adapter serves its type ``kvcr``."""

import importlib.util
import inspect
from typing import Any

from vllm_kvcr.doctor.child import answer
from vllm_kvcr.plugin import TIER_PACKAGE, TIER_TYPE


def main() -> None:
    from vllm.plugins import load_general_plugins

    # Each of vLLM's processes does this, with VLLM_PLUGINS as it is set here.
    load_general_plugins()
    from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

    found: dict[str, Any] = {"folder": None, "tier": None, "error": None}
    spec = importlib.util.find_spec(TIER_PACKAGE)
    if spec is not None and spec.submodule_search_locations:
        found["folder"] = next(iter(spec.submodule_search_locations))
    try:
        tier = SecondaryTierFactory.get_tier_class({"type": TIER_TYPE})
        found["tier"] = inspect.getfile(tier)
    except Exception as error:
        found["error"] = f"{type(error).__name__}: {error}"
    answer(found)


if __name__ == "__main__":
    main()
