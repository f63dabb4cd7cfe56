# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The vLLM on which two engines fit on two cores; ``make setup-peers`` sets it up."""

import sys
from pathlib import Path


def environment() -> dict[str, str]:
    """What makes a server run on it."""
    folder = Path(sys.prefix) / "peers-vllm"
    if not (folder / "ready").exists():
        raise FileNotFoundError(f"there is no {folder}; make setup-peers sets it up")
    return {"PYTHONPATH": str(folder)}
