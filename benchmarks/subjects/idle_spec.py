# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The CPU spec, noting which threads the tier brought into the engine's process."""

import json
import os
from pathlib import Path

from benchmarks.harness import threads
from benchmarks.subjects.idle_engine import OURS_VARIABLE, REPORT_VARIABLE
from vllm.v1.kv_offload.base import OffloadingManager
from vllm_kvcr.cpu import CpuTieringOffloadingSpec

if os.environ.get(OURS_VARIABLE) == "1":
    from vllm_kvcr.plugin import register

    register()


class NotingSpec(CpuTieringOffloadingSpec):
    def get_manager(self) -> OffloadingManager:
        before = sorted(threads.cpu_seconds(os.getpid()))
        manager = super().get_manager()
        report = {
            "pid": os.getpid(),
            "before_tier": before,
            "names": threads.python_names(),
        }
        Path(os.environ[REPORT_VARIABLE]).write_text(json.dumps(report))
        return manager
