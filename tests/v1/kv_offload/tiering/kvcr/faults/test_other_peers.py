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

from tests.v1.kv_offload.tiering.kvcr.builders import make_hint
from tests.v1.kv_offload.tiering.kvcr.faults.harness.engine import Engine
from tests.v1.kv_offload.tiering.kvcr.faults.harness.strangers import (
    KEYS,
    PATIENCE,
    assert_no_peer_of_each_other,
    own_engine,
    pull,
)
from vllm.v1.kv_offload.tiering.kvcr.peers import channel as channel_module


def other_releases() -> dict[str, str]:
    return {"kvcr": "0.0.9", "nixl": "1.0.0"}


def engine_of_other_releases(engines: Any, monkeypatch: pytest.MonkeyPatch) -> Engine:
    monkeypatch.setattr(channel_module, "installed", other_releases)
    return own_engine(engines)


def test_peers_of_other_releases_are_no_peers(
    peers: Any, engines: Any, monkeypatch: pytest.MonkeyPatch, tier_log: Any
) -> None:
    peer = peers(PATIENCE, rows=16)
    peer.call("hold", KEYS)
    engine = engine_of_other_releases(engines, monkeypatch)
    assert_no_peer_of_each_other(engine, peer, tier_log)


def test_without_connecting_early_the_first_load_is_refused_at_once(
    peers: Any, engines: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    peer = peers(PATIENCE, rows=16)
    peer.call("hold", KEYS)
    monkeypatch.setattr(channel_module, "installed", other_releases)
    engine = own_engine(engines, eager_ctrl_connect=False)
    seconds = pull(engine, peer.port, "first")
    assert seconds is not None
    assert seconds < 5
    assert pull(engine, peer.port, "second") is None
    assert engine.probe.ignored_hints() == {"incompatible_peer": 1}
    assert not engine.probe.unstopped


# --- the secret ------------------------------------------------------------------


@pytest.fixture
def secret(tmp_path: Path) -> str:
    file = tmp_path / "secret"
    file.write_text("0123456789abcdef0123456789abcdef\n")
    return str(file)


def test_peers_with_one_secret_pull_from_each_other(
    peers: Any, engines: Any, secret: str
) -> None:
    options = {"control_secret_file": secret}
    peer = peers(PATIENCE | options, rows=16)
    peer.call("hold", KEYS)
    engine = own_engine(engines, **options)
    context = engine.begin("r", make_hint(peer.port, KEYS))
    engine.lookup_all(KEYS, context)
    job = engine.load(KEYS, range(4), context)
    engine.finish(job)
    assert job.arrived == KEYS
    engine.end(context)


def test_who_does_not_know_the_secret_gets_nothing(
    peers: Any, engines: Any, secret: str
) -> None:
    peer = peers(PATIENCE | {"control_secret_file": secret}, rows=16)
    peer.call("hold", KEYS)
    engine = own_engine(engines, operation_timeout_ms=500)
    assert pull(engine, peer.port, "r") is not None
    (line,) = [
        text for text in peer.call("report")["log"] if "control_secret_file" in text
    ]
    assert engine.options["control_advertise_host"] in line
