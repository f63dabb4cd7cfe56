# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Checks whether NIXL can really create the backends that the configuration needs."""

import time
from collections.abc import Iterator
from dataclasses import dataclass, fields

from vllm_kvcr.doctor.child import Child, ChildFailed
from vllm_kvcr.doctor.finding import Finding, fail, ok, warn
from vllm_kvcr.doctor.setting import Setting

_SECONDS = 60.0
_PROBE = "vllm_kvcr.doctor.create_backends"
_MEMORY = "UCX"
_FILES = "POSIX"


@dataclass(frozen=True)
class _Wanted:
    option: str
    name: str
    options: tuple[tuple[str, str], ...] = ()
    is_default: bool = False


def check(setting: Setting) -> Iterator[Finding]:
    for wanted in _wanted(setting):
        yield from _create(wanted)


def _wanted(setting: Setting) -> list[_Wanted]:
    found: dict[tuple[str, object], _Wanted] = {}
    for _, config in setting.valid:
        wanted = [_Wanted("remote_fw_dram_backend", config.remote_fw_dram_backend)]
        # The service's pool is used with the backend above.
        if config.has_own_pool and config.kvcr_service_socket_path is None:
            wanted.append(_Wanted("local_dram_backend", config.local_dram_backend))
        if config.g3 is not None:
            options = tuple(config.g3.backend_options.items())
            name = config.g3.backend
            is_default = name is None
            wanted.append(
                _Wanted("g3.backend", name or _file_default(), options, is_default)
            )
        for each in wanted:
            found.setdefault((each.name, each.options), each)
    return list(found.values()) or [_Wanted("remote_fw_dram_backend", _MEMORY)]


def _file_default() -> str:
    from kvcr.config import G3Options

    return str(next(f.default for f in fields(G3Options) if f.name == "backend"))


def _create(wanted: _Wanted) -> Iterator[Finding]:
    available, error = _try(wanted.name, dict(wanted.options))
    what = f"{wanted.option} {wanted.name}"
    known = {"backend": wanted.name, "available": available}
    if error is None:
        yield ok(f"{what}: NIXL created it", **known)
        return
    offers = f"this NIXL offers {', '.join(available) or 'nothing'}"
    if wanted.is_default and _try(_FILES, {})[1] is None:
        yield warn(
            f"{what}, which is the default of g3.backend, cannot be used here "
            f"({error}), but {_FILES} can",
            f'set "backend": "{_FILES}" in g3',
            error=error,
            **known,
        )
        return
    yield fail(
        f"{what}: NIXL did not create it: {error}",
        f"set {wanted.option} to a plugin that works here; {offers}",
        error=error,
        **known,
    )


def _try(name: str, options: dict[str, str]) -> tuple[list[str], str | None]:
    """The plugins that NIXL offers, and why it did not create that backend."""
    available: list[str] = []
    deadline = time.monotonic() + _SECONDS
    with Child(_PROBE, {"backends": [[name, options]]}) as child:
        try:
            available = child.receive(deadline)
            return available, child.receive(deadline)
        except ChildFailed as error:
            child.kill()
            return available, str(error)
