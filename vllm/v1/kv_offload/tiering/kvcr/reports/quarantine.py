# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""KVCR's reports on memory that a failed transfer may still touch, and on itself.

A report is ``uncertain``, when a write could not be stopped, or ``quiesced``, when it
can no longer happen. Between the two the memory must not be used for anything else:
slots of the primary tier are held back, pins are kept, and of the pool, which KVCR
itself holds back, it is counted how much is left.
"""

from kvcr.types import TransferError

from vllm.v1.kv_offload.tiering.kvcr.compat import shims
from vllm.v1.kv_offload.tiering.kvcr.peers.pins import Pins
from vllm.v1.kv_offload.tiering.kvcr.reports.health import Health, Reason
from vllm.v1.kv_offload.tiering.kvcr.transfers.staging import Landings
from vllm.v1.kv_offload.tiering.kvcr.transfers.transfers import Transfers


class Resilience:
    """Passes each report on to those whose memory it is about.

    Args:
        is_source: Whether peers pull from this engine.
    """

    def __init__(self, health: Health, pins: Pins, is_source: bool) -> None:
        self._health = health
        self._pins = pins
        self._is_source = is_source
        self._open: set[tuple[str, int]] = set()
        self.transfers: Transfers | None = None

    def report(self, error: Exception) -> None:
        """KVCR's ``on_resilience_event``, called inside its poll."""
        if isinstance(error, TransferError):
            uncertain = error.state == "uncertain"
            if error.source_blocks:
                self._source(error, uncertain)
            if error.destination_regions:
                self._destination(error, uncertain)
        elif self._is_source:
            self._health.degrade(Reason.SOURCE_STALLED, error)

    def _source(self, error: TransferError, uncertain: bool) -> None:
        self._note("source", error, uncertain)
        if uncertain:
            self._pins.uncertain(error.op_handle, shims.primary_source_keys(error))
        else:
            self._pins.quiesced(error.op_handle)

    def _destination(self, error: TransferError, uncertain: bool) -> None:
        self._note("destination", error, uncertain)
        transfers = self.transfers
        if transfers is None:
            return
        if not shims.writes_primary(error):
            if transfers.landings is not None:
                blocks = len(error.destination_regions or ())
                self._landing(transfers.landings, blocks, uncertain)
        elif uncertain:
            transfers.uncertain(error.op_handle)
        else:
            transfers.quiesced(error.op_handle)

    def _landing(self, landings: Landings, blocks: int, uncertain: bool) -> None:
        if uncertain:
            landings.uncertain(blocks)
        else:
            landings.quiesced(blocks)
        if landings.room <= 0:
            self._health.degrade(Reason.LANDING_FULL, "no landing slot is left")
        else:
            self._health.recover(Reason.LANDING_FULL)

    def _note(self, side: str, error: TransferError, uncertain: bool) -> None:
        """Degraded as long as any report is open. Handles are unique by side."""
        if uncertain:
            self._open.add((side, error.op_handle))
            blocks = len(error.source_blocks or error.destination_regions or ())
            detail = f"{blocks} blocks are the {side} of a write that did not stop"
            self._health.degrade(Reason.MEMORY_UNCERTAIN, detail)
            return
        self._open.discard((side, error.op_handle))
        if not self._open:
            self._health.recover(Reason.MEMORY_UNCERTAIN)
