# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Wakes a sleeping engine core.

Serves vLLM where a thread polls tiers while the engine core sleeps: it gives them no
way to ask for a step. Can go once it does.
"""

import sys
import threading


def wake_engine() -> bool:
    """Have the engine core of this process look for work; false where there is none.

    It waits for its queue of requests. The queue is found through the thread that
    fills it, and the message is the one with which vLLM ends the wait for a shutdown.
    Callable from every thread; the engine core does nothing if it has no work.
    """
    # Where vLLM runs an engine core, its module is imported.
    core_type = getattr(sys.modules.get("vllm.v1.engine.core"), "EngineCoreProc", None)
    types = getattr(sys.modules.get("vllm.v1.engine"), "EngineCoreRequestType", None)
    wakeup = getattr(types, "WAKEUP", None)
    if core_type is None or wakeup is None:
        return False
    for thread in threading.enumerate():
        core = getattr(getattr(thread, "_target", None), "__self__", None)
        if isinstance(core, core_type):
            core.input_queue.put_nowait((wakeup, None))
            return True
    return False
