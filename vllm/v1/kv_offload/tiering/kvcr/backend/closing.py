# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Closes KVCR, and finds out whether native code has let go of the buffers."""

import threading
import time
from typing import Any

from vllm.logger import init_logger
from vllm.v1.kv_offload.tiering.kvcr.compat import shims

logger = init_logger(__name__)

_RECHECK_INTERVAL_S = 0.5


class Closer:
    """Closes KVCR once, on a thread of its own, since a close can take seconds.

    ``quiescent`` says whether native code has let go of every buffer, and is ``None``
    while that is not known. It can turn from false to true later.
    """

    def __init__(self, kvcr: Any) -> None:
        self._kvcr = kvcr
        self._thread: threading.Thread | None = None
        self._closed = threading.Event()
        self.quiescent: bool | None = None

    def start(self) -> None:
        """Start to close; further calls do nothing."""
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._close, name="kvcr-tier-close", daemon=True
            )
            self._thread.start()

    def wait(self, timeout_s: float) -> bool:
        """Start if need be and wait; true if native code has let go of the buffers."""
        self.start()
        self._closed.wait(timeout_s)
        return self.quiescent is True

    def _close(self) -> None:
        try:
            self._kvcr.close()
        except BaseException as error:
            # It may only repeat an old failure after everything was released.
            self.quiescent = shims.is_quiescent(self._kvcr)
            logger.warning(
                "kvcr tier: closing KVCR raised %s: %s; its buffers are %s",
                type(error).__name__,
                error,
                "free" if self.quiescent else "kept mapped: native code may use them",
            )
        else:
            self.quiescent = True
        self._closed.set()
        while not self.quiescent:
            time.sleep(_RECHECK_INTERVAL_S)
            self.quiescent = shims.is_quiescent(self._kvcr)
