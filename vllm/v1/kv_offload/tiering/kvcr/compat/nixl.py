# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Asks the installed NIXL which plugins it has.

``None`` means that NIXL cannot tell, in which case nothing is refused.
"""

import uuid
from collections.abc import Mapping
from contextlib import suppress
from typing import Any


class Nixl:
    """The plugins of the installed NIXL, found through an agent that uses none."""

    def __init__(self) -> None:
        self._agent: Any = None
        self.names: tuple[str, ...] | None = None
        with suppress(Exception):
            # NIXL ships no type annotations.
            from nixl import (  # type: ignore[import-untyped,unused-ignore]
                nixl_agent,
                nixl_agent_config,
            )

            config = nixl_agent_config(enable_prog_thread=False, backends=[])
            self._agent = nixl_agent(f"kvcr-probe-{uuid.uuid4().hex}", config)
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
