# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""NIXL's progress thread sleeps while nothing arrives."""

import time
from contextlib import closing

import psutil
import pytest

from tests.v1.kv_offload.tiering.kvcr.builders import keys
from tests.v1.kv_offload.tiering.kvcr.rig import Rig
from vllm.v1.kv_offload.tiering.kvcr.compat import nixl_thread

IDLE_S = 1.0


def share_of_a_core() -> float:
    """What all threads of this process take while they have nothing to do."""
    process = psutil.Process()
    before = process.cpu_times()
    time.sleep(IDLE_S)
    after = process.cpu_times()
    return (after.user + after.system - before.user - before.system) / IDLE_S


def rig(**options: object) -> Rig:
    return Rig(secondary_g2_slots=8, operation_timeout_ms=10_000, **options)


def test_an_idle_tier_takes_no_core_and_still_moves_blocks() -> None:
    with closing(rig()) as idle:
        assert share_of_a_core() < 0.3
        written = idle.fill(range(4))
        assert idle.result_of(idle.store(keys(4), range(4))).success
        assert idle.result_of(idle.load(keys(4), range(4, 8))).success
        assert (idle.memory[4:8] == written).all()


def test_with_no_delay_the_thread_spins_as_it_does_without_this_tier() -> None:
    with closing(rig(nixl_progress_delay_ms=0)):
        assert share_of_a_core() > 0.3


def test_a_nixl_without_this_setting_is_used_as_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from nixl import _bindings

    class Other:
        pass

    monkeypatch.setattr(_bindings, "nixlAgentConfig", Other)
    with nixl_thread.sleeping(1):
        assert _bindings.nixlAgentConfig is Other
