# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Two real servers, one of which pulls from the other; and the demo around them."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest

from tests import peers_vllm
from tests.vllm_kvcr.test_demo import table_of
from vllm_kvcr import demo, demo_peers
from vllm_kvcr.demo_model import CHUNK_BYTES
from vllm_kvcr.demo_plan import Workload
from vllm_kvcr.peers_run import Moved, PeersResult, run
from vllm_kvcr.servers import SHARED_MEMORY, Answer, ServerFailed

SHORT = Workload(prompts=3, chunks_per_prompt=4)


@pytest.mark.timeout(600)  # where much else runs
def test_b_is_served_by_a_and_lives_on_without_it(tmp_path: Path) -> None:
    """The demo on shorter prompts: HTTP, KV events, real KVCR over real NIXL, defaults.

    A sleeps while B pulls from it, so its side of the bytes also shows that the
    metrics of an engine that sleeps are current.
    """
    before = set(SHARED_MEMORY.glob("vllm_offload_*"))
    environment = peers_vllm.environment()
    result = run(tmp_path, print, workload=SHORT, environment=environment)
    assert result.faults(SHORT) == []
    assert set(SHARED_MEMORY.glob("vllm_offload_*")) <= before


# --- the verdict -----------------------------------------------------------------

ALL = SHORT.prompt_tokens
PULLED = SHORT.chunks_per_prompt * CHUNK_BYTES


def answer(token: int, cached: int = 0, seconds: float = 0.5) -> Answer:
    return Answer((token,), ALL, cached, seconds)


SERVED = PeersResult(
    at_source=(answer(1), answer(2), answer(3)),
    introduced=answer(1),
    served=answer(2, cached=ALL - SHORT.tail_tokens),
    after_kill=answer(3),
    moved=Moved(4, 4, PULLED, PULLED),
    idle_wakeups=3,
)


def test_what_was_served_has_no_faults() -> None:
    assert SERVED.faults(SHORT) == []


@pytest.mark.parametrize(
    ("result", "fault"),
    [
        (replace(SERVED, served=answer(2)), f"B computed {ALL} tokens"),
        (replace(SERVED, after_kill=answer(4)), "only 2 of 3 outputs"),
        (replace(SERVED, after_kill=answer(3, seconds=30)), "B took 30.0 s"),
        (replace(SERVED, idle_wakeups=3000), "woke up 3000 times"),
        (replace(SERVED, moved=Moved(4, 3, PULLED, PULLED)), "A wrote 3"),
        (replace(SERVED, moved=Moved(4, 4, 0, PULLED)), "A wrote 0"),
        (
            replace(SERVED, at_source=(answer(1, 32), answer(2), answer(3))),
            "A did not have to compute",
        ),
        (
            replace(
                SERVED,
                at_source=(answer(1),) * 3,
                served=replace(SERVED.served, token_ids=(1,)),
                after_kill=answer(1),
            ),
            "prove nothing",
        ),
    ],
)
def test_each_way_not_to_be_served_is_a_fault(result: PeersResult, fault: str) -> None:
    (found,) = result.faults(SHORT)
    assert re.search(fault, found)


def test_what_one_pull_moved_is_told_from_what_was_moved_before() -> None:
    assert Moved(5, 5, 50, 50).since(Moved(1, 2, 10, 20)) == Moved(4, 3, 40, 30)
    assert Moved(4, 4, 8, 8).agree
    assert not Moved(4, 4, 8, 0).agree
    assert not Moved(0, 0, 0, 0).agree


# --- the output ------------------------------------------------------------------


@pytest.fixture
def peers_demo(monkeypatch, tmp_path) -> Callable[[PeersResult | Exception], int]:
    def start(outcome: PeersResult | Exception) -> int:
        run = Mock(side_effect=[outcome])
        monkeypatch.setattr(demo_peers, "run", run)
        monkeypatch.setattr(demo, "entry_points", lambda group, name: [object()])
        arguments = ["--peers", "--log", str(tmp_path / "log")]
        status = demo.main([*arguments, "--tier", '{"pull_timeout_ms": 2000}'])
        assert run.call_args.kwargs["tier"] == {"pull_timeout_ms": 2000}
        return status

    return start


def test_the_demo_prints_what_was_measured(peers_demo, capsys, monkeypatch) -> None:
    monkeypatch.setattr(PeersResult, "faults", lambda self: [])
    assert peers_demo(SERVED) == 0
    cells = table_of(capsys.readouterr().out)
    assert cells["computed by B"] == ["520", "8", "520"]
    assert cells["Output equals A's"] == ["yes", "yes", "yes"]
    assert cells["Bytes that A wrote"][1] == f"{PULLED:,}"
    assert cells["Bytes that B received"][1] == f"{PULLED:,}"


def test_the_demo_fails_when_nothing_was_served(peers_demo, capsys) -> None:
    assert peers_demo(replace(SERVED, served=answer(2))) == 1
    assert "FAILED B computed 520 tokens" in capsys.readouterr().out


def test_the_demo_fails_when_a_server_does(peers_demo, capsys) -> None:
    assert peers_demo(ServerFailed("server A [gave up]")) == 1
    assert "server A [gave up]" in capsys.readouterr().err
