# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A short run of the soak; ``make soak`` runs the long one."""

from pathlib import Path

from tests.soak.soak import Soak


def test_a_short_run_has_no_faults(tmp_path: Path) -> None:
    with Soak(seed=20_251_129, folder=tmp_path) as soak:
        soak.run(10.0, report=print)
    assert soak.faults() == []
    assert soak.actions["load"] > 10
    assert soak.actions["pull"] > 10
