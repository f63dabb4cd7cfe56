# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The configuration to check: the JSON that vLLM would be given."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_kvcr.plugin import TIER_TYPE, register

if TYPE_CHECKING:
    from vllm.v1.kv_offload.tiering.kvcr.config import TierConfig

# Keys that vLLM's factory uses itself.
_NOT_OPTIONS = ("type", "module_path", "backpressure")
_CONNECTOR = "OffloadingConnector"


class UnreadableConfig(ValueError):
    """The input is not JSON as vLLM takes it; the text says why."""


@dataclass(frozen=True)
class Tier:
    """One kvcr tier of the configuration."""

    options: Mapping[str, Any]
    connector: Mapping[str, Any]
    """The ``kv_connector_extra_config`` that contains the tier."""

    @cached_property
    def _parsed(self) -> "tuple[TierConfig | None, str | None]":
        register()
        from vllm.v1.kv_offload.tiering.kvcr.config import OptionError, parse_options

        try:
            return parse_options(self.options), None
        except OptionError as error:
            return None, str(error)

    @property
    def config(self) -> "TierConfig | None":
        """The options, if they are valid."""
        return self._parsed[0]

    @property
    def error(self) -> str | None:
        """Why the options are not valid."""
        return self._parsed[1]


@dataclass(frozen=True)
class Setting:
    """Everything that the checks look at.

    Args:
        transfer: The value of ``--kv-transfer-config``; ``None`` if it was not given.
        events: The value of ``--kv-events-config``.
        chunk_bytes: Bytes of one chunk of the primary tier, if they are known.
    """

    transfer: Mapping[str, Any] | None = None
    events: Mapping[str, Any] = field(default_factory=dict)
    chunk_bytes: int | None = None

    @cached_property
    def offloading(self) -> list[Mapping[str, Any]]:
        """Each ``OffloadingConnector``, also inside a ``MultiConnector``."""
        return [] if self.transfer is None else list(_offloading(self.transfer))

    @cached_property
    def tiers(self) -> list[Tier]:
        """Each kvcr tier."""
        found = []
        for connector in self.offloading:
            extra = connector.get("kv_connector_extra_config") or {}
            for tier in extra.get("secondary_tiers") or ():
                if isinstance(tier, dict) and tier.get("type") == TIER_TYPE:
                    options = {k: v for k, v in tier.items() if k not in _NOT_OPTIONS}
                    found.append(Tier(options, extra))
        return found

    @property
    def valid(self) -> "list[tuple[Tier, TierConfig]]":
        """The tiers whose options are valid."""
        return [(t, t.config) for t in self.tiers if t.config is not None]

    @property
    def events_on(self) -> bool:
        return bool(self.events.get("enable_kv_cache_events"))


def _offloading(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    if config.get("kv_connector") == _CONNECTOR:
        yield config
    if config.get("kv_connector") == "MultiConnector":
        extra = config.get("kv_connector_extra_config") or {}
        for part in extra.get("connectors") or ():
            yield from _offloading(part)


def read_json(given: str, option: str) -> dict[str, Any]:
    """Parse ``given`` as a JSON object, or else read the file of that name.

    Raises:
        UnreadableConfig: neither is possible.
    """
    text, origin = given, option
    if not given.lstrip().startswith(("{", "[")):
        origin = f"{option} {given}"
        try:
            text = Path(given).read_text()
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise UnreadableConfig(
                f"{origin}: {reason}; give a file, or JSON that starts with '{{'"
            ) from error
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise UnreadableConfig(f"{origin}: not JSON: {error}") from error
    if not isinstance(value, dict):
        raise UnreadableConfig(
            f"{origin}: must be a JSON object, not {type(value).__name__}"
        )
    return value
