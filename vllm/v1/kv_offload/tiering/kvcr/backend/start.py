# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Starts KVCR with its memory, undoes a failed start, and closes KVCR again.

Memory that native code may still touch afterwards stays mapped.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvcr import KVCRBindings
from kvcr.config import KVCRGuardConfig

from vllm.v1.kv_offload.tiering.kvcr.backend import files, setup, start_errors, waiting
from vllm.v1.kv_offload.tiering.kvcr.backend.closing import Closer
from vllm.v1.kv_offload.tiering.kvcr.backend.pool import PoolMemory
from vllm.v1.kv_offload.tiering.kvcr.backend.protocol import KvcrApi
from vllm.v1.kv_offload.tiering.kvcr.compat import nixl, shims
from vllm.v1.kv_offload.tiering.kvcr.config import TierConfig
from vllm.v1.kv_offload.tiering.kvcr.peers.channel import PeerChannel, guard_channel

CLOSE_TIMEOUT_S = 20.0
"""Must exceed the time that KVCR's ``close`` waits for its operations, 5 s, and then
for its thread, 10 s."""


@dataclass(frozen=True)
class Natives:
    """What a backend is made from: names of the manager, where tests replace them."""

    kvcr: Callable[..., Any]
    channel: Callable[[str, int, str], Any]
    allocate: Callable[[int, int], Any]
    retained: list[Any]
    """Buffers that stay mapped until the process ends."""


class Backend:
    """A running KVCR and the memory that it works on."""

    def __init__(self, natives: Natives, primary_buffer: Any) -> None:
        self._natives = natives
        self._primary_buffer = primary_buffer
        self._pool: PoolMemory | None = None
        self._channel: Any | None = None
        self.kvcr: KvcrApi
        self.closer: Closer
        self.slots = 0
        """Slots of KVCR's pool; 0 if it has none, or one of unknown size."""

    @classmethod
    def start(
        cls,
        natives: Natives,
        config: TierConfig,
        primary: setup.Primary,
        *,
        primary_buffer: Any,
        agent: str,
        port: int | None,
        guard: KVCRGuardConfig | None,
        made_files: Sequence[Path],
        bindings: dict[str, Any],
    ) -> "Backend":
        """Start KVCR.

        Args:
            primary_buffer: The owner of the primary tier's memory, to be kept alive.
            port: Where to listen for peers, if they are served.
            made_files: Files that were made for this start; removed if it fails.
            bindings: KVCR's bindings, except for the control channel.

        Raises:
            Exception: KVCR, NIXL or the operating system refused. Nothing is left
                behind except buffers that native code may still touch.
        """
        backend = cls(natives, primary_buffer)
        unstopped = shims.unstopped_starts()
        try:
            backend._start(config, primary, agent, port, guard, bindings)
        except BaseException as error:
            backend._undo(error, unstopped)
            files.remove(made_files)
            refused = start_errors.explain(error, config, primary, guard)
            if refused is not None:
                raise refused from error
            raise
        backend.closer = Closer(backend.kvcr)
        return backend

    def is_incompatible(self, endpoint: str) -> bool:
        """Whether a peer has said that it runs other releases."""
        channel = self._channel
        return isinstance(channel, PeerChannel) and channel.is_incompatible(endpoint)

    def is_lost(self, endpoint: str) -> bool:
        """Whether a peer has closed the connection, as it does when it dies."""
        channel = self._channel
        return isinstance(channel, PeerChannel) and channel.is_lost(endpoint)

    @property
    def peer_channel(self) -> PeerChannel | None:
        """The channel to peers, if they are served."""
        return self._channel if isinstance(self._channel, PeerChannel) else None

    def stop(self) -> bool:
        """Close KVCR and free its memory; false if native code may still touch it."""
        if not self.closer.wait(CLOSE_TIMEOUT_S):
            self._retain()
            return False
        if self._pool is not None:
            self._pool.free()
        return True

    def _start(
        self,
        config: TierConfig,
        primary: setup.Primary,
        agent: str,
        port: int | None,
        guard: KVCRGuardConfig | None,
        bindings: dict[str, Any],
    ) -> None:
        self.slots, option = setup.pool_slots(config, primary)
        pool = None
        if self.slots:
            size = self.slots * primary.row_bytes
            self._pool = PoolMemory(
                self._natives.allocate, size, option, config.populate_pool
            )
            pool = (self._pool.address, self._pool.size)
        if port is not None:
            secret = setup.control_secret(config)
            channel = self._natives.channel(
                config.control_host, port, setup.advertise_host(config)
            )
            self._channel = guard_channel(channel, secret)
        with (
            waiting.announced(setup.what_answers(guard)),
            nixl.sleeping(config.nixl_progress_delay_ms),
        ):
            self.kvcr = self._natives.kvcr(
                setup.kvcr_config(config, primary, agent),
                KVCRBindings(framework_control=self._channel, **bindings),
                setup.backend_configs(config, primary, pool),
                guard,
            )
        if isinstance(self._channel, PeerChannel):
            self._channel.forget = shims.peer_forgetter(self.kvcr)
        if guard is not None:
            self.slots = (shims.service_pool_bytes(self.kvcr) or 0) // primary.row_bytes

    def _undo(self, error: BaseException, unstopped_before: int) -> None:
        """Close what was opened, or keep what must be kept."""
        alive = shims.native_alive_after(error, unstopped_before)
        if alive or not isinstance(error, Exception):
            self._retain()
            return
        if self._channel is not None:
            self._channel.close()
        if self._pool is not None:
            self._pool.free()

    def _retain(self) -> None:
        self._natives.retained.append(self._primary_buffer)
        if self._pool is not None:
            self._natives.retained.append(self._pool.buffer)
