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
        from vllm_kvcr.doctor import packages
    except ImportError as error:
        yield fail(
            f"vLLM's tiered KV-cache offloading cannot be imported: {error}",
            "install vLLM 0.30 to 0.33 in this Python's environment: "
            "pip install 'vllm-kvcr[cuda]', or '[cpu]' on a machine without a GPU",
        )
        return
    found = packages.look_around()
    versions = found.versions
    fault = packages.package_fault(found)
    faults = [fault] if fault is not None else environment.name_faults()
    for fault in faults:
        yield fail(fault.text, fault.command, versions=versions)
    if faults:
        return
    untested = environment.untested(versions)
    if untested is not None:
        yield warn(
            untested.removeprefix("kvcr tier: "),
            "install a tested release if the tier misbehaves",
            versions=versions,
        )
    else:
        yield ok(str(found), versions=versions, capabilities=_capabilities())


def _capabilities() -> dict[str, bool]:
    from vllm.v1.kv_offload.tiering.kvcr.compat import shims

    return shims.capabilities()
