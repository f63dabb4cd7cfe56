# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The names of vLLM and kvcr that this package cannot do without."""

import importlib

REQUIRED_NAMES = {
    "kvcr": (
        "DURATION_METRIC",
        "KVCR.close",
        "KVCR.deliver",
        "KVCR.deposit",
        "KVCR.discard_hint",
        "KVCR.fetch",
        "KVCR.get_stats",
        "KVCR.poll_completed",
        "KVCR.query",
        "KVCR.release",
        "KVCR.submit_hint",
        "KVCRBindings",
        "KVCRServiceError",
        "ROUTER_HINT_CAPABILITIES",
        "ROUTER_HINT_KEY",
        "STATE_METRIC",
        "TRANSFER_BLOCKS_METRIC",
        "TRANSFER_BYTES_METRIC",
    ),
    "kvcr.config": (
        "G3Options",
        "KVCRBackendConfigs",
        "KVCRConfig",
        "KVCRGuardConfig",
        "LocalDramOptions",
        "RemoteFWDramOptions",
    ),
    "kvcr.control_channels": ("ZmqPeerControlChannel",),
    "kvcr.policy": (
        "FIFOPolicy",
        "G3FIFOPolicy",
        "G3LRUPolicy",
        "KVCachePolicy",
        "LRUPolicy",
    ),
    "kvcr.types": (
        "BlockKey",
        "BlockMeta",
        "CacheTier",
        "InventoryEvent",
        "OpEntryResult",
        "OpEntryStatus",
        "PinHandle",
        "PinRequestId",
        "PinResult",
        "PlacementFailure",
        "QueryStatus",
        "ReleaseHandle",
        "TransferError",
    ),
    "vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics": (
        "OffloadingConnectorStats",
    ),
    "vllm.logger": ("init_logger",),
    "vllm.v1.core.kv_cache_utils": ("BlockHash", "maybe_convert_block_hash"),
    "vllm.v1.kv_offload.base": (
        "Locality",
        "LookupResult",
        "Medium",
        "OffloadKey",
        "OffloadingCounterMetadata",
        "OffloadingEvent",
        "OffloadingGaugeMetadata",
        "OffloadingHistogramMetadata",
        "OffloadingMetricMetadata",
        "OffloadingSpec",
        "ReqContext",
        "RequestOffloadingContext",
        "ScheduleEndContext",
        "get_offload_block_hash",
    ),
    "vllm.v1.kv_offload.tiering.base": (
        "JobId",
        "JobResult",
        "ParentManager",
        "SecondaryTierManager",
        "TransferJob",
    ),
}


def missing_names() -> list[str]:
    """Import their modules, and list those that do not exist, with their module."""
    missing = []
    for module, names in REQUIRED_NAMES.items():
        try:
            loaded = importlib.import_module(module)
        except ModuleNotFoundError as error:
            # If that module lacks something itself, its own error says so best.
            if not f"{module}.".startswith(f"{error.name}."):
                raise
            missing.append(module)
            continue
        for name in names:
            found: object = loaded
            for part in name.split("."):
                found = getattr(found, part, None)
            if found is None:
                missing.append(f"{module}.{name}")
    return missing
