# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A real engine with the kvcr tier over real NIXL: the demo, on shorter prompts.

Run by the compatibility matrix. ``make test`` runs the same with the installed wheel.
"""

import json
import os
from pathlib import Path

import pytest

from vllm_kvcr.demo_plan import TOKENS_PER_CHUNK, Stage, Workload
from vllm_kvcr.demo_process import run_stage
from vllm_kvcr.plugin import MANAGER_CLASS, packaged_tiering_folder

HELPERS = Path(__file__).parent
REPORT_VARIABLE = "VLLM_KVCR_TEST_REPORT"

WORKLOAD = Workload(prompts=3, chunks_per_prompt=4)
# All prompts but half a one fit into the pool: each load finds a part of its prompt
# there and a part in a file.
STAGE = Stage("pool and files", pool_chunks=10, file_chunks=12)


@pytest.mark.timeout(280)  # above the engine's own; the matrix gives a test less
def test_repeated_prompts_are_served_by_kvcr_with_equal_outputs(
    tmp_path: Path,
) -> None:
    report = tmp_path / "report.json"
    inherited = os.environ.get("PYTHONPATH")
    result = run_stage(
        WORKLOAD,
        STAGE,
        tmp_path / "engine.log",
        seconds=240,
        spec=("ReportingSpec", "reporting_spec"),
        environment={
            REPORT_VARIABLE: str(report),
            "PYTHONPATH": os.pathsep.join(filter(None, [str(HELPERS), inherited])),
        },
    )

    assert result.faults(STAGE) == []
    # All that was offloaded came back, some from each place.
    offloaded = WORKLOAD.chunks * TOKENS_PER_CHUNK
    assert result.served.cached_tokens == offloaded
    assert result.tokens_from_dram + result.tokens_from_files == offloaded
    assert result.tokens_from_dram > 0
    assert result.tokens_from_files > 0
    # vLLM's count of what the tier delivered is KVCR's.
    delivered = result.from_dram.bytes + result.from_files.bytes
    assert result.served.tier_bytes_read == delivered > 0

    made = json.loads(report.read_text())
    assert made["class"] == MANAGER_CLASS
    assert Path(made["file"]) == packaged_tiering_folder() / "kvcr" / "manager.py"
    # Where an operator's engine has it.
    assert made["process"].startswith("EngineCore")
