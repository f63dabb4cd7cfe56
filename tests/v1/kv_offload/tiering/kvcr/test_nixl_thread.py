# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""NIXL's progress thread may sleep. What that saves, the benchmarks measure."""

from contextlib import closing
from typing import Any

import pytest
from nixl import _bindings

from tests.v1.kv_offload.tiering.kvcr.builders import keys
from tests.v1.kv_offload.tiering.kvcr.rig import Rig
from vllm.v1.kv_offload.tiering.kvcr.compat import nixl


@pytest.fixture
def delays(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The delay of each agent with a progress thread, in µs."""
    found = []
    make = _bindings.nixlAgent

    def made(name: str, config: Any) -> Any:
        if config.useProgThread:
            found.append(config.pthrDelay)
        return make(name, config)

    monkeypatch.setattr(_bindings, "nixlAgent", made)
    return found


@pytest.mark.parametrize(
    ("options", "delay"), [({}, 1000), ({"nixl_progress_delay_ms": 0}, 0)]
)
def test_kvcrs_agent_has_the_delay_and_moves_blocks(
    delays: list[int], options: dict[str, int], delay: int
) -> None:
    own = _bindings.nixlAgentConfig
    given = {"secondary_g2_slots": 8, "operation_timeout_ms": 10_000} | options
    with closing(Rig(**given)) as rig:
        assert delays == [delay]
        assert _bindings.nixlAgentConfig is own
        written = rig.fill(range(4))
        assert rig.result_of(rig.store(keys(4), range(4))).success
        assert rig.result_of(rig.load(keys(4), range(4, 8))).success
        assert (rig.memory[4:8] == written).all()


def test_a_nixl_without_it_is_used_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    class Other:
        pass

    monkeypatch.setattr(_bindings, "nixlAgentConfig", Other)
    with nixl.sleeping(1):
        assert _bindings.nixlAgentConfig is Other
