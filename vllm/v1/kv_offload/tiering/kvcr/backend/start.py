# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Starts KVCR with its memory, undoes a failed start, and closes KVCR again.

Memory that native code may still touch afterwards stays mapped.
"""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvcr import KVCRBindings
from kvcr.config import KVCRGuardConfig

from vllm.logger import init_logger
from vllm.v1.kv_offload.tiering.kvcr.backend import files, pool, setup, start_messages
from vllm.v1.kv_offload.tiering.kvcr.backend.protocol import KvcrApi
from vllm.v1.kv_offload.tiering.kvcr.compat import nixl, shims
from vllm.v1.kv_offload.tiering.kvcr.config import TierConfig
from vllm.v1.kv_offload.tiering.kvcr.peers.channel import PeerChannel, guard_channel

logger = init_logger(__name__)

CLOSE_TIMEOUT_S = 20.0
"""Must exceed the time that KVCR's ``close`` waits for its operations, 5 s, and then
for its thread, 10 s."""
_RECHECK_INTERVAL_S = 0.5


@dataclass(frozen=True)
class Natives:
    """What a backend is made from: names of the manager, where tests replace them."""

    kvcr: Callable[..., Any]
    channel: Callable[[str, int, str], Any]
    allocate: Callable[[int, int], Any]
    retained: list[Any]
    """Buffers that stay mapped until the process ends."""


class Backend:
    """A running KVCR and the memory that it works on.

    Args:
        port: Where to listen for peers, if they are served.
        made_files: Files that were made for this start; removed if it fails.
        bindings: KVCR's bindings, except for the control channel.

    Raises:
        Exception: KVCR, NIXL or the operating system refused. Nothing is left behind
            except buffers that native code may still touch.
    """

    def __init__(
        self,
        natives: Natives,
        config: TierConfig,
        primary: setup.Primary,
        *,
        agent: str,
        port: int | None,
        guard: KVCRGuardConfig | None,
        made_files: Sequence[Path],
        bindings: dict[str, Any],
    ) -> None:
        self._natives = natives
        self._primary = primary
        self._pool: Any | None = None
        self._closing: threading.Thread | None = None
        self._closed = threading.Event()
        self.quiescent: bool | None = None
        """Whether native code has let go of every buffer; ``None`` until KVCR is
        closed. It can turn from false to true later."""
        self.peer_channel: PeerChannel | None = None
        channel: Any | None = None
        unstopped = shims.unstopped_starts()
        try:
            self.slots, option = setup.pool_slots(config, primary)
            if self.slots:
                size = self.slots * primary.row_bytes
                pool.check_room(size, option)
                self._pool = natives.allocate(-1, size)
                if config.populate_pool:
                    pool.populate(self._pool)
            if port is not None:
                secret = setup.control_secret(config)
                host = setup.advertise_host(config)
                channel = natives.channel(config.control_host, port, host)
                channel = guard_channel(channel, secret)
            with (
                start_messages.announced(start_messages.what_answers(guard)),
                nixl.sleeping(config.nixl_progress_delay_ms),
            ):
                self.kvcr: KvcrApi = natives.kvcr(
                    setup.kvcr_config(config, primary, agent),
                    KVCRBindings(framework_control=channel, **bindings),
                    setup.backend_configs(config, primary, self._pool),
                    guard,
                )
            if isinstance(channel, PeerChannel):
                self.peer_channel = channel
                channel.forget = shims.peer_forgetter(self.kvcr)
            if guard is not None:
                # 0 if the size of the service's pool is not known.
                pool_bytes = shims.service_pool_bytes(self.kvcr) or 0
                self.slots = pool_bytes // primary.row_bytes
        except BaseException as error:
            alive = shims.native_alive_after(error, unstopped)
            if alive or not isinstance(error, Exception):
                self._retain()
            else:
                if channel is not None:
                    channel.close()
                self._free_pool()
            files.remove(made_files)
            refused = start_messages.explain(error, config, primary, guard)
            if refused is not None:
                raise refused from error
            raise

    def is_incompatible(self, endpoint: str) -> bool:
        """Whether a peer has said that it runs other releases."""
        channel = self.peer_channel
        return channel is not None and channel.is_incompatible(endpoint)

    def is_lost(self, endpoint: str) -> bool:
        """Whether a peer has closed the connection, as it does when it dies."""
        channel = self.peer_channel
        return channel is not None and channel.is_lost(endpoint)

    def start_closing(self) -> None:
        """Close KVCR once, on a thread of its own, since a close can take seconds."""
        if self._closing is None:
            self._closing = threading.Thread(
                target=self._close, name="kvcr-tier-close", daemon=True
            )
            self._closing.start()

    def stop(self) -> bool:
        """Close KVCR and free its memory; false if native code may still touch it."""
        self.start_closing()
        self._closed.wait(CLOSE_TIMEOUT_S)
        free = self.quiescent is True
        if free:
            self._free_pool()
        else:
            self._retain()
        return free

    def _close(self) -> None:
        try:
            self.kvcr.close()
        except BaseException as error:
            # It may only repeat an old failure after everything was released.
            self.quiescent = shims.is_quiescent(self.kvcr)
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
            self.quiescent = shims.is_quiescent(self.kvcr)

    def _free_pool(self) -> None:
        if self._pool is not None:
            self._pool.close()

    def _retain(self) -> None:
        self._natives.retained.append(self._primary.buffer)
        if self._pool is not None:
            self._natives.retained.append(self._pool)
