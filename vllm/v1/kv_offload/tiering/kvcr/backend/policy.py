# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Makes the policy object that decides KVCR's placement and eviction."""

import importlib
from collections.abc import Callable
from typing import Any

from kvcr.policy import FIFOPolicy, G3FIFOPolicy, G3LRUPolicy, KVCachePolicy, LRUPolicy
from kvcr.types import BlockMeta, CacheTier

BUILT_IN: dict[str, type[KVCachePolicy]] = {
    "fifo": FIFOPolicy,
    "lru": LRUPolicy,
    "g3_fifo": G3FIFOPolicy,
    "g3_lru": G3LRUPolicy,
}

# A block that is in a file counts as this much older than it is. Longer than the reads
# that should find room without a write, and short enough that a block in frequent use
# outlives blocks that were not used for a minute.
_CLEAN_HANDICAP_S = 60.0


class CleanFirstPolicy(G3LRUPolicy):
    """Evicts the least recently used block, and prefers blocks that are in a file.

    Before KVCR can evict a block that is in no file, it has to write it to one, one
    block at a time. A block that was just read is in a file, so that reads do not wait
    for writes. A block that is used often stays in the pool all the same.
    """

    def eviction_score(self, meta: BlockMeta, source: CacheTier) -> float:
        score = super().eviction_score(meta, source)
        clean = source is CacheTier.LOCAL_G2 and CacheTier.G3 in meta.resident_tiers
        return score - _CLEAN_HANDICAP_S if clean else score


def choose_policy(name: str | None, *, has_files: bool) -> KVCachePolicy | None:
    """The policy for KVCR, or ``None`` to leave the choice to KVCR.

    Raises:
        ValueError, TypeError: the name cannot be used, or not with files.
    """
    if name is None:
        return CleanFirstPolicy() if has_files else None
    policy = _policy_class(name)()
    # FIFOPolicy takes every block into the pool and drops the blocks that it evicts.
    no_files = all(
        getattr(type(policy), name) is getattr(FIFOPolicy, name)
        for name in ("decide_ingest", "decide_eviction")
    )
    if has_files and no_files:
        raise ValueError(
            f"kvcr tier: policy = {name!r}: never writes to g3's files; use g3_lru or "
            "g3_fifo, or leave it out"
        )
    return policy


def follows_order(policy: KVCachePolicy | None) -> bool:
    """Whether a policy depends on the order in which vLLM uses blocks."""
    return type(policy) not in (FIFOPolicy, G3FIFOPolicy)


def observe(policy: KVCachePolicy, hook: str, report: Callable[..., None]) -> None:
    """Have ``report`` called with the arguments of each call of a policy's hook.

    KVCR tells only its policy where blocks come from and which it could not move.
    """
    own = getattr(policy, hook)

    def observed(*arguments: Any) -> Any:
        report(*arguments)
        return own(*arguments)

    # Replaced on the object, which keeps its class and any hooks that a later kvcr
    # adds.
    setattr(policy, hook, observed)


def _policy_class(name: str) -> type[KVCachePolicy]:
    if name in BUILT_IN:
        return BUILT_IN[name]
    module_name, _, class_name = name.rpartition(".")
    if not module_name or not class_name:
        raise ValueError(
            f"policy: unknown policy {name!r}; use one of {', '.join(BUILT_IN)}, or "
            "the full name module.Class of a KVCachePolicy subclass"
        )
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # a module may raise anything when it is imported
        raise ValueError(
            f"policy: {name!r}: module {module_name!r} could not be imported: "
            f"{type(error).__name__}: {error}"
        ) from error
    found = getattr(module, class_name, None)
    if found is None:
        raise ValueError(
            f"policy: {name!r}: module {module_name!r} has no class {class_name!r}"
        )
    if not (isinstance(found, type) and issubclass(found, KVCachePolicy)):
        raise TypeError(
            f"policy: {name!r} is not a subclass of kvcr.policy.KVCachePolicy"
        )
    return found
