# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A peer that hangs in the middle of a pull holds up nobody but its own requests."""

import time
from pathlib import Path
from typing import Any

from tests.v1.kv_offload.tiering.kvcr.builders import peer_options, request
from tests.v1.kv_offload.tiering.kvcr.faults.harness.blocks import make_keys
from tests.v1.kv_offload.tiering.kvcr.faults.harness.bounds import at_most
from tests.v1.kv_offload.tiering.kvcr.faults.harness.engine import Engine
from tests.v1.kv_offload.tiering.kvcr.faults.harness.files import g3

THEIRS = make_keys(48, "theirs")
OTHERS = make_keys(8, "another peer's")
FILED = make_keys(8, "filed")
FILLERS = make_keys(64, "fillers")
PULL_S = 1.0
# On a busy machine; KVCR's own deadline is a minute.
SOON_S = 5.0


def test_files_and_other_peers_go_on(peers: Any, engines: Any, disk: Path) -> None:
    hanging, other = peers(rows=64, hold=THEIRS), peers(rows=64, hold=OTHERS)
    options = peer_options(
        secondary_g2_slots=64,
        operation_timeout_ms=60_000,
        pull_timeout_ms=int(1000 * PULL_S),
        max_pull_blocks=64,
        g3=g3(disk / "g3", 128),
    )
    engine: Engine = engines(options, rows=96)
    for first in range(0, len(FILED + FILLERS), 8):
        part = (FILED + FILLERS)[first : first + 8]
        engine.finish(engine.store(part, range(8)))
        engine.run_for(0.05)
    # Both are known before one of them hangs.
    engine.pull(hanging.port, THEIRS[:1], [95], "h")
    engine.pull(other.port, OTHERS[:1], [95], "o")

    hanging.stop()
    stuck, _ = engine.begin_pull(hanging.port, THEIRS[1:], range(16, 63), "hangs")
    engine.run_for(0.1)
    started = time.monotonic()
    # At another request's service: it is not the one that asked the peer.
    read = engine.load(FILED, range(8), request("reads files"))
    engine.finish(read, timeout_s=SOON_S)
    assert read.arrived == FILED
    pulled, _ = engine.begin_pull(other.port, OTHERS[1:], range(8, 15), "served")
    engine.finish(pulled, timeout_s=SOON_S)
    assert pulled.arrived == OTHERS[1:]
    engine.finish(stuck, timeout_s=SOON_S)
    assert stuck.arrived == []
    assert time.monotonic() - started < SOON_S
    # What the hinted request then computes itself is stored, or not, at once.
    computed = engine.store(THEIRS[1:], range(16, 63))
    engine.finish(computed, timeout_s=SOON_S)
    with at_most(SOON_S):
        engine.drain()
    hanging.go_on()
