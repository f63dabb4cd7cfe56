# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""From a policy's name to the object that decides KVCR's placement and eviction."""

import importlib
from collections.abc import Callable

from kvcr.policy import (
    FIFOPolicy,
    G3FIFOPolicy,
    G3LRUPolicy,
    KVCachePolicy,
    LRUPolicy,
)
from kvcr.types import BlockMeta, CacheTier, PlacementDecision, PlacementFailure

BUILT_IN: dict[str, type[KVCachePolicy]] = {
    "fifo": FIFOPolicy,
    "lru": LRUPolicy,
    "g3_fifo": G3FIFOPolicy,
    "g3_lru": G3LRUPolicy,
}


# A clean block counts as this much older than it is.
_CLEAN_HANDICAP_S = 60.0


class CleanFirstPolicy(G3LRUPolicy):
    """Least recently used first, and blocks with a copy on file before the others.

    To evict a block that has no copy on file, KVCR has to write it first, one at a
    time. Blocks that were just read have one, so that reading does not wait for
    writing; a block that is used often stays all the same.
    """

    def eviction_score(self, meta: BlockMeta, source: CacheTier) -> float:
        score = super().eviction_score(meta, source)
        clean = source is CacheTier.LOCAL_G2 and CacheTier.G3 in meta.resident_tiers
        return score - _CLEAN_HANDICAP_S if clean else score


def choose_policy(name: str | None, *, has_files: bool) -> KVCachePolicy | None:
    """The policy to give to KVCR, or ``None`` for KVCR's own choice.

    Raises:
        ValueError, TypeError: as ``make_policy``.
    """
    if name is None:
        return CleanFirstPolicy() if has_files else None
    policy = make_policy(name)
    # It takes every block into the pool and drops what that evicts.
    no_files = all(
        getattr(type(policy), name) is getattr(FIFOPolicy, name)
        for name in ("decide_ingest", "decide_eviction")
    )
    if has_files and no_files:
        raise ValueError(
            f"kvcr tier: policy = {name!r}: never writes to the files of g3; use "
            "g3_lru or g3_fifo, or leave it out"
        )
    return policy


def follows_order(policy: KVCachePolicy | None) -> bool:
    """Whether it matters to a policy in which order vLLM uses blocks."""
    return type(policy) not in (FIFOPolicy, G3FIFOPolicy)


def observe(
    policy: KVCachePolicy,
    ingested: Callable[[BlockMeta, CacheTier], None] | None,
    failed: Callable[[PlacementFailure], None],
) -> None:
    """Have ``policy``'s hooks tell what KVCR tells nobody but its policy.

    Args:
        ingested: Told of each block whose first copy comes into KVCR, and from where.
        failed: Told of each block that the policy sent to a file in vain.
    """
    on_ingest, decide_recovery = policy.on_ingest, policy.decide_recovery

    def tell_ingested(meta: BlockMeta, source: CacheTier) -> None:
        assert ingested is not None
        ingested(meta, source)
        on_ingest(meta, source)

    def tell_failed(meta: BlockMeta, failure: PlacementFailure) -> PlacementDecision:
        failed(failure)
        return decide_recovery(meta, failure)

    # On the object, so that it stays of its class, with hooks that a later kvcr adds.
    if ingested is not None:
        policy.on_ingest = tell_ingested  # type: ignore[method-assign]
    policy.decide_recovery = tell_failed  # type: ignore[method-assign]


def make_policy(name: str) -> KVCachePolicy:
    """Build the policy called ``name``: a built-in one or ``module.Class``.

    Raises:
        ValueError: the name is unknown, or cannot be imported.
        TypeError: it names something that is not a ``KVCachePolicy`` class.
    """
    return _policy_class(name)()


def _policy_class(name: str) -> type[KVCachePolicy]:
    built_in = BUILT_IN.get(name)
    if built_in is not None:
        return built_in
    module_name, _, class_name = name.rpartition(".")
    if not module_name or not class_name:
        raise ValueError(
            f"policy: unknown policy {name!r}; use one of {', '.join(BUILT_IN)}, or "
            "the full name module.Class of a KVCachePolicy subclass"
        )
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # whatever the module does when it is imported
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
