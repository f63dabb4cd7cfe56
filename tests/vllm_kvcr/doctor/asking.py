# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Asks a check of the doctor about a configuration."""

from collections.abc import Mapping
from typing import Any

from vllm_kvcr.doctor.command import run
from vllm_kvcr.doctor.finding import Finding, Status
from vllm_kvcr.doctor.setting import Setting

PEERS = {"control_ports": [24990], "control_host": "127.0.0.1"}


def transfer(*tiers: Mapping[str, Any], **extra: Any) -> dict[str, Any]:
    """What goes to ``--kv-transfer-config``."""
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": "TieringOffloadingSpec",
            "cpu_bytes_to_use": 1 << 20,
            "secondary_tiers": [{"type": "kvcr", **tier} for tier in tiers],
            **extra,
        },
    }


def setting(tier: Mapping[str, Any] | None = None, **more: Any) -> Setting:
    """A setting with one tier, or with no configuration."""
    return Setting(None if tier is None else transfer(tier), **more)


def ask(check: str, about: Setting) -> list[Finding]:
    return list(run(check, about))


def the_only(check: str, about: Setting) -> Finding:
    (finding,) = ask(check, about)
    return finding


def failures(check: str, about: Setting) -> list[str]:
    """The failed lines, each of which must say what to do."""
    failed = [f for f in ask(check, about) if f.status is Status.FAIL]
    assert all(f.remedy for f in failed)
    return [f.text for f in failed]
