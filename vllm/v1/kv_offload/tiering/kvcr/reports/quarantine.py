# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The ledger of memory that transfers which could not be stopped may still touch.

KVCR reports such memory as ``uncertain``, and as ``quiesced`` once it is free again. In
between it must not be used for anything else. KVCR reports inside its poll, before it
fails the operation or releases the pin; whoever handles these reads the ledger.
"""

from kvcr.types import TransferError

from vllm.v1.kv_offload.tiering.kvcr.compat import shims
from vllm.v1.kv_offload.tiering.kvcr.reports.health import Health, Reason


class Quarantine:
    """The reports that KVCR has not taken back. Exists before KVCR does.

    Args:
        is_source: Whether peers pull from this engine.
    """

    def __init__(self, health: Health, is_source: bool) -> None:
        self._health = health
        self._is_source = is_source
        self._writes: dict[int, int] = {}
        self._reads: dict[int, set[bytes]] = {}
        self._pool: dict[int, int] = {}
        self.pool_slots = 0
        """Slots of KVCR's pool into which a peer may still write."""
        self.primary_slots = 0
        """Slots of the primary tier into which a peer may still write."""

    @property
    def is_empty(self) -> bool:
        return not (self._writes or self._reads or self._pool)

    def may_write(self, operation: int) -> bool:
        """Whether a peer may still write into the primary slots of a load."""
        return operation in self._writes

    def may_read(self, keys: frozenset[bytes]) -> bool:
        """Whether a write to a peer may still read any of these blocks."""
        return any(not keys.isdisjoint(held) for held in self._reads.values())

    def report(self, error: Exception) -> None:
        """Take KVCR's ``on_resilience_event`` calls."""
        if not isinstance(error, TransferError):
            if self._is_source:
                self._health.degrade(Reason.SOURCE_STALLED, error)
            return
        uncertain = error.state == "uncertain"
        if error.source_blocks:
            self._note_source(error, uncertain)
        if error.destination_regions:
            self._note_destination(error, uncertain)
        if self.is_empty:
            self._health.recover(Reason.MEMORY_UNCERTAIN)

    def native_stopped(self) -> None:
        """Native code has let go of every buffer."""
        self._writes.clear()
        self._reads.clear()
        self._pool.clear()
        self.pool_slots = self.primary_slots = 0

    def _note_source(self, error: TransferError, uncertain: bool) -> None:
        if uncertain:
            self._reads[error.op_handle] = shims.primary_source_keys(error)
            self._degrade(len(error.source_blocks or ()), "source")
        else:
            self._reads.pop(error.op_handle, None)

    def _note_destination(self, error: TransferError, uncertain: bool) -> None:
        handle = error.op_handle
        if uncertain:
            blocks = len(error.destination_regions or ())
            if shims.writes_primary(error):
                self._writes[handle] = blocks
            else:
                self._pool[handle] = blocks
            self._degrade(blocks, "destination")
        else:
            # Undo what was reported before, whatever numbers this report contains.
            self._writes.pop(handle, None)
            self._pool.pop(handle, None)
        self.pool_slots = sum(self._pool.values())
        self.primary_slots = sum(self._writes.values())

    def _degrade(self, blocks: int, side: str) -> None:
        detail = f"{blocks} blocks are the {side} of a write that did not stop"
        self._health.degrade(Reason.MEMORY_UNCERTAIN, detail)
