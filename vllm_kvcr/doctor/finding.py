# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A check's finding: one line with a status, and what to do about it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any


class Status(Enum):
    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    ``data`` is for machines: only built-in types, and no secrets.
    """

    status: Status
    text: str
    remedy: str | None = None
    data: Mapping[str, Any] = field(default_factory=dict)


def ok(text: str, **data: Any) -> Finding:
    return Finding(Status.OK, text, None, data)


def warn(text: str, remedy: str | None = None, **data: Any) -> Finding:
    return Finding(Status.WARN, text, remedy, data)


def fail(text: str, remedy: str, **data: Any) -> Finding:
    return Finding(Status.FAIL, text, remedy, data)


def size(count: int) -> str:
    """A size in bytes, formatted for people."""
    value, units = float(count), iter(("KiB", "MiB", "GiB", "TiB"))
    unit = "bytes"
    while value >= 1024 and (larger := next(units, None)) is not None:
        value, unit = value / 1024, larger
    return f"{count} bytes" if unit == "bytes" else f"{value:.1f} {unit}"
