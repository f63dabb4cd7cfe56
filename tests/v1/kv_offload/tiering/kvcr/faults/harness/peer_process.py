# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What runs in a peer's process: an engine, and the commands it is given."""

import logging
import os
import traceback
from multiprocessing.connection import Connection
from typing import Any

from tests.v1.kv_offload.tiering.kvcr.builders import make_hint
from tests.v1.kv_offload.tiering.kvcr.conftest import LogLines  # registers the tier
from tests.v1.kv_offload.tiering.kvcr.faults.harness.child import obey
from tests.v1.kv_offload.tiering.kvcr.faults.harness.engine import Engine, Keys


class Commands:
    """What the test's process may ask for."""

    def __init__(self, engine: Engine, log: LogLines) -> None:
        self._engine = engine
        self._log = log

    def hold(self, keys: Keys, first_chunk: int = 0) -> None:
        """Have blocks in the primary tier."""
        self._engine.hold(keys, first_chunk)

    def store(self, keys: Keys, first_chunk: int = 0) -> bool:
        """Cascade blocks to the tier; whether all were stored."""
        engine = self._engine
        job = engine.store(keys, range(first_chunk, first_chunk + len(keys)))
        engine.finish(job)
        return job.result is not None and job.result.success

    def pull(self, port: int, keys: Keys, request_id: str = "pull") -> dict[str, Any]:
        """Run one request that is hinted at the engine on ``port``."""
        engine = self._engine
        context = engine.begin(request_id, make_hint(port, keys))
        answers = engine.lookup_all(keys, context)
        found = [key for key, a in zip(keys, answers, strict=True) if a.name == "HIT"]
        # From the end, since what is held lies at the beginning.
        slots = range(engine.rows - len(found), engine.rows)
        job = engine.load(found, slots, context)
        seconds = engine.finish(job)
        engine.end(context)
        return {"arrived": len(job.arrived), "seconds": seconds, "wrong": engine.wrong}

    def gauges(self) -> dict[str, float]:
        """The tier's metrics, as vLLM exports them."""
        stats = self._engine.tier.get_stats()
        return {} if stats is None else dict(stats.reduce())

    def report(self) -> dict[str, Any]:
        """The tier's state, and everything that was lost and logged so far."""
        probe = self._engine.probe
        return {
            "state": probe.state,
            "reason": probe.reason,
            "lost": probe.lost(),
            "log": self._log.texts(),
            "pinned": sum(self._engine.pinned.values()),
            "wrong": list(self._engine.wrong),
        }


def serve(pipe: Connection, engine: dict[str, Any], transport: str | None) -> None:
    """Run an engine until the other end closes, or says so."""
    if transport is not None:
        os.environ["UCX_TLS"] = transport
    log = LogLines()
    logging.getLogger("vllm").addHandler(log.handler())
    try:
        own = Engine(**engine)
    except BaseException:
        pipe.send((False, traceback.format_exc()))
        raise
    pipe.send((True, None))
    try:
        obey(pipe, Commands(own, log), own.step)
    finally:
        own.close()
