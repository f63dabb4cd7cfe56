# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""``vllm-kvcr doctor``: check whether this machine can run a configuration.

Exit status: 0 without failures (warnings are allowed), 1 with failures, 2 for wrong
usage. A check that cannot run is a warning and does not stop the others.
"""

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Iterator, Sequence
from importlib import import_module

from vllm_kvcr.doctor.finding import Finding, Status, warn
from vllm_kvcr.doctor.report import Entry, record, show
from vllm_kvcr.doctor.setting import Setting, UnreadableConfig, read_json

CHECKS = (
    "versions",
    "adapter",
    "options",
    "backends",
    "network",
    "memory",
    "files",
    "guard",
    "hashing",
    "loopback",
)
"""Modules of this package, each with a ``check(setting)`` that yields findings."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = _parser()
    given = parser.parse_args(argv)
    try:
        setting = Setting(
            None if given.config is None else read_json(given.config, "--config"),
            read_json(given.events, "--kv-events-config") if given.events else {},
            given.chunk_bytes,
        )
    except UnreadableConfig as error:
        parser.error(str(error))
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    chosen = [c for c in given.only or CHECKS if c not in (given.skip or ())]
    # Imports may write to standard output, which is reserved for the report.
    with contextlib.redirect_stdout(sys.stderr):
        entries = [
            Entry(name, finding) for name in chosen for finding in run(name, setting)
        ]
    report = record(entries, [setting.transfer, setting.events])
    if given.json:
        print(json.dumps(report, indent=2))
    else:
        show(report)
    return 1 if report["summary"][Status.FAIL.value] else 0


def run(name: str, setting: Setting) -> Iterator[Finding]:
    """One check's findings, whatever happens in it."""
    try:
        yield from import_module(f"vllm_kvcr.doctor.{name}").check(setting)
    except Exception as error:
        yield warn(
            f"this check could not run: {type(error).__name__}: {error}",
            "see the other checks first; if they are ok, please report this",
        )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="vllm-kvcr doctor",
        description="Check whether this machine can run a configuration. Run it where "
        "vLLM will run: as that user, in that container, with that environment.",
        epilog="exit status: 0 without failures, 1 with failures, 2 for wrong usage",
    )
    parser.add_argument(
        "--config",
        metavar="FILE|JSON",
        help="what vLLM is given as --kv-transfer-config",
    )
    parser.add_argument(
        "--kv-events-config",
        metavar="FILE|JSON",
        dest="events",
        help="what vLLM is given as --kv-events-config",
    )
    parser.add_argument(
        "--chunk-bytes",
        metavar="N",
        type=_positive,
        help="bytes of one chunk of the primary tier, for options that count chunks",
    )
    parser.add_argument(
        "--json", action="store_true", help="print JSON to attach to a bug report"
    )
    for option, text in (("--only", "run only this check"), ("--skip", "skip a check")):
        parser.add_argument(
            option,
            action="append",
            choices=CHECKS,
            metavar="CHECK",
            help=f"{text}; may be repeated: {', '.join(CHECKS)}",
        )
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value <= 0:
        raise argparse.ArgumentTypeError(f"{value} is not positive")
    return value


if __name__ == "__main__":
    sys.exit(main())
