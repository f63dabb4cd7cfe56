# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Routing metadata: forwarded unread, and never a reason to fail a request."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvcr import ROUTER_HINT_KEY

from tests.v1.kv_offload.tiering.kvcr.builders import (
    LOCALHOST,
    free_port,
    hint,
    key,
    request,
)
from tests.v1.kv_offload.tiering.kvcr.json_values import JSON_VALUES
from tests.v1.kv_offload.tiering.kvcr.rig import Rig, StandinRig
from tests.v1.kv_offload.tiering.kvcr.standin import AT_PEER, HIT
from vllm.v1.kv_offload.base import LookupResult, ReqContext
from vllm.v1.kv_offload.tiering.kvcr.peers.hints import MAX_HINTED_PEERS

HAS_OWN_CARRIER = "kv_hints" in {f.name for f in dataclasses.fields(ReqContext)}
CARRIERS = ["kv_transfer_params", *(["kv_hints"] if HAS_OWN_CARRIER else [])]


def carried(value: Any, carrier: str, request_id: str = "r") -> ReqContext:
    if carrier == "kv_hints":
        return ReqContext(request_id, kv_hints=value)
    return ReqContext(request_id, {ROUTER_HINT_KEY: value})


def peer_rig(**options: Any) -> StandinRig:
    return StandinRig(control_ports=[7001], enable_telemetry=True, **options)


def action(payload: Any, **changes: Any) -> dict[str, Any]:
    whole = {
        "action_id": "a",
        "action_type": "kv.fetch",
        "action_version": "1.0",
        "payload": payload,
    }
    return {
        "protocol_version": "0.1",
        "message_id": "m",
        "actions": [whole | changes],
    }


SOURCE = "tcp://10.9.9.9:7001"
NOT_UNDERSTOOD: dict[str, Any] = {
    "no actions": {"protocol_version": "0.1", "message_id": "m", "actions": []},
    "another action": action({}, action_type="kv.pin"),
    "no hash": action({"source_control_endpoint": SOURCE, "block_hashes": []}),
    "a move": action(
        {"source_control_endpoint": SOURCE, "block_hashes": [1], "mode": "move"}
    ),
    "no retain": action(
        {"source_control_endpoint": SOURCE, "block_hashes": [1], "no_retain": True}
    ),
    "no source": action({"block_hashes": [1]}),
    "a negative hash": action(
        {"source_control_endpoint": SOURCE, "block_hashes": [-1]}
    ),
    "a hash that is text": action(
        {"source_control_endpoint": SOURCE, "block_hashes": ["1"]}
    ),
    "a hash of 65 bits": action(
        {"source_control_endpoint": SOURCE, "block_hashes": [1 << 64]}
    ),
    "an endpoint that is none": action(
        {"source_control_endpoint": "garbage", "block_hashes": [1]}
    ),
    "an endpoint without a port": action(
        {"source_control_endpoint": "tcp://10.9.9.9", "block_hashes": [1]}
    ),
    "an endpoint with port 0": action(
        {"source_control_endpoint": "tcp://10.9.9.9:0", "block_hashes": [1]}
    ),
    "an endpoint that is no text": action(
        {"source_control_endpoint": 7, "block_hashes": [1]}
    ),
    "a payload that is none": action("payload"),
    "actions that are none": {"actions": "kv.fetch"},
    "text": "kv",
    "a number": 7,
    "a list": [],
    "an action that is none": {"actions": [7]},
}


# --- on the stand-in -------------------------------------------------------------


@pytest.mark.parametrize("carrier", CARRIERS)
def test_a_hint_is_forwarded_as_it_is(carrier: str) -> None:
    rig = peer_rig()
    rig.tier.on_new_request(carried(hint([key(1)]), carrier))
    assert rig.kvcr.hints == [("r", hint([key(1)]))]
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
    assert_plain(forwarded)


def assert_plain(value: Any) -> None:
    assert type(value) in {dict, list, str, int, float, bool, type(None)}
    for part in value.values() if isinstance(value, dict) else ():
        assert_plain(part)
    for part in value if isinstance(value, list) else ():
        assert_plain(part)


def test_fields_that_nobody_here_knows_are_forwarded_too() -> None:
    rig = peer_rig()
    value = hint([key(1)]) | {"future": {"deep": [1, {"er": None}]}}
    rig.tier.on_new_request(request("r", value))
    assert rig.kvcr.hints == [("r", value)]


def test_a_request_without_a_hint_says_nothing() -> None:
    rig = peer_rig()
    for params in (None, {}, {"other": 1}, {ROUTER_HINT_KEY: None}):
        rig.tier.on_new_request(ReqContext("r", params))
        rig.tier.on_request_finished(ReqContext("r", params))
    assert (rig.kvcr.hints, rig.kvcr.discarded) == ([], [])
    assert rig.ignored_hints() == {}


def test_a_finished_requests_hint_is_discarded_once() -> None:
    rig = peer_rig()
    context = request("r", hint())
    rig.tier.on_new_request(context)
    rig.tier.on_request_finished(context)
    rig.tier.on_request_finished(context)
    assert rig.kvcr.discarded == ["r"]


