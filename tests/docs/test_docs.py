# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What the documentation lists is what there is."""

import json
import re
from pathlib import Path

import pytest
import yaml

from vllm.v1.kv_offload.tiering.kvcr.config import G3Config, TierConfig, parse_options
from vllm.v1.kv_offload.tiering.kvcr.reports.health import Reason
from vllm.v1.kv_offload.tiering.kvcr.reports.losses import Lost

ROOT = Path(__file__).resolve().parents[2]
CONFIGURATION = (ROOT / "docs" / "configuration.md").read_text()
OPERATIONS = (ROOT / "docs" / "operations.md").read_text()
USAGE = (ROOT / "docs" / "usage.md").read_text()
README = (ROOT / "README.md").read_text()


def named_in_tables(text: str) -> set[str]:
    cells = re.findall(r"^\| (.+?) \|", text, re.MULTILINE)
    return {name for cell in cells for name in re.findall(r"`([^`]+)`", cell)}


def test_every_option_has_a_row_in_the_reference_and_none_is_invented() -> None:
    g3 = {f"g3.{name}" for name in G3Config.model_fields}
    assert named_in_tables(CONFIGURATION) == set(TierConfig.model_fields) | g3


def test_the_readme_names_every_option() -> None:
    assert named_in_tables(README) == set(TierConfig.model_fields)


@pytest.mark.parametrize("reason", Lost, ids=lambda reason: reason.label)
def test_every_way_to_lose_a_block_is_explained(reason: Lost) -> None:
    assert f"| `{reason.label}` |" in OPERATIONS


@pytest.mark.parametrize(
    "reason", [r for r in Reason if r is not Reason.NONE], ids=lambda r: r.label
)
def test_every_reason_for_a_state_is_explained(reason: Reason) -> None:
    assert f"`{reason.label}` |" in OPERATIONS


def tiers() -> list[dict[str, object]]:
    blocks = [
        json.loads(text) for text in re.findall(r"```json\n(.+?)```", USAGE, re.S)
    ]
    return [block for block in blocks if block.get("type") == "kvcr"]


@pytest.mark.parametrize("tier", tiers(), ids=lambda tier: "-".join(sorted(tier)))
def test_every_tier_in_the_usage_guide_is_accepted(tier: dict[str, object]) -> None:
    assert parse_options({k: v for k, v in tier.items() if k != "type"})
    assert len(tiers()) >= 3


def test_the_numbers_of_the_comparison_are_those_of_the_benchmarks() -> None:
    compared = (ROOT / "docs" / "comparison.md").read_text()
    measured = (ROOT / "docs" / "benchmarks.md").read_text()
    numbers = re.findall(r"\b\d\.\d\d\b", compared.partition("## Together")[0])
    assert len(numbers) >= 6
    missing = {n for n in numbers if n != "0.33" and f"{n}x [" not in measured}
    assert missing == set(), "say in docs/comparison.md what the last run measured"


def test_the_tiers_of_the_comparison_are_accepted() -> None:
    text = (ROOT / "docs" / "comparison.md").read_text()
    (listed,) = re.findall(r"```json\n(.+?)```", text, re.S)
    (ours,) = [tier for tier in json.loads(listed) if tier.pop("type") == "kvcr"]
    assert parse_options(ours)


@pytest.mark.parametrize(
    "page", sorted((ROOT / "docs").glob("*.md")), ids=lambda page: page.name
)
def test_every_link_leads_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)", page.read_text()):
        if not target.startswith("https://"):
            assert (page.parent / target).exists(), target


def test_the_site_has_every_page() -> None:
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    pages = re.findall(r"[\w-]+\.md", json.dumps(site))
    assert sorted(pages) == sorted(p.name for p in (ROOT / "docs").glob("*.md"))
