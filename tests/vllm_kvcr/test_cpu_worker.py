# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The CPU worker against a block-at-a-time reference, on real shared regions."""

import itertools
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.v1.kv_offload.tiering.kvcr.vllm_engine import ONE_RANK
from vllm.utils.math_utils import cdiv, round_up
from vllm.v1.kv_offload.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    GPULoadStoreSpec,
)
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm_kvcr.cpu import CpuOffloadingWorker, CpuTieringOffloadingSpec

NUM_BLOCKS = 24
NUM_CHUNKS = 16


@dataclass(frozen=True)
class Layout:
    """What the workers of one engine have in common."""

    blocks_per_chunk: int
    num_workers: int
    # Bytes of a block in each tensor, padding included.
    page_sizes: tuple[int, ...]
    # (tensor, bytes used) of each layer, for each group.
    groups: tuple[tuple[tuple[int, int], ...], ...]

    @property
    def worker_bytes_per_chunk(self) -> int:
        return sum(self.page_sizes) * self.blocks_per_chunk

    @property
    def row_stride(self) -> int:
        return round_up(
            self.worker_bytes_per_chunk * self.num_workers,
            SharedOffloadRegion.BLOCK_SIZE_ALIGNMENT,
        )

    def region(self, engine_id: str, rank: int | None) -> SharedOffloadRegion:
        return SharedOffloadRegion(
            engine_id=engine_id,
            num_chunks=NUM_CHUNKS,
            rank=rank,
            kv_bytes_per_chunk=self.row_stride,
            cpu_page_size=self.worker_bytes_per_chunk,
        )

    def caches(self) -> CanonicalKVCaches:
        return CanonicalKVCaches(
            tensors=[
                CanonicalKVCacheTensor(random_bytes(NUM_BLOCKS, size), size)
                for size in self.page_sizes
            ],
            group_data_refs=[
                [CanonicalKVCacheRef(tensor, used) for tensor, used in refs]
                for refs in self.groups
            ],
        )


@dataclass(frozen=True)
class GroupTransfer:
    block_ids: list[int]
    chunk_ids: list[int]
    first_index: int


Case = tuple[Layout, list[GroupTransfer], list[GroupTransfer]]


def random_bytes(*shape: int) -> torch.Tensor:
    return torch.randint(-128, 128, shape, dtype=torch.int8)


def cache_spec(groups: list[GroupTransfer]) -> GPULoadStoreSpec:
    return GPULoadStoreSpec(
        [block for group in groups for block in group.block_ids],
        group_sizes=[len(group.block_ids) for group in groups],
        block_indices=[group.first_index for group in groups],
    )


def chunk_spec(groups: list[GroupTransfer]) -> CPULoadStoreSpec:
    return CPULoadStoreSpec([chunk for group in groups for chunk in group.chunk_ids])


