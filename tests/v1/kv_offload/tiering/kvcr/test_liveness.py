# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Which sources of blocks answer, and how long a silent one is left alone."""

from tests.v1.kv_offload.tiering.kvcr.rig import Clock
from vllm.v1.kv_offload.tiering.kvcr.peers.liveness import (
    FIRST_COOLDOWN_S,
    FIRST_PAUSE_S,
    LONGEST_COOLDOWN_S,
    LONGEST_PAUSE_S,
    Liveness,
    Standing,
)

PEER = "tcp://10.9.9.9:7001"


def test_a_cool_down_grows_and_ends_with_an_introduction() -> None:
    clock = Clock(1000.0)
    sources = Liveness(clock=clock)
    cooldowns = []
    for _ in range(10):
        assert sources.begin_introduction(PEER)
        assert not sources.begin_introduction(PEER)
        sources.silent(PEER, clock.now)
        assert sources.standing(PEER) is Standing.COOLING
        assert not sources.begin_introduction(PEER)
        silent_since = clock.now
        while sources.is_down(PEER):
            clock.now += FIRST_COOLDOWN_S / 4
        assert sources.standing(PEER) is Standing.UNKNOWN
        cooldowns.append(clock.now - silent_since)
    assert cooldowns == sorted(cooldowns)
    assert cooldowns[0] == FIRST_COOLDOWN_S
    assert cooldowns[-1] == LONGEST_COOLDOWN_S


def test_pauses_grow_and_have_an_end() -> None:
    clock = Clock(1000.0)
    sources = Liveness(clock=clock)
    pauses = []
    for _ in range(10):
        assert sources.begin_introduction(PEER)
        sources.inconclusive(PEER)
        assert not sources.is_down(PEER), "nothing is known against it"
        told_at = clock.now
        while not sources.begin_introduction(PEER):
            clock.now += FIRST_PAUSE_S / 2
        sources._sources[PEER].introducing = False
        pauses.append(clock.now - told_at)
    assert pauses[0] == FIRST_PAUSE_S
    assert max(pauses) == LONGEST_PAUSE_S


def test_an_answer_ends_the_suspicion() -> None:
    clock = Clock(1000.0)
    sources = Liveness(clock=clock)
    sources.silent(PEER, clock.now)
    sources.heard(PEER)
    assert sources.standing(PEER) is Standing.USABLE
    clock.now += 1
    sources.silent(PEER, clock.now - 2)
    assert sources.standing(PEER) is Standing.USABLE, "it was heard of since"


def test_pulls_that_were_on_their_way_count_once() -> None:
    clock = Clock(1000.0)
    sources = Liveness(clock=clock)
    sources.heard(PEER)
    clock.now += 1
    started = clock.now
    clock.now += 1
    for _ in range(20):
        sources.silent(PEER, started)
    clock.now += FIRST_COOLDOWN_S
    assert not sources.is_down(PEER)


def test_peers_are_forgotten_rather_than_collected() -> None:
    sources = Liveness(clock=Clock(1000.0))
    for number in range(5000):
        sources.heard(f"tcp://10.0.{number >> 8}.{number & 255}:7001")
    assert len(sources._sources) <= 1024
