# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""An engine in a process of its own that runs another kvcr and NIXL than this one."""

import os
import subprocess
import sys
import tempfile
from multiprocessing.connection import Client, Listener
from pathlib import Path
from typing import Any

from tests.v1.kv_offload.tiering.kvcr.builders import endpoint_of, peer_options
from tests.v1.kv_offload.tiering.kvcr.faults.harness.child import (
    CALL_TIMEOUT_S,
    Answering,
)

_START_TIMEOUT_S = 120.0


class ReleasedPeer(Answering):
    """As ``Peer``, started anew instead of forked.

    Args:
        packages: A folder with kvcr and nixl, searched before all others.
        options: The tier's options, beside those for serving peers.
        engine: Further arguments of ``Engine``.
    """

    def __init__(self, packages: Path, options: dict[str, Any], **engine: Any) -> None:
        engine["options"] = peer_options(**options)
        (self.port,) = engine["options"]["control_ports"]
        self.endpoint = endpoint_of(self.port)
        root = Path(__file__).resolve().parents[7]
        path = filter(None, (str(packages), str(root), os.environ.get("PYTHONPATH")))
        with tempfile.TemporaryDirectory() as folder:
            address = f"{folder}/pipe"
            with Listener(address, "AF_UNIX") as listener:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", __spec__.name, address],
                    env=os.environ | {"PYTHONPATH": os.pathsep.join(path)},
                )
                # One that does not even start connects never.
                listener._listener._socket.settimeout(_START_TIMEOUT_S)  # type: ignore[attr-defined]
                try:
                    self._connection = listener.accept()
                    self._connection.send(engine)
                    self.receive(_START_TIMEOUT_S)
                except BaseException:
                    self._process.kill()
                    raise

    @property
    def exit_code(self) -> int | None:
        return self._process.poll()

    def close(self) -> None:
        """Have the process end by itself; kill it if that takes too long."""
        self._connection.close()
        try:
            self._process.wait(CALL_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _main(address: str) -> None:
    from tests.v1.kv_offload.tiering.kvcr.faults.harness.peer_process import serve

    with Client(address, "AF_UNIX") as connection:
        serve(connection, connection.recv(), os.environ.get("UCX_TLS"))


if __name__ == "__main__":
    _main(sys.argv[1])
