# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""`make gpu-check` where there is no GPU, and what it makes of answers and metrics."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from scripts import gpu_check, gpu_run
from vllm_kvcr.demo_plan import Workload
from vllm_kvcr.servers import Answer, Metrics

ROOT = Path(__file__).resolve().parents[2]
WORK = Workload(prompts=2, chunks_per_prompt=2)
COLD = Answer((1, 2), WORK.prompt_tokens, 0, 1.0)
SERVED = Answer((1, 2), WORK.prompt_tokens, WORK.prompt_tokens - WORK.tail_tokens, 0.1)


@pytest.mark.parametrize(
    ("has_gpu", "said"),
    [(False, "skipped: torch "), (True, "skipped: vLLM's CUDA build is not")],
)
def test_without_a_gpu_or_a_build_for_it_that_is_said(
    has_gpu: bool, said: str, capsys, monkeypatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    assert gpu_check.main([]) == 0
    assert said in capsys.readouterr().out


def test_a_python_without_any_of_it_is_named() -> None:
    command = [sys.executable, "-S", "-m", "scripts.gpu_check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0
    assert "skipped: torch is not installed in" in done.stdout


@pytest.mark.parametrize(
    ("answer", "faults"),
    [
        (SERVED, []),
        (COLD, ["again: 264 tokens were computed again"]),
        (
            Answer((1, 3), SERVED.prompt_tokens, SERVED.cached_tokens, 0.1),
            ["again: the output is another one"],
        ),
    ],
)
def test_what_is_computed_again_or_differs_is_a_fault(
    answer: Answer, faults: list[str], monkeypatch, tmp_path
) -> None:
    monkeypatch.setattr(gpu_run, "write_model", lambda folder, tokens: None)
    check = gpu_run.Check(tmp_path, WORK, on_gpu=True)
    check._judge(answer, COLD, "again")
    assert check.faults == faults


METRICS = Metrics(
    """\
# TYPE vllm:kv_offload_store_bytes counter
vllm:kv_offload_store_bytes_total 4e9
# TYPE vllm:kv_offload_store_time counter
vllm:kv_offload_store_time_total 0.5
# TYPE vllm:kvcr_transfer_bytes counter
vllm:kvcr_transfer_bytes_total{operation="local_fill"} 3e9
# TYPE vllm:kvcr_duration_seconds histogram
vllm:kvcr_duration_seconds_sum{scope="local_fill",result="success"} 1.5
vllm:kvcr_duration_seconds_sum{scope="local_fill",result="failed"} 9.0
"""
)


def test_speed_is_bytes_by_the_time_that_they_took() -> None:
    assert "8.00 GB/s" in gpu_run.Hop.by_vllm("down", METRICS, "store").line
    assert "2.00 GB/s" in gpu_run.Hop.by_kvcr("in", METRICS, "local_fill").line
    assert "0.00 GB/s" in gpu_run.Hop.by_kvcr("out", METRICS, "local_deliver").line
