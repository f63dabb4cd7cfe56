# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The demo around its engine: verdict, processes, output. No vLLM is started."""

import os
import re
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from vllm_kvcr import demo, process_group
from vllm_kvcr.demo_plan import (
    BLOCKS_PER_CHUNK,
    TOKENS_PER_BLOCK,
    TOKENS_PER_CHUNK,
    Moved,
    Pass,
    Stage,
    StageResult,
    Workload,
    stages,
)
from vllm_kvcr.demo_process import StageFailed, require_direct_io, run_stage

CHUNK_BYTES = 1 << 18
COLD = Pass(
    prompt_tokens=2 * (4 * TOKENS_PER_CHUNK + 8),
    cached_tokens=0,
    kept_tokens=0,
    tier_bytes_read=0,
    seconds_to_first_token=(0.5, 0.7),
    outputs=((1, 2), (3, 4)),
    moved={"local_fill": Moved(8, 8 * CHUNK_BYTES)},
)


def repeated(**moved_chunks: int) -> Pass:
    return replace(
        COLD,
        cached_tokens=8 * TOKENS_PER_CHUNK,
        moved={
            name: Moved(chunks, chunks * CHUNK_BYTES)
            for name, chunks in moved_chunks.items()
        },
    )


FROM_DRAM = StageResult(COLD, repeated(local_deliver=8))
FROM_FILES = StageResult(COLD, repeated(local_deliver=3, g3_deliver=5))
DRAM_STAGE = Stage("KVCR DRAM", pool_chunks=8)
FILES_STAGE = Stage("KVCR files", pool_chunks=3, file_chunks=8)


@pytest.mark.parametrize("prompts", [3, 4, 7])
@pytest.mark.parametrize("chunks_per_prompt", [4, 16, 17])
def test_caches_hold_one_prompt_and_not_two(
    prompts: int, chunks_per_prompt: int
) -> None:
    work = Workload(prompts=prompts, chunks_per_prompt=chunks_per_prompt)
    tokens = work.prompt_tokens + work.output_tokens
    usable_tokens = (work.cache_blocks - 1) * TOKENS_PER_BLOCK
    assert tokens <= usable_tokens < 2 * chunks_per_prompt * TOKENS_PER_CHUNK
    assert chunks_per_prompt <= work.primary_chunks < 2 * chunks_per_prompt
    in_pool, in_files = stages(work)
    assert in_pool.pool_chunks >= work.chunks
    assert not in_pool.file_chunks
    # A store may not evict its own prompt's chunks.
    assert chunks_per_prompt < in_files.pool_chunks < work.chunks
    assert in_files.file_chunks >= work.chunks - in_files.pool_chunks
    assert TOKENS_PER_CHUNK == TOKENS_PER_BLOCK * BLOCKS_PER_CHUNK
    assert work.tail_tokens < TOKENS_PER_CHUNK


def test_tokens_are_attributed_to_where_the_bytes_came_from() -> None:
    assert FROM_DRAM.tokens_from_dram == 8 * TOKENS_PER_CHUNK
    assert FROM_DRAM.tokens_from_files == 0
    assert FROM_FILES.tokens_from_dram == 3 * TOKENS_PER_CHUNK
    assert FROM_FILES.tokens_from_files == 5 * TOKENS_PER_CHUNK
    through_the_pool = StageResult(COLD, repeated(g3_fill=5, local_deliver=8))
    assert through_the_pool.from_files == FROM_FILES.from_files
    assert through_the_pool.from_dram == FROM_FILES.from_dram


def test_a_stage_that_was_served_has_no_faults() -> None:
    assert FROM_DRAM.faults(DRAM_STAGE) == []
    assert FROM_FILES.faults(FILES_STAGE) == []


SAME_OUTPUTS = ((1, 2), (1, 2))


def served(cold: Pass = COLD, **changes: Any) -> StageResult:
    return StageResult(cold, replace(FROM_DRAM.served, **changes))


