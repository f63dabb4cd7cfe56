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

import pytest

ROOT = Path(__file__).resolve().parents[2]
OURS = "this adapter"


@pytest.fixture(scope="module")
def ratios(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, dict]]:
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
    return {
        title.split(":")[0]: rows
        for title, rows in json.loads(file.read_text()).items()
    }


def test_every_part_has_results(ratios: dict[str, dict[str, dict]]) -> None:
    assert set(ratios) == {
        "Idle",
        "Peers",
        "Control plane",
        "Flatness",
        "Large pools",
        "Large calls",
        "Data plane",
    }
    assert all(ratios.values())


def test_nothing_grows_with_what_is_outstanding(
    ratios: dict[str, dict[str, dict]],
) -> None:
    flat = {what: row[OURS] for what, row in ratios["Flatness"].items()}
    assert {what for what, ratio in flat.items() if ratio > 3} == set(), flat


def test_a_unit_of_a_large_call_costs_no_more_than_one_of_a_small_call(
    ratios: dict[str, dict[str, dict]],
) -> None:
    large = {what: row[OURS] for what, row in ratios["Large calls"].items()}
    assert {what for what, ratio in large.items() if ratio > 3} == set(), large


def test_touch_does_not_grow_with_the_pool(ratios: dict[str, dict[str, dict]]) -> None:
    touches = {
        what: row[OURS]
        for what, row in ratios["Large pools"].items()
        if what.startswith("touch")
    }
    assert touches
    assert all(ratio < 5 for ratio in touches.values()), touches


def test_control_plane_is_close_to_bare_kvcr(
    ratios: dict[str, dict[str, dict]],
) -> None:
    rows = ratios["Control plane"]
    bounds = {
        "lookup, hit": 3.0,
        "lookup, miss": 3.0,
        "store 256 (cpu)": 1.5,
        "load 256 (cpu)": 1.5,
        "store 1 (cpu)": 2.5,
        "load 1 (cpu)": 2.5,
    }
    found = {what: rows[what][OURS] for what in bounds}
    assert {what for what in bounds if found[what] > bounds[what]} == set(), found


def test_an_idle_tier_lets_the_engine_sleep(ratios: dict[str, dict[str, dict]]) -> None:
    assert ratios["Idle"][f"{OURS}, no peers"]["met"] is True
