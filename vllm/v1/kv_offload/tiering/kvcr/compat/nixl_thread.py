# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Lets NIXL's progress thread sleep.

NIXL's agent has a setting for how long that thread may wait for events (``pthrDelay``).
Its Python class sets it to 0 without a parameter for it, and the thread then takes a
whole core in every process with a KVCR. Can go once that class, and KVCR, have a
parameter.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def sleeping(delay_ms: int) -> Iterator[None]:
    """Have agents that are created meanwhile wait for events, up to ``delay_ms``.

    Other threads' agents are affected, too, which does them no harm. If the installed
    NIXL has no such setting, or ``delay_ms`` is 0, nothing changes.
    """
    try:
        # NIXL ships no type annotations.
        from nixl import _bindings as bindings  # type: ignore[import-untyped,unused-ignore]

        own: Any = bindings.nixlAgentConfig
    except (ImportError, AttributeError):
        own = None
    if not (delay_ms and hasattr(own, "pthrDelay")):
        yield
        return

    class Sleeping(own):
        def __setattr__(self, name: str, value: Any) -> None:
            if name == "pthrDelay":
                value = 1000 * delay_ms  # µs
            super().__setattr__(name, value)

    bindings.nixlAgentConfig = Sleeping
    try:
        yield
    finally:
        bindings.nixlAgentConfig = own