@pytest.mark.parametrize(
    ("stage", "result", "fault"),
    [
        (DRAM_STAGE, StageResult(COLD, COLD), "no token .* DRAM pool"),
        (FILES_STAGE, FROM_DRAM, "no token .* files"),
        (DRAM_STAGE, served(cached_tokens=0), "reused only 0"),
        (DRAM_STAGE, served(replace(COLD, cached_tokens=32)), "not cold"),
        (
            DRAM_STAGE,
            StageResult(COLD, repeated(local_deliver=7)),
            f"{TOKENS_PER_CHUNK} tokens were still in vLLM's caches",
        ),
        (DRAM_STAGE, served(kept_tokens=32), "32 tokens were still in vLLM's caches"),
        (DRAM_STAGE, served(outputs=((1, 2), (3, 5))), "only 1 of 2 outputs"),
        (
            DRAM_STAGE,
            served(replace(COLD, outputs=SAME_OUTPUTS), outputs=SAME_OUTPUTS),
            "prove nothing",
        ),
    ],
)
def test_each_way_not_to_be_served_is_a_fault(
    stage: Stage, result: StageResult, fault: str
) -> None:
    (found,) = result.faults(stage)
    assert re.search(fault, found)


def run_program(
    source: str, log: Path, tell: Callable[[str], None] = print, seconds: float = 30
) -> StageResult:
    preamble = "import json, os, sys, subprocess, time\n"
    preamble += "events = open(int(sys.argv[2]), 'w', buffering=1)\n"
    return run_stage(
        Workload(),
        DRAM_STAGE,
        log,
        tell=tell,
        seconds=seconds,
        folder=log.parent,
        program=["-c", preamble + source],
    )


