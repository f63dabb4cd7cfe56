# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""An engine that did not run for an operation timeout, which KVCR holds against it.

KVCR refuses to be a source from then on, until it is restarted, and says so nowhere but
in a callback.
"""

import time
from typing import Any

from tests.v1.kv_offload.tiering.kvcr.builders import peer_options
from tests.v1.kv_offload.tiering.kvcr.faults.harness.blocks import make_keys
from tests.v1.kv_offload.tiering.kvcr.faults.harness.engine import Engine
from tests.v1.kv_offload.tiering.kvcr.faults.harness.probe import state_samples

KEYS = make_keys(8)
STALL_S = 2.0


def test_it_says_so_and_is_of_no_use_to_peers(peers: Any, engines: Any) -> None:
    options = {"operation_timeout_ms": int(1000 * STALL_S), "enable_telemetry": True}
    peer = peers(options, rows=8, hold=KEYS)
    assert peer.call("report")["state"] == "healthy"
    assert state_samples(peer.call("gauges")) == {"('1', 'healthy', 'none')": 1}
    peer.stop()
    time.sleep(1.2 * STALL_S)
    peer.go_on()
    deadline = time.monotonic() + 5
    while peer.call("report")["state"] == "healthy":
        assert time.monotonic() < deadline
        time.sleep(0.05)

    report = peer.call("report")
    assert (report["state"], report["reason"]) == ("degraded", "source_stalled")
    (line,) = [line for line in report["log"] if "source_stalled" in line]
    assert "restart" in line
    samples = state_samples(peer.call("gauges"))
    assert samples["('1', 'degraded', 'source_stalled')"] == 1
    assert sum(samples.values()) == 1

    # It says no at once: nobody waits for it.
    engine: Engine = engines(peer_options(operation_timeout_ms=20_000), rows=16)
    started = time.monotonic()
    assert not engine.pull(peer.port, KEYS, range(8)).arrived
    assert time.monotonic() - started < 5
    assert peer.call("report")["wrong"] == []
