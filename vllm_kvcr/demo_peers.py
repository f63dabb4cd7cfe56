# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Shows two real OpenAI servers, one of which pulls KV blocks from the other.

The exit status is zero only if B computed no more than the end of a prompt that A had
computed, every output equals A's, both sides count the same bytes, and B still answers
when A is gone.
"""

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from vllm_kvcr.demo_console import conclude, shown, termination_interrupts
from vllm_kvcr.peers_run import PeersResult, run
from vllm_kvcr.servers import Answer, ServerFailed

TITLE = "Peers"


def show(
    progress: Console, log: Path, folder: Path | None, tier: Mapping[str, Any]
) -> int:
    """Run both servers, print the results and return the exit status."""
    scratch = tempfile.TemporaryDirectory(prefix="vllm-kvcr-demo-", dir=folder)
    try:
        with termination_interrupts(), scratch, shown(progress, TITLE) as tell:
            result = run(Path(scratch.name), tell, tier=tier, log=log)
    except ServerFailed as failure:
        progress.print(f"{TITLE}: {failure}", markup=False, soft_wrap=True)
        progress.print(f"The whole log: {log}", soft_wrap=True)
        return 1
    except KeyboardInterrupt:
        progress.print("Interrupted; the servers have been stopped.")
        return 130

    return conclude(
        table(result),
        result.faults(),
        "B computed only the end of the prompt that A had computed, and every output "
        "equals A's.",
    )


def table(result: PeersResult) -> Table:
    """A table with a column for each request to B and a row for each measure."""
    shown_table = Table(
        title="Prompts that A has computed, sent to B with a hint that names A"
    )
    for title in ("", "first contact", "served from A", "A killed"):
        shown_table.add_column(title, justify="right" if title else "left")
    rows: list[tuple[str, Callable[[Answer, Answer], str]]] = [
        ("Prompt tokens", lambda cold, answer: f"{answer.prompt_tokens:,}"),
        ("  from A", lambda cold, answer: f"{answer.cached_tokens:,}"),
        ("  computed by B", lambda cold, answer: f"{answer.computed_tokens:,}"),
        ("Time at A, cold", lambda cold, answer: _milliseconds(cold)),
        ("Time at B", lambda cold, answer: _milliseconds(answer)),
        (
            "Output equals A's",
            lambda cold, answer: "yes" if cold.token_ids == answer.token_ids else "NO",
        ),
    ]
    pairs = list(zip(result.at_source, result.at_target, strict=True))
    for name, cell in rows:
        shown_table.add_row(name, *(cell(cold, answer) for cold, answer in pairs))
    moved = result.moved
    shown_table.add_row("Bytes that A wrote", "", f"{moved.bytes_written:,}", "")
    shown_table.add_row("Bytes that B received", "", f"{moved.bytes_delivered:,}", "")
    shown_table.add_row("A's wake-ups, idle", "", f"{result.idle_wakeups:,}", "")
    return shown_table


def _milliseconds(answer: Answer) -> str:
    return f"{answer.seconds * 1000:,.0f} ms"
