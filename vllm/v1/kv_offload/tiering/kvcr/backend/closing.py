# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Closing KVCR, and finding out whether native code has let go of the buffers."""

import threading
from typing import Any

from vllm.logger import init_logger
from vllm.v1.kv_offload.tiering.kvcr.compat import shims

logger = init_logger(__name__)


class Closer:
    """Closes KVCR once, beside the engine's thread, which a close can hold up for
    seconds.

    ``quiescent`` is ``None`` while that is not known; then whether every buffer is
    free of native code.
    """

    def __init__(self, kvcr: Any) -> None:
        self._kvcr = kvcr
        self._thread: threading.Thread | None = None
        self.quiescent: bool | None = None

    def start(self) -> None:
        """Begin to close; further calls do nothing."""
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._close, name="kvcr-tier-close", daemon=True
            )
            self._thread.start()

    def wait(self, timeout_s: float) -> bool:
        """Begin if need be, and wait; true if the buffers are free."""
        self.start()
        assert self._thread is not None
        self._thread.join(timeout_s)
        return self.quiescent is True

    def _close(self) -> None:
        try:
            self._kvcr.close()
        except BaseException as error:
            # What it raises may be an old failure, told once more after everything
            # was released.
            self.quiescent = shims.is_quiescent(self._kvcr)
            logger.warning(
                "kvcr tier: KVCR closed with %s: %s; its buffers are %s",
                type(error).__name__,
                error,
                "free" if self.quiescent else "kept mapped, native code may use them",
            )
        else:
            self.quiescent = True
