# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Peers of other releases, and such that do not know the secret.

A receiver that was written to by another release of NIXL has crashed inside of UCX.
Here neither side gets so far: KVCR and NIXL see nothing of such a peer. What another
release is, these tests only claim; ``mixed_releases`` has one.
"""

from pathlib import Path
from typing import Any

import pytest

from tests.v1.kv_offload.tiering.kvcr.faults.harness.strangers import (
    KEYS,
    PATIENCE,
    assert_no_peer_of_each_other,
    own_engine,
    pull,
)
from vllm.v1.kv_offload.tiering.kvcr.peers import channel as channel_module


def test_peers_of_other_releases_are_no_peers(
    peers: Any, engines: Any, monkeypatch: pytest.MonkeyPatch, tier_log: Any
) -> None:
    peer = peers(PATIENCE, rows=16, hold=KEYS)
    others = {"kvcr": "0.0.9", "nixl": "1.0.0"}
    monkeypatch.setattr(channel_module, "installed", lambda: others)
    assert_no_peer_of_each_other(own_engine(engines), peer, tier_log)

    # Without connecting early, the first load is refused at once.
    late = own_engine(engines, eager_ctrl_connect=False)
    seconds = pull(late, peer.port, "first")
    assert seconds is not None
    assert seconds < 5
    assert pull(late, peer.port, "second") is None
    assert late.probe.ignored_hints() == {"incompatible_peer": 1}
    assert not late.probe.unstopped


def test_without_the_secret_no_blocks(peers: Any, engines: Any, tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text("0123456789abcdef0123456789abcdef\n")
    secret = {"control_secret_file": str(file)}
    peer = peers(PATIENCE | secret, rows=16, hold=KEYS)
    stranger = own_engine(engines, operation_timeout_ms=500)
    assert pull(stranger, peer.port, "r") is not None
    log = peer.call("report")["log"]
    (line,) = [text for text in log if "control_secret_file" in text]
    assert stranger.options["control_advertise_host"] in line

    friend = own_engine(engines, **secret)
    assert friend.pull(peer.port, KEYS, range(4)).arrived == KEYS
