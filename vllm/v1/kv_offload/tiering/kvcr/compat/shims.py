# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The only place that knows how releases of vLLM and kvcr differ.

Each shim looks at what the installed packages *have*, never at a version number, and
says which releases it serves and when it can go. Nothing else in this package may
mention a version.
"""

from collections.abc import Callable
from contextlib import suppress
from inspect import signature
from typing import Any

from vllm.v1.kv_offload.tiering.kvcr.compat import environment

try:
    import kvcr
    import kvcr.api as kvcr_api
    import kvcr.config as kvcr_config
    import kvcr.types as kvcr_types
except ImportError as error:
    raise environment.explain(error) from error

environment.check_names()

from vllm.v1.kv_offload.base import OffloadKey, ReqContext  # noqa: E402
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager  # noqa: E402

BlockRefs = list[Any]
"""One block's memory, in the form that KVCR takes: a list with one reference."""


# --- for kvcr 0.1.0; can go with it --------------------------------------------------

# Its start never reports native work that it could not stop.
KVCRStartupError: type[Exception] | None = getattr(kvcr_types, "KVCRStartupError", None)
# It cannot be told in which order blocks are used.
HAS_SEQUENCE_ALIGNMENT = hasattr(kvcr_api.KVCR, "align_sequence")
# To it an address identifies a block, to later ones an index into a registered region.
_HAS_REGIONS = hasattr(kvcr_types, "RegionDescriptor")
# Its reports do not say whose memory they concern.
_HAS_MEMORY_OWNERS = (
    "destination_owner" in signature(kvcr_types.TransferError.__init__).parameters
)

# --- for vLLM 0.30; can go with it ---------------------------------------------------

# It alone reports the use of blocks to its tiers (``touch``). Later schedulers record
# where each block is in the request, and only the primary tier uses that. Stays if a
# later release calls ``touch`` again.
REPORTS_USE = not hasattr(ReqContext, "set_offload_key_position")
# Its tiers take no backpressure detector, and its job results have no size.
HAS_BACKPRESSURE = hasattr(SecondaryTierManager, "bp_detector")
_HAS_TRANSFER_BYTES = "transfer_bytes" in JobResult.__dataclass_fields__
# Its requests have no field for hints; see ``request_hints``.
_HAS_KV_HINTS = "kv_hints" in ReqContext.__dataclass_fields__

# --- for vLLM 0.31 and before; can go with them --------------------------------------

# They do not tell where cached tokens came from.
HIT_SOURCES: tuple[Any, ...] = tuple(
    getattr(type(getattr(SecondaryTierManager, "cache_hit_source", None)), name, None)
    for name in ("HOST", "DISK", "P2P")
)
"""What vLLM calls KVCR's pool, its files and a peer there."""

# --- for vLLM 0.32 and before; can go with them --------------------------------------

# Nothing wakes a sleeping engine there for a peer's request.
HAS_TIER_POLL_THREAD = hasattr(SecondaryTierManager, "tolerates_off_thread_polling")
# They publish no information about a tier.
_HAS_CONFIG_INFO = hasattr(SecondaryTierManager, "config_info")


def primary_region(address: int, row_bytes: int, rows: int) -> dict[str, Any]:
    """The argument of ``KVCRBackendConfigs`` that registers the primary tier."""
    if _HAS_REGIONS:
        region = kvcr_types.RegionDescriptor(addr=address, size=row_bytes, count=rows)
        return {"framework_regions": [region]}
    whole = kvcr_config.FrameworkDramInput(address, row_bytes * rows)  # type: ignore[attr-defined,unused-ignore]
    return {"framework_dram": whole}


def block_refs_factory(
    agent: str, address: int, row_bytes: int
) -> Callable[[int], BlockRefs]:
    """Make a function that describes chunk ``i`` of the primary tier to KVCR."""
    if _HAS_REGIONS:
        ref = kvcr_types.MemoryRef
        return lambda index: [ref(end_point_name=agent, element_index=index)]
    descriptor = kvcr_types.MemDescriptor  # type: ignore[attr-defined,unused-ignore]
    return lambda index: [
        descriptor(agent, "DRAM", address + index * row_bytes, row_bytes, 0)
    ]


def base_arguments(backpressure_detector: Any | None) -> dict[str, Any]:
    """Extra arguments of ``SecondaryTierManager.__init__``."""
    extra = {"backpressure_detector": backpressure_detector}
    return extra if HAS_BACKPRESSURE else {}


def job_result(
    job_id: int,
    success: bool,
    *,
    successful_keys: set[OffloadKey] | None = None,
    transfer_time: float | None = None,
    transfer_bytes: int | None = None,
) -> JobResult:
    """A ``JobResult`` with the fields that this vLLM has."""
    result = JobResult(
        job_id, success, successful_keys=successful_keys, transfer_time=transfer_time
    )
    if _HAS_TRANSFER_BYTES:
        result.transfer_bytes = transfer_bytes
    return result


