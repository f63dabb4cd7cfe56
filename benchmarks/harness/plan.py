# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""How much is measured."""

from dataclasses import dataclass

MIB = 1 << 20
IDLE_ROWS = 64
IDLE_ROW_BYTES = 64 << 10


@dataclass(frozen=True)
class Plan:
    """Sizes and repetitions; the defaults are the full run's."""

    idle_seconds: float = 3.0
    # Real engines take most of a minute to start.
    engines: bool = True

    lookup_repetitions: int = 400
    control_repetitions: int = 50
    job_sizes: tuple[int, ...] = (256, 1)
    outstanding: tuple[int, ...] = (10, 100, 1_000, 10_000)
    flat_repetitions: int = 21
    burst_repetitions: int = 3

    pool_slots: tuple[int, ...] = (2_000, 200_000, 2_000_000)
    pool_policies: tuple[str | None, ...] = (None, "lru")
    touches: int = 8
    call_units: tuple[int, int] = (100, 100_000)
    scaling_repetitions: int = 3

    pulls: int = 20
    # At a source that steps every 900 ms; each takes up to a second.
    slow_pulls: int = 5
    landing_blocks: int = 16
    landing_pulls: int = 10

    blocks: int = 256
    block_bytes: int = MIB
    # Each start places a process's memory anew, which moves its speed by some percent.
    starts: int = 2
    passes: int = 7
    first_passes: int = 3
    disk_passes: int = 3
    sweep_passes: int = 4
    # Bounds of one operation and of all of them; the others are multiples of the first.
    sweep_mib: tuple[tuple[int, int], ...] = (
        (32, 128),
        (4, 128),
        (16, 128),
        (32, 64),
        (16, 32),
        (256, 256),
    )

    size_bytes: tuple[int, ...] = (64 << 10, 256 << 10, MIB, 4 * MIB)
    batches: tuple[int, ...] = (1, 8, 64)
    size_passes: int = 3


QUICK = Plan(
    idle_seconds=1.0,
    engines=False,
    lookup_repetitions=40,
    control_repetitions=10,
    outstanding=(10, 5_000),
    flat_repetitions=5,
    burst_repetitions=1,
    pool_slots=(2_000, 20_000),
    pool_policies=(None,),
    call_units=(100, 5_000),
    scaling_repetitions=1,
    pulls=2,
    slow_pulls=0,
    landing_pulls=0,
    blocks=32,
    block_bytes=256 << 10,
    starts=1,
    passes=1,
    first_passes=1,
    disk_passes=0,
    sweep_passes=0,
    size_passes=0,
)
