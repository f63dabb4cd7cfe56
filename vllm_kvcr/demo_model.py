# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The demos' model, which is small enough to be written quickly, and its prompts."""

import random
from pathlib import Path

from vllm_kvcr.demo_plan import TOKENS_PER_CHUNK, Workload

VOCABULARY = 1024
HIDDEN_SIZE = 512
HEAD_SIZE = 64
LAYERS = 2
KV_HEADS = 2
# Keys and values in float32.
CHUNK_BYTES = LAYERS * 2 * KV_HEADS * HEAD_SIZE * 4 * TOKENS_PER_CHUNK


def write_model(folder: Path, max_tokens: int) -> None:
    """Write a two-layer Llama with random weights.

    vLLM's own dummy weights are so small that all prompts have the same output, so
    equal outputs would prove nothing. These weights keep activations near one.
    """
    # Imported here, because it takes seconds, and most users of this module only need
    # the sizes.
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=HIDDEN_SIZE,
        intermediate_size=2 * HIDDEN_SIZE,
        num_hidden_layers=LAYERS,
        num_attention_heads=HIDDEN_SIZE // HEAD_SIZE,
        num_key_value_heads=KV_HEADS,
        vocab_size=VOCABULARY,
        max_position_embeddings=max_tokens,
        initializer_range=HIDDEN_SIZE**-0.5,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def make_prompts(workload: Workload) -> list[list[int]]:
    draw = random.Random(0)
    tail = draw.choices(range(VOCABULARY), k=workload.tail_tokens)
    length = workload.prompt_tokens - workload.tail_tokens
    return [
        draw.choices(range(VOCABULARY), k=length) + tail
        for _ in range(workload.prompts)
    ]
