# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Runs the tier's tests on every supported pair of vLLM and kvcr: ``make matrix``.

Run from the repository's root as ``python -m scripts.matrix``. The environments are
built once, below ``.matrix``. A complete run writes ``docs/compatibility.md``.
"""

import argparse
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from scripts.matrix_env import Environments, WrongEnvironment
from scripts.matrix_report import Outcome, read_junit, table, write_document
from scripts.pip import ENV
from scripts.quiet_run import CommandFailed
from scripts.setup_env import ROOT, one_at_a_time
from scripts.versions import KVCRS, VLLM, VLLMS

TESTS = Path("tests/v1/kv_offload/tiering/kvcr")
END_TO_END = Path("tests/vllm_kvcr/end_to_end.py")
FAULTS = TESTS / "faults"
MIXED = TESTS / "mixed_releases.py"
DOCUMENT = ROOT / "docs" / "compatibility.md"
IN_TREE = "in-tree"

# Far above what a pair needs; ends one that hangs beyond pytest's own time limits.
_SECONDS_PER_PAIR = 1200

# The tree is no checkout of this project, so pytest's settings go with it.
_PYTEST_IN_TREE = """[pytest]
addopts = -q --strict-markers --import-mode=importlib
pythonpath = .
timeout = 300
"""


@dataclass(frozen=True)
class Pair:
    vllm: VLLM
    kvcr: str
    in_tree: bool = False

    @property
    def name(self) -> str:
        if self.in_tree:
            return IN_TREE
        return f"{self.vllm.version}:{self.kvcr}"

    @property
    def brings_engine(self) -> bool:
        """Whether an engine runs here unless all shall: each vLLM has its turn, and
        each kvcr."""
        oldest = self.vllm == VLLMS[0]
        return self.kvcr == (KVCRS[0] if oldest else KVCRS[-1])

    @property
    def meets_another(self) -> bool:
        """Whether an engine of another kvcr is run beside this one's."""
        return self.vllm == VLLMS[-1] and not self.in_tree

    @property
    def title(self) -> str:
        title = f"vLLM {self.vllm.version}, kvcr {self.kvcr}"
        return f"{title}, in vLLM's tree" if self.in_tree else title


PAIRS = [
    *(Pair(vllm, kvcr) for vllm in VLLMS for kvcr in KVCRS),
    # As in a vLLM checkout: the folder copied over vLLM's own, no plugin.
    Pair(VLLMS[-1], KVCRS[-1], in_tree=True),
]


def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    # Ends like an interrupted one, so that no test's processes stay.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    environments = Environments(options.folder.absolute())
    environments.folder.mkdir(parents=True, exist_ok=True)
    try:
        with one_at_a_time(environments.folder / "lock"):
            started = time.monotonic()
            pythons = [
                environments.pair(p.vllm, p.kvcr, p.in_tree) for p in options.pairs
            ]
            print(f"Environments ready in {time.monotonic() - started:.0f} s.")
            outcomes = _run_all(environments, options, pythons)
    except (CommandFailed, WrongEnvironment) as failure:
        last = "\n".join(f"  {line}" for line in str(failure).splitlines()[-15:])
        print(f"Set-up failed:\n{last}\nAll of it: {environments.log}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nInterrupted; what is set up is kept.", file=sys.stderr)
        return 130
    print("\n" + table(outcomes))
    if options.pairs == PAIRS and not options.adapter_level and not options.pytest:
        nixls = {kvcr: environments.nixl_of(kvcr) for kvcr in KVCRS}
        write_document(DOCUMENT, outcomes, nixls)
        print(f"Written: {DOCUMENT.relative_to(ROOT)}")
    else:
        print("A part of the matrix only; docs/compatibility.md stays as it is.")
    return 0 if all(outcome.passed for outcome in outcomes) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--pairs",
        type=_pairs,
        default=PAIRS,
        metavar="VLLM:KVCR,...",
        help=f"only these of {' '.join(pair.name for pair in PAIRS)}",
    )
    parser.add_argument(
        "--adapter-level",
        action="store_true",
        help="leave out the tests that run an engine",
    )
    parser.add_argument(
        "--all-engines",
        action="store_true",
        help="run an engine with each kvcr, not only once for each vLLM",
    )
    parser.add_argument(
        "--faults",
        action="store_true",
        help="run the tests with processes that are killed and stopped, too",
    )
    parser.add_argument(
        "--jobs",
        type=int,
        default=min(2, len(os.sched_getaffinity(0))),
        help="pairs at a time (default: 2, or 1 on one core)",
    )
    parser.add_argument("--folder", type=Path, default=ROOT / ".matrix")
    parser.add_argument(
        "pytest", nargs="*", help="further arguments for pytest, after --"
    )
    return parser


