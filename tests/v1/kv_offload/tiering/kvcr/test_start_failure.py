# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A start that fails: what is closed after it, and what has to be kept."""

from typing import Any
from unittest import mock

import numpy as np
import pytest

from tests.v1.kv_offload.tiering.kvcr.builders import make_spec
from tests.v1.kv_offload.tiering.kvcr.rig import StandinRig
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
    """A start in which one part raises ``error``."""

    def __init__(
        self,
        error: BaseException,
        part: str = "KVCR",
        shape: tuple[int, ...] = (4, 4096),
    ) -> None:
        self.memory = np.zeros(shape, np.uint8)
        self.mmap = MmapStandin()
        self.channels: list[ChannelStandin] = []
        parts = {
            "KVCR": KvcrStandin,
            "ZmqPeerControlChannel": self._make_channel,
            "mmap": self.mmap,
        }
        parts[part] = mock.Mock(side_effect=error)
        with (
            mock.patch.multiple(manager, **parts),
            pytest.raises(type(error)) as raised,
        ):
            manager.KVCRSecondaryTierManager(
                make_spec(), memoryview(self.memory), "kvcr", **OPTIONS
            )
        assert raised.value is error

    def _make_channel(self, *arguments: Any) -> ChannelStandin:
        self.channels.append(ChannelStandin(*arguments))
        return self.channels[-1]


@pytest.mark.parametrize(
    "error", [RuntimeError("no NIXL"), OSError("no device"), ValueError("no sense")]
)
def test_everything_opened_is_closed(error: Exception, retained: list[Any]) -> None:
    attempt = Attempt(error)
    assert [channel.closed for channel in attempt.channels] == [1]
    assert [buffer.closed for buffer in attempt.mmap.made] == [True]
    assert retained == []


def test_a_channel_that_cannot_be_had_leaves_no_pool(retained: list[Any]) -> None:
    attempt = Attempt(OSError("address in use"), "ZmqPeerControlChannel")
    assert [buffer.closed for buffer in attempt.mmap.made] == [True]
    assert retained == []


def test_a_pool_that_cannot_be_populated_is_given_back(retained: list[Any]) -> None:
    made = MmapStandin()
    with (
        mock.patch.object(manager, "mmap", made),
        mock.patch.object(pool, "_populate", side_effect=OSError("no memory")),
        pytest.raises(OSError, match="no memory"),
    ):
        manager.KVCRSecondaryTierManager(
            make_spec(),
            memoryview(np.zeros((4, 4096), np.uint8)),
            "kvcr",
            secondary_g2_slots=4,
        )
    assert [buffer.closed for buffer in made.made] == [True]
    assert retained == []


STILL_ALIVE = [KeyboardInterrupt(), SystemExit(1)]
if issubclass(shims.KVCRStartupError, RuntimeError):  # where kvcr has it
    STILL_ALIVE.append(shims.KVCRStartupError("a transfer is under way"))


@pytest.mark.parametrize("error", STILL_ALIVE, ids=lambda error: type(error).__name__)
def test_what_native_code_may_touch_is_kept_and_nothing_else_touched(
    error: BaseException, retained: list[Any]
) -> None:
    attempt = Attempt(error)
    assert [buffer.closed for buffer in attempt.mmap.made] == [False]
    assert [channel.closed for channel in attempt.channels] == [0]
    assert any(kept is attempt.memory for kept in retained)
    assert any(kept is attempt.mmap.made[0] for kept in retained)


@pytest.mark.parametrize("error", [RuntimeError("no NIXL"), *STILL_ALIVE])
def test_a_flat_primary_fails_the_same_way(
    error: BaseException, retained: list[Any]
) -> None:
    attempt = Attempt(error, shape=(4096,))
    kept = error in STILL_ALIVE
    assert [buffer.closed for buffer in attempt.mmap.made] == [not kept]
    assert any(each is attempt.memory for each in retained) == kept


def test_a_bad_option_is_told_before_anything_is_opened() -> None:
    with mock.patch.object(manager, "KVCR") as kvcr:
        for options in ({"secondary_g2_slots": -1}, {"policy": "lfu"}, {"nonsense": 1}):
            made = MmapStandin()
            with mock.patch.object(manager, "mmap", made), pytest.raises(ValueError):  # noqa: PT011
                manager.KVCRSecondaryTierManager(
                    make_spec(),
                    memoryview(np.zeros((4, 4096), np.uint8)),
                    "kvcr",
                    **OPTIONS | options,
                )
            assert made.made == []
    assert not kvcr.called


def test_the_stand_ins_are_what_a_good_start_uses() -> None:
    rig = StandinRig(**OPTIONS)
    assert isinstance(rig.kvcr, KvcrStandin)
    assert len(rig.mmap.made) == len(rig.channels) == 1
