# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Waits until nothing uses the primary tier's memory."""

import time
from collections.abc import Callable

from vllm.logger import init_logger
from vllm.v1.kv_offload.tiering.kvcr.backend.start import Backend
from vllm.v1.kv_offload.tiering.kvcr.peers.pins import Pins
from vllm.v1.kv_offload.tiering.kvcr.reports.health import Health
from vllm.v1.kv_offload.tiering.kvcr.transfers.results import Results

logger = init_logger(__name__)

_POLL_INTERVAL_S = 0.001
_WARNING_INTERVAL_S = 5.0


def wait_until_unused(
    poll: Callable[[], None],
    *,
    results: Results,
    pins: Pins,
    health: Health,
    backend: Backend,
    patience_s: float,
    give_up_after_s: float | None,
) -> bool:
    """Poll until no job or pin uses the primary tier; false if it gave up.

    Args:
        patience_s: How long to wait for a peer that may still read from it.
        give_up_after_s: None waits for as long as it takes.
    """
    started = warned = time.monotonic()
    while True:
        poll()
        if not results.outstanding and not pins.outstanding:
            return True
        now = time.monotonic()
        waited = now - started
        if not results.outstanding and pins.only_refused and waited > patience_s:
            logger.warning(
                "kvcr tier: released %d pins although a peer that hung or died may "
                "still read their blocks; that peer will not use what it gets",
                pins.let_go_of_refused(),
            )
            continue
        if give_up_after_s is not None and (
            waited > give_up_after_s or backend.quiescent is False
        ):
            return False
        if now - warned >= _WARNING_INTERVAL_S:
            warned = now
            logger.warning(
                "kvcr tier: still waiting for %d jobs and %d pins after %.0f s "
                "(state: %s, reason: %s)",
                results.outstanding,
                pins.outstanding,
                waited,
                health.state.value,
                health.reason.label,
            )
        time.sleep(_POLL_INTERVAL_S)
