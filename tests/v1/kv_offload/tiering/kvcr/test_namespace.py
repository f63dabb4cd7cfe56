# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Namespaces: the same for the same bytes, another one for everything else."""

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.v1.kv_offload.tiering.kvcr.builders import key, make_spec
from tests.v1.kv_offload.tiering.kvcr.rig import StandinRig
from tests.v1.kv_offload.tiering.kvcr.standin import (
    FAILED,
    HIT,
    SUCCESS,
    RecordingParent,
)
from vllm.v1.kv_offload.base import LookupResult, OffloadingKVEventsConfig
from vllm.v1.kv_offload.tiering.kvcr.keys import SIZE, KeyCodec, make_codec

ROW = 4096
FIELDS: dict[str, tuple[Any, Any, str]] = {
    "model": ("org/model", "org/other", "model"),
    "dtype": ("bfloat16", "fp8", "kv_dtype"),
    "tokens_per_block": ((16, 32), (16,), "groups"),
    "tokens_per_hash": (16, 32, "groups"),
    "blocks_per_chunk": (2, 1, "groups"),
    "world_size": (4, 2, "parallel"),
    "tp_size": (4, 2, "parallel"),
    "pp_size": (1, 2, "parallel"),
    "agnostic": (False, True, "parallel"),
    "worker_bytes": (1024, 2048, "block_bytes"),
    "canonical": (False, True, "layout"),
    "layout": ("NHD", "HND", "layout"),
}
"""What an engine has, what another one has, and what the difference is called."""


def full_spec(**changes: Any) -> Any:
    v = {name: values[0] for name, values in FIELDS.items()} | changes
    return SimpleNamespace(
        kv_events_config=OffloadingKVEventsConfig(False, False),
        config=SimpleNamespace(
            groups=[
                SimpleNamespace(tokens_per_block=tokens)
                for tokens in v["tokens_per_block"]
            ],
            model=SimpleNamespace(name=v["model"], dtype=v["dtype"]),
            cache=SimpleNamespace(
                tokens_per_hash=v["tokens_per_hash"],
                blocks_per_chunk=v["blocks_per_chunk"],
            ),
            parallel=SimpleNamespace(
                data_parallel_rank_local=None,
                world_size=v["world_size"],
                tp_size=v["tp_size"],
                pp_size=v["pp_size"],
                pcp_size=1,
                dcp_size=1,
                is_parallelism_agnostic=v["agnostic"],
            ),
            worker_kv_bytes_per_block=v["worker_bytes"],
            canonical_layout=v["canonical"],
            kv_cache_layout=v["layout"],
            replicated_layout=False,
        ),
    )


def auto(row_bytes: int = ROW, **changes: Any) -> KeyCodec:
    return make_codec("auto", full_spec(**changes), row_bytes)


def test_the_same_engine_has_the_same_namespace() -> None:
    assert auto() == auto()
    assert len(auto().prefix) == SIZE


@pytest.mark.parametrize("field", FIELDS)
def test_what_defines_the_bytes_defines_the_namespace(field: str) -> None:
    _, other, called = FIELDS[field]
    ours, theirs = auto(), auto(**{field: other})
    assert ours.prefix != theirs.prefix
    foreign = theirs.prefix + key(1)
    assert called in ours.difference(foreign)


def test_the_row_size_and_the_hash_seed_count(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = auto()
    assert auto(row_bytes=2 * ROW).prefix != ours.prefix
    monkeypatch.setenv("PYTHONHASHSEED", "4711")
    assert auto().prefix != ours.prefix


def test_ranks_of_an_agnostic_layout_share_blocks() -> None:
    assert auto(agnostic=True) == auto(agnostic=True, tp_size=2, world_size=2)


AUTO = ["auto", "Auto", "AUTO", " auto", "auto ", True, "true", "on", "Yes", "1"]
OFF = ["off", " OFF\n", False, "false", "False", "no", "None", "NULL", "0", ""]


@pytest.mark.parametrize("option", AUTO)
def test_a_word_that_means_on_derives_the_namespace(option: Any) -> None:
    assert make_codec(option, full_spec(), ROW) == auto()
    assert make_codec(option, make_spec(), ROW).prefix == b"", "a partial spec"


@pytest.mark.parametrize("option", [*OFF, None, " "])
def test_a_word_that_means_off_is_none(option: Any) -> None:
    assert make_codec(option, full_spec(), ROW).prefix == b""


@given(st.text(min_size=1), st.text(min_size=1))
@example("automatic", "prod")
@example("10", "true-north")
@example("prod", "Prod")
def test_a_given_text_is_the_whole_namespace(one: str, other: str) -> None:
    switches = {str(word).strip().lower() for word in (*AUTO, *OFF)}
    if {one.strip().lower(), other.strip().lower()} & switches:
        return
    mine = make_codec(one, full_spec(), ROW)
    assert mine.prefix not in (b"", auto().prefix)
    assert mine == make_codec(one, full_spec(model="another"), 2 * ROW)
    assert (mine == make_codec(other, full_spec(), ROW)) == (one == other)


@given(st.binary(max_size=80))
def test_no_foreign_key_breaks_the_naming(foreign: bytes) -> None:
    own = len(auto().prefix + key(1))
    for each in (foreign, foreign.ljust(own, b"x")[:own]):
        assert auto().difference(each)
        assert KeyCodec().difference(each)


def test_kvcr_sees_namespaced_keys_and_vllm_does_not() -> None:
    rig = StandinRig(spec=full_spec())
    one, other = (auto().prefix + each for each in (key(1), key(2)))
    rig.kvcr.statuses[one] = rig.kvcr.statuses[other] = HIT
    assert rig.lookup(key(1)) is LookupResult.HIT
    rig.load([key(1), key(2)], [0, 1])
    assert list(rig.kvcr.last.blocks) == [one, other]
    rig.kvcr.complete(1, {one: FAILED, other: SUCCESS})
    (result,) = rig.poll()
    assert result.successful_keys == {key(2)}


def test_peers_and_kvcr_use_block_keys_and_vllm_its_own() -> None:
    rig = StandinRig(spec=full_spec(), control_ports=[7001])
    block_key = auto().prefix + key(1)
    parent = RecordingParent({key(1): 3})
    rig.kvcr.want(block_key)
    rig.poll()
    rig.tier.serve_external_requests(parent)
    ((_, blocks),) = rig.kvcr.pin_answers.values()
    assert list(blocks) == [block_key]
    assert blocks[block_key] is not None
    assert ("lookup", key(1)) in parent.calls


def test_events_name_vllms_keys() -> None:
    spec = full_spec()
    spec.kv_events_config = OffloadingKVEventsConfig(True, True)
    rig = StandinRig(spec=spec)
    rig.kvcr.publish(auto().prefix + key(1))
    (event,) = rig.tier.take_events()
    assert event.keys == [key(1)]


def test_a_foreign_peers_key_is_a_miss_that_names_what_differs(
    tier_log: Any,
) -> None:
    rig = StandinRig(spec=full_spec(), control_ports=[7001], enable_telemetry=True)
    parent = RecordingParent({key(1): 3})
    foreign = auto(dtype="fp8").prefix + key(1)
    rig.kvcr.want(foreign)
    rig.poll()
    rig.tier.serve_external_requests(parent)
    assert list(rig.kvcr.pin_answers.values()) == [None]
    assert parent.jobs == []
    assert rig.losses() == {"foreign": 1}
    for _ in range(3):
        rig.tier.on_schedule_end(None)  # type: ignore[arg-type]
    assert len([text for text in tier_log.texts() if "kv_dtype" in text]) == 1
