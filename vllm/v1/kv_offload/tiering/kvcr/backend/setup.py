# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Derives KVCR's configuration from the options and the primary tier's shape.

Pure functions; nothing here starts anything. Each refuses with an ``OptionError`` what
cannot work.
"""

import socket
from dataclasses import dataclass, replace
from mmap import PAGESIZE
from pathlib import Path
from typing import Any

from kvcr.config import (
    G3Options,
    KVCRBackendConfigs,
    KVCRConfig,
    KVCRGuardConfig,
    LocalDramOptions,
    RemoteFWDramOptions,
)

from vllm.v1.kv_offload.tiering.kvcr.backend.pool import address_of
from vllm.v1.kv_offload.tiering.kvcr.compat import shims
from vllm.v1.kv_offload.tiering.kvcr.config import G3Config, OptionError, TierConfig
from vllm.v1.kv_offload.tiering.kvcr.keys import KeyCodec
from vllm.v1.kv_offload.tiering.kvcr.peers.greeting import read_secret
from vllm.v1.kv_offload.tiering.kvcr.transfers.jobs import Limits

_LANDING_POOL_BYTES = 256 << 20
_LANDING_SLOTS = (8, 256)
# If peers write into the primary tier, only their introductions need slots. A peer that
# dies during its introduction keeps its slot.
_INTRODUCTION_SLOTS = 4
# Small enough that even a slow disk reads it long before the tier takes it for a disk
# that hangs.
_FILE_OPERATION_BYTES = 8 << 20
# NIXL insists on a port to listen on, and picks a free one if it is 0. Peers never dial
# it: they exchange NIXL's metadata over the control channel.
_ANY_PORT = 0


@dataclass(frozen=True)
class Primary:
    """The primary tier's memory: ``rows`` chunks of ``row_bytes`` from ``address``."""

    address: int
    row_bytes: int
    rows: int
    buffer: Any = None
    """The owner of the memory, to be kept alive: vLLM releases its view of it."""


def primary_of(view: memoryview) -> Primary:
    """Read the primary tier's address and shape from its view.

    Raises:
        ValueError: the view is neither flat nor of the shape that vLLM promises,
            ``(num_chunks, row_stride_bytes)``. Addresses derived from it would be
            wrong.
    """
    if view.readonly:
        raise ValueError("the primary tier's memory is read-only")
    if view.ndim not in (1, 2) or not view.c_contiguous:
        raise ValueError(
            "the primary tier's memory must be a C-contiguous view of shape "
            "(num_chunks, row_stride_bytes), or a flat one with one element for each "
            f"chunk, but its shape is {view.shape} with strides {view.strides}"
        )
    assert view.shape is not None
    assert view.strides is not None
    if not view.nbytes:
        raise ValueError(
            f"the primary tier's memory, of shape {view.shape}, is empty; raise "
            "cpu_bytes_to_use"
        )
    return Primary(address_of(view), view.strides[0], view.shape[0], view.obj)


def warnings(config: TierConfig, events: Any) -> list[str]:
    """List what an operator should know at start."""
    said = []
    if config.kvcr_service_socket_path is not None and config.has_own_pool:
        said.append(
            "secondary_g2_slots and secondary_g2_bytes are ignored, because the KVCR "
            "service's pool is used"
        )
    given = config.operation_timeout_ms
    if (
        config.serves_peers
        and given is not None
        and config.introduction_timeout < config.introduction_timeout_ms
    ):
        said.append(
            f"operation_timeout_ms = {given} also limits the first contact with a "
            "peer, which can take seconds; to limit how long requests wait, set "
            "pull_timeout_ms instead"
        )
    if config.owns_inventory and not events.enable_kv_cache_events:
        said.append(
            "KV events are off, so routers will not learn which blocks KVCR holds"
        )
    elif config.owns_inventory and not events.self_describing_kv_events:
        raise OptionError(
            "kvcr tier: KV events are on, so the blocks that KVCR owns "
            "(secondary_g2_slots, kvcr_service_socket_path, g3) need "
            "self_describing_kv_events: true in kv_connector_extra_config; otherwise "
            "routers cannot identify them"
        )
    return said


def advertise_host(config: TierConfig) -> str:
    return config.control_advertise_host or socket.gethostname()


def control_secret(config: TierConfig) -> bytes | None:
    """The secret that control messages are signed with, if they are."""
    if config.control_secret_file is None:
        return None
    try:
        return read_secret(Path(config.control_secret_file))
    except ValueError as error:
        raise OptionError(
            f"kvcr tier: control_secret_file = {config.control_secret_file!r}: {error}"
        ) from error


def pool_slots(config: TierConfig, primary: Primary) -> tuple[int, str]:
    """Chunks of the pool that this process provides, and the option that sets them."""
    if config.kvcr_service_socket_path is not None:
        return 0, ""
    if config.secondary_g2_slots:
        return config.secondary_g2_slots, "secondary_g2_slots"
    if config.secondary_g2_bytes:
        slots = config.secondary_g2_bytes // primary.row_bytes
        if not slots:
            raise OptionError(
                f"kvcr tier: secondary_g2_bytes = {config.secondary_g2_bytes}: is "
                f"smaller than one chunk, which has {primary.row_bytes} bytes"
            )
        return slots, "secondary_g2_bytes"
    # KVCR will refuse files without a pool; see ``start_messages.explain``.
    if not config.serves_peers or config.g3 is not None:
        return 0, ""
    if config.landing_slots is not None:
        return config.landing_slots, "landing_slots"
    if config.remote_landing == "primary":
        return _INTRODUCTION_SLOTS, "landing_slots"
    least, most = _LANDING_SLOTS
    fitting = _LANDING_POOL_BYTES // primary.row_bytes
    return max(least, min(most, fitting)), "landing_slots"


