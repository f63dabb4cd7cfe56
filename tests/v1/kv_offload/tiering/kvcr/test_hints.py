# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Routing metadata: forwarded unread, and never a reason to fail a request."""

import dataclasses
import json
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvcr import ROUTER_HINT_KEY

from tests.v1.kv_offload.tiering.kvcr.builders import (
    free_port,
    hint,
    key,
    peer_options,
    request,
)
from tests.v1.kv_offload.tiering.kvcr.faults.harness.bad_hints import bad_hint
from tests.v1.kv_offload.tiering.kvcr.json_values import JSON_VALUES
from tests.v1.kv_offload.tiering.kvcr.rig import Rig, StandinRig
from tests.v1.kv_offload.tiering.kvcr.standin import AT_PEER, HIT
from vllm.v1.kv_offload.base import LookupResult, ReqContext
from vllm.v1.kv_offload.tiering.kvcr.peers.hints import MAX_HINTED_PEERS

HAS_OWN_CARRIER = "kv_hints" in {f.name for f in dataclasses.fields(ReqContext)}
CARRIERS = ["kv_transfer_params", *(["kv_hints"] if HAS_OWN_CARRIER else [])]
SOURCE = "tcp://10.9.9.9:7001"


def carried(value: Any, carrier: str, request_id: str = "r") -> ReqContext:
    if carrier == "kv_hints":
        return ReqContext(request_id, kv_hints=value)
    return ReqContext(request_id, {ROUTER_HINT_KEY: value})


def peer_rig(**options: Any) -> StandinRig:
    return StandinRig(control_ports=[7001], enable_telemetry=True, **options)


# --- on the stand-in -------------------------------------------------------------


@pytest.mark.parametrize("carrier", CARRIERS)
def test_a_hint_is_forwarded_as_it_is(carrier: str) -> None:
    rig = peer_rig()
    # With fields that nobody here knows.
    value = hint([key(1)]) | {"future": {"deep": [1, {"er": None}]}}
    rig.tier.on_new_request(carried(value, carrier))
    assert rig.kvcr.hints == [("r", value)]
    assert rig.ignored_hints() == {}


def test_vllms_envelope_is_forwarded_as_plain_types() -> None:
    rig = peer_rig()
    value: Any = hint([key(1)])
    if HAS_OWN_CARRIER:
        from vllm.v1.kv_hints import KvHintsEnvelope

        value = msgspec.convert(value, KvHintsEnvelope)
    rig.tier.on_new_request(carried(value, CARRIERS[-1]))
    ((_, forwarded),) = rig.kvcr.hints
    assert forwarded == hint([key(1)])
    json.dumps(forwarded)  # takes nothing but plain types


def test_a_request_without_a_hint_says_nothing() -> None:
    rig = peer_rig()
    for params in (None, {}, {"other": 1}, {ROUTER_HINT_KEY: None}):
        rig.tier.on_new_request(ReqContext("r", params))
        rig.tier.on_request_finished(ReqContext("r", params))
    assert (rig.kvcr.hints, rig.kvcr.discarded) == ([], [])
    assert rig.ignored_hints() == {}


def test_after_preemption_the_new_hint_counts_and_is_discarded_once() -> None:
    rig = peer_rig()
    rig.tier.on_new_request(request("r", hint([key(1)])))
    rig.tier.on_new_request(request("r", hint([key(2)])))
    assert rig.kvcr.calls == ["submit_hint", "discard_hint", "submit_hint"]
    assert rig.kvcr.hints[-1] == ("r", hint([key(2)]))
    for _ in range(2):
        rig.tier.on_request_finished(ReqContext("r"))
    assert rig.kvcr.discarded == ["r", "r"]


@pytest.mark.parametrize("later", [None, "nonsense"])
def test_after_preemption_a_hint_that_is_gone_is_gone(later: Any) -> None:
    rig = peer_rig()
    rig.tier.on_new_request(request("r", hint([key(1)])))
    rig.tier.on_new_request(request("r", later))
    assert rig.kvcr.discarded == ["r"]
    assert len(rig.kvcr.hints) == 1


