# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A second engine in a process of its own."""

import os
from typing import Any

from tests.v1.kv_offload.tiering.kvcr.builders import endpoint_of, peer_options
from tests.v1.kv_offload.tiering.kvcr.faults.harness.child import Child
from tests.v1.kv_offload.tiering.kvcr.faults.harness.engine import Keys
from tests.v1.kv_offload.tiering.kvcr.faults.harness.peer_process import serve


class Peer(Child):
    """An engine that steps by itself; commands are those of ``peer_process``.

    Args:
        options: The tier's options, beside those for serving peers.
        port: The control port; by default a free one.
        hold: Blocks that its primary tier has from the start.
        engine: Further arguments of ``Engine``.
    """

    def __init__(
        self,
        options: dict[str, Any] | None = None,
        port: int | None = None,
        hold: Keys = (),
        **engine: Any,
    ) -> None:
        engine["options"] = peer_options(port, **options or {})
        (self.port,) = engine["options"]["control_ports"]
        self.endpoint = endpoint_of(self.port)
        # Both ends of a transfer have to use the same.
        super().__init__(serve, engine, os.environ.get("UCX_TLS"))
        if hold:
            self.call("hold", hold)

    def pull_from(self, engine: Any, keys: Keys, name: str = "pull") -> dict[str, Any]:
        """Pull blocks from an engine of the test's process, which steps meanwhile."""
        self.send("pull", engine.options["control_ports"][0], keys, name)
        engine.run_until(lambda: self.answered, 20, "a pull")
        return dict(self.receive())
