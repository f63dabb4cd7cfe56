# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Why blocks were lost: counted by reason, and logged at most once a minute."""

import time
from collections import Counter
from enum import Enum

from vllm.logger import init_logger

logger = init_logger(__name__)

_LOG_INTERVAL_S = 60.0


class Lost(Enum):
    """Why a block was not reused, and what an operator can do about it.

    The first entry of each pair is the value of the metric's label ``reason``.
    """

    NOT_RESIDENT = ("not_resident", "")
    NOT_HINTED = ("not_hinted", "")
    PULL_LIMIT = (
        "pull_limit",
        "a request was hinted more blocks than it may pull; see max_pull_blocks",
    )
    PEER_DOWN = (
        "peer_down",
        "a hinted peer did not answer and is left alone for a while; check that it "
        "runs and that its control port can be reached from here",
    )
    INTRODUCING = (
        "introducing",
        "a hinted peer is being contacted for the first time; it serves requests once "
        "it has answered",
    )
    DISK_STALLED = (
        "disk_stalled",
        "the g3 files did not answer and are left alone for a while; check the disk "
        "that they are on",
    )
    INCOMPATIBLE_PEER = (
        "incompatible_peer",
        "a hinted peer runs different releases of kvcr or nixl; all engines need the "
        "same ones",
    )
    LANDING_FULL = (
        "landing_full",
        "unfinished writes of dead peers occupy all slots for peers' blocks; restart "
        "this engine to free them",
    )
    BACKING_OFF = (
        "backing_off",
        "a block that could not be loaded is not requested again for a while",
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
        "blocks did not contain what was stored and were recomputed; check the disk of "
        "the g3 files and that no other process writes to them",
    )
    UNVERIFIED = (
        "unverified",
        "blocks from a peer were written to a g3 file before their checksum was known, "
        "so they could not be verified and were recomputed",
    )
    DISK_FAILED = ("disk_failed", "")
    STORE_FAILED = (
        "store_failed",
        "blocks could not be stored within operation_timeout_ms, or there was no room; "
        "raise secondary_g2_slots or the service's pool, or use faster or larger g3 "
        "files",
    )
    DROPPED = ("dropped", "the placement policy declined blocks")
    NOT_PINNED = (
        "not_pinned",
        "peers asked for blocks that this engine no longer has in host memory; the "
        "router's view is out of date, or cpu_bytes_to_use is too small for this load",
    )
    FOREIGN = (
        "foreign",
        "peers asked for blocks of another namespace: they run another model, dtype, "
        "layout or hash seed, or set the option namespace differently",
    )
    PIN_FAILED = ("pin_failed", "blocks could not be pinned for a peer")
    BACKEND_FAILED = ("backend_failed", "KVCR has stopped; see the error in the log")
    QUARANTINED = (
        "quarantined",
        "a peer may still write into a load's slots, so these slots are not reused "
        "yet; remote_landing=pool avoids this",
    )
    ABORTED = ("aborted", "")

    def __init__(self, label: str, advice: str) -> None:
        self.label = label
        self.advice = advice


class Losses:
    """Counts lost blocks and ignored hints, and logs them.

    ``add`` is for the hot path and only counts. ``log`` runs once a step.
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
        """Count lookups that missed; ``hinted`` of them were of hinted requests."""
        if hinted:
            self._counts[Lost.NOT_HINTED] += hinted
        if lookups > hinted:
            self._counts[Lost.NOT_RESIDENT] += lookups - hinted

    def ignore_hint(self, reason: str, detail: object) -> None:
        """Count a hint that was not used; ``reason`` comes from a bounded set."""
        self._hints[reason] += 1
        label = f"hint {reason}"
        total = self._unlogged.get(label, (0, ""))[0] + 1
        self._unlogged[label] = (total, f"the request runs without its hint: {detail}")

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
