# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Samples, and ratios of their medians."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

_RESAMPLES = 2000
_CONFIDENCE = 90


@dataclass
class Samples:
    """Times of one kind of call, of a contender and of bare KVCR."""

    tier: list[float] = field(default_factory=list)
    bare: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Ratio:
    """A ratio of medians, with its bootstrapped 90 % interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{_short(self.value)}x [{_short(self.low)}-{_short(self.high)}]"


def median(samples: Sequence[float]) -> float:
    return float(np.median(samples))


def ratio(samples: Sequence[float], reference: Sequence[float]) -> Ratio:
    """How many times the reference: the same seed gives the same interval."""
    draw = np.random.default_rng(0)
    tops = _medians_of_resamples(samples, draw)
    bottoms = _medians_of_resamples(reference, draw)
    tail = (100 - _CONFIDENCE) / 2
    low, high = np.percentile(tops / bottoms, (tail, 100 - tail))
    return Ratio(median(samples) / median(reference), float(low), float(high))


def _medians_of_resamples(
    samples: Sequence[float], draw: np.random.Generator
) -> np.ndarray:
    values = np.asarray(samples, dtype=float)
    picked = draw.integers(len(values), size=(_RESAMPLES, len(values)))
    medians: np.ndarray = np.median(values[picked], axis=1)
    return medians


def _short(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.0f}"
