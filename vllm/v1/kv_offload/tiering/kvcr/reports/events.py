# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""KVCR's inventory as vLLM's KV events."""

from kvcr.types import CacheTier, InventoryEvent

from vllm.v1.kv_offload.base import Locality, OffloadingEvent
from vllm.v1.kv_offload.tiering.kvcr.compat.vocabulary import MEDIA
from vllm.v1.kv_offload.tiering.kvcr.keys import KeyCodec

OWNERSHIP = "kvcr"


class Inventory:
    """Collects what KVCR reports until vLLM takes it.

    KVCR reports on the thread that calls into it, so this needs no lock.

    Args:
        publishes: Whether vLLM wants events at all.
    """

    def __init__(
        self, codec: KeyCodec, locality: Locality | None, *, publishes: bool
    ) -> None:
        self._publishes = publishes
        self.file_events = 0
        """Grows whenever a block enters or leaves a file."""
        self._codec = codec
        self._locality = locality
        self._events: list[OffloadingEvent] = []

    @property
    def pending(self) -> bool:
        return bool(self._events)

    def report(self, event: InventoryEvent) -> None:
        """KVCR's inventory sink."""
        if event.tier is CacheTier.G3:
            self.file_events += 1
        medium = MEDIA[event.tier]
        if medium is None or not self._publishes:
            return
        keys = [self._codec.offload_key(key) for key in event.keys]
        self._events.append(
            OffloadingEvent(
                keys=[key for key in keys if key is not None],
                medium=medium,
                removed=event.removed,
                locality=self._locality,
                ownership=OWNERSHIP,
                removal_expected=True,
            )
        )

    def take(self) -> list[OffloadingEvent]:
        """Hand the collected events over, once."""
        events, self._events = self._events, []
        return events
