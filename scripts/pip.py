# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Runs pip so that torch's CPU build is found wherever it is published."""

import os
from pathlib import Path

from scripts.quiet_run import CommandFailed, describe_pip, run_quietly

# Where torch's CPU builds are published. Another place that mirrors them can be
# named by the environment variable of the same name.
PYTORCH_CPU_WHEELS = "https://download.pytorch.org/whl/cpu"

# The caller's PYTHONPATH could put another vLLM in front of the one set up here.
ENV = {
    **{key: value for key, value in os.environ.items() if key != "PYTHONPATH"},
    "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    "PIP_NO_INPUT": "1",
    "PYTHONUNBUFFERED": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}


def pip(python: Path, log: Path, title: str, *arguments: str) -> None:
    """Run ``python``'s pip, and if it finds no torch, again with PyTorch's own index.

    Raises:
        CommandFailed: with what pip said.
    """
    command = [str(python), "-m", "pip", *arguments]
    try:
        run_quietly(title, command, log, ENV, describe_pip)
    except CommandFailed as failure:
        if "No matching distribution found for torch==" not in str(failure):
            raise
        print("  torch's CPU build is not in the package index; trying PyTorch's")
        wheels = os.environ.get("PYTORCH_CPU_WHEELS", PYTORCH_CPU_WHEELS)
        command += ["--extra-index-url", wheels]
        run_quietly(title, command, log, ENV, describe_pip)
