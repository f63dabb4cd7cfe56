# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What the demo runs and measures, and when it counts as a success.

Sizes are in chunks, the unit that tiers store. vLLM's own caches hold little more than
one prompt each, and the prompts take turns. So each prompt has left both caches when it
is repeated, and every token that is not computed then was served by KVCR.
"""

from collections.abc import Mapping
from dataclasses import dataclass

# The CPU backend needs multiples of 32.
TOKENS_PER_BLOCK = 32
BLOCKS_PER_CHUNK = 4
TOKENS_PER_CHUNK = TOKENS_PER_BLOCK * BLOCKS_PER_CHUNK


@dataclass(frozen=True)
class Workload:
    """Distinct long prompts, run one after the other, in two passes."""

    prompts: int = 4
    chunks_per_prompt: int = 16
    # The end of every prompt, which is the same in all and too short to be offloaded.
    # So outputs of two prompts can differ only because of KV that was offloaded.
    tail_tokens: int = 8
    output_tokens: int = 16

    @property
    def chunks(self) -> int:
        return self.prompts * self.chunks_per_prompt

    @property
    def prompt_tokens(self) -> int:
        return self.chunks_per_prompt * TOKENS_PER_CHUNK + self.tail_tokens

    @property
    def cache_blocks(self) -> int:
        """vLLM's KV cache: one and a quarter prompts, and one reserved block."""
        offloaded = self.chunks_per_prompt * BLOCKS_PER_CHUNK
        own = -(-(self.tail_tokens + self.output_tokens) // TOKENS_PER_BLOCK)
        return offloaded * 5 // 4 + own + 1

    @property
    def primary_chunks(self) -> int:
        """vLLM's primary tier: one and a half prompts."""
        return self.chunks_per_prompt * 3 // 2


@dataclass(frozen=True)
class Stage:
    """One engine with one configuration of the tier."""

    title: str
    pool_chunks: int
    # 0 means no files.
    file_chunks: int = 0


def stages(workload: Workload) -> tuple[Stage, Stage]:
    """One stage whose pool holds everything, and one that has to use files."""
    return (
        Stage("KVCR DRAM", pool_chunks=workload.chunks + 8),
        Stage(
            "KVCR files",
            pool_chunks=workload.chunks_per_prompt * 3 // 2,
            file_chunks=workload.chunks,
        ),
    )


@dataclass(frozen=True)
class Moved:
    """What one kind of KVCR operation moved, by KVCR's own count."""

    chunks: int = 0
    bytes: int = 0


@dataclass(frozen=True)
class Pass:
    """One run over all prompts."""

    prompt_tokens: int
    # Those that vLLM says it did not compute.
    cached_tokens: int
    # Those of the latter that were still in vLLM's own KV cache.
    kept_tokens: int
    seconds_to_first_token: tuple[float, ...]
    outputs: tuple[tuple[int, ...], ...]
    # Bytes that vLLM says it read from the tier.
    tier_bytes_read: int
    moved: Mapping[str, Moved]

    def operation(self, name: str) -> Moved:
        return self.moved.get(name, Moved())


@dataclass(frozen=True)
class StageResult:
    """A stage's cold pass and its repetition."""

    cold: Pass
    served: Pass

    @property
    def from_files(self) -> Moved:
        """What was read from files, into the pool or into the primary tier."""
        direct, fill = map(self.served.operation, ("g3_deliver", "g3_fill"))
        return Moved(direct.chunks + fill.chunks, direct.bytes + fill.bytes)

    @property
    def from_dram(self) -> Moved:
        """What was copied from the pool, except what only passed through it."""
        out, through = map(self.served.operation, ("local_deliver", "g3_fill"))
        return Moved(out.chunks - through.chunks, out.bytes - through.bytes)

    @property
    def moved_to_files(self) -> Moved:
        """What was moved from the pool to files, in both passes."""
        first, second = (p.operation("g3_store") for p in (self.cold, self.served))
        return Moved(first.chunks + second.chunks, first.bytes + second.bytes)

    @property
    def tokens_from_dram(self) -> int:
        return self.from_dram.chunks * TOKENS_PER_CHUNK

    @property
    def tokens_from_files(self) -> int:
        return self.from_files.chunks * TOKENS_PER_CHUNK

    @property
    def tokens_from_vllm(self) -> int:
        """Tokens that vLLM still had itself: neither computed nor delivered by KVCR."""
        delivered = self.tokens_from_dram + self.tokens_from_files
        return max(self.served.cached_tokens - delivered, self.served.kept_tokens)

    @property
    def equal_outputs(self) -> int:
        pairs = zip(self.cold.outputs, self.served.outputs, strict=True)
        return sum(cold == served for cold, served in pairs)

    def faults(self, stage: Stage) -> list[str]:
        """The reasons why this does not show what the stage is meant to show."""
        faults = []
        wanted = "files" if stage.file_chunks else "DRAM pool"
        got = self.tokens_from_files if stage.file_chunks else self.tokens_from_dram
        if got <= 0:
            faults.append(f"no token was served from KVCR's {wanted}")
        if self.served.cached_tokens < got:
            faults.append(
                f"KVCR delivered {got} tokens, but vLLM reused only "
                f"{self.served.cached_tokens}"
            )
        if self.cold.cached_tokens:
            faults.append("the cold pass was not cold")
        if self.tokens_from_vllm:
            faults.append(f"{self.tokens_from_vllm} tokens were still in vLLM's caches")
        outputs = self.cold.outputs
        if self.equal_outputs < len(outputs):
            faults.append(
                f"only {self.equal_outputs} of {len(outputs)} outputs equal the cold "
                "ones"
            )
        if len(set(outputs)) < len(outputs):
            faults.append(
                "different prompts gave the same output, so equal outputs would prove "
                "nothing"
            )
        return faults


@dataclass(frozen=True)
class Job:
    """The arguments of the process that runs an engine."""

    workload: Workload
    stage: Stage
    # The folder for the model and the tier's files; the caller removes it.
    folder: str
    # Part of the names of the engine's files in shared memory.
    engine_id: str
    spec_name: str = "CpuTieringOffloadingSpec"
    spec_module_path: str = "vllm_kvcr.cpu"
