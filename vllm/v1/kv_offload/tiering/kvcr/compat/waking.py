# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Wakes a sleeping engine core.

Serves vLLM releases in which a thread polls tiers while the engine core sleeps, but a
tier has no way to ask for a step. Can go once it has one.
"""

import sys
import threading


def wake_engine() -> bool:
    """Make this process's engine core look for work; false if it has no engine core.

    A sleeping engine core waits for its queue of requests. The queue is found through
    the thread that fills it, and the message is the one with which vLLM itself ends
    that wait at a shutdown. An engine core without work does nothing and sleeps on.
    Safe on every thread.
    """
    # A process that runs an engine core has imported its module.
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
