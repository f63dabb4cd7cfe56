# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The tier's reports: metrics, health, KV events, and memory that is held back."""
