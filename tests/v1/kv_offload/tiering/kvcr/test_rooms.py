# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Imports go one way: which of the tier's rooms may use which."""

import ast
from pathlib import Path

import pytest

from vllm.v1.kv_offload.tiering.kvcr.compat import shims

PACKAGE = Path(shims.__file__).parents[1]
NAME = "vllm.v1.kv_offload.tiering.kvcr"
DOOR = {"config", "keys", "values"}
MAY_USE = {
    "compat": set(),
    "reports": {"compat", *DOOR},
    "peers": {"backend.protocol", "compat", "reports", *DOOR},
    "transfers": {"backend.protocol", "compat", "reports", "peers", *DOOR},
    "backend": {"compat", "reports", "peers", "transfers.jobs", *DOOR},
    # Values are read by what knows them.
    "assembly": {"backend", "compat", "reports", "peers", "transfers", *DOOR},
    "draining": {"backend", "reports", "peers", "transfers"},
    "config": {"values"},
    "values": {"peers.endpoints"},
    "keys": set(),
}


def rooms_of(source: Path) -> set[str]:
    """What a file imports from the tier, as room and module."""
    used = set()
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(NAME):
            module = (node.module or "").removeprefix(NAME).removeprefix(".")
            room = module.partition(".")[0]
            if module and "." not in module and (PACKAGE / module).is_dir():
                used.update(f"{module}.{alias.name}" for alias in node.names)
            elif module:
                used.add(module)
            else:
                used.update(alias.name for alias in node.names)
            assert room in ("", "manager", *MAY_USE) or room in DOOR
    return used


@pytest.mark.parametrize("room", MAY_USE)
def test_a_room_uses_what_it_may(room: str) -> None:
    path = PACKAGE / room
    sources = path.rglob("*.py") if path.is_dir() else [path.with_suffix(".py")]
    allowed = MAY_USE[room] | {room}
    for source in sources:
        for used in rooms_of(source):
            assert allowed & {used, used.partition(".")[0]}, f"{source.name}: {used}"


def test_every_room_has_its_row() -> None:
    rooms = {p.stem for p in PACKAGE.iterdir() if not p.stem.startswith("__")}
    assert rooms == {*MAY_USE, "manager"}