def test_after_preemption_the_new_hint_counts() -> None:
    rig = peer_rig()
    rig.tier.on_new_request(request("r", hint([key(1)])))
    rig.tier.on_new_request(request("r", hint([key(2)])))
    assert rig.kvcr.calls == ["submit_hint", "discard_hint", "submit_hint"]
    assert rig.kvcr.hints[-1] == ("r", hint([key(2)]))
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


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "localhost", "10.1.1.1"], ids=lambda host: host
)
def test_a_hint_that_names_this_engine_is_ignored(host: str) -> None:
    rig = peer_rig(control_advertise_host="10.1.1.1")
    rig.tier.on_new_request(request("r", hint(endpoint=f"tcp://{host}:7001")))
    assert rig.kvcr.hints == []
    assert rig.ignored_hints() == {"own_endpoint": 1}
    rig.tier.on_new_request(request("r", hint(endpoint=f"tcp://{host}:7002")))
    assert len(rig.kvcr.hints) == 1


def test_a_hint_for_a_tier_without_peers_is_ignored() -> None:
    rig = StandinRig(secondary_g2_slots=4, enable_telemetry=True)
    rig.tier.on_new_request(request("r", hint()))
    assert rig.kvcr.hints == []
    assert sum(rig.ignored_hints().values()) == 1


def test_a_hint_that_would_hold_up_the_engine_is_ignored() -> None:
    rig = peer_rig()
    value = action({"source_control_endpoint": SOURCE, "block_hashes": [1] * 10**6})
    rig.tier.on_new_request(request("r", value))
    assert rig.kvcr.hints == []
    assert rig.ignored_hints() == {"too_large": 1}


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
    spellings = [
        "tcp://Peer.Example:80",
        "tcp://peer.example.:80",
        "tcp://PEER.example:0080",
    ]
    for number, spelling in enumerate(spellings):
        value = hint(endpoint=spelling)
        rig.tier.on_new_request(request(f"r{number}", value))
        assert value == hint(endpoint=spelling), "vLLM's own object stays as it is"
    assert endpoints_taken(rig) == ["tcp://peer.example:80"] * 3


def test_a_peer_that_is_not_allowed_is_ignored() -> None:
    rig = peer_rig(allowed_peers=["10.0.0.0/8", "peer.example"])
    for number, host in enumerate(["11.0.0.1", "other.example", "127.0.0.9"]):
        value = hint(endpoint=f"tcp://{host}:80")
        rig.tier.on_new_request(request(f"r{number}", value))
    assert rig.kvcr.hints == []
    assert rig.ignored_hints() == {"not_allowed": 3}
    for number, host in enumerate(["10.0.0.1", "Peer.Example."]):
        value = hint(endpoint=f"tcp://{host}:80")
        rig.tier.on_new_request(request(f"ok{number}", value))
    assert endpoints_taken(rig) == ["tcp://10.0.0.1:80", "tcp://peer.example:80"]


def test_an_ipv6_endpoint_is_ignored_by_its_own_reason() -> None:
    rig = peer_rig()
    rig.tier.on_new_request(request("r", hint(endpoint="tcp://[::1]:80")))
    assert rig.kvcr.hints == []
    assert rig.ignored_hints() == {"ipv6": 1}


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
    rig = Rig(
        control_ports=[free_port()],
        control_host=LOCALHOST,
        control_advertise_host=LOCALHOST,
        landing_slots=8,
        enable_telemetry=True,
    )
    yield rig
    rig.tier.shutdown()
    rig.view.release()


@pytest.mark.parametrize("carrier", CARRIERS)
@pytest.mark.parametrize("value", NOT_UNDERSTOOD.values(), ids=NOT_UNDERSTOOD.keys())
def test_what_kvcr_does_not_understand_costs_one_hint(
    real: Rig, value: Any, carrier: str
) -> None:
    real.ignored_hints()
    context = carried(value, carrier)
    real.tier.on_new_request(context)
    assert real.lookup(key(1), "r") is LookupResult.MISS
    real.tier.on_request_finished(context)
    assert sum(real.ignored_hints().values()) == 1
    assert_still_serves(real)


def test_on_the_real_kvcr_the_new_hint_counts(real: Rig) -> None:
    real.tier.on_new_request(request("r", hint([key(1)])))
    assert real.hits([key(1), key(2)], "r") == [key(1)]
    real.tier.on_new_request(request("r", hint([key(2)])))
    assert real.hits([key(1), key(2)], "r") == [key(2)]
    real.tier.on_request_finished(ReqContext("r"))
    assert real.hits([key(1), key(2)], "r") == []


ENDPOINTS = st.sampled_from(
    [
        SOURCE,
        "tcp://[::1]:7001",
        "tcp://*:7001",
        "ipc:///x",
        "tcp://h:70000",
        "",
        "tcp:",
    ]
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
    rig.know("tcp://10.9.9.9:7001")
    rig.tier.on_new_request(request("other", hint([key(7)])))
    assert rig.lookup(key(7), "other") is LookupResult.HIT
    rig.tier.on_request_finished(ReqContext("other"))
