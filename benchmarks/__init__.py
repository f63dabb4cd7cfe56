# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Side-by-side measurements: ``python -m benchmarks``.

Only ratios of contenders that ran in the same run mean something; absolute figures are
those of the machine named beside them.
"""
