# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Asks the installed NIXL which plugins it has, and lets its progress thread sleep."""

import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any


class Nixl:
    """The plugins of the installed NIXL, found through an agent that uses none.

    ``None`` means that NIXL cannot tell, in which case nothing is refused.
    """

    def __init__(self) -> None:
        self._agent: Any = None
        self.names: tuple[str, ...] | None = None
        with suppress(Exception):
            # NIXL ships no type annotations.
            import nixl  # type: ignore[import-untyped,unused-ignore]

            config = nixl.nixl_agent_config(enable_prog_thread=False, backends=[])
            self._agent = nixl.nixl_agent(f"kvcr-probe-{uuid.uuid4().hex}", config)
            self.names = tuple(self._agent.get_plugin_list())

    def memory(self, name: str) -> tuple[str, ...] | None:
        """The kinds of memory that a plugin moves; empty if it cannot be loaded."""
        if self.names is None:
            return None
        if name not in self.names:
            return ()
        try:
            # Bypasses the wrapper, which would log a failure.
            _, kinds = self._agent.agent.getPluginParams(name)
        except AttributeError:
            return None
        except Exception:
            return ()
        return tuple(map(str, kinds))

    def why_unusable(self, name: str, options: Mapping[str, str]) -> str | None:
        """Create a backend of a plugin, and say why it cannot be used if that fails."""
        if self.names is None:
            return None
        if not self.memory(name):
            return "the plugin, or a library that it needs, is missing"
        try:
            self._agent.create_backend(name, dict(options))
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return None


@contextmanager
def sleeping(delay_ms: int) -> Iterator[None]:
    """Have agents that are created meanwhile wait for events, up to ``delay_ms``.

    NIXL's agent has a setting for that (``pthrDelay``), but its Python class sets it to
    0 without a parameter for it, and the progress thread then takes a whole core in
    every process with a KVCR. Can go once that class, and KVCR, have a parameter.

    Other threads' agents are affected, too, which does them no harm. If the installed
    NIXL has no such setting, or ``delay_ms`` is 0, nothing changes.
    """
    try:
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
