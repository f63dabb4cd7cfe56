# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Writes what a pull request to vLLM would carry: ``python -m scripts.upstream_tree``.

The paths are those of vLLM's own tree, into which the folder can be copied as it is;
see docs/upstream.md. Whatever lies at one of these paths is replaced.
"""

import argparse
import shutil
from collections.abc import Sequence
from pathlib import Path

from scripts.setup_env import ROOT

CARRIED = (
    Path("vllm/v1/kv_offload/tiering/kvcr"),
    Path("tests/v1/kv_offload/tiering/kvcr"),
    Path(".buildkite/scripts/install-kv-offload.sh"),
    Path(".buildkite/test_areas/misc.yaml"),
)
_CACHES = shutil.ignore_patterns("__pycache__", "*.pyc")


def copy_into(tree: Path) -> None:
    """Put everything that is carried into ``tree``."""
    for path in CARRIED:
        source, target = ROOT / path, tree / path
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_file():
            shutil.copy2(source, target)
            continue
        if target.exists():
            shutil.rmtree(target)
        shutil.copytree(source, target, ignore=_CACHES)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.upstream_tree",
        description="Write what a pull request to vLLM would carry.",
    )
    parser.add_argument(
        "folder",
        nargs="?",
        type=Path,
        default=ROOT / "build" / "upstream",
        help="where to (default: build/upstream)",
    )
    folder = parser.parse_args(argv).folder
    copy_into(folder)
    for path in CARRIED:
        files = [path] if (ROOT / path).is_file() else list((folder / path).rglob("*"))
        count = sum((folder / file).is_file() for file in files)
        print(f"{path}: {count} file{'s' if count > 1 else ''}")
    print(f"Written to {folder}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
