# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""KVCR's vocabulary in vLLM's words: one table for each kind of answer.

If a release of kvcr adds an exception, a query status, an entry status or a cache tier,
a test fails here before an engine meets it.
"""

from enum import Enum

from kvcr.types import CacheTier, OpEntryStatus, QueryStatus

from vllm.v1.kv_offload.base import LookupResult, Medium


class Entry(Enum):
    """What became of one block of an operation."""

    DONE = "moved, or held already"
    DROPPED = "declined by the placement policy, which is not a failure"
    FAILED = "not moved"


UNREADABLE_HINT = (
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)
"""What KVCR raises from ``submit_hint`` for a hint that it does not understand; none of
its own exceptions is among them. A dead progress thread may have died of one of these
too, which the next poll finds out."""

LOOKUPS: dict[QueryStatus, LookupResult] = {
    QueryStatus.HIT: LookupResult.HIT,
    QueryStatus.FETCHABLE: LookupResult.HIT,
    QueryStatus.FETCHING: LookupResult.RETRY,
    QueryStatus.MISS: LookupResult.MISS,
}

ENTRIES: dict[OpEntryStatus, Entry] = {
    OpEntryStatus.SUCCESS: Entry.DONE,
    OpEntryStatus.DROPPED: Entry.DROPPED,
    OpEntryStatus.FAILED: Entry.FAILED,
}

MEDIA: dict[CacheTier, Medium | None] = {
    CacheTier.LOCAL_G2: Medium.CPU,
    CacheTier.G3: Medium.STORAGE,
    # Not KVCR's to report: vLLM's own tiers, and those of peers.
    CacheTier.FW_G1: None,
    CacheTier.FW_G2: None,
    CacheTier.REMOTE_G2: None,
}

WRITE_FAILURES = frozenset({"transfer failed"})
"""``PlacementFailure.reason`` if a write to a file failed. KVCR's other reasons mean
that every slot of the files is in use, or that KVCR is being closed."""
