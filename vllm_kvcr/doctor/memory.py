# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Checks whether the configured memory is available, and whether it may be pinned."""

import resource
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_kvcr.doctor.finding import Finding, fail, ok, size, warn
from vllm_kvcr.doctor.setting import Setting, Tier

if TYPE_CHECKING:
    from vllm.v1.kv_offload.tiering.kvcr.config import TierConfig

SHARED_MEMORY = Path("/dev/shm")
INFINIBAND = Path("/sys/class/infiniband")


def check(setting: Setting) -> Iterator[Finding]:
    if not setting.valid:
        yield warn("no pool to check without a valid configuration")
    primary, pools = 0, 0
    for tier, config in setting.valid:
        ranks = len(config.control_ports or (0,))
        primary = max(primary, ranks * _primary_bytes(tier))
        pool = _pool_bytes(tier, config, setting.chunk_bytes)
        if pool is None:
            yield warn(
                "the pool's size in bytes is not known, so it was not checked",
                "give --chunk-bytes: cpu_bytes_to_use divided by the number of chunks "
                "that fit in it",
            )
        pools += ranks * (pool or 0)
    if primary:
        yield _shared_memory(primary)
    if primary or pools:
        yield _host_memory(primary, pools)
    yield _memlock(primary + pools)


def _primary_bytes(tier: Tier) -> int:
    budget = tier.connector.get("cpu_bytes_to_use")
    return int(budget) if isinstance(budget, (int, float)) else 0


def _pool_bytes(
    tier: Tier, config: "TierConfig", chunk_bytes: int | None
) -> int | None:
    """Bytes of one rank's own pool; ``None`` if they are not known."""
    from vllm.v1.kv_offload.tiering.kvcr.backend.setup import Primary, pool_slots

    if config.kvcr_service_socket_path is not None:
        return 0
    if chunk_bytes is not None:
        rows = _primary_bytes(tier) // chunk_bytes
        return pool_slots(config, Primary(0, chunk_bytes, rows))[0] * chunk_bytes
    # The landing pool's default is a size in bytes.
    return None if config.has_own_pool or config.landing_slots else 0


def _shared_memory(primary: int) -> Finding:
    free = shutil.disk_usage(SHARED_MEMORY).free
    known = {"needed": primary, "free": free}
    text = f"the primary tier needs {size(primary)} of {SHARED_MEMORY}, and "
    if free < primary:
        return fail(
            text + f"{size(free)} are free",
            "lower cpu_bytes_to_use, or enlarge it: docker run --shm-size, or an "
            "emptyDir with medium Memory mounted there",
            **known,
        )
    return ok(text + f"{size(free)} are free", **known)


def _host_memory(primary: int, pools: int) -> Finding:
    from vllm.v1.kv_offload.tiering.kvcr.backend.pool import available_memory

    available = available_memory()
    known = {"primary": primary, "pools": pools, "available": available}
    text = (
        f"primary tier {size(primary)} and KVCR's pools {size(pools)}, of "
        f"{size(available)} available to this machine or container"
    )
    if primary + pools > available:
        return fail(
            text,
            "lower cpu_bytes_to_use or secondary_g2_slots, or raise the container's "
            "memory limit",
            **known,
        )
    return ok(text, **known)


def _memlock(needed: int) -> Finding:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    unlimited = soft == resource.RLIM_INFINITY
    rdma = INFINIBAND.is_dir() and any(INFINIBAND.iterdir())
    known = {"limit": None if unlimited else soft, "needed": needed, "rdma": rdma}
    if unlimited:
        return ok("memlock is unlimited", **known)
    text = f"memlock is {size(soft)}, and {size(needed)} will be registered"
    if soft >= needed > 0:
        return ok(text, **known)
    remedy = "ulimit -l unlimited, LimitMEMLOCK=infinity, or docker's --ulimit memlock"
    if rdma:
        return fail(text + " with an RDMA device, which pins them", remedy, **known)
    return warn(
        text + "; only RDMA devices need more, and none was found", remedy, **known
    )
