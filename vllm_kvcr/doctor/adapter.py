# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Which adapter serves type ``kvcr`` in vLLM's processes, and why."""

import os
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path

from vllm_kvcr import __version__
from vllm_kvcr.doctor.child import ChildFailed, ask
from vllm_kvcr.doctor.finding import Finding, fail, ok
from vllm_kvcr.doctor.setting import Setting
from vllm_kvcr.plugin import TIER_TYPE, packaged_tiering_folder

_SECONDS = 120.0
_GROUP = "vllm.general_plugins"


def check(setting: Setting) -> Iterator[Finding]:
    ours = packaged_tiering_folder() / TIER_TYPE
    try:
        found = ask("vllm_kvcr.doctor.which_adapter", {}, _SECONDS)
    except ChildFailed as error:
        yield fail(
            f"vLLM's plugins could not be loaded: {error}",
            "run python -c 'import vllm' and fix what it reports",
        )
        return
    folder = found["folder"]
    if folder is not None and Path(folder).resolve() == ours.resolve():
        if found["error"] is None:
            yield ok(
                f"type '{TIER_TYPE}' is served by vllm-kvcr {__version__} "
                f"from {folder}",
                **found,
            )
        else:
            yield fail(
                f"vllm-kvcr {__version__} is found in {folder}, but cannot be "
                f"imported: {found['error']}",
                "see the versions check, or reinstall vllm-kvcr",
                **found,
            )
        return
    served = f"type '{TIER_TYPE}' is served by the adapter in {folder}"
    if found["tier"] is None:
        served = f"vLLM has no usable tier type '{TIER_TYPE}'"
    reason, remedy = _why_not_ours()
    yield fail(f"{served}, not by vllm-kvcr: {reason}", remedy, **found)


def _why_not_ours() -> tuple[str, str]:
    allowed = os.environ.get("VLLM_PLUGINS")
    names = [e.name for e in entry_points(group=_GROUP) if e.name == TIER_TYPE]
    if not names:
        return (
            f"this Python's environment has no {_GROUP} entry point '{TIER_TYPE}'",
            "pip install vllm-kvcr into the environment that vLLM runs in",
        )
    if allowed is not None and TIER_TYPE not in allowed.split(","):
        return (
            f"VLLM_PLUGINS={allowed!r} leaves it out",
            f"unset VLLM_PLUGINS, or add '{TIER_TYPE}' to it",
        )
    return (
        "another plugin imported that adapter first",
        "look for 'KVCR tier:' in vLLM's log, and remove the other plugin",
    )
