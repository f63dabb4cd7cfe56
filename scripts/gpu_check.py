# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The ways of KV blocks on a machine with a GPU: ``python -m scripts.gpu_check``.

Runs in the Python that has vLLM's CUDA build. Where that, or a GPU, is absent, it
prints "skipped" with the reason, and its exit status is 0.
"""

import argparse
import importlib.util
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, entry_points, version
from pathlib import Path

INSTALL = "pip install '.[cuda,demo]'"


def reason_to_skip() -> str | None:
    """Why this cannot be checked on this machine with this Python."""
    for needed in ("torch", "vllm", "kvcr", "httpx", "rich"):
        if importlib.util.find_spec(needed) is None:
            return f"{needed} is not installed in {sys.executable}; {INSTALL}"
    import torch

    if not torch.cuda.is_available():
        return f"torch {torch.__version__} finds no CUDA device"
    try:
        version("vllm")
    except PackageNotFoundError:
        return f"vLLM's CUDA build is not installed in {sys.executable}; {INSTALL}"
    if not entry_points(group="vllm.general_plugins", name="kvcr"):
        return f"vllm-kvcr is not installed in {sys.executable}; {INSTALL}"
    return None


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.gpu_check",
        description="The ways of KV blocks on a machine with a GPU, checked and timed.",
    )
    parser.add_argument(
        "--folder", type=Path, help="for files, on the disk that is to be measured"
    )
    parser.add_argument(
        "--chunks",
        type=int,
        default=64,
        help="of 128 tokens in each prompt (default: %(default)s)",
    )
    parser.add_argument(
        "--on-cpu",
        action="store_true",
        help="run all of it on vLLM's CPU backend, which checks this check",
    )
    options = parser.parse_args(argv)
    reason = None if options.on_cpu else reason_to_skip()
    if reason is not None:
        print(f"skipped: {reason}")
        return 0
    from scripts import gpu_run

    return gpu_run.run(options.folder, options.chunks, not options.on_cpu)


if __name__ == "__main__":
    sys.exit(main())
