# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Turns KVCR's inventory events into vLLM's KV events."""

from collections.abc import Callable, Sequence

from kvcr.types import InventoryEvent

from vllm.v1.kv_offload.base import Locality, OffloadingEvent
from vllm.v1.kv_offload.tiering.kvcr.compat.vocabulary import MEDIA
from vllm.v1.kv_offload.tiering.kvcr.keys import KeyCodec

OWNERSHIP = "kvcr"

Sink = Callable[[InventoryEvent], None]


def sink_of(sinks: Sequence[Sink]) -> Sink | None:
    """One inventory sink that calls several; ``None`` if there are none."""

    def report(event: InventoryEvent) -> None:
        for sink in sinks:
            sink(event)

    return report if sinks else None


class Inventory:
    """Collects KVCR's reports until vLLM takes them.

    KVCR reports on the thread that calls it, so this needs no lock.
    """

    def __init__(self, codec: KeyCodec, locality: Locality | None) -> None:
        self._codec = codec
        self._locality = locality
        self._events: list[OffloadingEvent] = []

    @property
    def pending(self) -> bool:
        return bool(self._events)

    def report(self, event: InventoryEvent) -> None:
        """Take KVCR's inventory events."""
        medium = MEDIA[event.tier]
        if medium is None:
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
        """Return the collected events, once."""
        events, self._events = self._events, []
        return events
