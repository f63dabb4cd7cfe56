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
    """Works in part: the reason says what does not."""
    FAILED = "failed"
    """KVCR is gone: every lookup misses, every job fails, the engine recomputes."""


class Reason(Enum):
    """Why the tier is not healthy, with what an operator can do about it."""

    NONE = ("none", "")
    SOURCE_STALLED = (
        "source_stalled",
        "peers can no longer pull from this engine until it is restarted; it was not "
        "scheduled for a whole operation_timeout_ms: give it CPU, or raise the option",
    )
    LANDING_FULL = (
        "landing_full",
        "writes of peers that died or hang still own KVCR's memory, so nothing can be "
        "pulled from peers; restart this engine to get it back",
    )
    MEMORY_UNCERTAIN = (
        "memory_uncertain",
        "a peer may still write into memory that is therefore held back; it is freed "
        "once the peer is heard of, or when this engine restarts",
    )
    CORRUPT_BLOCKS = (
        "corrupt_blocks",
        (
            "read from a g3 file, they were not what was stored; peers that pull them "
            "from KVCR's pool cannot tell: check the disk and restart this engine"
        ),
    )
    DISK_STALLED = (
        "disk_stalled",
        "blocks on file are recomputed meanwhile, and the files are tried again after "
        "a pause; check their disk, or raise operation_timeout_ms if it is only slow",
    )
    DISK_FAILING = (
        "disk_failing",
        "blocks that leave KVCR's pool are lost instead of being kept in a file: check "
        "the disk, and restart this engine if a file was moved or replaced",
    )
    BACKEND_FAILED = (
        "backend_failed",
        "blocks are recomputed from here on; restart this engine to use KVCR again",
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
        """Note that something does not work; the same reason is logged once."""
        if reason in self._degraded or self.failed:
            return
        self._degraded.append(reason)
        self._set(State.DEGRADED, reason)
        logger.warning(
            "kvcr tier is degraded (%s): %s. %s", reason.label, detail, reason.advice
        )

    def recover(self, reason: Reason) -> None:
        """Note that what ``reason`` stands for works again."""
        if reason not in self._degraded or self.failed:
            return
        self._degraded.remove(reason)
        if self._degraded:
            self._set(State.DEGRADED, self._degraded[-1])
        else:
            self._set(State.HEALTHY, Reason.NONE)
        logger.info("kvcr tier: %s is over, now %s", reason.label, self.state.value)

    def fail(self, error: BaseException) -> None:
        """Note, once and for good, that KVCR can no longer be used."""
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
        """Whether the state is another one than at the last ``take``."""
        return not self._reported.get((self.state, self.reason))

    def take(self) -> Mapping[tuple[State, Reason], int]:
        """1 for the present state, 0 for those of before."""
        self._reported = dict.fromkeys(self._reported, 0)
        self._reported[self.state, self.reason] = 1
        return self._reported

    def _set(self, state: State, reason: Reason) -> None:
        self.state = state
        self.reason = reason
