# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The checks of ``vllm-kvcr doctor``, one module for each subject."""
