# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""KVCR's vocabulary: everything that the installed kvcr can say has a row.

Fails on a kvcr that says something new, before an engine meets it.
"""

import importlib
import inspect
import pkgutil
import re

import kvcr
import pytest
from kvcr import local_disk
from kvcr.types import CacheTier, OpEntryStatus, QueryStatus, TransferError

from vllm.v1.kv_offload.base import Medium
from vllm.v1.kv_offload.tiering.kvcr.compat.vocabulary import (
    ENTRIES,
    LOOKUPS,
    MEDIA,
    UNREADABLE_HINT,
    WRITE_FAILURES,
)


def kvcr_exceptions() -> list[type[BaseException]]:
    """Each exception type that a module of kvcr defines, private ones apart: those
    do not leave kvcr."""
    found: set[type[BaseException]] = set()
    for module_info in pkgutil.walk_packages(kvcr.__path__, "kvcr."):
        if module_info.name.rpartition(".")[2].startswith("_"):
            continue  # as __main__, which would run
        module = importlib.import_module(module_info.name)
        found.update(
            kind
            for name, kind in inspect.getmembers(module, inspect.isclass)
            if issubclass(kind, BaseException)
            and kind.__module__.partition(".")[0] == "kvcr"
            and not name.startswith("_")
        )
    return sorted(found, key=lambda kind: kind.__name__)


KNOWN = {
    *("KVCRGuardProtocolError", "KVCRMsgFramingError", "KVCRServiceError"),
    *("KVCRSocketError", "KVCRStartupError", "RecoveryJournalError"),
    *("RecoveryJournalTornError", "RecoveryMirrorError", "TransferError"),
}
"""Those of which it was decided what they mean for the tier."""


@pytest.mark.parametrize("kind", kvcr_exceptions(), ids=lambda kind: kind.__name__)
def test_every_exception_of_kvcrs_is_known(kind: type[BaseException]) -> None:
    assert kind.__name__ in KNOWN


def test_no_exception_of_kvcrs_is_taken_for_an_unreadable_hint() -> None:
    found = kvcr_exceptions()
    assert {TransferError, kvcr.KVCRServiceError} <= set(found)
    assert not [kind for kind in found if issubclass(kind, UNREADABLE_HINT)]


def test_every_status_and_tier_of_kvcrs_has_a_row_that_says_what_was_agreed() -> None:
    lookups = {"HIT": "HIT", "FETCHABLE": "HIT", "FETCHING": "RETRY", "MISS": "MISS"}
    assert {status.name: result.name for status, result in LOOKUPS.items()} == lookups
    entries = {"SUCCESS": "DONE", "DROPPED": "DROPPED", "FAILED": "FAILED"}
    assert {status.name: entry.name for status, entry in ENTRIES.items()} == entries
    media = {"LOCAL_G2": Medium.CPU, "G3": Medium.STORAGE}
    assert {tier.name: medium for tier, medium in MEDIA.items() if medium} == media
    rows = (set(LOOKUPS), set(ENTRIES), set(MEDIA))
    assert rows == (set(QueryStatus), set(OpEntryStatus), set(CacheTier))


def test_the_reasons_for_a_failed_placement_are_those_that_are_told_apart() -> None:
    source = inspect.getsource(local_disk)
    reasons = set(re.findall(r'_recover_store_failure\(key, "([^"]+)"\)', source))
    others = {"G3 destination unavailable", "store failed to start"}
    assert reasons == WRITE_FAILURES | others
