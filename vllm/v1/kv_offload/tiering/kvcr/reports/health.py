# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Whether the tier works, and why it does not."""

from collections.abc import Mapping
from enum import Enum

from vllm.logger import init_logger

logger = init_logger(__name__)


class State(Enum):
    HEALTHY = "healthy"
    DEGRADED = "degraded"
    """The tier works in part; the reason says what does not work."""
    FAILED = "failed"
    """KVCR is gone: every lookup misses, every job fails, and the engine recomputes."""


class Reason(Enum):
    """Why the tier is not healthy, with what an operator can do about it."""

    NONE = ("none", "")
    SOURCE_STALLED = (
        "source_stalled",
        "Peers cannot pull from this engine until it is restarted, because KVCR's "
        "thread was not scheduled for a whole operation_timeout_ms. Give the engine "
        "more CPU, or raise the option",
    )
    LANDING_FULL = (
        "landing_full",
        "Unfinished writes of peers that died or hang occupy KVCR's memory, so nothing "
        "can be pulled from peers. Restart this engine to free it",
    )
    MEMORY_UNCERTAIN = (
        "memory_uncertain",
        "A peer that does not answer may still access this memory, so it is not reused "
        "until the peer answers again or this engine restarts",
    )
    CORRUPT_BLOCKS = (
        "corrupt_blocks",
        "Peers that pull such blocks from KVCR's pool cannot notice the damage. Check "
        "the disk and restart this engine",
    )
    DISK_STALLED = (
        "disk_stalled",
        "Until the files answer again, which is tried after a pause, blocks in files "
        "are recomputed. Check the disk, or raise operation_timeout_ms if it is only "
        "slow",
    )
    DISK_FAILING = (
        "disk_failing",
        "Blocks that leave KVCR's pool are lost instead of being moved to a file. "
        "Check the disk, and restart this engine if a file was moved or replaced",
    )
    BACKEND_FAILED = (
        "backend_failed",
        "Blocks are recomputed from now on. Restart this engine to use KVCR again",
    )

    def __init__(self, label: str, advice: str) -> None:
        self.label = label
        self.advice = advice


class Health:
    """The tier's state. Only the thread that drives the tier changes it."""

    def __init__(self) -> None:
        self.state = State.HEALTHY
        self.reason = Reason.NONE
        self._degraded: list[Reason] = []
        self._reported = {(State.HEALTHY, Reason.NONE): 1}

    @property
    def failed(self) -> bool:
        return self.state is State.FAILED

    def degrade(self, reason: Reason, detail: object) -> None:
        """Note that something does not work; each reason is logged once."""
        if reason in self._degraded or self.failed:
            return
        self._degraded.append(reason)
        self._set(State.DEGRADED, reason)
        logger.warning(
            "kvcr tier is degraded (%s): %s. %s", reason.label, detail, reason.advice
        )

    def recover(self, reason: Reason) -> None:
        """Note that something works again."""
        if reason not in self._degraded or self.failed:
            return
        self._degraded.remove(reason)
        if self._degraded:
            self._set(State.DEGRADED, self._degraded[-1])
        else:
            self._set(State.HEALTHY, Reason.NONE)
        logger.info("kvcr tier: %s is over, now %s", reason.label, self.state.value)

    def fail(self, error: BaseException) -> None:
        """Note that KVCR can no longer be used, which is final."""
        if self.failed:
            return
        self._set(State.FAILED, Reason.BACKEND_FAILED)
        logger.error(
            "kvcr tier failed: %s: %s. %s",
            type(error).__name__,
            error,
            Reason.BACKEND_FAILED.advice,
        )

    @property
    def changed(self) -> bool:
        """Whether the state has changed since the last ``take``."""
        return not self._reported.get((self.state, self.reason))

    def take(self) -> Mapping[tuple[State, Reason], int]:
        """1 for the present state, 0 for those of before."""
        self._reported = dict.fromkeys(self._reported, 0)
        self._reported[self.state, self.reason] = 1
        return self._reported

    def _set(self, state: State, reason: Reason) -> None:
        self.state = state
        self.reason = reason
