# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""How bare KVCR is told of memory, in the words of the installed release."""

from collections.abc import Callable
from typing import Any

import kvcr.config
import kvcr.types

# kvcr 0.1.0 has addresses where later releases have regions.
_HAS_REGIONS = hasattr(kvcr.types, "RegionDescriptor")


def region_keyword(address: int, row_bytes: int, rows: int) -> dict[str, Any]:
    """The argument of ``KVCRBackendConfigs`` that registers the primary tier."""
    if _HAS_REGIONS:
        region = kvcr.types.RegionDescriptor(addr=address, size=row_bytes, count=rows)
        return {"framework_regions": [region]}
    whole = kvcr.config.FrameworkDramInput  # type: ignore[attr-defined,unused-ignore]
    return {"framework_dram": whole(address, row_bytes * rows)}


def block_ref_maker(
    agent: str, address: int, row_bytes: int
) -> Callable[[int], list[Any]]:
    if _HAS_REGIONS:
        ref = kvcr.types.MemoryRef
        return lambda chunk: [ref(end_point_name=agent, element_index=chunk)]
    descriptor = kvcr.types.MemDescriptor  # type: ignore[attr-defined,unused-ignore]
    return lambda chunk: [
        descriptor(agent, "DRAM", address + chunk * row_bytes, row_bytes, 0)
    ]
