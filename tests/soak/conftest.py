# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The soak runs the adapter of this checkout."""

from vllm_kvcr.plugin import register

register()