def reference_copies(
    layout: Layout, rank: int, groups: list[GroupTransfer]
) -> Iterator[tuple[int, int, int, int]]:
    """(tensor, block, offset in the region, bytes) of each copy, one block a time."""
    for refs, group in zip(layout.groups, groups, strict=True):
        for (tensor, used), (i, block) in itertools.product(
            refs, enumerate(group.block_ids)
        ):
            position = group.first_index % layout.blocks_per_chunk + i
            chunk = group.chunk_ids[position // layout.blocks_per_chunk]
            page_size = layout.page_sizes[tensor]
            offset = (
                chunk * layout.row_stride
                + rank * layout.worker_bytes_per_chunk
                + sum(layout.page_sizes[:tensor]) * layout.blocks_per_chunk
                + (position % layout.blocks_per_chunk) * page_size
            )
            yield tensor, block, offset, used


@contextmanager
def running_workers(
    layout: Layout, all_caches: list[CanonicalKVCaches]
) -> Iterator[tuple[torch.Tensor, list[CpuOffloadingWorker]]]:
    """The region's bytes as the scheduler sees them, and a worker for each rank."""
    engine_id = f"test-{uuid.uuid4()}"
    with ExitStack() as stack:
        scheduler_region = layout.region(engine_id, rank=None)
        stack.callback(scheduler_region.cleanup)
        workers = []
        for rank, caches in enumerate(all_caches):
            worker = CpuOffloadingWorker(
                caches, layout.blocks_per_chunk, layout.region(engine_id, rank)
            )
            stack.callback(worker.shutdown)
            workers.append(worker)
        yield torch.from_numpy(scheduler_region._base.numpy()), workers


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    page_sizes = draw(st.lists(st.integers(1, 40), min_size=1, max_size=3))
    # A tensor may serve several groups, and a layer may leave padding unused.
    layer = st.integers(0, len(page_sizes) - 1).flatmap(
        lambda tensor: st.tuples(st.just(tensor), st.integers(1, page_sizes[tensor]))
    )
    group = st.lists(layer, min_size=1, max_size=3, unique_by=lambda ref: ref[0])
    return Layout(
        blocks_per_chunk=draw(st.integers(1, 5)),
        num_workers=draw(st.integers(1, 3)),
        page_sizes=tuple(page_sizes),
        groups=tuple(
            tuple(refs) for refs in draw(st.lists(group, min_size=1, max_size=3))
        ),
    )


@st.composite
def transfers(draw: st.DrawFn, layout: Layout) -> list[GroupTransfer]:
    free_blocks = draw(st.permutations(range(NUM_BLOCKS)))
    free_chunks = draw(st.permutations(range(NUM_CHUNKS)))
    groups = []
    for _ in layout.groups:
        first_index = draw(st.integers(0, 3 * layout.blocks_per_chunk))
        size = draw(st.integers(0, NUM_BLOCKS // len(layout.groups)))
        # One chunk may start and one may end inside a group: leave room for both.
        skipped = first_index % layout.blocks_per_chunk
        room = NUM_CHUNKS // len(layout.groups) * layout.blocks_per_chunk - skipped
        size = min(size, room)
        num_chunks = cdiv(skipped + size, layout.blocks_per_chunk) if size else 0
        groups.append(
            GroupTransfer(free_blocks[:size], free_chunks[:num_chunks], first_index)
        )
        free_blocks = free_blocks[size:]
        free_chunks = free_chunks[num_chunks:]
    return groups


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """A layout, a store, and a load of the same chunks into other blocks."""
    layout = draw(layouts())
    stored = draw(transfers(layout))
    other_blocks = iter(draw(st.permutations(range(NUM_BLOCKS))))
    loaded = [
        replace(group, block_ids=[next(other_blocks) for _ in group.block_ids])
        for group in stored
    ]
    return layout, stored, loaded


@settings(max_examples=100, deadline=None)
@given(cases())
def test_copies_exactly_what_the_reference_copies(case: Case) -> None:
    layout, stored, loaded = case
    all_caches = [layout.caches() for _ in range(layout.num_workers)]
    with running_workers(layout, all_caches) as (region, workers):
        region.copy_(random_bytes(len(region)))
        expected_region = region.clone()
        for rank, (caches, worker) in enumerate(zip(all_caches, workers, strict=True)):
            assert worker.submit_store(1, cache_spec(stored), chunk_spec(stored))
            for tensor, block, offset, size in reference_copies(layout, rank, stored):
                expected_region[offset : offset + size] = caches.tensors[tensor].tensor[
                    block, :size
                ]
        assert torch.equal(region, expected_region)

        for rank, (caches, worker) in enumerate(zip(all_caches, workers, strict=True)):
            expected_caches = [cache.tensor.clone() for cache in caches.tensors]
            assert worker.submit_load(2, chunk_spec(loaded), cache_spec(loaded))
            copied = 0
            for tensor, block, offset, size in reference_copies(layout, rank, loaded):
                expected_caches[tensor][block, :size] = region[offset : offset + size]
                copied += size
            for cache, expected in zip(caches.tensors, expected_caches, strict=True):
                assert torch.equal(cache.tensor, expected)
            assert [
                (result.job_id, result.success, result.transfer_size)
                for result in worker.get_finished()
            ] == [(1, True, copied), (2, True, copied)]
            assert worker.get_finished() == []
        assert torch.equal(region, expected_region)


def test_page_strides_and_element_types_of_the_model_are_kept() -> None:
    """A layer's pages may lie apart (packed layouts) and hold wider elements."""
    layout = Layout(2, 1, page_sizes=(8,), groups=(((0, 8),),))
    packed = torch.arange(NUM_BLOCKS * 12, dtype=torch.bfloat16).view(NUM_BLOCKS, 12)
    caches = CanonicalKVCaches(
        [CanonicalKVCacheTensor(packed[:, :4], 8)], [[CanonicalKVCacheRef(0, 8)]]
    )
    before = packed.clone()
    stored = [GroupTransfer([3, 5, 7], [9, 4], first_index=1)]
    with running_workers(layout, [caches]) as (_, (worker,)):
        worker.submit_store(1, cache_spec(stored), chunk_spec(stored))
        packed[:, :4] = 0
        worker.submit_load(2, chunk_spec(stored), cache_spec(stored))
    for block in range(NUM_BLOCKS):
        if block in (3, 5, 7):
            assert torch.equal(packed[block], before[block])
        else:
            assert torch.equal(packed[block, :4], torch.zeros(4))
            assert torch.equal(packed[block, 4:], before[block, 4:])


ONE_GROUP = Layout(2, 1, page_sizes=(16,), groups=(((0, 16),),))


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ([GroupTransfer([0, 1, 2], [0], 0)], "too few"),
        ([GroupTransfer([0, 1], [0], 1)], "too few"),
        ([GroupTransfer([0, 1], [0, 1], 0)], "fill 1"),
        ([GroupTransfer([], [0], 1)], "fill 0"),
        ([GroupTransfer([0], [0], 0)] * 2, "2 KV cache groups"),
    ],
)
def test_blocks_and_chunks_that_do_not_match_are_refused(
    groups: list[GroupTransfer], message: str
) -> None:
    caches = ONE_GROUP.caches()
    before = caches.tensors[0].tensor.clone()
    with running_workers(ONE_GROUP, [caches]) as (region, (worker,)):
        with pytest.raises(ValueError, match=message):
            worker.submit_store(1, cache_spec(groups), chunk_spec(groups))
        with pytest.raises(ValueError, match=message):
            worker.submit_load(2, chunk_spec(groups), cache_spec(groups))
        assert not region.any()
        assert worker.get_finished() == []
    assert torch.equal(caches.tensors[0].tensor, before)


def test_shutdown_releases_the_region_and_may_be_repeated() -> None:
    region = ONE_GROUP.region(f"test-{uuid.uuid4()}", rank=0)
    file = Path(region.mmap_path)
    mapping = region.mmap_obj
    assert file.exists()
    worker = CpuOffloadingWorker(ONE_GROUP.caches(), 2, region)
    worker.shutdown()
    worker.shutdown()
    assert mapping.closed
    assert not file.exists()


def offloading_config(
    engine_id: str, *, rank: int = 0, **overrides: object
) -> OffloadingConfig:
    values: dict[str, object] = {
        "groups": (OffloadingGroupConfig(32, ("layer",), 0),),
        "worker_kv_bytes_per_block": sum(ONE_GROUP.page_sizes),
        "enable_kv_cache_events": False,
        "extra_config": {
            "cpu_bytes_to_use": NUM_CHUNKS * SharedOffloadRegion.BLOCK_SIZE_ALIGNMENT
        },
        "engine_id": engine_id,
        "model": OffloadingModelConfig("model", "float32"),
        "cache": OffloadingCacheConfig(32, ONE_GROUP.blocks_per_chunk),
        "parallel": OffloadingParallelConfig(
            **(ONE_RANK | {"rank": rank, "world_size": 2, "tp_size": 2})  # type: ignore[arg-type]
        ),
    }
    return OffloadingConfig(**(values | overrides))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("replicated", "expected_slot"), [(False, 1), (True, 0)], ids=["own", "shared"]
)
def test_spec_gives_each_worker_its_slot_of_the_managers_rows(
    replicated: bool, expected_slot: int
) -> None:
    """The second rank writes to its own slot, unless all ranks hold the same bytes."""
    engine_id = f"test-{uuid.uuid4()}"
    caches = ONE_GROUP.caches()
    stored = [GroupTransfer([3, 4], [5], 0)]
    spec = CpuTieringOffloadingSpec(
        offloading_config(engine_id, rank=1, replicated_layout=replicated)
    )
    manager = spec.get_manager()
    try:
        worker = spec.get_worker(caches)
        assert spec.get_worker(caches) is worker
        worker.submit_store(1, cache_spec(stored), chunk_spec(stored))
        view = manager.primary_tier.get_kv_memoryview()  # type: ignore[attr-defined]
        row = torch.frombuffer(view, dtype=torch.int8).view(view.shape)[5].clone()
        worker.shutdown()
    finally:
        del view
        manager.shutdown()
    slot = row[expected_slot * 32 : (expected_slot + 1) * 32]
    assert torch.equal(slot, caches.tensors[0].tensor[[3, 4]].flatten())
    assert row.count_nonzero() == slot.count_nonzero()


def test_spec_refuses_the_canonical_layout() -> None:
    with pytest.raises(ValueError, match="canonical_layout"):
        CpuTieringOffloadingSpec(offloading_config("test", canonical_layout=True))


def test_a_cache_that_is_not_in_host_memory_is_refused_and_leaves_nothing() -> None:
    engine_id = f"test-{uuid.uuid4()}"
    caches = CanonicalKVCaches(
        [CanonicalKVCacheTensor(torch.empty(4, 16, device="meta"), 16)],
        [[CanonicalKVCacheRef(0, 16)]],
    )
    spec = CpuTieringOffloadingSpec(offloading_config(engine_id))
    with pytest.raises(ValueError, match=r"meta.*TieringOffloadingSpec"):
        spec.get_worker(caches)
    assert not Path(f"/dev/shm/vllm_offload_{engine_id}.mmap").exists()
