# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Makes a real transfer between two processes on this machine, through the tier.

Both ends are started here with the configuration's backends, and listen only on
127.0.0.1, on ports of their own. This shows that KVCR, NIXL and the tier work together,
but says nothing about the network between hosts: on one host UCX uses shared memory.
"""

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from vllm_kvcr.doctor.child import Child, ChildFailed
from vllm_kvcr.doctor.finding import Finding, fail, ok, size
from vllm_kvcr.doctor.setting import Setting
from vllm_kvcr.ports import LOCALHOST, free_ports

if TYPE_CHECKING:
    from vllm.v1.kv_offload.tiering.kvcr.config import TierConfig

SECONDS = 180.0
_END = "vllm_kvcr.doctor.loopback_end"
_TOTAL_BYTES = 64 << 20
_CHUNK_BYTES = 1 << 20
_MOST_CHUNK_BYTES = 16 << 20
_FIRST = 4
"""Blocks of the first pull, which also connects the two ends and is not timed."""


def check(setting: Setting) -> Iterator[Finding]:
    configs = [c for _, c in setting.valid if c.serves_peers]
    # If none serves peers, the defaults still show whether KVCR and NIXL work here.
    yield _transfer(configs[0] if configs else None, setting.chunk_bytes)


def _transfer(config: "TierConfig | None", chunk_bytes: int | None) -> Finding:
    row_bytes = min(chunk_bytes or _CHUNK_BYTES, _MOST_CHUNK_BYTES)
    rows = max(2 * _FIRST, _TOTAL_BYTES // row_bytes)
    ports = free_ports(2)
    deadline = time.monotonic() + SECONDS
    common = {"rows": rows, "row_bytes": row_bytes}
    source = common | {"role": "source", "options": options(config, ports[0], rows)}
    receiver = common | {
        "role": "receiver",
        "options": options(config, ports[1], rows),
        "source_port": ports[0],
    }
    with Child(_END, source) as giving, Child(_END, receiver) as taking:
        try:
            for name, child in (("source", giving), ("receiver", taking)):
                try:
                    child.receive(deadline)
                except ChildFailed as error:
                    return _failed(f"the {name} did not start: {error}")
            for first, last in ((0, _FIRST), (_FIRST, rows)):
                taking.send([first, last])
                pulled = taking.receive(deadline)
                if pulled["arrived"] != pulled["asked"] or pulled["wrong"]:
                    return _incomplete(pulled)
        except ChildFailed as error:
            giving.kill()
            taking.kill()
            return _failed(f"the transfer did not end: {error}")
    speed = pulled["bytes"] / pulled["seconds"] / 1e9
    backend = "UCX" if config is None else config.remote_fw_dram_backend
    return ok(
        f"{size(pulled['bytes'])} pulled from another process over {backend} at "
        f"{speed:.2f} GB/s, every byte compared (one host: not the network's speed)",
        backend=backend,
        gigabytes_per_second=round(speed, 3),
        **pulled,
    )


def options(config: "TierConfig | None", port: int, rows: int) -> dict[str, Any]:
    """The tier's options for one end."""
    chosen: dict[str, Any] = {
        "control_ports": [port],
        "control_host": LOCALHOST,
        "control_advertise_host": LOCALHOST,
        "landing_slots": rows,
        "max_pull_blocks": rows,
        "operation_timeout_ms": 20_000,
        "namespace": "vllm-kvcr doctor",
    }
    if config is not None:
        for name in (
            "remote_fw_dram_backend",
            "local_dram_backend",
            "remote_landing",
            "max_operation_bytes",
            "max_inflight_bytes",
        ):
            chosen[name] = getattr(config, name)
    return chosen


def _failed(text: str) -> Finding:
    return fail(
        text,
        "see the checks above; UCX_LOG_LEVEL=info and NIXL_LOG_LEVEL=INFO say more",
    )


def _incomplete(pulled: dict[str, Any]) -> Finding:
    if pulled["wrong"]:
        return fail(
            f"{pulled['wrong']} of {pulled['arrived']} blocks arrived with wrong bytes",
            "do not use this machine; attach this report, with --json, to a bug report",
            **pulled,
        )
    return fail(
        f"{pulled['arrived']} of {pulled['asked']} blocks arrived from another process",
        "UCX_LOG_LEVEL=info shows which transport was tried; UCX_TLS and "
        "UCX_NET_DEVICES select others",
        **pulled,
    )
