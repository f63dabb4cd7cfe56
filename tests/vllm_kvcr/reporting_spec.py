# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The CPU spec, telling a test which tier it made, and in which process."""

import json
import multiprocessing
import os
import sys
from pathlib import Path

from vllm.v1.kv_offload.base import OffloadingManager
from vllm_kvcr.cpu import CpuTieringOffloadingSpec

# Names the file that the report goes to.
REPORT_VARIABLE = "VLLM_KVCR_TEST_REPORT"


class ReportingSpec(CpuTieringOffloadingSpec):
    def get_manager(self) -> OffloadingManager:
        manager = super().get_manager()
        (tier,) = manager.secondary_tiers  # type: ignore[attr-defined]
        report = {
            "process": multiprocessing.current_process().name,
            "class": type(tier).__name__,
            "file": sys.modules[type(tier).__module__].__file__,
        }
        Path(os.environ[REPORT_VARIABLE]).write_text(json.dumps(report))
        return manager
