# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Which sources of blocks answer: peers, and this engine's own files.

A peer that nobody has pulled from yet is introduced first: one block is pulled beside
all requests, which run as if they had no hint until it arrives. Connecting, exchanging
NIXL's metadata and wiring UCX up can take seconds, which is no peer's fault.

A source that is known to answer and then stays silent for a whole timeout is left
alone, twice as long each time, and is then introduced again. So a dead peer or a disk
that hangs costs one wait and not one a request. Files need no first introduction.
"""

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto

FILES = "files"
"""Stands for this engine's own files, beside the peers' ``tcp://`` endpoints."""

FIRST_COOLDOWN_S = 10.0
LONGEST_COOLDOWN_S = 600.0
FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 60.0
"""Between introductions that told nothing, such as one block that was not there."""

SILENT_SHARE = 0.9
"""A transfer that failed after this share of its time was not answered. KVCR's deadline
can be the same as ours; the rest is for the polls in between."""

_MAX_SOURCES = 1024


class Standing(Enum):
    USABLE = auto()
    UNKNOWN = auto()
    """Not introduced yet, or introductions told nothing so far."""
    COOLING = auto()
    """Left alone after a silence."""


@dataclass(slots=True)
class _Source:
    proven: bool = False
    introducing: bool = False
    silences: int = 0
    silent_since: float = 0.0
    inconclusive: int = 0
    left_alone_until: float = 0.0
    heard_at: float = 0.0


class Liveness:
    """What is known of each source. Bounded; driven by one thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._sources: OrderedDict[str, _Source] = OrderedDict()
        self._files = _Source(proven=True)

    def standing(self, name: str) -> Standing:
        """Whether blocks may be asked for. Changes nothing."""
        source = self._known(name)
        if source is None:
            return Standing.UNKNOWN
        if source.silences and self._clock() < source.left_alone_until:
            return Standing.COOLING
        return Standing.USABLE if source.proven else Standing.UNKNOWN

    def count(self) -> dict[str, int]:
        """How many peers there are of each standing."""
        counts = {standing.name.lower(): 0 for standing in Standing}
        for name in self._sources:
            counts[self.standing(name).name.lower()] += 1
        return counts

    def is_down(self, name: str) -> bool:
        return self.standing(name) is Standing.COOLING

    def begin_introduction(self, name: str) -> bool:
        """Reserve the introduction of a source, if one is due."""
        source = self._source(name)
        if (
            source.proven
            or source.introducing
            or self._clock() < source.left_alone_until
        ):
            return False
        source.introducing = True
        return True

    def heard(self, name: str) -> None:
        """A block arrived in time."""
        source = self._source(name)
        source.proven = True
        source.introducing = False
        source.silences = source.inconclusive = 0
        source.left_alone_until = 0.0
        source.heard_at = self._clock()

    def heard_late(self, name: str) -> None:
        """A block arrived after it was given up: the source is alive, but slow.

        It is usable once it has cooled down, without another introduction.
        """
        source = self._source(name)
        source.proven = True
        source.introducing = False

    def inconclusive(self, name: str) -> None:
        """An introduction failed before its time, which tells nothing."""
        source = self._source(name)
        source.introducing = False
        pause = FIRST_PAUSE_S * 2.0 ** min(source.inconclusive, 16)
        source.inconclusive += 1
        source.left_alone_until = self._clock() + min(pause, LONGEST_PAUSE_S)

    def silent(self, name: str, asked_at: float) -> None:
        """Nothing arrived in time of what was asked for at ``asked_at``.

        Ignored if the source was heard of since, or if this silence was noted already.
        """
        source = self._source(name)
        source.introducing = False
        if asked_at < source.heard_at or (
            source.silences and asked_at < source.silent_since
        ):
            return
        source.proven = False
        cooldown = FIRST_COOLDOWN_S * 2.0 ** min(source.silences, 16)
        source.silences += 1
        source.silent_since = self._clock()
        source.left_alone_until = source.silent_since + min(
            cooldown, LONGEST_COOLDOWN_S
        )

    def _known(self, name: str) -> _Source | None:
        return self._files if name is FILES else self._sources.get(name)

    def _source(self, name: str) -> _Source:
        source = self._known(name)
        if source is None:
            while len(self._sources) >= _MAX_SOURCES:
                self._sources.popitem(last=False)
            source = self._sources[name] = _Source()
        elif name is not FILES:
            self._sources.move_to_end(name)
        return source
