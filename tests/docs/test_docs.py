# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What the documentation lists is what there is, and its numbers are right."""

import ast
import inspect
import json
import re
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from vllm.v1.kv_offload.tiering.kvcr.config import G3Config, TierConfig, parse_options
from vllm.v1.kv_offload.tiering.kvcr.peers import endpoints, hints
from vllm.v1.kv_offload.tiering.kvcr.reports.health import Reason, State
from vllm.v1.kv_offload.tiering.kvcr.reports.losses import Lost

ROOT = Path(__file__).resolve().parents[2]
PAGES = {page.name: page.read_text() for page in sorted((ROOT / "docs").glob("*.md"))}
OPERATIONS = PAGES["operations.md"]


def named_in_tables(text: str) -> set[str]:
    cells = re.findall(r"^\| (.+?) \|", text, re.MULTILINE)
    return {name for cell in cells for name in re.findall(r"`([^`]+)`", cell)}


def test_every_option_is_listed_and_none_is_invented() -> None:
    options = set(TierConfig.model_fields)
    g3 = {f"g3.{name}" for name in G3Config.model_fields}
    assert named_in_tables(PAGES["configuration.md"]) == options | g3
    assert named_in_tables((ROOT / "README.md").read_text()) == options


def tiers() -> list[dict[str, object]]:
    """The kvcr tiers that the guides show."""
    found = []
    for page in ("usage.md", "comparison.md"):
        for text in re.findall(r"```json\n(.+?)```", PAGES[page], re.S):
            block = json.loads(text)
            found += block if isinstance(block, list) else [block]
    return [block for block in found if block.get("type") == "kvcr"]


@pytest.mark.parametrize("tier", tiers(), ids=lambda tier: "-".join(sorted(tier)))
def test_every_tier_in_the_guides_is_accepted(tier: dict[str, object]) -> None:
    assert parse_options({k: v for k, v in tier.items() if k != "type"})
    assert len(tiers()) >= 4


def test_the_numbers_of_the_comparison_are_those_of_the_benchmarks() -> None:
    compared = PAGES["comparison.md"].partition("## Together")[0]
    numbers = re.findall(r"\b\d\.\d\d\b", compared)
    assert len(numbers) >= 6
    measured = PAGES["benchmarks.md"]
    missing = {n for n in numbers if n != "0.33" and f"{n}x [" not in measured}
    assert missing == set(), "say in docs/comparison.md what the last run measured"


@pytest.mark.parametrize("page", PAGES)
def test_every_link_leads_somewhere(page: str) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)", PAGES[page]):
        if not target.startswith("https://"):
            assert (ROOT / "docs" / target).exists(), target


def test_the_site_has_every_page() -> None:
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    assert sorted(re.findall(r"[\w-]+\.md", json.dumps(site))) == list(PAGES)


# --- the operations guide's tables list what the code can report, and each once ------


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
    rows = table_after("vllm:kvcr_tier_lost_blocks_total{reason}` c")
    assert sorted(row[0] for row in rows) == sorted(reason.label for reason in Lost)


def test_the_reasons_for_ignored_hints() -> None:
    rows = table_after("vllm:kvcr_tier_ignored_hints_total{reason}` c")
    used = constants(hints, "Unusable") | constants(endpoints, "Unusable")
    assert {"no_source", "ipv6"} <= used
    assert sorted(row[0] for row in rows) == sorted(used)


def test_the_states_and_their_reasons() -> None:
    rows = table_after("## States")
    known = {reason.label for reason in Reason} - {Reason.NONE.label}
    assert sorted(row[1] for row in rows) == sorted(known)
    assert {row[0] for row in rows} == {State.DEGRADED.value, State.FAILED.value}


# --- the sizing guide's numbers follow from the architectures that it names ----------

BF16_BYTES = 2
TOKENS = 16
ROWS = re.findall(
    r"^\| ([^|]+) \| (\d+) \| (?:(\d+) x (\d+)|MLA (\d+)) "
    r"\| ([\d.,]+) \| ([\d.,]+) \| ([\d,]+) \| ([\d,]+) \|$",
    PAGES["sizing.md"],
    re.MULTILINE,
)


def number(cell: str) -> float:
    return float(cell.replace(",", ""))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_its_numbers_are_right(row: tuple[str, ...]) -> None:
    assert len(ROWS) == 5
    _, layers, heads, size, latent, per_token, per_chunk, chunks, tokens = row
    elements = int(latent) if latent else 2 * int(heads) * int(size)
    token_bytes = int(layers) * elements * BF16_BYTES
    assert number(per_token) == token_bytes / 1024
    assert number(per_chunk) == TOKENS * token_bytes / 1024
    assert number(chunks) == (64 << 30) // (TOKENS * token_bytes)
    assert number(tokens) == TOKENS * number(chunks)


def test_the_example_of_a_pool_is_right() -> None:
    (gib,) = re.findall(r"that is (\d+) GiB", PAGES["sizing.md"])
    assert int(gib) == 200 * 8000 * 128 * 1024 // (1 << 30)
