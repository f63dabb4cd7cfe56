# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Runs a real vLLM engine on the CPU with the KVCR tier: ``python -m vllm_kvcr.demo``.

Distinct long prompts run cold. They run again when neither vLLM's KV cache nor its
primary tier holds them any more, but only KVCR: in its DRAM pool and, on a second
engine whose pool is too small, in files over NIXL's POSIX backend. The exit status is
zero only if tokens were served from both, and every output equals the cold one.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import entry_points
from pathlib import Path

from rich.console import Console
from rich.table import Table

from vllm_kvcr import demo_peers
from vllm_kvcr.demo_console import conclude, new_log, shown, termination_interrupts
from vllm_kvcr.demo_plan import Stage, StageResult, Workload, stages
from vllm_kvcr.demo_process import StageFailed, run_stage


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="vllm-kvcr demo",
        description="A real vLLM engine on the CPU, served by the KVCR tier.",
    )
    parser.add_argument(
        "--folder",
        type=Path,
        help="for temporary files, on a disk (default: the system's temporary folder)",
    )
    parser.add_argument(
        "--log", type=Path, help="for vLLM's output (default: a new temporary file)"
    )
    parser.add_argument(
        "--peers",
        action="store_true",
        help="show two OpenAI servers instead, one of which pulls from the other; on a "
        "machine with few cores this needs vLLM 0.33 or later",
    )
    parser.add_argument(
        "--tier",
        type=json.loads,
        default={},
        metavar="JSON",
        help="with --peers: further options of the kvcr tier",
    )
    options = parser.parse_args(argv)
    progress = Console(stderr=True)
    if not entry_points(group="vllm.general_plugins", name="kvcr"):
        progress.print(
            "vllm-kvcr is not installed for this Python, so vLLM would not find it"
        )
        return 1
    log = options.log or new_log()
    log.write_bytes(b"")
    progress.print(f"vLLM's log: {log}", soft_wrap=True)
    if options.peers:
        return demo_peers.show(progress, log, options.folder, options.tier)

    workload = Workload()
    results: list[tuple[Stage, StageResult]] = []
    try:
        with termination_interrupts():
            for stage in stages(workload):
                with shown(progress, stage.title) as tell:
                    result = run_stage(
                        workload, stage, log, tell=tell, folder=options.folder
                    )
                results.append((stage, result))
    except StageFailed as failure:
        progress.print(f"{stage.title}: {failure}", markup=False, soft_wrap=True)
        progress.print(f"The whole log: {log}", soft_wrap=True)
        return 1
    except KeyboardInterrupt:
        progress.print("Interrupted; the engine has been stopped.")
        return 130

    faults = [
        f"{stage.title}: {fault}"
        for stage, result in results
        for fault in result.faults(stage)
    ]
    return conclude(
        table(results),
        faults,
        "Prompts were served from KVCR's DRAM and from its files, and every output "
        "equals the cold one.",
    )


def table(results: Sequence[tuple[Stage, StageResult]]) -> Table:
    """A table with a column for each stage and a row for each measure."""
    shown = Table(title="Prompts run cold, then again when only KVCR holds them")
    shown.add_column()
    for stage, _ in results:
        shown.add_column(f"from {stage.title}", justify="right")

    rows: list[tuple[str, Callable[[StageResult], str]]] = [
        ("Prompts", lambda r: f"{len(r.cold.outputs)}"),
        ("Prompt tokens", lambda r: f"{r.served.prompt_tokens:,}"),
        ("  served from KVCR DRAM", lambda r: f"{r.tokens_from_dram:,}"),
        ("  served from KVCR files", lambda r: f"{r.tokens_from_files:,}"),
        ("  still in vLLM's own caches", lambda r: f"{r.tokens_from_vllm:,}"),
        (
            "  computed again",
            lambda r: f"{r.served.prompt_tokens - r.served.cached_tokens:,}",
        ),
        (
            "Bytes stored in KVCR DRAM",
            lambda r: _mib(r.cold.operation("local_fill").bytes),
        ),
        ("Bytes moved from there to files", lambda r: _mib(r.moved_to_files.bytes)),
        ("Bytes read from KVCR DRAM", lambda r: _mib(r.from_dram.bytes)),
        ("Bytes read from KVCR files", lambda r: _mib(r.from_files.bytes)),
        (
            "Time to first token, cold",
            lambda r: _milliseconds(r.cold.seconds_to_first_token),
        ),
        (
            "Time to first token, served",
            lambda r: _milliseconds(r.served.seconds_to_first_token),
        ),
        (
            "Output equals the cold one",
            lambda r: (
                ("yes" if r.equal_outputs == len(r.cold.outputs) else "NO")
                + f" ({r.equal_outputs} of {len(r.cold.outputs)})"
            ),
        ),
    ]
    for name, show in rows:
        shown.add_row(name, *(show(result) for _, result in results))
    shown.caption = "Times are medians over the prompts."
    return shown


def _mib(size: int) -> str:
    return f"{size / 2**20:,.1f} MiB"


def _milliseconds(seconds: Sequence[float]) -> str:
    return f"{statistics.median(seconds) * 1000:,.0f} ms"


if __name__ == "__main__":
    sys.exit(main())
