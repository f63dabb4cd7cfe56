# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The command ``vllm-kvcr``: finds the subcommand's module and runs it."""

import argparse
import importlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from vllm_kvcr import __version__


@dataclass(frozen=True)
class Command:
    """A subcommand: ``main(argv)`` of a module, which is imported only when needed."""

    module: str
    summary: str


COMMANDS = {
    "demo": Command(
        "vllm_kvcr.demo", "run a small vLLM engine on the CPU, served by the KVCR tier"
    ),
    "doctor": Command(
        "vllm_kvcr.doctor.command", "check whether this machine can run a configuration"
    ),
    "guard": Command(
        "vllm_kvcr.guard", "start the KVCR service that a configuration needs"
    ),
    "hint": Command(
        "vllm_kvcr.hint", "print the hint for a prompt, from an engine's KV events"
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the subcommand that ``argv`` names and return its exit status."""
    parser = argparse.ArgumentParser(
        prog="vllm-kvcr",
        description="KVCR as a secondary tier of vLLM's tiered KV-cache offloading.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="commands:\n"
        + "\n".join(
            f"  {name:<10}{command.summary}" for name, command in COMMANDS.items()
        ),
    )
    parser.add_argument("--version", action="version", version=__version__)
    parser.add_argument("command", choices=COMMANDS, metavar="command")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="of the command")
    chosen = parser.parse_args(argv)
    try:
        module = importlib.import_module(COMMANDS[chosen.command].module)
    except ModuleNotFoundError as missing:
        print(
            f"vllm-kvcr {chosen.command}: Python module '{missing.name}' is not "
            "installed; pip install 'vllm-kvcr[cpu,demo]' installs everything that a "
            "machine without a GPU needs",
            file=sys.stderr,
        )
        return 1
    return int(module.main(chosen.arguments) or 0)


if __name__ == "__main__":
    sys.exit(main())
