# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A second engine in a process of its own."""

import os
from collections.abc import Sequence
from typing import Any

from tests.v1.kv_offload.tiering.kvcr.builders import (
    endpoint_of,
    free_port,
    peer_options,
)
from tests.v1.kv_offload.tiering.kvcr.faults.harness.child import Child
from tests.v1.kv_offload.tiering.kvcr.faults.harness.peer_process import serve
from vllm.v1.kv_offload.base import OffloadKey


class Peer(Child):
    """An engine that steps by itself; commands are those of ``peer_process``.

    Args:
        options: The tier's options, beside those for serving peers.
        port: The control port; by default a free one.
        engine: Further arguments of ``Engine``.
    """

    def __init__(
        self,
        options: dict[str, Any] | None = None,
        port: int | None = None,
        **engine: Any,
    ) -> None:
        self.port = port or free_port()
        self.endpoint = endpoint_of(self.port)
        engine["options"] = peer_options(self.port) | (options or {})
        # Both ends of a transfer have to use the same.
        super().__init__(serve, engine, os.environ.get("UCX_TLS"))

    def pull_from(
        self, engine: Any, keys: Sequence[OffloadKey], request_id: str = "pull"
    ) -> dict[str, Any]:
        """Pull blocks from an engine of the test's process, which steps meanwhile."""
        self.send("pull", engine.options["control_ports"][0], keys, request_id)
        engine.run_until(lambda: self.answered, 20, "a pull")
        return dict(self.receive())
