# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Tracks which sources of blocks answer: peers, and this engine's own files.

A new peer is introduced first: one block is pulled on behalf of no request, and until
it arrives all requests run as if they had no hint. Connecting, exchanging NIXL's
metadata and setting up UCX can take seconds, even if the peer is healthy.

If a source stays silent for a whole timeout, it is left alone, twice as long each time,
and then introduced again. So a dead peer, or a disk that hangs, costs one wait instead
of one wait per request. Files need no first introduction.

A peer that was only slow is used again after that pause without another introduction.
"""

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto

FILES = "files"
"""The name of this engine's own files; peers have ``tcp://`` endpoints."""

FIRST_COOLDOWN_S = 10.0
LONGEST_COOLDOWN_S = 600.0
FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 60.0
"""The pauses between inconclusive introductions, for example if the block was gone."""

SILENT_SHARE = 0.9
"""A transfer that fails after this share of its timeout counts as unanswered. Must be
less than 1: KVCR's deadline can be the same as the tier's, and polls come a little
before or after it."""

_MAX_SOURCES = 1024


class Standing(Enum):
    USABLE = auto()
    UNKNOWN = auto()  # not introduced yet, or not conclusively
    COOLING = auto()  # was silent and is left alone for a while


@dataclass(slots=True)
class _Source:
    proven: bool = False
    introducing: bool = False
    silences: int = 0
    inconclusive: int = 0
    left_alone_until: float = 0.0
    judged_at: float = 0.0  # when it was last heard, or found to be silent


class Liveness:
    """The known sources, in bounded number. Driven by one thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._sources: OrderedDict[str, _Source] = OrderedDict()
        self._files = _Source(proven=True)

    def standing(self, name: str) -> Standing:
        """Whether a source may be asked for blocks. Changes nothing."""
        source = self._files if name is FILES else self._sources.get(name)
        if source is None:
            return Standing.UNKNOWN
        if source.silences and self._clock() < source.left_alone_until:
            return Standing.COOLING
        return Standing.USABLE if source.proven else Standing.UNKNOWN

    def count(self) -> dict[str, int]:
        """How many peers there are of each standing."""
        standings = [self.standing(name) for name in self._sources]
        return {each.name.lower(): standings.count(each) for each in Standing}

    def is_down(self, name: str) -> bool:
        return self.standing(name) is Standing.COOLING

    def begin_introduction(self, name: str) -> bool:
        """Reserve the introduction of a source, if one is due."""
        source = self._source(name)
        begun = source.proven or source.introducing
        if begun or self._clock() < source.left_alone_until:
            return False
        source.introducing = True
        return True

    def heard(self, name: str) -> None:
        """Note that a block arrived in time."""
        source = self._source(name)
        source.proven = True
        source.introducing = False
        source.silences = source.inconclusive = 0
        source.left_alone_until = 0.0
        source.judged_at = self._clock()

    def heard_late(self, name: str) -> None:
        """Note that a block arrived too late: the source is alive, but slow."""
        source = self._source(name)
        source.proven = True
        source.introducing = False

    def inconclusive(self, name: str) -> None:
        """Note that an introduction failed early, which proves nothing."""
        source = self._source(name)
        source.introducing = False
        pause = FIRST_PAUSE_S * 2.0 ** min(source.inconclusive, 16)
        source.inconclusive += 1
        source.left_alone_until = self._clock() + min(pause, LONGEST_PAUSE_S)

    def silent(self, name: str, asked_at: float) -> None:
        """Note that nothing arrived in time of what was asked for at ``asked_at``.

        Ignored if the source has answered since, or if this silence was noted before.
        """
        source = self._source(name)
        source.introducing = False
        if asked_at < source.judged_at:
            return
        source.proven = False
        cooldown = FIRST_COOLDOWN_S * 2.0 ** min(source.silences, 16)
        source.silences += 1
        source.judged_at = now = self._clock()
        source.left_alone_until = now + min(cooldown, LONGEST_COOLDOWN_S)

    def _source(self, name: str) -> _Source:
        if name is FILES:
            return self._files
        source = self._sources.get(name)
        if source is None:
            source = self._sources[name] = _Source()
        self._sources.move_to_end(name)
        if len(self._sources) > _MAX_SOURCES:
            self._sources.popitem(last=False)
        return source
