# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Logs what a start is waiting for."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from vllm.logger import init_logger

logger = init_logger(__name__)

_FIRST_S = 5.0
_THEN_S = 15.0


@contextmanager
def announced(what: str) -> Iterator[None]:
    """Log a line after some seconds, and again every few, while the block runs."""
    over = threading.Event()
    began = time.monotonic()

    def tell() -> None:
        pause_s = _FIRST_S
        while not over.wait(pause_s):
            waited_s = time.monotonic() - began
            logger.warning(
                "kvcr tier: after %.0f s still waiting for %s", waited_s, what
            )
            pause_s = _THEN_S

    thread = threading.Thread(target=tell, name="kvcr-tier-wait", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
