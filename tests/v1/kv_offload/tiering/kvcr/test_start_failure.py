# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A start that fails: what is closed after it, and what has to be kept."""

from typing import Any
from unittest import mock

import numpy as np
import pytest

from tests.v1.kv_offload.tiering.kvcr.builders import make_spec
from tests.v1.kv_offload.tiering.kvcr.rig import Rig
from tests.v1.kv_offload.tiering.kvcr.standin import (
    ChannelStandin,
    KvcrStandin,
    MmapStandin,
)
from vllm.v1.kv_offload.tiering.kvcr import manager
from vllm.v1.kv_offload.tiering.kvcr.backend import pool
from vllm.v1.kv_offload.tiering.kvcr.compat import shims

OPTIONS: dict[str, Any] = {"secondary_g2_slots": 4, "control_ports": [7001]}


class Attempt:
    """A start in which one part of ``module`` raises ``error``."""

    def __init__(
        self,
        error: BaseException,
        shape: tuple[int, ...] = (4, 4096),
        module: Any = manager,
        part: str = "KVCR",
    ) -> None:
        self.memory = np.zeros(shape, np.uint8)
        self.mmap = MmapStandin()
        self.channels: list[ChannelStandin] = []
        with (
            mock.patch.multiple(
                manager,
                KVCR=KvcrStandin,
                ZmqPeerControlChannel=self._make_channel,
                mmap=self.mmap,
            ),
            mock.patch.object(module, part, mock.Mock(side_effect=error)),
            pytest.raises(type(error)) as raised,
        ):
            manager.KVCRSecondaryTierManager(
                make_spec(), memoryview(self.memory), "kvcr", **OPTIONS
            )
        assert raised.value is error

    def _make_channel(self, *arguments: Any) -> ChannelStandin:
        self.channels.append(ChannelStandin(*arguments))
        return self.channels[-1]


@pytest.mark.parametrize("shape", [(4, 4096), (4096,)], ids=["rows", "flat"])
@pytest.mark.parametrize(
    "error", [RuntimeError("no NIXL"), OSError("no device"), ValueError("no sense")]
)
def test_everything_opened_is_closed(
    error: Exception, shape: tuple[int, ...], retained: list[Any]
) -> None:
    attempt = Attempt(error, shape)
    assert [channel.closed for channel in attempt.channels] == [1]
    assert [buffer.closed for buffer in attempt.mmap.made] == [True]
    assert retained == []


@pytest.mark.parametrize(
    ("module", "part"), [(manager, "ZmqPeerControlChannel"), (pool, "populate")]
)
def test_a_pool_is_given_back(module: Any, part: str, retained: list[Any]) -> None:
    attempt = Attempt(OSError("no"), module=module, part=part)
    assert [buffer.closed for buffer in attempt.mmap.made] == [True]
    assert all(channel.closed == 1 for channel in attempt.channels)
    assert retained == []


STILL_ALIVE = [KeyboardInterrupt(), SystemExit(1)]
if shims.KVCRStartupError is not None:  # where kvcr has it
    STILL_ALIVE.append(shims.KVCRStartupError("a transfer is under way"))


@pytest.mark.parametrize("shape", [(4, 4096), (4096,)], ids=["rows", "flat"])
@pytest.mark.parametrize("error", STILL_ALIVE, ids=lambda error: type(error).__name__)
def test_what_native_code_may_touch_is_kept_and_nothing_else_touched(
    error: BaseException, shape: tuple[int, ...], retained: list[Any]
) -> None:
    attempt = Attempt(error, shape)
    assert [buffer.closed for buffer in attempt.mmap.made] == [False]
    assert [channel.closed for channel in attempt.channels] == [0]
    assert any(kept is attempt.memory for kept in retained)
    assert any(kept is attempt.mmap.made[0] for kept in retained)


@pytest.mark.parametrize(
    "wrong", [{"secondary_g2_slots": -1}, {"policy": "lfu"}, {"nonsense": 1}]
)
def test_a_bad_option_is_told_before_anything_is_opened(wrong: dict[str, Any]) -> None:
    opened = mock.Mock()
    with (
        mock.patch.multiple(
            manager, KVCR=opened, ZmqPeerControlChannel=opened, mmap=opened
        ),
        pytest.raises(ValueError),  # noqa: PT011
    ):
        Rig(**OPTIONS | wrong)
    assert opened.mock_calls == []
