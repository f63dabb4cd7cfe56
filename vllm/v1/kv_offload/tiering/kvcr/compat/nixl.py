# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What the installed NIXL has. The one place that asks it, and only asks.

What cannot be told is ``None``, and speaks against nothing.
"""

import uuid
from collections.abc import Mapping
from typing import Any


class Nixl:
    """The plugins of the installed NIXL, asked through an agent without any."""

    def __init__(self) -> None:
        self._agent: Any | None = None
        self.names: tuple[str, ...] | None = None
        try:
            # Ships no type annotations.
            from nixl import (  # type: ignore[import-untyped,unused-ignore]
                nixl_agent,
                nixl_agent_config,
            )

            config = nixl_agent_config(enable_prog_thread=False, backends=[])
            self._agent = nixl_agent(f"kvcr-probe-{uuid.uuid4().hex}", config)
            self.names = tuple(self._agent.get_plugin_list())
        except Exception:
            self._agent = None

    def memory(self, name: str) -> tuple[str, ...] | None:
        """The kinds of memory that a plugin moves; none if it cannot be loaded."""
        if self._agent is None or self.names is None:
            return None
        if name not in self.names:
            return ()
        try:
            # Not through the wrapper, which writes the failure to the log.
            _, kinds = self._agent.agent.getPluginParams(name)
        except AttributeError:
            return None
        except Exception:
            return ()
        return tuple(map(str, kinds))

    def why_unusable(self, name: str, options: Mapping[str, str]) -> str | None:
        """Why a plugin cannot be used, found by making a backend of it."""
        if self._agent is None:
            return None
        if not self.memory(name):
            return "it, or a library that it needs, is not here"
        try:
            self._agent.create_backend(name, dict(options))
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return None
