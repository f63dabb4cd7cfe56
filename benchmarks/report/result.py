# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What a measurement found: rows of one table, and curves of one plot."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from benchmarks.harness.contenders import OURS, SHIPPED
from benchmarks.harness.stats import Ratio, median, ratio


@dataclass(frozen=True)
class Unit:
    """How to show a quantity that was measured in seconds, or in its own unit."""

    name: str
    factor: float = 1.0

    def show(self, value: float) -> str:
        scaled = value * self.factor
        digits = 0 if scaled >= 100 else 1 if scaled >= 10 else 2
        return f"{scaled:.{digits}f} {self.name}"


MICROSECONDS = Unit("µs", 1e6)
MILLISECONDS = Unit("ms", 1e3)
GIGABYTES = Unit("GB/s")
PERCENT = Unit("%", 100.0)


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Args:
        what: What was measured.
        reference: What the others are multiples of.
        target: What is aimed at, and ``met`` whether this adapter reached that here.
        ratios: By contender, where there are any.
    """

    what: str
    reference: str = ""
    ours: str = ""
    shipped: str = ""
    others: str = ""
    target: str = ""
    met: bool | None = None
    ratios: Mapping[str, Ratio] = field(default_factory=dict)


@dataclass(frozen=True)
class Section:
    title: str
    rows: Sequence[Row]
    notes: Sequence[str] = ()


@dataclass(frozen=True)
class Curve:
    """One contender's line in one panel of the plot."""

    panel: str
    contender: str
    x: Sequence[float]
    y: Sequence[float]


def compare(
    what: str,
    samples: Mapping[str, Sequence[float]],
    reference: str,
    unit: Unit,
    *,
    at_most: float | None = None,
    at_least: float | None = None,
) -> Row:
    """Every contender as a multiple of the reference; the target is for ours.

    A contender without samples is left out.
    """
    ratios = {
        name: ratio(values, samples[reference])
        for name, values in samples.items()
        if name != reference and values
    }
    target, met = "", None
    if OURS in ratios:
        if at_most is not None:
            target, met = f"<= {at_most:g}x", ratios[OURS].value <= at_most
        elif at_least is not None:
            target, met = f">= {at_least:g}x", ratios[OURS].value >= at_least
    others = [name for name in ratios if name not in (OURS, SHIPPED)]
    return Row(
        what,
        f"{reference} {unit.show(median(samples[reference]))}",
        str(ratios.get(OURS, "")),
        str(ratios.get(SHIPPED, "")),
        ", ".join(f"{name} {ratios[name]}" for name in others),
        target,
        met,
        ratios,
    )
