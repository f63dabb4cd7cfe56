# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Meeting a peer for the first time, on the real KVCR.

No request waits for it, and however long it takes, up to its own allowance, it is not
held against the peer.
"""

import threading
import time
from typing import Any

from tests.v1.kv_offload.tiering.kvcr.builders import free_port, make_hint, peer_options
from tests.v1.kv_offload.tiering.kvcr.faults.harness.blocks import make_keys
from tests.v1.kv_offload.tiering.kvcr.faults.harness.managed import ManagedEngine

KEYS = make_keys(8)
OTHERS = make_keys(8, "others")


def stranger(managed: Any, **options: Any) -> ManagedEngine:
    """An engine with the defaults for all that has to do with time."""
    engine: ManagedEngine = managed(peer_options(**options), rows=64)
    engine.strangers = True
    return engine


def meet(engine: ManagedEngine) -> None:
    engine.run_until(lambda: not engine.probe.introducing, 20, "the introduction")


def test_the_second_request_is_served(peers: Any, managed: Any) -> None:
    peer = peers(rows=16, hold=KEYS + OTHERS)
    for landing in ("pool", "primary"):
        engine = stranger(managed, remote_landing=landing)
        first = engine.run("first", KEYS, make_hint(peer.port, KEYS))
        assert (first.hits, first.steps) == (0, 1), "it has waited for nothing"
        meet(engine)
        second = engine.run("second", OTHERS, make_hint(peer.port, OTHERS))
        assert second.hits == len(OTHERS)
        assert set(engine.probe.lost()) <= {"introducing", "not_resident", "not_hinted"}


def test_a_slow_peer_is_usable_later_and_waited_for(peers: Any, managed: Any) -> None:
    peer = peers(rows=16, hold=KEYS + OTHERS)
    engine = stranger(managed, pull_timeout_ms=500)
    peer.stop()
    hint = make_hint(peer.port, KEYS)
    started = time.monotonic()
    number = 0
    while time.monotonic() - started < 1.5:
        # The same prompt, too: KVCR says of its first block that it is on its way.
        served = engine.run(f"meanwhile {number}", KEYS[:1], hint)
        assert served.steps == 1
        engine.manager.reset_cache()
        number += 1
    peer.go_on()
    meet(engine)
    assert engine.run("then", OTHERS, make_hint(peer.port, OTHERS)).hits == len(OTHERS)
    assert engine.probe.ignored_hints() == {}

    # Known, it may pause for as long as a pull may take.
    engine.probe.set_pull_timeout(10.0)
    peer.stop()
    resume = threading.Timer(1.0, peer.go_on)
    resume.start()
    paused = engine.run("paused", KEYS, hint)
    resume.join()
    assert paused.hits == len(KEYS)
    assert "timed_out" not in engine.probe.lost()


def test_a_port_where_nobody_listens_costs_nobody_a_wait(managed: Any) -> None:
    engine = stranger(managed, introduction_timeout_ms=2000)
    nobody = free_port()
    for number in range(100):
        keys = make_keys(4, str(number))
        served = engine.run(f"r{number}", keys, make_hint(nobody, keys))
        assert (served.hits, served.steps) == (0, 1)
    meet(engine)
    engine.run("late", KEYS, make_hint(nobody, KEYS))
    assert engine.probe.ignored_hints() == {"peer_down": 1}
