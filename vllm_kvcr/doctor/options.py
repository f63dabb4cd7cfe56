# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Checks whether vLLM would accept the configuration, and the tier its options."""

from collections.abc import Iterator, Mapping
from typing import Any

from vllm_kvcr.doctor.finding import Finding, fail, ok, warn
from vllm_kvcr.doctor.setting import Setting, Tier
from vllm_kvcr.plugin import TIER_TYPE

_SPEC = "TieringOffloadingSpec"


def check(setting: Setting) -> Iterator[Finding]:
    if setting.transfer is None:
        yield warn("no configuration was given", "give it with --config")
        return
    if not setting.offloading:
        yield fail(
            f"kv_connector is {setting.transfer.get('kv_connector')!r}, but only "
            "OffloadingConnector has tiers",
            'set "kv_connector": "OffloadingConnector"',
        )
        return
    for connector in setting.offloading:
        yield from _check_connector(connector)
    if not setting.tiers:
        yield fail(
            f"secondary_tiers of kv_connector_extra_config has no '{TIER_TYPE}'",
            f'add {{"type": "{TIER_TYPE}", "secondary_g2_slots": 4096}} to it',
        )
    for tier in setting.tiers:
        yield from _check_tier(tier, setting)


def _check_connector(connector: Mapping[str, Any]) -> Iterator[Finding]:
    extra = connector.get("kv_connector_extra_config") or {}
    if connector.get("kv_role") != "kv_both":
        yield fail(
            f"kv_role is {connector.get('kv_role')!r}", 'set "kv_role": "kv_both"'
        )
    spec = extra.get("spec_name")
    if spec is None:
        yield fail(
            "without spec_name vLLM uses no secondary tiers",
            f'set "spec_name": "{_SPEC}" in kv_connector_extra_config',
        )
    elif spec != _SPEC and "spec_module_path" not in extra:
        yield fail(f"spec_name is {spec!r}", f'set "spec_name": "{_SPEC}"')
    budget = extra.get("cpu_bytes_to_use")
    if not isinstance(budget, (int, float)) or budget <= 0:
        yield fail(
            f"cpu_bytes_to_use is {budget!r}: the primary tier needs memory",
            "set cpu_bytes_to_use in kv_connector_extra_config, in bytes",
        )


def _check_tier(tier: Tier, setting: Setting) -> Iterator[Finding]:
    config = tier.config
    if config is None:
        yield fail(
            str(tier.error).removeprefix("kvcr tier: "), "see docs/configuration.md"
        )
        return
    from vllm.v1.kv_offload.base import OffloadingKVEventsConfig
    from vllm.v1.kv_offload.tiering.kvcr.backend.policy import choose_policy
    from vllm.v1.kv_offload.tiering.kvcr.backend.setup import warnings

    described = bool(tier.connector.get("self_describing_kv_events"))
    try:
        choose_policy(config.policy, has_files=config.g3 is not None)
        said = warnings(config, OffloadingKVEventsConfig(setting.events_on, described))
    except (ImportError, TypeError, ValueError) as error:
        yield fail(str(error).removeprefix("kvcr tier: "), "change that option")
        return
    for warning in said:
        if "KV events are off" not in warning:
            yield warn(warning, "see docs/configuration.md")
        elif config.serves_peers:
            yield warn(
                warning,
                "turn them on with --kv-events-config if routers should know these "
                "blocks",
            )
    yield ok(
        f"the options are valid: {', '.join(sorted(tier.options))}",
        options=sorted(tier.options),
    )