@pytest.mark.parametrize(
    "error",
    [ValueError, TypeError, KeyError, OverflowError, AttributeError, RecursionError],
)
def test_a_hint_that_kvcr_refuses_is_counted_and_forgotten(
    error: type[Exception],
) -> None:
    rig = peer_rig()
    rig.kvcr.raises["submit_hint"] = error("no")
    rig.kvcr.statuses[key(1)] = HIT
    context = request("r", hint())
    rig.tier.on_new_request(context)
    assert rig.lookup(key(1)) is LookupResult.HIT
    rig.tier.on_request_finished(context)
    assert sum(rig.ignored_hints().values()) == 1
    assert rig.kvcr.discarded == []


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "pod-a.example"])
def test_a_hint_that_names_this_engine_is_ignored(host: str) -> None:
    rig = peer_rig(control_advertise_host="Pod-A.Example")
    rig.tier.on_new_request(request("r", hint(endpoint=f"tcp://{host}:7001")))
    assert rig.kvcr.hints == []
    assert rig.ignored_hints() == {"own_endpoint": 1}
    rig.tier.on_new_request(request("r", hint(endpoint=f"tcp://{host}:7002")))
    assert len(rig.kvcr.hints) == 1


@pytest.mark.parametrize(
    ("options", "value", "reason"),
    [
        ({"secondary_g2_slots": 4}, hint(), "no_peers"),
        ({"control_ports": [7001]}, hint(endpoint="tcp://[::1]:80"), "ipv6"),
        # It would hold up the engine.
        ({"control_ports": [7001]}, bad_hint(block_hashes=[1] * 10**6), "too_large"),
    ],
)
def test_a_hint_of_no_use_is_ignored_by_its_reason(
    options: dict[str, Any], value: Any, reason: str
) -> None:
    rig = StandinRig(enable_telemetry=True, **options)
    rig.tier.on_new_request(request("r", value))
    assert rig.kvcr.hints == []
    assert rig.ignored_hints() == {reason: 1}


@pytest.mark.parametrize("carrier", CARRIERS)
def test_a_hint_nested_without_end_is_ignored(carrier: str) -> None:
    rig = peer_rig()
    value: Any = []
    for _ in range(100_000):
        value = [value]
    rig.tier.on_new_request(carried({"actions": value}, carrier))
    assert sum(rig.ignored_hints().values()) == 1


def test_many_bad_hints_are_few_lines(tier_log: Any) -> None:
    rig = peer_rig()
    before = len(tier_log.texts())
    for number in range(100):
        rig.tier.on_new_request(request(f"r{number}", 7))
        rig.tier.on_schedule_end(None)  # type: ignore[arg-type]
    assert len(tier_log.texts()) == before + 1


# --- which peers may be hinted at ------------------------------------------------


def endpoints_taken(rig: StandinRig) -> list[str]:
    return [
        value["actions"][0]["payload"]["source_control_endpoint"]
        for _, value in rig.kvcr.hints
    ]


def test_spellings_of_one_peer_reach_kvcr_as_one() -> None:
    rig = peer_rig()
    for spelling in ("Peer.Example:80", "peer.example.:80", "PEER.example:0080"):
        value = hint(endpoint=f"tcp://{spelling}")
        rig.tier.on_new_request(request(spelling, value))
        assert value == hint(endpoint=f"tcp://{spelling}"), "vLLM's own object stays"
    assert endpoints_taken(rig) == ["tcp://peer.example:80"] * 3


def test_a_peer_that_is_not_allowed_is_ignored() -> None:
    rig = peer_rig(allowed_peers=["10.0.0.0/8", "peer.example"])
    for host in ("11.0.0.1", "other.example", "10.0.0.1", "Peer.Example."):
        value = hint(endpoint=f"tcp://{host}:80")
        rig.tier.on_new_request(request(host, value))
    assert rig.ignored_hints() == {"not_allowed": 2}
    assert endpoints_taken(rig) == ["tcp://10.0.0.1:80", "tcp://peer.example:80"]


def test_requests_under_way_are_hinted_at_few_peers() -> None:
    rig = peer_rig()
    for number in range(MAX_HINTED_PEERS + 10):
        value = hint(endpoint=f"tcp://10.0.1.{number + 1}:80")
        rig.tier.on_new_request(request(f"r{number}", value))
    assert len(rig.kvcr.hints) == MAX_HINTED_PEERS
    assert rig.ignored_hints() == {"too_many_peers": 10}
    # Another request for one of them is no further peer, and one that ends makes room.
    again = hint(endpoint="tcp://10.0.1.1:80")
    rig.tier.on_new_request(request("again", again))
    rig.tier.on_request_finished(ReqContext("again"))
    other = hint(endpoint="tcp://10.0.2.1:80")
    rig.tier.on_new_request(request("other", other))
    assert rig.ignored_hints() == {"too_many_peers": 1}
    rig.tier.on_request_finished(ReqContext("r1"))
    rig.tier.on_new_request(request("other", other))
    assert rig.ignored_hints() == {}


