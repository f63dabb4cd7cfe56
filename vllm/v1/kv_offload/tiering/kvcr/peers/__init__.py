# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Other engines: hints that name them, which of them answer, pins they ask for."""
