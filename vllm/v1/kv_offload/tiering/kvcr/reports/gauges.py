# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What the tier is like now: its health, and what it holds or leaves alone."""

import time
from collections.abc import Callable, Mapping

from vllm.v1.kv_offload.tiering.kvcr.reports import metrics
from vllm.v1.kv_offload.tiering.kvcr.reports.health import Health
from vllm.v1.kv_offload.tiering.kvcr.reports.quarantine import Quarantine
from vllm.v1.kv_offload.tiering.kvcr.reports.traffic import DISK, DRAM

Samples = dict[tuple[str, tuple[str, ...]], float]
"""``(metric's name, label values)`` -> value."""

_INTERVAL_S = 1.0
_COUNT = "_kvcr_tiers"
_RESOURCES = {DRAM: "local_g2", DISK: "g3"}
"""How KVCR calls its pool and its files in its own gauge."""


def label_among_tiers(offloading_spec: object) -> str:
    """A label for the next kvcr tier of this spec: "1", "2", ...

    A tier is not told its place in the list, and a spec is all that an engine's tiers
    have in common, so they are counted there.
    """
    try:
        attributes = vars(offloading_spec)
    except TypeError:
        return "1"
    attributes[_COUNT] = attributes.get(_COUNT, 0) + 1
    return str(attributes[_COUNT])


class Gauges:
    """Samples, at most once a second; what is new of the health at once.

    They are repeated although nothing changed: with several API servers vLLM gives
    each report to one of them, and each shows the last that it was given.

    Args:
        tier: The label that tells an engine's kvcr tiers apart.
        block_bytes: Size of a slot of KVCR's.
        pins: How many pins peers hold here, and the age of the oldest, in seconds.
        peers: How many peers there are of each standing.
    """

    def __init__(
        self,
        tier: str,
        block_bytes: int,
        health: Health,
        quarantine: Quarantine,
        pins: Callable[[], tuple[int, float]],
        peers: Callable[[], Mapping[str, int]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._tier = tier
        self._block_bytes = block_bytes
        self._health = health
        self._quarantine = quarantine
        self._pins = pins
        self._peers = peers
        self._clock = clock
        self.started = False
        """Whether there is a state to be told: the engine has begun to step."""
        self._next_at = 0.0
        self._told: Samples = {}

    @property
    def has_news(self) -> bool:
        """Whether a sleeping engine's metrics say something that is no longer so."""
        if self._health.changed or not self.started:
            return True
        peers = self._standings()
        return any(self._told.get(name) != value for name, value in peers.items())

    def take(self, kvcr_state: Mapping[tuple[str, ...], float]) -> Samples:
        """What is to be reported now.

        Args:
            kvcr_state: KVCR's own gauge: label values -> value.
        """
        samples: Samples = {}
        now = self._clock()
        due = self.started and now >= self._next_at
        if due or self._health.changed:
            for (state, reason), value in self._health.take().items():
                labels = (self._tier, state.value, reason.label)
                samples[metrics.TIER_STATE, labels] = value
        if due:
            self._next_at = now + _INTERVAL_S
            samples |= self._held() | self._standings() | self._stored(kvcr_state)
            self._told = samples
        return samples

    def _held(self) -> Samples:
        tier, quarantine = self._tier, self._quarantine
        pins, oldest_age = self._pins()
        return {
            (metrics.QUARANTINED_SLOTS, (tier, "pool")): quarantine.pool_slots,
            (metrics.QUARANTINED_SLOTS, (tier, "primary")): quarantine.primary_slots,
            (metrics.PINS, (tier,)): pins,
            (metrics.OLDEST_PIN_AGE, (tier,)): oldest_age,
        }

    def _standings(self) -> Samples:
        return {
            (metrics.PEERS, (self._tier, standing)): count
            for standing, count in self._peers().items()
        }

    def _stored(self, kvcr_state: Mapping[tuple[str, ...], float]) -> Samples:
        samples: Samples = {}
        for place, resource in _RESOURCES.items():
            slots = kvcr_state.get((f"{resource}_total_slots",))
            used = kvcr_state.get((f"{resource}_allocated_slots",))
            if slots is not None and used is not None:
                labels = (self._tier, place)
                samples[metrics.CAPACITY, labels] = slots * self._block_bytes
                samples[metrics.USED, labels] = used * self._block_bytes
        return samples
