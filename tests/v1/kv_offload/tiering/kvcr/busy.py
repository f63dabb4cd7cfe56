# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A tier on which everything is under way, and what can happen to it then."""

import threading
from typing import Any

from kvcr.types import TransferError

from tests.v1.kv_offload.tiering.kvcr.builders import hint, key, keys, request
from tests.v1.kv_offload.tiering.kvcr.rig import StandinRig
from tests.v1.kv_offload.tiering.kvcr.standin import RecordingParent
from vllm.v1.kv_offload.base import LookupResult


def busy_rig(**options: Any) -> tuple[StandinRig, RecordingParent]:
    """Two loads, one store and one pin are under way."""
    options = {"secondary_g2_slots": 64, "control_ports": [7001]} | options
    rig = StandinRig(**options)
    parent = RecordingParent({key(90): 15})
    rig.load(keys(3), range(3))
    rig.load(keys(2, first=10), range(3, 5))
    rig.store(keys(4, first=20), range(5, 9))
    rig.kvcr.want(key(90))
    rig.poll()
    rig.tier.serve_external_requests(parent)
    rig.given += [job.job_id for job in parent.jobs]
    assert rig.tier.has_pending_work()
    return rig, parent


def in_thread(work: Any) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def use_everything(rig: StandinRig) -> None:
    """Call each method once; nothing may come out."""
    context = request("late", hint())
    rig.tier.on_new_request(context)
    assert rig.lookup(key(1), "late") is LookupResult.MISS
    rig.tier.touch([key(1)], context)
    rig.load([key(1)], [0])
    rig.store([key(1)], [0])
    rig.poll()
    rig.tier.serve_external_requests(RecordingParent({key(1): 0}))
    rig.tier.on_schedule_end(None)  # type: ignore[arg-type]
    list(rig.tier.take_events())
    rig.tier.get_stats()
    rig.tier.has_pending_work()
    rig.tier.on_request_finished(context)
    drain = in_thread(rig.tier.drain_jobs)
    drain.join(5)
    assert not drain.is_alive()
    rig.poll()
    rig.tier.shutdown()


def transfer_error(state: str, **fields: Any) -> Exception:
    """KVCR's report about memory of a transfer that failed."""
    known = {"op_handle", "source_blocks", "destination_regions"}
    try:
        return TransferError("peer hangs", state=state, **fields)  # type: ignore[arg-type]
    except TypeError:  # where kvcr does not name the owners
        fields = {name: value for name, value in fields.items() if name in known}
        return TransferError("peer hangs", state=state, **fields)  # type: ignore[arg-type]
