# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Several real servers on one machine, part by part: ``python -m tests.fleet [PART]``.

The exit status is zero only if each part's is. A part with options of its own is also a
module: ``python -m tests.fleet.first_contact --starts 3``.
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence

from tests.fleet import dynamo, first_contact, guard, ranks, router
from vllm_kvcr.demo_console import termination_interrupts

PARTS: dict[str, tuple[Callable[[Sequence[str]], int], str]] = {
    "router": (router.main, "the example's router in front of two servers"),
    "dynamo": (dynamo.main, "Dynamo's router in front of two engines"),
    "ranks": (ranks.main, "a server pulls from another one's second rank"),
    "guard": (guard.main, "a pool that outlives its server"),
    "first-contact": (first_contact.main, "two servers meet, twenty times"),
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.fleet",
        description="Several real servers on one machine, part by part.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="parts:\n"
        + "\n".join(f"  {name:<15}{summary}" for name, (_, summary) in PARTS.items()),
    )
    parser.add_argument(
        "parts", nargs="*", metavar="part", help="which (default: all of them)"
    )
    parser.add_argument(
        "--starts", type=int, default=20, help="of first-contact (default: %(default)s)"
    )
    options = parser.parse_args(argv)
    unknown = set(options.parts) - PARTS.keys()
    if unknown:
        parser.error(f"no part is called {', '.join(sorted(unknown))}")
    failed = []
    # Whoever waits for minutes wants to see each line when it is printed.
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    for name in options.parts or PARTS:
        part, summary = PARTS[name]
        print(f"== {name}: {summary}", flush=True)
        started = time.monotonic()
        arguments = ["--starts", str(options.starts)] if name == "first-contact" else []
        with termination_interrupts():
            status = part(arguments)
        print(
            f"== {name}: {'FAILED' if status else 'passed'} in "
            f"{time.monotonic() - started:.0f} s",
            flush=True,
        )
        if status:
            failed.append(name)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