def _pairs(text: str) -> list[Pair]:
    known = {pair.name: pair for pair in PAIRS}
    unknown = [name for name in text.split(",") if name not in known]
    if unknown:
        raise argparse.ArgumentTypeError(
            f"no such pair: {', '.join(unknown)}; there are {', '.join(known)}"
        )
    return [known[name] for name in text.split(",")]


def _run_all(
    environments: Environments, options: argparse.Namespace, pythons: Sequence[Path]
) -> list[Outcome]:
    """Run the tests of every pair, some at a time; most of their time is waiting."""
    stop = threading.Event()
    # Those with an engine take longest; started last, one would run alone.
    waiting = sorted(
        zip(options.pairs, pythons, strict=True),
        key=lambda waits: not _runs_engine(waits[0], options),
    )
    with ThreadPoolExecutor(options.jobs) as pool:
        runs = {
            pair: pool.submit(_run, environments, pair, python, options, stop)
            for pair, python in waiting
        }
        try:
            return [runs[pair].result() for pair in options.pairs]
        except BaseException:
            stop.set()
            raise


def _runs_engine(pair: Pair, options: argparse.Namespace) -> bool:
    return (
        not pair.in_tree
        and not options.adapter_level
        and (pair.brings_engine or options.all_engines)
    )


def _run(
    environments: Environments,
    pair: Pair,
    python: Path,
    options: argparse.Namespace,
    stop: threading.Event,
) -> Outcome:
    """Run the tests of one pair, and say on one line what came of it."""
    with_engine = _runs_engine(pair, options)
    name = pair.name.replace(":", "-")
    junit = environments.folder / f"{name}.xml"
    log = environments.folder / f"{name}.log"
    junit.unlink(missing_ok=True)
    command = [str(python), "-m", "pytest", str(TESTS), f"--junit-xml={junit}"]
    command += ["-p", "no:cacheprovider", "--timeout=120", *options.pytest]
    if with_engine:
        command.append(str(END_TO_END))
    if not options.faults:
        command.append(f"--ignore={FAULTS}")
    env = {}
    if pair.meets_another:
        (other,) = (version for version in KVCRS if version != pair.kvcr)
        env["KVCR_OTHER_RELEASE"] = str(environments.kvcr(other))
        command.append(str(MIXED))
    where = ROOT
    if pair.in_tree:
        where = environments.tree(pair.vllm)
        (where / "pytest.ini").write_text(_PYTEST_IN_TREE)
    started = time.monotonic()
    status = _run_bounded(command, where, log, stop, env)
    seconds = time.monotonic() - started
    outcome = read_junit(
        junit,
        vllm=f"{pair.vllm.version}{' (in tree)' if pair.in_tree else ''}",
        kvcr=pair.kvcr,
        with_engine=with_engine,
        status=status,
        seconds=seconds,
    )
    lines = [f"{pair.title:<42} {outcome.line}"]
    if not outcome.passed:
        lines += [f"    {failure}" for failure in outcome.failures[:10]]
        lines.append(f"    all of it: {log}")
    if not stop.is_set():
        print("\n".join(lines), flush=True)
    return outcome


def _run_bounded(
    command: Sequence[str],
    where: Path,
    log: Path,
    stop: threading.Event,
    further_env: Mapping[str, str] | None = None,
) -> int:
    """Run ``command`` with its output in ``log``; none of its processes stays."""
    if stop.is_set():
        return -signal.SIGINT
    env = {
        **ENV,
        "CI": "true",  # a test that would be skipped fails
        "HF_HUB_OFFLINE": "1",
        "PYTHONHASHSEED": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_TARGET_DEVICE": "cpu",
        **(further_env or {}),
    }
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            cwd=where,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        deadline = time.monotonic() + _SECONDS_PER_PAIR
        try:
            while time.monotonic() < deadline and not stop.is_set():
                with suppress(subprocess.TimeoutExpired):
                    return process.wait(timeout=1)
            return -signal.SIGALRM
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


if __name__ == "__main__":
    sys.exit(main())
