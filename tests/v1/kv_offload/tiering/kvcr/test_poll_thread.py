# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The tier and KVCR under vLLM's tier-poll thread: two threads, one lock, real KVCR.

From vLLM 0.33 on a thread polls the tier every millisecond, between the scheduler's
calls and under the manager's lock. Here it does not pause, so that the two interleave
as often as they can.
"""

import threading
from functools import partial

import numpy as np

from tests.v1.kv_offload.tiering.kvcr.builders import keys, peer_options
from tests.v1.kv_offload.tiering.kvcr.rig import Rig, wait_until
from tests.v1.kv_offload.tiering.kvcr.standin import RecordingParent
from vllm.v1.kv_offload.base import ReqContext

OPERATIONS = 100_000
KEYS = keys(256)


def test_a_hundred_thousand_operations() -> None:
    rig = Rig(rows=64, **peer_options(secondary_g2_slots=128))
    lock = threading.Lock()
    stop = threading.Event()
    polls = 0
    faults: list[BaseException] = []

    def poll() -> None:
        nonlocal polls
        parent = RecordingParent()
        try:
            while not stop.is_set():
                with lock:
                    rig.poll()
                    rig.tier.serve_external_requests(parent)
                    polls += 1
                # Locks are not fair: without a gap the other thread never gets in.
                stop.wait(0.00001)
        except BaseException as fault:
            faults.append(fault)

    random = np.random.default_rng(7)
    expected = random.integers(0, 256, (len(KEYS), rig.memory.shape[1]), np.uint8)
    thread = threading.Thread(target=poll)
    thread.start()
    done = loaded = 0
    try:
        while done < OPERATIONS and not faults:
            first = int(random.integers(0, len(KEYS) - 16))
            part = KEYS[first : first + 16]
            with lock:
                rig.memory[:16] = expected[first : first + 16]
                store = rig.store(part, range(16))
            wait_until(partial(rig.finished.get, store), "a store")
            with lock:
                rig.memory[16:32] = 0
                # vLLM loads what is a hit, and the pool is smaller than the keys.
                found = rig.hits(part)
                load = rig.load(found, range(16, 16 + len(found)))
            right = expected[[KEYS.index(each) for each in found]]
            assert wait_until(partial(rig.finished.get, load), "a load").success
            assert (rig.memory[16 : 16 + len(found)] == right).all()
            done += 16 * 3
            loaded += len(found)
            for number in random.integers(0, len(KEYS), 200):
                with lock:
                    rig.tier.lookup(KEYS[number], ReqContext("r"))
            done += 200
    finally:
        stop.set()
        thread.join(30)
        rig.tier.shutdown()
    assert not faults
    assert loaded > 1000
    assert polls > 1000
    assert sorted(rig.finished) == rig.given
