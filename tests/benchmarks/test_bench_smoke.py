# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The benchmarks run, and what holds on any machine holds.

Only ratios within one run are looked at, and only those of CPU time, which other
processes on the machine hardly change; with room to spare all the same.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
OURS = "this adapter"
PARTS = {
    "Idle",
    "Peers",
    "Control plane",
    "Flatness",
    "Large pools",
    "Large calls",
    "Data plane",
}


@pytest.fixture(scope="module")
def ratios(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """By the first word of a section's title, and by row."""
    file = tmp_path_factory.mktemp("benchmarks") / "ratios.json"
    run = subprocess.run(
        [sys.executable, "-m", "benchmarks", "--quick", "--json", str(file)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    sections = json.loads(file.read_text()).items()
    return {title.split(":")[0]: rows for title, rows in sections}


def test_every_part_has_results(ratios) -> None:
    assert set(ratios) == PARTS
    assert all(ratios.values())


@pytest.mark.parametrize(
    ("part", "rows", "most"),
    [
        # One more, with few things outstanding and with many.
        ("Flatness", "", 3),
        # A unit of a large call and of a small one.
        ("Large calls", "", 3),
        ("Large pools", "touch", 5),
    ],
)
def test_nothing_grows_with_what_there_is(ratios, part, rows, most) -> None:
    found = {
        what: row[OURS] for what, row in ratios[part].items() if what.startswith(rows)
    }
    assert found
    assert all(ratio <= most for ratio in found.values()), found


def test_control_plane_is_close_to_bare_kvcr(ratios) -> None:
    bounds = {
        "lookup, hit": 3.0,
        "lookup, miss": 3.0,
        "store 256 (cpu)": 1.5,
        "load 256 (cpu)": 1.5,
        "store 1 (cpu)": 2.5,
        "load 1 (cpu)": 2.5,
    }
    found = {what: ratios["Control plane"][what][OURS] for what in bounds}
    assert all(found[what] <= bounds[what] for what in bounds), found


def test_an_idle_tier_lets_the_engine_sleep(ratios) -> None:
    assert ratios["Idle"][f"{OURS}, no peers"]["met"] is True
