# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Rigs whose stand-in for KVCR fetches blocks from files and peers."""

from typing import Any

from tests.v1.kv_offload.tiering.kvcr.builders import hint, key, keys, request
from tests.v1.kv_offload.tiering.kvcr.rig import ROW_BYTES, Clock, StandinRig
from tests.v1.kv_offload.tiering.kvcr.standin import (
    AT_PEER,
    SUCCESS,
    FetchingStandin,
    Operation,
)

FILES = {
    "secondary_g2_slots": 16,
    "g3": {"paths": "g3.data", "capacity_bytes_per_file": 64 * ROW_BYTES},
    "verify_blocks": False,
}
PEER = "tcp://10.9.9.9:7001"
OTHER_PEER = "tcp://10.9.9.8:7001"


def file_rig(**options: Any) -> StandinRig:
    return StandinRig(kvcr=FetchingStandin, enable_telemetry=True, **FILES | options)


def stop_the_clock(rig: StandinRig) -> Clock:
    """Time goes on as a test says, for all that decides about waiting."""
    clock = Clock()
    rig.tier._staging._clock = rig.tier._staging._liveness._clock = clock
    rig.tier._staging._next_check = 0.0
    return clock


def peer_rig(*, introduced: bool = True, **options: Any) -> StandinRig:
    """A rig whose peer has blocks 0 to 7, with a request that is hinted at it."""
    # So that none but the silent peer is taken for one.
    options = {"operation_timeout_ms": 60_000} | options
    options = {name: value for name, value in options.items() if value is not None}
    rig = StandinRig(
        kvcr=FetchingStandin, control_ports=[7001], enable_telemetry=True, **options
    )
    rig.kvcr.statuses.update(dict.fromkeys(keys(8), AT_PEER))
    rig.tier.on_new_request(request("r", hint(keys(8), PEER)))
    if introduced:
        rig.introduce(key(0))
        rig.kvcr.operations.clear()
        rig.losses()
    return rig


def timed_peer_rig(**options: Any) -> tuple[StandinRig, Clock]:
    """As ``peer_rig``, and its clock, which stands still."""
    rig = peer_rig(**options)
    return rig, stop_the_clock(rig)


def begin_introduction(rig: StandinRig) -> Operation:
    """Ask for a block of a peer that is not known yet: what that has KVCR fetch."""
    rig.hits(keys(1))
    rig.poll()
    return fetches(rig)[-1]


def fetches(rig: StandinRig) -> list[Operation]:
    return rig.kvcr.of_kind("fetch")


def answer(rig: StandinRig, operation: Operation, status: Any = SUCCESS) -> None:
    rig.kvcr.complete(operation.handle, dict.fromkeys(operation.blocks, status))
    rig.poll()
