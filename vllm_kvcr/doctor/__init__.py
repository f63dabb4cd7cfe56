# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What ``vllm-kvcr doctor`` checks, a module for each subject."""
