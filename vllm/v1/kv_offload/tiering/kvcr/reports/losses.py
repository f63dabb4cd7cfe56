# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""How blocks were lost: counted by reason, and logged now and then."""

import time
from collections import Counter
from enum import Enum

from vllm.logger import init_logger

logger = init_logger(__name__)

_LOG_INTERVAL_S = 60.0


class Lost(Enum):
    """How a block was not reused, with what an operator can do about it.

    The first entry of each pair is the metric's label ``reason``.
    """

    NOT_RESIDENT = ("not_resident", "")
    NOT_HINTED = ("not_hinted", "")
    PULL_LIMIT = (
        "pull_limit",
        "a request was hinted more blocks than it may pull; see max_pull_blocks",
    )
    PEER_DOWN = (
        "peer_down",
        "a hinted peer did not answer lately and is left alone for a while; check "
        "that it runs and that its control port can be reached from here",
    )
    INTRODUCING = (
        "introducing",
        "a hinted peer was contacted for the first time; requests are served from it "
        "once it has answered",
    )
    DISK_STALLED = (
        "disk_stalled",
        "the g3 files did not answer lately and are left alone for a while; check "
        "their disk",
    )
    INCOMPATIBLE_PEER = (
        "incompatible_peer",
        "a hinted peer runs other releases of kvcr or nixl; both engines need the same",
    )
    LANDING_FULL = (
        "landing_full",
        "peers that died still own KVCR's memory; restart this engine",
    )
    BACKING_OFF = (
        "backing_off",
        "a block that could not be loaded is not tried again for a while",
    )
    GONE = ("gone", "")
    UNAWAITED = ("unawaited", "")
    TIMED_OUT = (
        "timed_out",
        "a peer did not deliver within pull_timeout_ms, or a file within "
        "operation_timeout_ms; check the peer or the disk, or raise the option",
    )
    LOAD_FAILED = (
        "load_failed",
        "blocks could not be loaded: the peer no longer had them, or KVCR could not "
        "read or copy them",
    )
    CORRUPT = (
        "corrupt",
        "blocks did not hold what was stored and were recomputed; check the g3 files' "
        "disk and that no other process writes to them",
    )
    UNVERIFIED = (
        "unverified",
        "blocks of a peer went to a g3 file before their checksum was known, so that "
        "nobody could tell whether they are right, and were recomputed",
    )
    DISK_FAILED = ("disk_failed", "")
    STORE_FAILED = (
        "store_failed",
        "blocks could not be stored in operation_timeout_ms or found no room; raise "
        "secondary_g2_slots, the service's pool, or the g3 files' speed or size",
    )
    DROPPED = ("dropped", "the placement policy declined blocks")
    NOT_PINNED = (
        "not_pinned",
        "peers asked for blocks that this engine no longer has in host memory; the "
        "router's view is behind, or cpu_bytes_to_use is small for this load",
    )
    FOREIGN = (
        "foreign",
        "peers asked for blocks of another namespace: they run another model, dtype, "
        "layout or hash seed, or set the option namespace differently",
    )
    PIN_FAILED = ("pin_failed", "blocks could not be pinned for a peer")
    BACKEND_FAILED = ("backend_failed", "KVCR is gone; see the error logged then")
    QUARANTINED = (
        "quarantined",
        "a peer may still write into a load's slots, so they are held back; "
        "remote_landing=pool avoids it",
    )
    ABORTED = ("aborted", "")

    def __init__(self, label: str, advice: str) -> None:
        self.label = label
        self.advice = advice


class Losses:
    """Counts what was lost and says so now and then.

    ``add`` is for the hot path: it only counts. ``log`` runs once a step.
    """

    def __init__(self) -> None:
        self._counts: Counter[Lost] = Counter()
        self._hints: Counter[str] = Counter()
        self._unlogged: dict[str, tuple[int, str]] = {}
        self._logged_at: dict[str, float] = {}

    def add(self, reason: Lost, blocks: int = 1, detail: str = "") -> None:
        self._counts[reason] += blocks
        if reason.advice:
            total = self._unlogged.get(reason.label, (0, ""))[0] + blocks
            text = f"{reason.advice} ({detail})" if detail else reason.advice
            self._unlogged[reason.label] = (total, text)

    def add_misses(self, lookups: int, hinted: int) -> None:
        """Count lookups that missed, ``hinted`` of them of hinted requests."""
        if hinted:
            self._counts[Lost.NOT_HINTED] += hinted
        if lookups > hinted:
            self._counts[Lost.NOT_RESIDENT] += lookups - hinted

    def ignore_hint(self, reason: str, detail: object) -> None:
        """Count a hint that was not used; ``reason`` comes from a bounded set."""
        self._hints[reason] += 1
        label = f"hint {reason}"
        total = self._unlogged.get(label, (0, ""))[0] + 1
        self._unlogged[label] = (total, f"served without it: {detail}")

    def log(self) -> None:
        """Log each reason's losses, each at most once a minute."""
        if not self._unlogged:
            return
        now = time.monotonic()
        for label, (count, text) in list(self._unlogged.items()):
            if now - self._logged_at.get(label, -_LOG_INTERVAL_S) < _LOG_INTERVAL_S:
                continue
            self._logged_at[label] = now
            del self._unlogged[label]
            logger.warning("kvcr tier: %s x%d: %s", label, count, text)

    @property
    def pending(self) -> bool:
        """Whether anything was counted since the last ``take``."""
        return bool(self._counts or self._hints)

    def take(self) -> tuple[dict[str, int], dict[str, int]]:
        """Counts since the last call: blocks by reason, hints by reason."""
        if not self.pending:
            return {}, {}
        lost = {reason.label: count for reason, count in self._counts.items()}
        hints = dict(self._hints)
        self._counts.clear()
        self._hints.clear()
        return lost, hints
