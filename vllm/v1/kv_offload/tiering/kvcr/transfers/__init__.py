# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Jobs of vLLM and the operations of KVCR that carry them out."""
