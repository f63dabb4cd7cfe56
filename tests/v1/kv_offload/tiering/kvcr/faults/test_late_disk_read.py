# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Files that are slower than the operation timeout.

KVCR gives such a transfer up by releasing its native handle, which does not stop what
the kernel has begun: the data arrives later, wherever the memory belongs by then, and
NIXL's POSIX plugin completes into memory that it has freed, which killed 8 processes
of 9. So each scenario runs in a process of its own. The disk is whatever holds pytest's
temporary folder; the timeouts are so short that it is always too slow.
"""

from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.v1.kv_offload.tiering.kvcr.faults.harness.blocks import make_keys
from tests.v1.kv_offload.tiering.kvcr.faults.harness.child import Child
from tests.v1.kv_offload.tiering.kvcr.faults.harness.engine import MIB, Engine

BLOCKS = 384
POOL = 128
KEYS = make_keys(BLOCKS)
OTHERS = make_keys(BLOCKS, "somebody else's prompt")
SLOTS = list(range(BLOCKS))


def engine_with_files(folder: Path, **options: Any) -> Engine:
    """An engine all of whose blocks are in the pool or in a file."""
    return Engine(
        {
            "secondary_g2_slots": POOL,
            "max_operation_bytes": 32 * MIB,
            "g3": {
                "paths": folder / "g3",
                "capacity_bytes_per_file": BLOCKS * MIB,
                "backend": "POSIX",
            },
        }
        | options,
        rows=BLOCKS,
    )


def store_all(engine: Engine) -> None:
    engine.finish(engine.store(KEYS, SLOTS))


def load_and_reuse(engine: Engine) -> int:
    """Load everything, give what failed to others at once; slots harmed later."""
    engine.memory.fill(1)
    job = engine.load(KEYS, SLOTS)
    engine.finish(job)
    slots = job.failed_chunks
    others = OTHERS[: len(slots)]
    engine.write(others, slots, writer="somebody else")
    engine.run_for(0.3)
    return len(engine.wrong_blocks(others, slots, writer="somebody else"))


def run_as_it_is(connection: Connection, folder: Path, timeout_ms: int) -> None:
    connection.send((True, None))
    engine = engine_with_files(
        folder, operation_timeout_ms=timeout_ms, abandon_timeout_ms=2 * timeout_ms
    )
    harmed = 0
    for _ in range(4):
        store_all(engine)
        harmed += load_and_reuse(engine)
    arrived = [len(job.arrived) for job in engine.jobs.values() if job.is_load]
    engine.close()
    assert engine.unanswered == []
    connection.send((True, (harmed, len(engine.wrong), arrived)))


def run_straight_into_the_slots(connection: Connection, folder: Path) -> None:
    connection.send((True, None))
    engine = engine_with_files(folder, operation_timeout_ms=20_000, verify_blocks=False)
    store_all(engine)
    engine.probe.write_straight(BLOCKS)
    # When it hits depends on the disk. In each sweep it has hit twice or more often.
    for _ in range(5):
        for timeout_s in (0.02, 0.04, 0.06, 0.09, 0.13, 0.2):
            engine.probe.set_operation_timeout(timeout_s)
            if load_and_reuse(engine) or engine.wrong:
                connection.send((True, "wrong bytes"))
                return
    connection.send((True, "nothing"))


def test_a_short_timeout_harms_nobody(tmp_path: Path) -> None:
    child = Child(run_as_it_is, tmp_path, 10)
    try:
        harmed, wrong, arrived = child.receive(60.0)
    finally:
        child.close()
    assert child.exit_code == 0
    # Some are given up, which costs their reuse and nothing else.
    assert (harmed, wrong) == (0, 0)
    assert arrived


def test_straight_into_the_slots_they_do(tmp_path: Path) -> None:
    """What the test above would see of the obvious adapter.

    Some blocks are overwritten later, others are reported as loaded before they are;
    or the process is gone.
    """
    # It is a race, which a busy machine can win once.
    for _ in range(3):
        child = Child(run_straight_into_the_slots, tmp_path)
        try:
            outcome = child.receive(60.0)
        except EOFError:
            outcome = "killed by its own memory"
        finally:
            child.close()
        if outcome != "nothing":
            break
    assert outcome != "nothing"
