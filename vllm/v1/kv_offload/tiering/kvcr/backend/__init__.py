# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Sets up, starts and closes KVCR, with its memory and its policy."""
