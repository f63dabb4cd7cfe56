# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The operations guide's tables list what the code can report: all, and each once."""

import ast
import inspect
import re
from types import ModuleType

from tests.docs.test_docs import OPERATIONS
from vllm.v1.kv_offload.tiering.kvcr.peers import endpoints, hints
from vllm.v1.kv_offload.tiering.kvcr.reports.health import Reason, State
from vllm.v1.kv_offload.tiering.kvcr.reports.losses import Lost


def table_after(text: str) -> list[list[str]]:
    """The rows of the first table after ``text``, without its head."""
    following = OPERATIONS[OPERATIONS.index(text) :]
    table = re.search(r"(?:^\|.*\n)+", following, re.MULTILINE)
    assert table is not None
    rows = table[0].splitlines()[2:]
    return [[cell.strip(" `") for cell in row.strip("|").split("|")] for row in rows]


def constants(module: ModuleType, *callables: str) -> set[str]:
    """Constant first arguments of calls of these, and what functions of it return."""
    found = set()
    for node in ast.walk(ast.parse(inspect.getsource(module))):
        value: ast.expr | None = None
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            if node.func.id in callables and node.args:
                value = node.args[0]
        elif isinstance(node, ast.Return):
            value = node.value
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            found.add(value.value)
    return found


def test_the_reasons_for_lost_blocks() -> None:
    listed = [
        row[0] for row in table_after("vllm:kvcr_tier_lost_blocks_total{reason}` c")
    ]
    assert sorted(listed) == sorted(reason.label for reason in Lost)


def test_the_reasons_for_ignored_hints() -> None:
    listed = [
        row[0] for row in table_after("vllm:kvcr_tier_ignored_hints_total{reason}` c")
    ]
    used = constants(hints, "_Unusable") | constants(endpoints, "EndpointError")
    assert "no_source" in used
    assert "ipv6" in used
    assert sorted(listed) == sorted(used)


def test_the_states_and_their_reasons() -> None:
    rows = table_after("## States")
    known = {reason.label for reason in Reason} - {Reason.NONE.label}
    assert sorted(row[1] for row in rows) == sorted(known)
    assert {row[0] for row in rows} == {State.DEGRADED.value, State.FAILED.value}
