# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Fixtures of the kvcr tier's tests, which test the adapter of this checkout."""

import importlib.util
import logging
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

TIER_PACKAGE = "vllm.v1.kv_offload.tiering.kvcr"
CHECKOUT = Path(__file__).resolve().parents[5]

try:
    from vllm_kvcr.plugin import register
except ModuleNotFoundError as error:  # copied into vLLM's tree, it needs no plugin
    if error.name is None or not error.name.startswith("vllm_kvcr"):
        raise
else:
    register()
_found = importlib.util.find_spec(TIER_PACKAGE)
_expected = CHECKOUT.joinpath(*TIER_PACKAGE.split("."), "__init__.py")
assert _found is not None, f"no {TIER_PACKAGE}"
assert _found.origin == str(_expected), f"{_found.origin} would be tested"


def pytest_collect_directory() -> None:
    """Skip all of this without kvcr, which vLLM does not require."""
    pytest.importorskip("kvcr")


# A file that is named on the command line.
pytest_pycollect_makemodule = pytest_collect_directory


class LogLines(list[logging.LogRecord]):
    """What the tier logged."""

    def handler(self) -> logging.Handler:
        handler = logging.Handler()
        handler.emit = self.append  # type: ignore[method-assign]
        return handler

    def texts(self, level: int = logging.WARNING) -> list[str]:
        return [line.getMessage() for line in self if line.levelno >= level]


@pytest.fixture
def tier_log() -> Iterator[LogLines]:
    # vLLM's loggers do not propagate to where pytest listens.
    lines = LogLines()
    handler = lines.handler()
    logger = logging.getLogger(TIER_PACKAGE)
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield lines
    logger.removeHandler(handler)
    logger.setLevel(level)


@pytest.fixture
def retained(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The buffers kept mapped for native code, emptied for one test."""
    from vllm.v1.kv_offload.tiering.kvcr import manager

    buffers: list[Any] = []
    monkeypatch.setattr(manager, "_RETAINED_NATIVE_BUFFERS", buffers)
    return buffers


@pytest.fixture(scope="class")
def disk() -> Iterator[Path]:
    """A folder that takes direct I/O, which one in memory may not."""
    with tempfile.TemporaryDirectory(prefix="kvcr-test-", dir="/var/tmp") as folder:
        yield Path(folder)
