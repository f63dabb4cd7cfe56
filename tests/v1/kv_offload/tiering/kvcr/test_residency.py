# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What is known of the blocks that KVCR holds, and for how long."""

import numpy as np
import pytest
from kvcr.types import BlockKey, BlockMeta, CacheTier, InventoryEvent

from tests.v1.kv_offload.tiering.kvcr.rig import wait_until
from vllm.v1.kv_offload.tiering.kvcr.transfers.checksums import BlockSums, Checked
from vllm.v1.kv_offload.tiering.kvcr.transfers.residency import Residency

KEY = BlockKey(b"key")
POOL, FILE = CacheTier.LOCAL_G2, CacheTier.G3
OWN, OTHER = 0, 1
"""Rows of the primary tier with different bytes."""


class Bench:
    """A ledger, told what KVCR would tell it, and the checksums on top."""

    def __init__(self) -> None:
        rows = np.arange(2 * 64, dtype=np.uint8).reshape(2, 64)
        self.residency = Residency()
        self.sums = BlockSums(rows, self.residency)

    def came(self, tier: CacheTier) -> None:
        self.residency.report(InventoryEvent((KEY,), tier, False))

    def went(self, tier: CacheTier) -> None:
        self.residency.report(InventoryEvent((KEY,), tier, True))

    def came_from(self, source: CacheTier, *tiers: CacheTier) -> None:
        meta = BlockMeta(KEY, 64, 0, None, frozenset(tiers))
        self.residency.ingested(meta, source)

    def done(self) -> Checked:
        outcomes: list[Checked] = []

        def take() -> bool:
            outcomes.extend(self.sums.take_done())
            return bool(outcomes)

        wait_until(take, "a checksum")
        (outcome,) = outcomes
        return outcome

    def store(self, row: int = OWN) -> None:
        """As a store that KVCR takes in."""
        kept = self.sums.record("store", [(KEY, row)])
        self.came(POOL)
        self.sums.stored(kept)
        self.done()

    def load(self, row: int) -> str:
        """What a load that brings a row's bytes is called."""
        expected = self.sums.expect([KEY])
        self.sums.verify("load", expected, [(KEY, row)])
        _, corrupt, unverified = self.done()
        return "corrupt" if corrupt else "unverified" if unverified else "good"


@pytest.fixture
def bench() -> Bench:
    return Bench()


def to_file_and_back(bench: Bench) -> None:
    bench.came(FILE)
    bench.went(POOL)
    bench.came(POOL)


def test_what_was_stored_is_known_until_the_last_copy_goes(bench: Bench) -> None:
    bench.store()
    assert (bench.load(OWN), bench.load(OTHER)) == ("good", "corrupt")
    to_file_and_back(bench)
    assert (bench.load(OWN), bench.load(OTHER)) == ("good", "corrupt")
    bench.went(POOL)
    assert (bench.load(OWN), bench.load(OTHER)) == ("good", "corrupt")
    assert len(bench.residency) == 1
    bench.went(FILE)
    assert len(bench.residency) == 0


def test_a_block_evicted_while_it_is_loaded_is_still_compared(bench: Bench) -> None:
    bench.store()
    expected = bench.sums.expect([KEY])
    bench.went(POOL)
    bench.sums.verify("load", expected, [(KEY, OTHER)])
    assert bench.done().corrupt == [KEY]


def test_a_store_keeps_what_it_brings_while_the_older_copy_goes(bench: Bench) -> None:
    bench.store(OTHER)
    bench.came(FILE)
    bench.went(POOL)
    kept = bench.sums.record("store", [(KEY, OWN)])
    bench.went(FILE)
    bench.came(POOL)
    bench.sums.stored(kept)
    bench.done()
    assert (bench.load(OWN), bench.load(OTHER)) == ("good", "corrupt")


def test_a_store_of_what_the_pool_has_changes_nothing(bench: Bench) -> None:
    bench.store(OWN)
    assert bench.sums.record("again", [(KEY, OTHER)]) == {}
    assert bench.done().token == "again"
    assert (bench.load(OWN), bench.load(OTHER)) == ("good", "corrupt")


def test_after_a_store_over_a_file_either_is_right(bench: Bench) -> None:
    """The file still has what was stored first, and the pool what came later."""
    bench.store(OWN)
    bench.came(FILE)
    bench.went(POOL)
    bench.store(OTHER)
    assert (bench.load(OWN), bench.load(OTHER)) == ("good", "good")


def test_however_often_that_happens_little_is_kept(bench: Bench) -> None:
    rows = np.arange(64, dtype=np.uint8).reshape(64, 1)
    bench.sums = BlockSums(rows, bench.residency)
    for row in range(64):
        bench.store(row)
        if row:
            bench.went(FILE)
        bench.came(FILE)
        bench.went(POOL)
    (copy,) = bench.residency.copies([KEY]).values()
    assert len(copy.sums) <= 6
    # Nobody knows any more: that is not corrupt.
    assert bench.load(0) == "unverified"


def test_a_peers_block_is_what_its_first_load_says(bench: Bench) -> None:
    bench.came_from(CacheTier.REMOTE_G2)
    bench.came(POOL)
    assert (bench.load(OWN), bench.load(OWN)) == ("good", "good")
    to_file_and_back(bench)
    assert (bench.load(OWN), bench.load(OTHER)) == ("good", "corrupt")


def test_a_peers_block_that_a_store_waited_for_is_the_peers(bench: Bench) -> None:
    kept = bench.sums.record("store", [(KEY, OWN)])
    bench.came_from(CacheTier.REMOTE_G2)
    bench.came(POOL)
    bench.sums.stored(kept)
    bench.done()
    assert (bench.load(OTHER), bench.load(OWN)) == ("good", "corrupt")


def test_a_peers_block_from_a_file_that_nobody_saw_before(bench: Bench) -> None:
    bench.came_from(CacheTier.REMOTE_G2)
    bench.came(POOL)
    to_file_and_back(bench)
    assert (bench.load(OWN), bench.load(OWN)) == ("unverified", "unverified")


def test_a_block_that_kvcr_does_not_hold_is_not_judged(bench: Bench) -> None:
    assert bench.load(OWN) == "good"
    kept = bench.sums.record("store", [(KEY, OWN)])
    bench.done()
    assert bench.load(OTHER) == "good", "from a peer, straight into the primary tier"
    bench.sums.stored(kept)
    assert len(bench.residency) == 0


@pytest.mark.parametrize("tiers", [[POOL], [FILE], [POOL, FILE]])
def test_what_a_service_had_is_not_judged(bench: Bench, tiers: list[CacheTier]) -> None:
    bench.came_from(tiers[0], *tiers)
    if POOL not in tiers:
        bench.came(POOL)
    assert (bench.load(OWN), bench.load(OTHER)) == ("good", "good")
    bench.went(POOL)
    bench.went(FILE)
    assert len(bench.residency) == 0


def test_a_checksum_that_could_not_be_computed_accuses_nobody(bench: Bench) -> None:
    bench.store()
    assert bench.load(99) == "unverified"