def limits_of(
    config: TierConfig, primary: Primary, slots: int, *, stages: bool
) -> Limits:
    """The bounds on blocks in flight.

    Args:
        slots: Slots of KVCR's pool; 0 if their number is not known.
        stages: Whether this KVCR can stage blocks at all.
    """
    operation = max(1, config.max_operation_bytes // primary.row_bytes)
    window = max(operation, config.max_inflight_bytes // primary.row_bytes)
    # A service's pool of unknown size is assumed to be large.
    pool = slots or 4 * window
    # Slots in use cannot be evicted. The shares add up to the pool at most, so that
    # everything that is started finds a slot.
    if config.has_own_storage:
        load, store, staged = pool // 2, pool // 4, pool // 4
    elif config.remote_landing == "pool":
        load, store, staged = pool // 4, 0, pool - pool // 4
    else:  # the pool is there for introductions only
        load, store, staged = window, 0, pool
    files, peers = stages and config.g3 is not None, stages and config.serves_peers
    # Files and peers have shares of their own, so that neither waits for the other.
    filed = staged // 2 if peers else staged
    pulled = staged - filed if files else staged
    file_window = _positive(window, filed) if files else 0
    file_operation = _FILE_OPERATION_BYTES // primary.row_bytes
    return Limits(
        load_operation=_positive(operation, load),
        load_window=_positive(window, load),
        store_operation=_positive(operation, store),
        store_window=_positive(window, store),
        file_operation=_positive(file_operation, operation, file_window),
        file_window=file_window,
        # One peer may use three quarters of this, which should make a whole window.
        peer_window=_positive(window * 4 // 3, pulled) if peers else 0,
        stages_peers=peers and config.remote_landing == "pool",
        operation_timeout_s=config.operation_timeout / 1000,
        file_timeout_s=config.load_timeout / 1000,
        pull_timeout_s=config.pull_timeout / 1000,
        introduction_timeout_s=config.introduction_timeout / 1000,
    )


def _positive(*bounds: int) -> int:
    return max(1, min(bounds))


def kvcr_config(config: TierConfig, primary: Primary, agent: str) -> KVCRConfig:
    return KVCRConfig(
        nixl_agent_name=agent,
        pool_layouts=[("", primary.row_bytes)],
        enable_telemetry=config.enable_telemetry,
        operation_timeout_ms=config.operation_timeout,
        abandon_timeout_ms=config.abandon_timeout,
        nixl_listen_port=_ANY_PORT,
    )


def backend_configs(
    config: TierConfig, primary: Primary, pool: Any | None
) -> KVCRBackendConfigs:
    """KVCR's backends; ``pool`` is the buffer of this process's own pool."""
    local = None
    if pool is not None:
        pools = [("", address_of(pool), len(pool))]
        local = LocalDramOptions(pools=pools, backend=config.local_dram_backend)
    g3 = None
    if config.g3 is not None:
        g3 = G3Options(
            paths=config.g3.paths,
            capacity_bytes_per_file=g3_file_bytes(config.g3, primary),
            backend_options=config.g3.backend_options,
        )
        if config.g3.backend is not None:
            g3 = replace(g3, backend=config.g3.backend)
    return KVCRBackendConfigs(
        local_dram=local,
        g3=g3,
        remote_fw_dram=RemoteFWDramOptions(
            eager_ctrl_connect=config.eager_ctrl_connect,
            opportunistic_query=config.opportunistic_query,
            metadata_retry_interval_ms=config.metadata_retry_interval_ms,
            backend=config.remote_fw_dram_backend,
        ),
        **shims.primary_region(primary.address, primary.row_bytes, primary.rows),
    )


def guard_config(
    config: TierConfig, local_rank: int | None, codec: KeyCodec
) -> KVCRGuardConfig | None:
    """How to reach the KVCR service, if one is used."""
    if config.kvcr_service_socket_path is None:
        return None
    digest = config.compatibility_digest or ""
    if config.derives_digest:
        digest = codec.digest
        if not digest:
            raise OptionError(
                "kvcr tier: compatibility_digest = 'auto' stands for the namespace, "
                "but there is none; give a digest, or set namespace to 'auto'"
            )
    return KVCRGuardConfig(
        kvcr_service_socket_path=config.kvcr_service_socket_path,
        guard_index=local_rank or 0,
        compatibility_digest=digest,
    )


def g3_file_bytes(g3: G3Config, primary: Primary) -> int:
    """Size of each file: its capacity, rounded down to whole chunks."""
    size = g3.capacity_bytes_per_file // primary.row_bytes * primary.row_bytes
    if primary.row_bytes % PAGESIZE:
        raise OptionError(
            f"kvcr tier: g3 needs chunks of whole {PAGESIZE}-byte pages, but this "
            f"primary tier's chunks have {primary.row_bytes} bytes"
        )
    if not size:
        raise OptionError(
            f"kvcr tier: g3.capacity_bytes_per_file = {g3.capacity_bytes_per_file}: is "
            f"smaller than one chunk, which has {primary.row_bytes} bytes"
        )
    return size
