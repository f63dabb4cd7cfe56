# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The account of an engine's events: what does not balance, and who was late."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fleet.ledger import GPU, Ledger
from tests.fleet.router import Routed, faults_of_load
from vllm_kvcr.routing import Residency
from vllm_kvcr.servers import Answer

PRIMARY = Residency("CPU", None)
POOL = Residency("CPU", "kvcr")
# Eight blocks of 32 tokens: two chunks of four, whose hashes are 1 to 8.
PROMPT = list(range(8 * 32 + 1))


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    with Ledger(f"ipc://{tmp_path}/events", None) as ledger:
        yield ledger


def enter(ledger: Ledger, when: float, *events: dict[str, Any]) -> None:
    for event in events:
        ledger.index.apply(event)
        ledger._enter(event, when)


def stored(place: Residency, first: int = 1, last: int = 8) -> dict[str, Any]:
    return {
        "type": "BlockStored",
        "block_hashes": list(range(first, last + 1)),
        "parent_block_hash": first - 1 or None,
        "token_ids": PROMPT[(first - 1) * 32 : last * 32],
        "block_size": 32,
        **place._asdict(),
    }


def removed(place: Residency, first: int = 1, last: int = 8) -> dict[str, Any]:
    blocks = list(range(first, last + 1))
    return {"type": "BlockRemoved", "block_hashes": blocks, **place._asdict()}


def test_events_in_turn_balance(ledger: Ledger) -> None:
    enter(ledger, 1, stored(PRIMARY), stored(POOL), removed(PRIMARY), stored(PRIMARY))
    enter(ledger, 2, removed(POOL), removed(PRIMARY), stored(GPU), stored(GPU))
    assert ledger.faults == []
    assert (ledger.stored, ledger.removed) == (24, 24)


@pytest.mark.parametrize(
    ("events", "fault"),
    [
        ([stored(POOL), stored(POOL, 1, 1)], "block 1 was stored twice in"),
        ([stored(POOL), removed(PRIMARY, 2, 2)], "block 2 was removed without being"),
        ([removed(POOL, 3, 3)], "block 3 was removed without being stored"),
    ],
)
def test_events_that_do_not_balance_are_faults(
    ledger: Ledger, events: list[dict[str, Any]], fault: str
) -> None:
    enter(ledger, 1, *events)
    (found,) = ledger.faults
    assert fault in found


def test_a_block_is_gone_when_the_last_place_has_let_go(ledger: Ledger) -> None:
    assert ledger.gone_for(1, 9) == math.inf
    enter(ledger, 10, stored(PRIMARY), stored(POOL))
    enter(ledger, 20, removed(PRIMARY))
    assert ledger.gone_for(1, 25) == 0
    enter(ledger, 30, removed(POOL))
    assert ledger.gone_for(1, 30.5) == 0.5
    assert ledger.gone_for(1, 25) == 0
    assert ledger.left_between(1, 29, 31)
    assert not ledger.left_between(1, 31, 40)
    assert ledger.ever_held(PROMPT) == list(range(1, 9))


@pytest.mark.parametrize(
    ("events", "blocks"),
    [
        ([], 0),
        ([stored(GPU, 1, 3)], 3),
        ([stored(POOL)], 8),
        ([stored(GPU, 1, 5), stored(PRIMARY)], 8),
        # A chunk is found whole, or not at all.
        ([stored(POOL), removed(POOL, 6, 6)], 4),
        # What only the GPU has counts from the beginning alone.
        ([stored(POOL, 1, 4), stored(GPU, 5, 8)], 4),
        ([stored(POOL, 1, 4), stored(GPU)], 8),
        ([stored(Residency("STORAGE", "fs"))], 0),
    ],
)
def test_what_an_engine_has_to_find(
    ledger: Ledger, events: list[dict[str, Any]], blocks: int
) -> None:
    enter(ledger, 1, *events)
    assert ledger.expected_hit(PROMPT, 4) == blocks


# --- what became of hints --------------------------------------------------------


def routed(sent: float, served: bool, output: int = 1) -> Routed:
    answer = Answer((output,), len(PROMPT), 256 if served else 0, 0.5)
    return Routed(0, "b", "a", 8, sent, sent + 1, answer)


def faults(ledger: Ledger, *made: Routed) -> list[str]:
    return faults_of_load(list(made), [PROMPT], {"a": ledger})


def test_a_first_contact_need_not_be_served(ledger: Ledger) -> None:
    enter(ledger, 1, stored(POOL))
    assert faults(ledger, routed(10, False), routed(20, True)) == []
    assert faults(ledger, routed(10, False)) == ["no hint was ever served"]


def test_an_unserved_hint_is_a_fault_unless_its_blocks_left(ledger: Ledger) -> None:
    enter(ledger, 1, stored(POOL))
    made = routed(10, True), routed(20, False)
    (fault,) = faults(ledger, *made)
    assert "only 0 tokens served" in fault
    enter(ledger, 20.5, removed(POOL))
    assert faults(ledger, *made) == []


def test_a_hint_for_what_is_long_gone_is_a_fault(ledger: Ledger) -> None:
    enter(ledger, 1, stored(POOL))
    enter(ledger, 15, removed(POOL))
    ledger.delays += [0.1, 1.5]
    assert faults(ledger, routed(10, True), routed(16, True)) == []
    found = faults(ledger, routed(10, True), routed(17, True))
    assert found == ["prompt 0: a block was hinted 2.0 s after it had left its source"]


def test_another_output_is_a_fault(ledger: Ledger) -> None:
    enter(ledger, 1, stored(POOL))
    made = routed(10, True), routed(20, True, output=2)
    assert faults(ledger, *made) == ["prompt 0 had two outputs"]
