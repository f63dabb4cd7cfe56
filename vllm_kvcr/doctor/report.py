# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The report: a table for people, and a record for bug reports."""

import os
import platform
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from vllm_kvcr import __version__
from vllm_kvcr.doctor.finding import Finding, Status

_HIDDEN = "<hidden>"
_SECRET_MAPPINGS = ("backend_options",)
_SECRET_NAMES = ("secret", "password", "passwd", "token", "credential", "access_key")
_LEAST_SECRET = 4
"""Shorter values are not hidden, since parts of other words would be hidden, too."""
_COLOURS = {Status.OK: "green", Status.WARN: "yellow", Status.FAIL: "bold red"}


@dataclass(frozen=True)
class Entry:
    """A finding, and the check that made it."""

    check: str
    finding: Finding


def record(entries: Iterable[Entry], configs: Iterable[Any]) -> dict[str, Any]:
    """The report as built-in types, without the secrets in ``configs``."""
    entries = list(entries)
    counts = Counter(entry.finding.status for entry in entries)
    secrets = sorted(_secrets(list(configs)), key=len, reverse=True)
    return {
        "vllm_kvcr": __version__,
        "machine": {
            "python": platform.python_version(),
            "kernel": platform.release(),
            "architecture": platform.machine(),
            "cpus": os.cpu_count(),
        },
        "summary": {status.value: counts[status] for status in Status},
        "checks": [
            {
                "check": entry.check,
                "status": entry.finding.status.value,
                "text": _without(secrets, entry.finding.text),
                "remedy": _without(secrets, entry.finding.remedy),
                "data": _without(secrets, dict(entry.finding.data)),
            }
            for entry in entries
        ],
    }


def show(report: Mapping[str, Any]) -> None:
    """Print the report for people."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2))
    for each in report["checks"]:
        status = Status(each["status"])
        told = Text(each["text"])
        if each["remedy"]:
            told.append(f"\n→ {each['remedy']}", style="dim")
        table.add_row(Text(status.value, style=_COLOURS[status]), each["check"], told)
    console = Console()
    console.print(table)
    counts = ", ".join(f"{count} {name}" for name, count in report["summary"].items())
    console.print(f"\n{counts}")


def _secrets(value: Any, inside: bool = False) -> set[str]:
    """All values that may be secrets, as they could appear in messages."""
    if isinstance(value, Mapping):
        return {
            secret
            for name, each in value.items()
            for secret in _secrets(each, inside or _is_secret(str(name)))
        }
    if isinstance(value, (list, tuple)):
        return {secret for each in value for secret in _secrets(each, inside)}
    text = str(value)
    return {text} if inside and len(text) >= _LEAST_SECRET else set()


def _is_secret(name: str) -> bool:
    lower = name.lower()
    return lower in _SECRET_MAPPINGS or any(part in lower for part in _SECRET_NAMES)


def _without(secrets: Iterable[str], value: Any) -> Any:
    if isinstance(value, str):
        for secret in secrets:
            value = value.replace(secret, _HIDDEN)
        return value
    if isinstance(value, Mapping):
        return {name: _without(secrets, each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without(secrets, each) for each in value]
    return value