def test_events_and_the_result_reach_the_caller(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("before\n")
    heard: list[str] = []
    result = run_program(
        f"""
assert json.loads(sys.argv[1])["stage"]["title"] == "KVCR DRAM"
assert os.environ["VLLM_PLUGINS"] == "kvcr"
print("what the engine prints", flush=True)
print(json.dumps({{"doing": "this"}}), file=events)
print(json.dumps({{"doing": "that"}}), file=events)
print(json.dumps({{"result": {asdict(FROM_FILES)!r}}}), file=events)
""",
        log,
        heard.append,
    )
    assert result == FROM_FILES
    assert heard == ["this", "that"]
    assert log.read_text() == "before\nwhat the engine prints\n"
    assert os.listdir(tmp_path) == ["log"]


@pytest.mark.parametrize(
    ("program", "says"),
    [
        ("print('out of luck', flush=True); os._exit(3)", "exit status 3.*out of luck"),
        ("pass", "exit status 0"),
        ("time.sleep(60)", "not finished after 2 s"),
    ],
)
def test_a_stage_that_dies_or_hangs_or_has_no_result_says_so_and_shows_its_log(
    program: str, says: str, tmp_path: Path
) -> None:
    with pytest.raises(StageFailed, match=f"(?s){says}"):
        run_program(program, tmp_path / "log", seconds=2 if "sleep" in program else 30)


TIDY = """
import signal, sys, time
def stop(*_):
    time.sleep(0.5)
    print("cleaned up", flush=True)
    sys.exit()
signal.signal(signal.SIGTERM, stop)
print("ready", flush=True)
time.sleep(60)
"""
DEAF = TIDY.replace("stop)", "signal.SIG_IGN)")


def test_what_outlives_a_stage_may_clean_up_and_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Processes, one of which ignores a polite request, and what is left in memory."""
    monkeypatch.setattr(process_group, "STOP_SECONDS", 2.0)
    log = tmp_path / "log"
    heard: list[str] = []
    with pytest.raises(StageFailed, match="exit status 4"):
        run_program(
            f"""
pids = [subprocess.Popen([sys.executable, "-c", c]).pid for c in {[TIDY, DEAF]!r}]
while open({str(log)!r}).read().count("ready") < 2:
    time.sleep(0.05)
name = "/dev/shm/vllm_offload_" + json.loads(sys.argv[1])["engine_id"] + ".mmap"
open(name, "w").close()
print(json.dumps({{"doing": f"{{pids[0]}} {{pids[1]}} {{name}}"}}), file=events)
events.close()
os._exit(4)
""",
            log,
            heard.append,
        )
    *pids, name = heard[0].split()
    assert log.read_text().count("cleaned up") == 1
    assert not Path(name).exists()
    for pid in pids:
        wait_until_dead(int(pid))


def wait_until_dead(pid: int) -> None:
    """Until it no longer executes: nobody may be there to reap it."""
    deadline = time.monotonic() + 10
    with suppress(FileNotFoundError):
        while Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "Z":
            assert time.monotonic() < deadline
            time.sleep(0.05)


def test_a_folder_without_direct_io_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    require_direct_io(tmp_path)
    assert os.listdir(tmp_path) == []
    real_open = os.open

    def without_direct_io(path: Path, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return real_open(path, flags, mode)

    monkeypatch.setattr(os, "open", without_direct_io)
    with pytest.raises(StageFailed, match=f"{tmp_path}.*--folder"):
        require_direct_io(tmp_path)


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "entry_points", lambda group, name: [object()])


@pytest.fixture
def run_demo(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., int]:
    """The demo with these for its stages' results."""

    def run_demo(*results: StageResult | Exception) -> int:
        remaining = iter(results)

        def run(*_: object, tell: Callable[[str], None], folder: object) -> StageResult:
            tell("cold, prompt 1 of 2")
            result = next(remaining)
            if isinstance(result, Exception):
                raise result
            return result

        monkeypatch.setattr(demo, "run_stage", run)
        return demo.main(["--log", str(tmp_path / "log")])

    return run_demo


def table_of(printed: str) -> dict[str, list[str]]:
    """The cells of each row that was printed, by the first one."""
    rows = [line.strip("│ ").split("│") for line in printed.splitlines() if "│" in line]
    return {first.strip(): [cell.strip() for cell in row] for first, *row in rows}


def test_demo_prints_what_was_measured_and_succeeds(run_demo, tmp_path, capsys) -> None:
    assert run_demo(FROM_DRAM, FROM_FILES) == 0
    printed = capsys.readouterr()
    cells = table_of(printed.out)
    assert cells["served from KVCR DRAM"] == ["1,024", "384"]
    assert cells["served from KVCR files"] == ["0", "640"]
    assert cells["computed again"] == ["16", "16"]
    assert cells["Bytes read from KVCR files"] == ["0.0 MiB", "1.2 MiB"]
    assert cells["Time to first token, cold"] == ["600 ms", "600 ms"]
    assert cells["Output equals the cold one"] == ["yes (2 of 2)", "yes (2 of 2)"]
    assert all(len(line) <= 80 for line in printed.out.splitlines())
    assert f"vLLM's log: {tmp_path / 'log'}" in printed.err
    assert "KVCR files: cold, prompt 1 of 2" in printed.err


def test_demo_fails_when_a_stage_was_not_served(run_demo, capsys) -> None:
    assert run_demo(FROM_DRAM, FROM_DRAM) == 1
    assert "FAILED KVCR files: no token was served" in capsys.readouterr().out


def test_demo_fails_when_a_stage_has_no_result(run_demo, tmp_path, capsys) -> None:
    failure = StageFailed("exit status 1; its log ends with\n  [no such thing]")
    assert run_demo(failure) == 1
    printed = capsys.readouterr().err
    assert "[no such thing]" in printed
    assert str(tmp_path / "log") in printed


def test_demo_that_is_terminated_stops_its_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = signal.getsignal(signal.SIGTERM)
    stopped: list[bool] = []

    def run(*_: object, **__: object) -> StageResult:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(10)
        finally:
            stopped.append(True)
        return FROM_DRAM

    monkeypatch.setattr(demo, "run_stage", run)
    assert demo.main(["--log", str(tmp_path / "log")]) == 130
    assert stopped == [True]
    assert "Interrupted" in capsys.readouterr().err
    assert signal.getsignal(signal.SIGTERM) is before


def test_demo_says_when_it_is_not_installed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "entry_points", lambda group, name: [])
    assert demo.main([]) == 1
    assert "not installed" in capsys.readouterr().err
