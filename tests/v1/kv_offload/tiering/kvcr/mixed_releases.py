# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Two releases of kvcr and NIXL that meet: neither engine may die of the other.

Not collected by itself, since it takes a second kvcr. ``make matrix`` names it, and in
``KVCR_OTHER_RELEASE`` a folder with that kvcr and its NIXL.
"""

import os
from pathlib import Path
from typing import Any

from tests.v1.kv_offload.tiering.kvcr.faults.harness.engine import Engine
from tests.v1.kv_offload.tiering.kvcr.faults.harness.released import ReleasedPeer
from tests.v1.kv_offload.tiering.kvcr.faults.harness.strangers import (
    KEYS,
    PATIENCE,
    assert_no_peer_of_each_other,
    own_engine,
)


def test_a_peer_of_another_release_is_no_peer(tier_log: Any) -> None:
    other = Path(os.environ["KVCR_OTHER_RELEASE"])
    peer = ReleasedPeer(other, PATIENCE, rows=16)
    try:
        peer.call("hold", KEYS)
        engine = own_engine(Engine)
        try:
            assert_no_peer_of_each_other(engine, peer, tier_log)
        finally:
            engine.close()
        assert peer.exit_code is None
    finally:
        peer.close()