def request_hints(req_context: ReqContext) -> object | None:
    """The request's routing metadata, from whichever field holds it.

    Since vLLM 0.31 requests have ``kv_hints``. Before, the metadata travels in
    ``kv_transfer_params`` under KVCR's key, as it still does for some clients. The
    second half can go when 0.30 is no longer supported.
    """
    hints = getattr(req_context, "kv_hints", None)
    if hints is not None:
        return hints
    params = getattr(req_context, "kv_transfer_params", None)
    return params.get(kvcr.ROUTER_HINT_KEY) if isinstance(params, dict) else None


def writes_primary(error: kvcr_types.TransferError) -> bool:
    """Whether a destination report concerns the primary tier's memory.

    kvcr 0.1.0 does not name the owner; there a negative handle identifies KVCR's own
    fills. That half can go with 0.1.0.
    """
    owner = getattr(error, "destination_owner", None)
    return owner == "framework" if owner is not None else error.op_handle >= 0


def primary_source_keys(error: kvcr_types.TransferError) -> set[bytes]:
    """The keys of a source report whose blocks lie in the primary tier.

    kvcr 0.1.0 does not name the owner, so there every key counts: to hold a pin a
    little longer than needed is safe. Can go with 0.1.0.
    """
    owners = getattr(error, "source_owners", None)
    blocks = error.source_blocks or {}
    return {key for key in blocks if owners is None or owners.get(key) == "framework"}


def is_quiescent(kvcr_instance: Any) -> bool:
    """Whether native code has provably let go of every buffer.

    ``close()`` repeats the progress thread's old failure even after everything was
    released, and kvcr has no public way to ask. Can go once it has one.
    """
    with suppress(Exception):
        return kvcr_instance._core.is_quiescent() is True
    return False


def service_pool_bytes(kvcr_instance: Any) -> int | None:
    """Size of the pool that the KVCR service granted; ``None`` if it is not known.

    kvcr has no public way to ask. Can go once it has one.
    """
    with suppress(Exception):
        return sum(pool.size_bytes for pool in kvcr_instance._pool_hold._pools)
    return None


def peer_forgetter(kvcr_instance: Any) -> Callable[[str], None]:
    """Make a function that drops everything that KVCR remembers of a control endpoint.

    The function has to be called on KVCR's progress thread. Without it KVCR would
    remember the endpoint for good. Can go once KVCR has a public way to forget.
    """
    core = getattr(kvcr_instance, "_core", None)
    backend: Any = getattr(core, "_remote_fw_dram", None)

    def forget(endpoint: str) -> None:
        # Each by itself, so that a kvcr without one of them still forgets the others.
        with suppress(AttributeError, TypeError):
            backend._metadata_acked_sources.discard(endpoint)
        with suppress(AttributeError, TypeError):
            backend._metadata_retry_after.pop(endpoint, None)
        with suppress(AttributeError, TypeError):
            backend._dangling_ops.sources.pop(endpoint, None)

    return forget


def unstopped_starts() -> int:
    """How many failed starts in this process kvcr 0.1.0 could not stop.

    It keeps a list of them, and has no exception that says so. Can go with 0.1.0.
    """
    return len(getattr(kvcr_api, "_NONQUIESCENT_STARTUP_RESOURCES", ()))


def native_alive_after(error: BaseException, unstopped_before: int) -> bool:
    """Whether a failed start of KVCR left native code that may still touch the buffers.

    ``unstopped_before`` is what ``unstopped_starts`` said before it; with kvcr 0.1.0
    that half can go.
    """
    if KVCRStartupError is not None:
        return isinstance(error, KVCRStartupError)
    return unstopped_starts() > unstopped_before


def capabilities() -> dict[str, bool]:
    """Capabilities that depend on the installed releases, and whether they are on."""
    return {
        "off_thread_polling": HAS_TIER_POLL_THREAD,
        "backpressure": HAS_BACKPRESSURE,
        "transfer_sizes": _HAS_TRANSFER_BYTES,
        "kv_hints": _HAS_KV_HINTS,
        "config_info": _HAS_CONFIG_INFO,
        "sequence_alignment": HAS_SEQUENCE_ALIGNMENT and REPORTS_USE,
        "retained_startup_buffers": KVCRStartupError is not None,
        "memory_owners": _HAS_MEMORY_OWNERS,
    }


def describe_start() -> str:
    """The line for the log: the versions, and which capabilities are on and off."""
    has = capabilities()
    on = ", ".join(name for name in has if has[name]) or "-"
    off = ", ".join(name for name in has if not has[name]) or "-"
    return f"{environment.describe()}; on: {on}; off: {off}"


def config_info() -> dict[str, str]:
    """The tier's labels, and their values, in vLLM's metric on the configuration."""
    versions = environment.installed()
    return {
        "kvcr_version": versions.get("kvcr", ""),
        "nixl_version": versions.get("nixl", ""),
        "kvcr_capabilities": ",".join(n for n, has in capabilities().items() if has),
    }
