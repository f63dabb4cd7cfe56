# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What the parts of the fleet have in common."""

import tempfile
from collections.abc import Callable
from pathlib import Path

from vllm_kvcr.servers import ServerFailed


def status_of(run: Callable[[Path], list[str]]) -> int:
    """Run a part in a folder of its own, print its faults, return its exit status."""
    with tempfile.TemporaryDirectory(prefix="vllm-kvcr-fleet-") as folder:
        try:
            faults = run(Path(folder))
        except ServerFailed as failure:
            faults = [str(failure)]
    for fault in faults:
        print(f"FAILED {fault}")
    return 1 if faults else 0
