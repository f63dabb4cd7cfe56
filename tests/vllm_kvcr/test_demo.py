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


@pytest.mark.parametrize(
    ("stage", "result", "fault"),
    [
        (DRAM_STAGE, StageResult(COLD, COLD), "no token .* DRAM pool"),
        (FILES_STAGE, FROM_DRAM, "no token .* files"),
        (
            DRAM_STAGE,
            StageResult(COLD, replace(FROM_DRAM.served, cached_tokens=0)),
            "reused only 0",
        ),
        (
            DRAM_STAGE,
            StageResult(replace(COLD, cached_tokens=32), FROM_DRAM.served),
            "not cold",
        ),
        (
            DRAM_STAGE,
            StageResult(COLD, repeated(local_deliver=7)),
            f"{TOKENS_PER_CHUNK} tokens were still in vLLM's caches",
        ),
        (
            DRAM_STAGE,
            StageResult(COLD, replace(FROM_DRAM.served, kept_tokens=32)),
            "32 tokens were still in vLLM's caches",
        ),
        (
            DRAM_STAGE,
            StageResult(COLD, replace(FROM_DRAM.served, outputs=((1, 2), (3, 5)))),
            "only 1 of 2 outputs",
        ),
        (
            DRAM_STAGE,
            StageResult(
                replace(COLD, outputs=SAME_OUTPUTS),
                replace(FROM_DRAM.served, outputs=SAME_OUTPUTS),
            ),
            "prove nothing",
        ),
    ],
)
def test_each_way_not_to_be_served_is_a_fault(
    stage: Stage, result: StageResult, fault: str
) -> None:
    faults = result.faults(stage)
    assert len(faults) == 1
    assert re.search(fault, faults[0])


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


def test_a_stage_that_dies_says_how_and_shows_the_end_of_its_log(
    tmp_path: Path,
) -> None:
    with pytest.raises(StageFailed, match=r"(?s)exit status 3.*out of luck"):
        run_program("print('out of luck', flush=True); os._exit(3)", tmp_path / "log")


def test_a_stage_without_a_result_failed(tmp_path: Path) -> None:
    with pytest.raises(StageFailed, match="exit status 0"):
        run_program("pass", tmp_path / "log")


def test_a_stage_that_hangs_is_ended_with_all_its_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those that ignore a polite request, and what the engine left in memory."""
    monkeypatch.setattr(process_group, "STOP_SECONDS", 1.0)
    heard: list[str] = []
    started = time.monotonic()
    with pytest.raises(StageFailed, match="not finished after 2 s"):
        run_program(
            """
import signal
deaf = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(60)"
child = subprocess.Popen([sys.executable, "-c", deaf])
name = "/dev/shm/vllm_offload_" + json.loads(sys.argv[1])["engine_id"] + ".mmap"
open(name, "w").close()
print(json.dumps({"doing": f"{child.pid} {name}"}), file=events)
time.sleep(60)
""",
            tmp_path / "log",
            heard.append,
            seconds=2,
        )
    assert time.monotonic() - started < 20
    pid, name = heard[0].split()
    assert not Path(name).exists()
    wait_until_dead(int(pid))


def test_processes_that_outlive_the_stage_may_finish_cleaning_up(
    tmp_path: Path,
) -> None:
    """As vLLM's engine core does when the process that started it has failed."""
    tidy = (
        "import signal, sys, time\n"
        "def stop(*_):\n"
        "    time.sleep(0.5)\n"
        "    print('cleaned up', flush=True)\n"
        "    sys.exit()\n"
        "signal.signal(signal.SIGTERM, stop)\n"
        "print('ready', flush=True)\n"
        "time.sleep(60)\n"
    )
    log = tmp_path / "log"
    heard: list[str] = []
    with pytest.raises(StageFailed, match="exit status 4"):
        run_program(
            f"""
child = subprocess.Popen([sys.executable, "-c", {tidy!r}])
while "ready" not in open({str(log)!r}).read():
    time.sleep(0.05)
print(json.dumps({{"doing": str(child.pid)}}), file=events)
events.close()
os._exit(4)
""",
            log,
            heard.append,
        )
    assert "cleaned up" in log.read_text()
    wait_until_dead(int(heard[0]))


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


def stand_in(*answers: StageResult | Exception) -> Callable[..., StageResult]:
    remaining = list(answers)

    def run(
        workload: Workload,
        stage: Stage,
        log: Path,
        *,
        tell: Callable[[str], None],
        folder: Path | None,
    ) -> StageResult:
        tell("cold, prompt 1 of 2")
        answer = remaining.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    return run


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "entry_points", lambda group, name: [object()])


def test_demo_prints_what_was_measured_and_succeeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "run_stage", stand_in(FROM_DRAM, FROM_FILES))
    log = tmp_path / "engine.log"
    assert demo.main(["--log", str(log)]) == 0
    printed = capsys.readouterr()
    cells = {
        line.strip("│ ").split("│")[0].strip(): [
            cell.strip() for cell in line.strip("│ ").split("│")[1:]
        ]
        for line in printed.out.splitlines()
        if "│" in line
    }
    assert cells["served from KVCR DRAM"] == ["1,024", "384"]
    assert cells["served from KVCR files"] == ["0", "640"]
    assert cells["computed again"] == ["16", "16"]
    assert cells["Bytes read from KVCR files"] == ["0.0 MiB", "1.2 MiB"]
    assert cells["Time to first token, cold"] == ["600 ms", "600 ms"]
    assert cells["Output equals the cold one"] == ["yes (2 of 2)", "yes (2 of 2)"]
    assert all(len(line) <= 80 for line in printed.out.splitlines())
    assert f"vLLM's log: {log}" in printed.err
    assert "KVCR files: cold, prompt 1 of 2" in printed.err


def test_demo_fails_when_a_stage_was_not_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "run_stage", stand_in(FROM_DRAM, FROM_DRAM))
    assert demo.main(["--log", str(tmp_path / "log")]) == 1
    assert "FAILED KVCR files: no token was served" in capsys.readouterr().out


def test_demo_fails_when_a_stage_has_no_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    failure = StageFailed("exit status 1; its log ends with\n  [no such thing]")
    monkeypatch.setattr(demo, "run_stage", stand_in(failure))
    log = tmp_path / "log"
    assert demo.main(["--log", str(log)]) == 1
    printed = capsys.readouterr().err
    assert "[no such thing]" in printed
    assert str(log) in printed


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
