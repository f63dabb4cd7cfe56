# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What one hint may cost an engine's own cache.

With ``opportunistic_query`` KVCR answers that a hinted peer may have any block at all,
and vLLM reserves a slot, evicting a block, for each.
"""

from typing import Any

from tests.v1.kv_offload.tiering.kvcr.builders import make_hint, peer_options
from tests.v1.kv_offload.tiering.kvcr.faults.harness.blocks import make_keys
from tests.v1.kv_offload.tiering.kvcr.faults.harness.managed import ManagedEngine

ROWS = 32
OWN = make_keys(ROWS, "own")
PROMPT = make_keys(ROWS, "nobody has it")


def test_it_is_bounded(peers: Any, managed: Any) -> None:
    peer = peers({"operation_timeout_ms": 20_000}, rows=1, hold=PROMPT[:1])
    options = peer_options(operation_timeout_ms=20_000, opportunistic_query=True)
    engine: ManagedEngine = managed(options, rows=ROWS)
    engine.run("own", OWN)
    engine.settle()
    assert engine.resident(OWN) == ROWS

    hint = make_hint(peer.port, PROMPT[:1])
    greedy = engine.begin("greedy", PROMPT, hint)
    engine.wait_for(greedy)
    assert ROWS - engine.resident(OWN) <= ROWS // 2
    assert greedy.hits == 1, "the block that was hinted is there"
    engine.serve(greedy)
