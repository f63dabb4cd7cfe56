# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Which sources of blocks answer, and how long a silent one is left alone."""

from tests.v1.kv_offload.tiering.kvcr.rig import Clock
from vllm.v1.kv_offload.tiering.kvcr.peers.liveness import (
    FILES,
    FIRST_COOLDOWN_S,
    FIRST_PAUSE_S,
    LONGEST_COOLDOWN_S,
    LONGEST_PAUSE_S,
    QUICK_ANSWERS,
    QUICK_SHARE,
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


def quick_peer(clock: Clock) -> Liveness:
    sources = Liveness(10.0, clock)
    sources.begin_introduction(PEER)
    sources.heard(PEER, 0.1)
    for _ in range(QUICK_ANSWERS):
        assert sources.patience(PEER) == 10.0
        sources.heard(PEER, 0.1)
    assert sources.patience(PEER) == 1.0
    return sources


def test_a_quick_peer_has_one_timeout_until_it_is_slow() -> None:
    sources = quick_peer(Clock(1000.0))
    sources.heard(PEER, QUICK_SHARE)
    assert sources.patience(PEER) == 10.0


def test_a_quick_peer_that_is_late_once_is_used_at_once() -> None:
    clock = Clock(1000.0)
    sources = quick_peer(clock)
    asked_at = clock.now
    clock.now += 3
    sources.silent(PEER, asked_at)
    assert sources.standing(PEER) is Standing.COOLING
    sources.heard_late(PEER)
    assert sources.standing(PEER) is Standing.USABLE, "slow, and not silent"
    assert sources.patience(PEER) == 10.0
    # Another pull that was under way at that time tells nothing new.
    sources.silent(PEER, asked_at + 1)
    assert sources.standing(PEER) is Standing.USABLE
    clock.now += 1
    sources.silent(PEER, clock.now)
    sources.heard_late(PEER)
    assert sources.standing(PEER) is Standing.COOLING, "it had the time"
    clock.now += FIRST_COOLDOWN_S
    assert sources.standing(PEER) is Standing.USABLE, "without an introduction"


def test_files_get_no_patience() -> None:
    clock = Clock(1000.0)
    sources = Liveness(10.0, clock)
    for _ in range(QUICK_ANSWERS):
        sources.heard(FILES, 0.1)
    clock.now += 1
    sources.silent(FILES, clock.now)
    sources.heard_late(FILES)
    assert sources.standing(FILES) is Standing.COOLING


def test_files_need_no_introduction() -> None:
    assert Liveness(clock=Clock(1000.0)).standing(FILES) is Standing.USABLE


def test_peers_are_forgotten_rather_than_collected() -> None:
    sources = Liveness(clock=Clock(1000.0))
    for number in range(5000):
        sources.heard(f"tcp://10.0.{number >> 8}.{number & 255}:7001")
    assert len(sources._sources) <= 1024
