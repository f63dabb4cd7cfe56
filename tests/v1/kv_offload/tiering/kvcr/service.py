# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The KVCR service, in a process of its own, whose pool outlives an engine."""

import subprocess
import sys
import time
from decimal import Decimal
from pathlib import Path
from typing import Any

from tests.v1.kv_offload.tiering.kvcr.builders import free_port
from tests.v1.kv_offload.tiering.kvcr.rig import ROW_BYTES

DIGEST = "kvcr-test"
_START_S = 60.0


class Service:
    """A running service with one pool.

    Args:
        folder: Where its socket and its pool lie; the socket's path must be short.
        slots: Chunks that the pool holds.
    """

    def __init__(self, folder: Path, *, slots: int, row_bytes: int = ROW_BYTES) -> None:
        # The service listens there for peers, for good, once an engine said so.
        self.port = free_port()
        self.socket = folder / "kvcr.sock"
        self._log = (folder / "service.log").open("w+b")
        gib = Decimal(slots * row_bytes) / (1 << 30)
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-m", "kvcr.kvcr_service"),
                *("--socket-path", str(self.socket), "--pool-dir", str(folder)),
                *("--guard-count", "1", "--pool-sizes-gb", f"{gib:f}"),
                *("--compatibility-digest", DIGEST),
            ],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )
        deadline = time.monotonic() + _START_S
        while not self.socket.exists():
            assert self._process.poll() is None, self.output()
            assert time.monotonic() < deadline, self.output()
            time.sleep(0.01)

    def output(self) -> str:
        self._log.seek(0)
        return self._log.read().decode(errors="replace")

    def options(self, digest: str = DIGEST) -> dict[str, Any]:
        """What makes a tier use it."""
        return {
            "kvcr_service_socket_path": str(self.socket),
            "compatibility_digest": digest,
        }

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        # Asked to stop, one that nobody has used yet takes half a minute.
        self.kill()
        self._log.close()
