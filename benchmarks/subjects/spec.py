# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What vLLM hands to a tier, without an engine."""

import importlib
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

from benchmarks.harness import remote
from vllm.v1.kv_offload.base import OffloadingSpec
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.tiering.base import SecondaryTierManager
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

KVCR_TIER_MODULE = "vllm.v1.kv_offload.tiering.kvcr.manager"


class BenchmarkSpec(OffloadingSpec):
    """A spec of which only what describes the model is used."""

    def get_manager(self) -> Any:
        raise NotImplementedError

    def get_worker(self, kv_caches: Any) -> Any:
        raise NotImplementedError


def make_spec(row_bytes: int) -> BenchmarkSpec:
    config = _known(
        OffloadingConfig,
        groups=(
            _known(
                OffloadingGroupConfig,
                tokens_per_block=16,
                layer_names=("layer",),
                group_id=0,
            ),
        ),
        worker_kv_bytes_per_block=row_bytes,
        enable_kv_cache_events=False,
        extra_config={},
        engine_id="benchmark",
        model=_known(OffloadingModelConfig, name="benchmark", dtype="float16"),
        cache=_known(OffloadingCacheConfig, tokens_per_hash=16, blocks_per_chunk=1),
        parallel=_known(
            OffloadingParallelConfig,
            rank=0,
            world_size=1,
            tp_size=1,
            pp_size=1,
            pcp_size=1,
            dcp_size=1,
            data_parallel_index=0,
            data_parallel_size=1,
            data_parallel_rank_local=None,
            is_parallelism_agnostic=False,
        ),
    )
    return BenchmarkSpec(config)


def make_tier(view: memoryview, options: dict[str, Any]) -> SecondaryTierManager:
    """A tier, made by vLLM's own factory.

    Raises:
        RuntimeError: ``kvcr`` here is not the adapter that is to be measured.
    """
    if options["type"] == "kvcr" and _is_ours() != remote.serves_ours:
        raise RuntimeError("the other kvcr adapter would be measured")
    assert view.shape is not None
    assert view.strides is not None
    return SecondaryTierFactory.create_secondary_tier(
        options, view, make_spec(view.strides[0])
    )


def _is_ours() -> bool:
    """Whether this process has this project's adapter, and not the one of vLLM."""
    importlib.import_module(KVCR_TIER_MODULE)
    found = Path(sys.modules[KVCR_TIER_MODULE].__file__ or "").resolve()
    installed = importlib.import_module("vllm").__file__ or ""
    return Path(installed).resolve().parent not in found.parents


def _known(kind: type, **values: Any) -> Any:
    """An object of ``kind``, which has not every field in each release of vLLM."""
    names = {field.name for field in fields(kind)}
    return kind(**{name: value for name, value in values.items() if name in names})
