# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What the distribution adds around the KVCR tier for vLLM."""

__version__ = "0.1.0"
