# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What would go upstream stands on its own. That its tests pass in vLLM's tree is shown
by the compatibility matrix, which makes its tree with the same function."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts import upstream_tree
from tests.distribution.clean_env import REPOSITORY, clean_environ

# Of this project, and not among what is carried.
FOREIGN = ("vllm_kvcr", "scripts", "benchmarks", "tests.vllm_kvcr")


def files(folder: Path, *carried: Path) -> set[Path]:
    return {
        path.relative_to(folder)
        for each in carried
        for path in [folder / each, *(folder / each).rglob("*")]
        if path.is_file() and path.suffix != ".pyc"
    }


def imports(module: ast.Module) -> Iterator[str]:
    """All that is imported other than in a ``try``."""
    tries = (node for node in ast.walk(module) if isinstance(node, ast.Try))
    guarded = {id(inner) for node in tries for inner in ast.walk(node)}
    for node in ast.walk(module):
        if id(node) in guarded:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""


def test_it_is_complete_and_imports_nothing_that_it_does_not_carry(
    tmp_path: Path,
) -> None:
    stale = tmp_path / upstream_tree.CARRIED[0] / "stale.py"
    stale.parent.mkdir(parents=True)
    stale.touch()
    assert upstream_tree.main([str(tmp_path)]) == 0
    assert files(tmp_path, Path()) == files(REPOSITORY, *upstream_tree.CARRIED)
    foreign = {
        (str(path.relative_to(tmp_path)), name)
        for path in tmp_path.rglob("*.py")
        for name in imports(ast.parse(path.read_text()))
        if any(name == other or name.startswith(f"{other}.") for other in FOREIGN)
    }
    assert foreign == set()


_NO_KVCR = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "kvcr":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Absent())
"""


def test_its_tests_are_skipped_where_kvcr_is_not_installed(tmp_path: Path) -> None:
    (tmp_path / "no_kvcr.py").write_text(_NO_KVCR)
    plugins = ("-p", "no_kvcr", "-p", "no:cacheprovider")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-rs", *plugins, upstream_tree.CARRIED[1]],
        capture_output=True,
        text=True,
        cwd=REPOSITORY,
        env=clean_environ(CI="", PYTHONPATH=str(tmp_path)),
        timeout=120,
    )
    assert done.returncode == pytest.ExitCode.NO_TESTS_COLLECTED, done.stdout
    assert "could not import 'kvcr'" in done.stdout
    assert "error" not in done.stdout.lower()