def test_a_peer_of_other_releases_is_ignored() -> None:
    rig = peer_rig()
    rig.tier.on_new_request(request("early", hint([key(1)])))
    rig.kvcr.statuses[key(1)] = AT_PEER
    assert rig.lookup(key(1), "early") is LookupResult.HIT
    rig.tier._hints._is_incompatible = lambda endpoint: endpoint == SOURCE
    assert rig.lookup(key(1), "early") is LookupResult.MISS
    assert rig.losses() == {"incompatible_peer": 1}
    rig.tier.on_new_request(request("late", hint([key(1)])))
    assert rig.ignored_hints() == {"incompatible_peer": 1}


def test_a_block_looked_up_often_is_pulled_once() -> None:
    rig = peer_rig(max_pull_blocks=2)
    for number in range(3):
        rig.kvcr.statuses[key(number)] = AT_PEER
    rig.tier.on_new_request(request("r", hint(map(key, range(3)))))
    for _ in range(10):
        assert rig.lookup(key(0)) is LookupResult.HIT
        assert rig.lookup(key(1)) is LookupResult.HIT
    assert rig.lookup(key(2)) is LookupResult.MISS
    assert rig.losses() == {"pull_limit": 1}
    # Another request has a limit of its own.
    rig.tier.on_new_request(request("other", hint(map(key, range(3)))))
    assert rig.lookup(key(2), "other") is LookupResult.HIT
    for request_id in ("r", "other"):
        rig.tier.on_request_finished(ReqContext(request_id))
    assert rig.tier._hints.requests == {}
    assert not rig.tier._hints._hinted_at


# --- on the real KVCR, which decides what it understands -------------------------


@pytest.fixture(scope="module")
def real() -> Iterator[Rig]:
    rig = Rig(**peer_options(free_port()), enable_telemetry=True)
    yield rig
    rig.close()


def test_on_the_real_kvcr_the_new_hint_counts(real: Rig) -> None:
    real.know(SOURCE)
    for number in (1, 2):
        real.tier.on_new_request(request("r", hint([key(number)])))
        assert real.hits([key(1), key(2)], "r") == [key(number)]
    real.tier.on_request_finished(ReqContext("r"))
    assert real.hits([key(1), key(2)], "r") == []


ENDPOINTS = st.sampled_from(
    [SOURCE, "tcp://[::1]:7001", "tcp://*:7001", "ipc:///x", "tcp://h:70000", "tcp:"]
)
PAYLOADS = st.fixed_dictionaries(
    {},
    optional={
        "source_control_endpoint": ENDPOINTS | JSON_VALUES,
        "block_hashes": st.lists(st.integers(-2, 2**65), max_size=3) | JSON_VALUES,
        "mode": st.sampled_from(["copy", "move"]) | JSON_VALUES,
        "no_retain": JSON_VALUES,
    },
)
ACTIONS = st.fixed_dictionaries(
    {},
    optional={
        "action_id": JSON_VALUES,
        "action_type": st.sampled_from(["kv.fetch", "kv.pin"]) | JSON_VALUES,
        "action_version": st.sampled_from(["1.0", "9.9"]) | JSON_VALUES,
        "payload": PAYLOADS | JSON_VALUES,
    },
)
# Arbitrary values, and such as go deeper into what is read of a hint.
HINTS = JSON_VALUES | st.fixed_dictionaries(
    {"actions": st.lists(ACTIONS | JSON_VALUES, max_size=3) | JSON_VALUES},
    optional={"protocol_version": JSON_VALUES, "message_id": JSON_VALUES},
)


@pytest.mark.parametrize("carrier", CARRIERS)
@given(value=HINTS)
@settings(max_examples=150, deadline=None)
def test_no_hint_whatever_it_holds_fails_a_request(
    real: Rig, carrier: str, value: Any
) -> None:
    context = carried(value, carrier)
    real.tier.on_new_request(context)
    assert real.lookup(key(1), "r") in (LookupResult.MISS, LookupResult.HIT)
    real.poll()
    real.tier.on_request_finished(context)
    assert_still_serves(real)


@given(params=JSON_VALUES)
@settings(max_examples=50, deadline=None)
def test_no_transfer_params_whatever_they_hold_fail_a_request(
    real: Rig, params: Any
) -> None:
    real.tier.on_new_request(ReqContext("r", params))
    real.tier.on_request_finished(ReqContext("r", params))
    assert_still_serves(real)


def assert_still_serves(rig: Rig) -> None:
    """Other requests' good hints count: the tier did not fail over a bad one."""
    rig.know(SOURCE)
    rig.tier.on_new_request(request("other", hint([key(7)])))
    assert rig.lookup(key(7), "other") is LookupResult.HIT
    rig.tier.on_request_finished(ReqContext("other"))
