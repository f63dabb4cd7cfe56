# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Tiered KV-cache offloading for vLLM's CPU backend.

vLLM's own offloading worker moves blocks with GPU copies and refuses the CPU platform.
This spec is vLLM's tiering spec with a worker that copies in host memory, so that the
whole stack runs on a machine without a GPU. Select it in
``kv_connector_extra_config``::

    "spec_name": "CpuTieringOffloadingSpec",
    "spec_module_path": "vllm_kvcr.cpu"
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from vllm.v1.kv_offload.base import (
    BlockIDsLoadStoreSpec,
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)
from vllm.v1.kv_offload.config import OffloadingConfig
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class CpuTieringOffloadingSpec(TieringOffloadingSpec):
    """``TieringOffloadingSpec`` whose worker runs on vLLM's CPU backend."""

    def __init__(self, config: OffloadingConfig):
        if config.canonical_layout:
            raise ValueError(
                "CpuTieringOffloadingSpec does not support canonical_layout; "
                "remove it from kv_connector_extra_config"
            )
        super().__init__(config)
        self._cpu_worker: CpuOffloadingWorker | None = None

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        if self._cpu_worker is None:
            # Workers whose blocks hold the same bytes share the first slot.
            rank = 0 if self.replicated_layout else self.config.parallel.rank
            region = SharedOffloadRegion(
                engine_id=self.config.engine_id,
                num_chunks=self.num_chunks,
                rank=rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            try:
                self._cpu_worker = CpuOffloadingWorker(
                    kv_caches, self.blocks_per_chunk, region
                )
            except BaseException:
                region.cleanup()
                raise
        return self._cpu_worker


@dataclass(frozen=True)
class _PagePair:
    """The same layer's pages in the KV cache and in the offload region."""

    # (number of blocks, bytes per block)
    cache: np.ndarray
    # (number of chunks, blocks per chunk, bytes per block)
    offloaded: np.ndarray


@dataclass(frozen=True)
class _BlockMap:
    """Where each block of a group lies on both sides."""

    cache_block: np.ndarray
    chunk: np.ndarray
    block_in_chunk: np.ndarray


class CpuOffloadingWorker(OffloadingWorker):
    """Copies blocks between CPU KV caches and the shared offload region.

    A transfer is complete when ``submit_store`` or ``submit_load`` returns, and the
    next ``get_finished`` reports it. The CPU backend runs the model and the submissions
    in one thread, so there is no computation with which an asynchronous copy could
    overlap. Failure model: a transfer whose blocks and chunks do not match raises
    before any byte is copied.

    Once it is constructed, the worker owns ``region``.
    """

    def __init__(
        self,
        kv_caches: CanonicalKVCaches,
        blocks_per_chunk: int,
        region: SharedOffloadRegion,
    ):
        self._blocks_per_chunk = blocks_per_chunk
        self._region: SharedOffloadRegion | None = region
        self._finished: list[TransferResult] = []

        tensors: list[_PagePair] = []
        for kv_cache in kv_caches.tensors:
            if kv_cache.tensor.device.type != "cpu":
                raise ValueError(
                    f"KV cache is on {kv_cache.tensor.device}, but "
                    "CpuTieringOffloadingSpec serves the CPU backend only; "
                    "use vLLM's TieringOffloadingSpec"
                )
            page_size = kv_cache.page_size_bytes
            cache = kv_cache.tensor.view(torch.int8).view(-1, page_size)
            # Each view takes the next bytes of this worker's slot in every row.
            offloaded = region.create_next_worker_view(page_size * blocks_per_chunk)
            tensors.append(
                _PagePair(
                    cache.numpy(),
                    offloaded.unflatten(1, (blocks_per_chunk, page_size)).numpy(),
                )
            )
        # Only the unpadded part of a page holds data.
        self._group_pages: list[list[_PagePair]] = [
            [
                _PagePair(
                    tensors[ref.tensor_idx].cache[:, : ref.page_size_bytes],
                    tensors[ref.tensor_idx].offloaded[:, :, : ref.page_size_bytes],
                )
                for ref in group_refs
            ]
            for group_refs in kv_caches.group_data_refs
        ]

    def submit_store(
        self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec
    ) -> bool:
        started = time.perf_counter()
        copied = 0
        for pages, blocks in self._locate(src_spec, dst_spec):
            pages.offloaded[blocks.chunk, blocks.block_in_chunk] = pages.cache[
                blocks.cache_block
            ]
            copied += len(blocks.cache_block) * pages.cache.shape[1]
        return self._finish(job_id, copied, started)

    def submit_load(
        self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec
    ) -> bool:
        started = time.perf_counter()
        copied = 0
        for pages, blocks in self._locate(dst_spec, src_spec):
            pages.cache[blocks.cache_block] = pages.offloaded[
                blocks.chunk, blocks.block_in_chunk
            ]
            copied += len(blocks.cache_block) * pages.cache.shape[1]
        return self._finish(job_id, copied, started)

    def get_finished(self) -> list[TransferResult]:
        finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: set[int]) -> None:
        """Nothing to wait for: every submitted transfer is complete."""

    def shutdown(self) -> None:
        # The region can only be unmapped once nothing refers to its memory.
        self._group_pages = []
        if self._region is not None:
            self._region.cleanup()
            self._region = None

    def _finish(self, job_id: int, copied: int, started: float) -> bool:
        self._finished.append(
            TransferResult(
                job_id=job_id,
                success=True,
                transfer_size=copied,
                transfer_time=time.perf_counter() - started,
            )
        )
        return True

    def _locate(
        self, cache_spec: GPULoadStoreSpec, offload_spec: LoadStoreSpec
    ) -> Iterator[tuple[_PagePair, _BlockMap]]:
        """Pair each page view with its blocks, after all of them were checked."""
        if not isinstance(offload_spec, BlockIDsLoadStoreSpec):
            raise TypeError(
                f"expected chunk ids of the CPU tier, not {type(offload_spec).__name__}"
            )
        groups = self._map_blocks(cache_spec, offload_spec.block_ids)
        return (
            (pages, blocks)
            for group_pages, blocks in zip(self._group_pages, groups, strict=True)
            for pages in group_pages
            if len(blocks.cache_block)
        )

    def _map_blocks(
        self, cache_spec: GPULoadStoreSpec, chunk_ids: np.ndarray
    ) -> list[_BlockMap]:
        """Locate the blocks of each group.

        Both id lists contain one group after the other. A group starts inside its first
        chunk if the index of its first block in the request is not a multiple of
        ``blocks_per_chunk``, and it may end inside its last chunk.
        """
        if len(cache_spec.group_sizes) != len(self._group_pages):
            raise ValueError(
                f"the transfer has {len(cache_spec.group_sizes)} KV cache groups, but "
                f"the worker has {len(self._group_pages)}"
            )
        maps: list[_BlockMap] = []
        first_block = first_chunk = 0
        for size, index in zip(
            cache_spec.group_sizes, cache_spec.block_indices, strict=True
        ):
            position = np.arange(size) + (index % self._blocks_per_chunk)
            chunk, block_in_chunk = np.divmod(position, self._blocks_per_chunk)
            num_chunks = int(chunk[-1]) + 1 if size else 0
            group_chunks = chunk_ids[first_chunk : first_chunk + num_chunks]
            if len(group_chunks) != num_chunks:
                raise ValueError(
                    f"the transfer names {len(chunk_ids)} chunks, too few for its "
                    f"{len(cache_spec.block_ids)} blocks"
                )
            maps.append(
                _BlockMap(
                    cache_spec.block_ids[first_block : first_block + size],
                    group_chunks[chunk],
                    block_in_chunk,
                )
            )
            first_block += size
            first_chunk += num_chunks
        if first_chunk != len(chunk_ids):
            raise ValueError(
                f"the transfer names {len(chunk_ids)} chunks, but its blocks fill "
                f"{first_chunk}"
            )
        return maps
