# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""An end to calls that might have none."""

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType


@contextlib.contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Fail what is inside, on the main thread, if it takes longer."""

    def ring(number: int, frame: FrameType | None) -> None:
        raise AssertionError(f"not over after {seconds:.1f} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
