# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The sizing guide's numbers follow from the architectures that it names."""

import re
from pathlib import Path

import pytest

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "sizing.md").read_text()
BF16_BYTES = 2
TOKENS = 16
ROWS = re.findall(
    r"^\| ([^|]+) \| (\d+) \| (?:(\d+) x (\d+)|MLA (\d+)) "
    r"\| ([\d.,]+) \| ([\d.,]+) \| ([\d,]+) \| ([\d,]+) \|$",
    TEXT,
    re.MULTILINE,
)


def number(cell: str) -> float:
    return float(cell.replace(",", ""))


def test_there_are_five_models() -> None:
    assert len(ROWS) == 5


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_its_numbers_are_right(row: tuple[str, ...]) -> None:
    _, layers, heads, size, latent, per_token, per_chunk, chunks, tokens = row
    elements = int(latent) if latent else 2 * int(heads) * int(size)
    token_bytes = int(layers) * elements * BF16_BYTES
    assert number(per_token) == token_bytes / 1024
    assert number(per_chunk) == TOKENS * token_bytes / 1024
    assert number(chunks) == (64 << 30) // (TOKENS * token_bytes)
    assert number(tokens) == TOKENS * number(chunks)


def test_the_example_of_a_pool_is_right() -> None:
    (gib,) = re.findall(r"that is (\d+) GiB", TEXT)
    assert int(gib) == 200 * 8000 * 128 * 1024 // (1 << 30)
