# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A start that fails: what is closed after it, and what has to be kept."""

from typing import Any
from unittest import mock

import pytest

from tests.v1.kv_offload.tiering.kvcr.rig import Rig, StandinRig
from vllm.v1.kv_offload.tiering.kvcr import manager
from vllm.v1.kv_offload.tiering.kvcr.backend import pool
from vllm.v1.kv_offload.tiering.kvcr.compat import shims

OPTIONS: dict[str, Any] = {"secondary_g2_slots": 4, "control_ports": [7001]}


class Attempt(StandinRig):
    """A start of which a part raises ``error``."""

    def __init__(self, error: BaseException, **options: Any) -> None:
        with pytest.raises(type(error)) as raised:
            super().__init__(**OPTIONS | options)
        assert raised.value is error


def failing(error: BaseException) -> mock.Mock:
    return mock.Mock(side_effect=error)


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize(
    "error", [RuntimeError("no NIXL"), OSError("no device"), ValueError("no sense")]
)
def test_everything_opened_is_closed(
    error: Exception, flat: bool, retained: list[Any]
) -> None:
    attempt = Attempt(error, kvcr=failing(error), flat=flat)
    assert [channel.closed for channel in attempt.channels] == [1]
    assert [buffer.closed for buffer in attempt.mmap.made] == [True]
    assert retained == []


@pytest.mark.parametrize("part", ["channel", "populate"])
def test_a_pool_is_given_back(part: str, retained: list[Any]) -> None:
    error = OSError("no")
    if part == "channel":
        attempt = Attempt(error, channel=failing(error))
    else:
        with mock.patch.object(pool, part, failing(error)):
            attempt = Attempt(error)
    assert [buffer.closed for buffer in attempt.mmap.made] == [True]
    assert all(channel.closed == 1 for channel in attempt.channels)
    assert retained == []


STILL_ALIVE = [KeyboardInterrupt(), SystemExit(1)]
if shims.KVCRStartupError is not None:  # where kvcr has it
    STILL_ALIVE.append(shims.KVCRStartupError("a transfer is under way"))


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("error", STILL_ALIVE, ids=lambda error: type(error).__name__)
def test_what_native_code_may_touch_is_kept_and_nothing_else_touched(
    error: BaseException, flat: bool, retained: list[Any]
) -> None:
    attempt = Attempt(error, kvcr=failing(error), flat=flat)
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
