# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""KVCR's vocabulary in vLLM's words: the one table for each kind of answer.

A release of kvcr that adds an exception, a query status, an entry status or a cache
tier fails a test here instead of surprising an engine.
"""

from enum import Enum

from kvcr import (
    KVCRGuardProtocolError,
    KVCRMsgFramingError,
    KVCRServiceError,
    KVCRSocketError,
)
from kvcr.recovery_journal import RecoveryJournalError, RecoveryJournalTornError
from kvcr.types import (
    CacheTier,
    OpEntryStatus,
    QueryStatus,
    RecoveryMirrorError,
    TransferError,
)

from vllm.v1.kv_offload.base import LookupResult, Medium
from vllm.v1.kv_offload.tiering.kvcr.compat.shims import KVCRStartupError


class Fault(Enum):
    """What an exception of KVCR's means for the tier."""

    NATIVE_ALIVE = "start-up failed and native code may still touch the buffers"
    STARTUP = "start-up failed and everything was released"
    MEMORY = "a report about memory that a failed transfer may still touch"
    HINT = "a hint that KVCR does not understand"
    BACKEND = "KVCR can no longer be used"


class Entry(Enum):
    """What became of one block of an operation."""

    DONE = "moved, or held already"
    DROPPED = "declined by the placement policy, which is no failure"
    FAILED = "not moved"


FAULTS: dict[type[BaseException], Fault] = {
    KVCRStartupError: Fault.NATIVE_ALIVE,
    TransferError: Fault.MEMORY,
    RecoveryMirrorError: Fault.STARTUP,
    RecoveryJournalError: Fault.STARTUP,
    RecoveryJournalTornError: Fault.STARTUP,
    KVCRSocketError: Fault.STARTUP,
    KVCRMsgFramingError: Fault.STARTUP,
    KVCRGuardProtocolError: Fault.STARTUP,
    KVCRServiceError: Fault.STARTUP,
    # What reading a malformed value raises. A dead progress thread may have died of
    # one of these too; the next poll tells the two apart.
    ValueError: Fault.HINT,
    TypeError: Fault.HINT,
    LookupError: Fault.HINT,
    AttributeError: Fault.HINT,
    ArithmeticError: Fault.HINT,
    RecursionError: Fault.HINT,
}

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
    # Not owned by KVCR: vLLM's own tiers, or a peer's, which reports them itself.
    CacheTier.FW_G1: None,
    CacheTier.FW_G2: None,
    CacheTier.REMOTE_G2: None,
}

WRITE_FAILURES = frozenset({"transfer failed"})
"""``PlacementFailure.reason`` where a write to a file failed. KVCR's others mean that
every slot of the files is in use, or that it is being closed."""


def fault_of(error: BaseException) -> Fault:
    """The most specific row for ``error``; anything unknown is ``BACKEND``."""
    for kind in type(error).__mro__:
        if kind in FAULTS:
            return FAULTS[kind]
    return Fault.BACKEND
