# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Hints that cannot be used, of every kind that routers and clients may send."""

from typing import Any

from tests.v1.kv_offload.tiering.kvcr.builders import fetch_action, hint_of

NOWHERE = "tcp://127.0.0.1:9"


def bad_hint(**payload: Any) -> dict[str, Any]:
    complete = {"source_control_endpoint": NOWHERE, "block_hashes": [1]} | payload
    return hint_of([fetch_action(complete)])


def _deep(depth: int) -> Any:
    value: Any = []
    for _ in range(depth):
        value = [value]
    return value


BAD_HINTS: dict[str, Any] = {
    "no actions": hint_of([]),
    "actions are text": hint_of("kv.fetch"),
    "actions missing": {"protocol_version": "0.1"},
    "another action": hint_of([fetch_action({}, "kv.pin")]),
    "action is a number": hint_of([7]),
    "action type is a list": hint_of([fetch_action({}, [])]),
    "payload is text": hint_of([fetch_action("x")]),
    "payload missing": hint_of([{"action_type": "kv.fetch"}]),
    "no source": hint_of([fetch_action({"block_hashes": [1]})]),
    "source is a number": bad_hint(source_control_endpoint=7),
    "source is no url": bad_hint(source_control_endpoint="garbage"),
    "source has no port": bad_hint(source_control_endpoint="tcp://127.0.0.1"),
    "source has a bad port": bad_hint(source_control_endpoint="tcp://127.0.0.1:99999"),
    "source is another protocol": bad_hint(source_control_endpoint="ipc:///x"),
    "source is huge": bad_hint(source_control_endpoint="tcp://" + "x" * 1_000_000),
    "no hashes": bad_hint(block_hashes=[]),
    "hashes are text": bad_hint(block_hashes="abc"),
    "hashes are negative": bad_hint(block_hashes=[-1]),
    "hashes are huge": bad_hint(block_hashes=[1 << 200]),
    "hashes are booleans": bad_hint(block_hashes=[True]),
    "hashes are mixed": bad_hint(block_hashes=[1, "a", None]),
    "hashes are deep": bad_hint(block_hashes=_deep(2000)),
    "hashes are too many": bad_hint(block_hashes=list(range(200_000))),
    "move": bad_hint(mode="move"),
    "no_retain": bad_hint(no_retain=True),
    "deep": hint_of(_deep(2000)),
    "text": "kv",
    "number": 7,
    "list": [],
    "object": object(),
}
