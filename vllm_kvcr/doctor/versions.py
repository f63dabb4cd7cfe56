# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Checks whether the installed releases can work together."""

from collections.abc import Iterator

from vllm_kvcr.doctor.finding import Finding, fail, ok, warn
from vllm_kvcr.doctor.setting import Setting
from vllm_kvcr.plugin import register


def check(setting: Setting) -> Iterator[Finding]:
    register()
    try:
        from vllm.v1.kv_offload.tiering.kvcr.compat import environment
    except ImportError as error:
        yield fail(
            f"vLLM's tiered KV-cache offloading cannot be imported: {error}",
            "install vLLM 0.30 to 0.33 in this Python's environment: "
            "pip install 'vllm-kvcr[cuda]', or '[cpu]' on a machine without a GPU",
        )
        return
    found = environment.look_around()
    described = environment.describe(found)
    faults = environment.metadata_faults(found) or environment.name_faults(found)
    for fault in faults:
        yield fail(fault.text, fault.command, versions=found.versions)
    if faults:
        return
    untested = environment.untested(found)
    if untested is not None:
        yield warn(
            untested.removeprefix("kvcr tier: "),
            "install a tested release if the tier misbehaves",
            versions=found.versions,
        )
    else:
        yield ok(described, versions=found.versions, capabilities=_capabilities())


def _capabilities() -> dict[str, bool]:
    from vllm.v1.kv_offload.tiering.kvcr.compat import shims

    return shims.capabilities()
