# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Checks whether two engines would give the same block the same hash."""

import os
from collections.abc import Iterator

from vllm_kvcr.doctor.finding import Finding, ok, warn
from vllm_kvcr.doctor.setting import Setting

_SEED = "PYTHONHASHSEED"
_AS_NUMBERS = "VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES"


def check(setting: Setting) -> Iterator[Finding]:
    shared = [c for _, c in setting.valid if c.serves_peers]
    if not shared:
        yield ok(f"engines share no blocks, so {_SEED} does not matter")
        return
    yield _seed()
    if os.environ.get(_AS_NUMBERS, "1").strip() in ("0",):
        yield warn(
            f"{_AS_NUMBERS}=0: events carry no 64-bit hashes, but hints need them",
            f"unset {_AS_NUMBERS}",
        )


def _seed() -> Finding:
    seed = os.environ.get(_SEED)
    if seed is not None:
        return ok(f"{_SEED}={seed}; every engine needs the same value", seed=seed)
    from vllm.v1.core import kv_cache_utils

    text = f"{_SEED} is not set here"
    remedy = f"start every engine with the same value, such as {_SEED}=0"
    # If vLLM has it, its default is the same in each process.
    if hasattr(kv_cache_utils, "DEFAULT_NONE_HASH_SEED"):
        return ok(
            f"{text}: hashes agree as long as every engine leaves it unset and uses a "
            "sha256 --prefix-caching-hash-algo",
            seed=None,
        )
    return warn(
        f"{text}: engines would not recognize each other's blocks", remedy, seed=None
    )
