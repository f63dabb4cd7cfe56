# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""KVCR as a secondary tier of vLLM's KV-cache offloading (``"type": "kvcr"``)."""
