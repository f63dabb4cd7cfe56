# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Every option of the tier: typed, validated and documented in one place.

Options are the keys beside ``"type": "kvcr"`` in the tier's configuration. They are
checked before anything native starts, and each refusal names the option, the value,
what is allowed and what to do.
"""

import difflib
import ipaddress
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from kvcr import ROUTER_HINT_CAPABILITIES
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    model_validator,
)
from pydantic_core import PydanticCustomError

from vllm.v1.kv_offload.tiering.kvcr.peers.endpoints import peer_pattern

_LEAST_FILE_TIMEOUT_MS = 60_000
_LOAD_TIMEOUT_MS = 1000


class OptionError(ValueError):
    """An option that cannot be used; the message names it and what to do."""


class OptionTypeError(OptionError, TypeError):
    """An option whose type is the fault."""


def _no_bool(value: Any) -> Any:
    # bool is an int to Python: true would silently become 1.
    if isinstance(value, bool):
        raise PydanticCustomError("int_type", "Input should be a number, not a boolean")
    return value


def _one_or_more(value: Any) -> Any:
    return (value,) if isinstance(value, (str, int, Path)) else value


def _advertisable(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    host = value.strip()
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    try:
        address = ipaddress.ip_address(bare)
    except ValueError:
        address = None
    if host in ("", "*") or (address is not None and address.is_unspecified):
        raise ValueError("peers cannot dial a wildcard; give the host they can reach")
    if address is not None:
        return f"[{bare}]" if address.version == 6 else bare
    if any(mark in host for mark in ":/[] "):
        raise ValueError(
            "give the host only, without scheme or port; the port is control_ports'"
        )
    return host


Count = Annotated[int, BeforeValidator(_no_bool), Field(gt=0)]
Port = Annotated[int, BeforeValidator(_no_bool), Field(ge=1, le=65535)]
Host = Annotated[str, Field(min_length=1)]
Name = Annotated[str, Field(min_length=1)]


class _Options(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, coerce_numbers_to_str=True)


class G3Config(_Options):
    """The option ``g3``: files in which KVCR keeps what its pool evicts."""

    paths: Annotated[
        tuple[Path, ...], BeforeValidator(_one_or_more), Field(min_length=1)
    ]
    """The files. One each, used by this engine alone; created if absent."""

    capacity_bytes_per_file: Count
    """Size of each file; rounded down to whole chunks."""

    backend: Name | None = None
    """NIXL's storage plugin; by default KVCR's own choice. ``POSIX`` needs no GPU."""

    backend_options: dict[str, str] = {}
    """Passed to that plugin."""


class TierConfig(_Options):
    """All options. Times are milliseconds, sizes bytes, pools counted in chunks."""

    # --- peers -------------------------------------------------------------------
    control_ports: (
        Annotated[tuple[Port, ...], BeforeValidator(_one_or_more), Field(min_length=1)]
        | None
    ) = None
    """One control port for each local data-parallel rank. Left out: no peers."""

    control_host: Host = "0.0.0.0"
    """The address to listen on for peers."""

    control_advertise_host: Annotated[Host, BeforeValidator(_advertisable)] | None = (
        None
    )
    """The host that peers dial; by default this machine's host name."""

    router_capabilities: (
        Annotated[tuple[Name, ...], BeforeValidator(_one_or_more)] | None
    ) = None
    """What the router can do; must cover what KVCR's hints need. Default: that."""

    allowed_peers: (
        Annotated[
            tuple[Annotated[str, AfterValidator(peer_pattern)], ...],
            BeforeValidator(_one_or_more),
            Field(min_length=1),
        ]
        | None
    ) = None
    """Host names, IPv4 addresses and networks that hints may name; default: any."""

    control_secret_file: Path | None = None
    """A file with a secret that every peer's control messages must be signed with."""

    eager_ctrl_connect: bool = True
    """Connect to a hinted peer when the hint arrives, not at the first load."""

    opportunistic_query: bool = False
    """Ask a hinted peer for every block of the request, hinted or not. Blocks the
    peer does not have cost primary slots and a wait, up to ``max_pull_blocks``."""

    max_pull_blocks: Count | None = None
    """Most blocks one request may pull from a peer; by default half the primary."""

    metadata_retry_interval_ms: Count = 100
    """How soon an unanswered introduction to a peer is repeated."""

    remote_landing: Literal["pool", "primary"] = "pool"
    """Where a peer's blocks land first. ``pool``: in KVCR's memory, which a late
    write can never leave. ``primary``: straight in vLLM's, one copy less; a load
    whose write cannot be stopped then holds its slots until the peer is heard of."""

    landing_slots: Count | None = None
    """Chunks of the landing pool where KVCR has no other pool. Default: what 256 MiB
    hold, at least 8 and at most 256."""

    remote_fw_dram_backend: Name = "UCX"
    """NIXL's plugin for transfers between peers."""

    # --- storage -----------------------------------------------------------------
    secondary_g2_slots: Annotated[int, BeforeValidator(_no_bool), Field(ge=0)] = 0
    """Chunks of KVCR's own host DRAM pool; 0: no pool."""

    g3: G3Config | None = None
    """Files below that pool."""

    policy: Name | None = None
    """``fifo``, ``lru``, ``g3_fifo``, ``g3_lru``, ``module.Class``; default: KVCR's."""

    kvcr_service_socket_path: Name | None = None
    """Use the pool of the KVCR service behind this socket instead of an own one."""

    compatibility_digest: Name | None = None
    """What blocks in the service's pool must agree on; ``auto``: the namespace."""

    local_dram_backend: Name = "UCX"
    """NIXL's plugin for copies to and from the pool."""

    populate_pool: bool = True
    """Back the pool with memory at start instead of during the first stores."""

    verify_blocks: bool = True
    """With ``g3``: check every loaded block against what was stored."""

    # --- limits ------------------------------------------------------------------
    operation_timeout_ms: Count | None = None
    """How long a load waits for a file, and KVCR works on one operation before it
    cancels it; by default 1000. Left out, KVCR is given ``introduction_timeout_ms``
    where peers are served. With ``g3`` KVCR is given at least a minute in any case:
    NIXL can crash the process when a file operation under way is cancelled."""

    pull_timeout_ms: Count | None = None
    """How long a pull from a peer may take before the request goes on without it; by
    default as long as ``operation_timeout_ms``."""

    introduction_timeout_ms: Count = 15_000
    """How long the first contact with a peer may take. Requests that are hinted at it
    run meanwhile as if they had no hint. A given ``operation_timeout_ms``, or half a
    given ``abandon_timeout_ms``, bounds it."""

    abandon_timeout_ms: Count | None = None
    """When a peer's unstoppable write is given up; at least twice the above."""

    max_operation_bytes: Count = 32 << 20
    """Jobs are cut into operations of at most this size."""

    max_inflight_bytes: Count = 128 << 20
    """Most bytes in operations at a time, for loads and for stores each."""

    # --- the rest ----------------------------------------------------------------
    namespace: str | bool | None = "auto"
    """Keeps models apart. ``auto``: from what defines the bytes; any other text: that
    text; ``off``, ``false``, ``null``: none, as kvcr tiers without this option."""

    enable_telemetry: bool = False
    """Export KVCR's and the tier's metrics."""

    locality: Literal["LOCAL", "REMOTE"] | None = None
    """Where vLLM shall say that this tier's blocks are."""

    @model_validator(mode="after")
    def _fits_together(self) -> "TierConfig":
        if (self.kvcr_service_socket_path is None) != (
            self.compatibility_digest is None
        ):
            raise ValueError(
                "kvcr_service_socket_path and compatibility_digest must be configured "
                "together: blocks outlive the engine in the service's pool, and the "
                'digest says which engines may share them ("auto" derives it)'
            )
        abandon = self.abandon_timeout_ms
        if abandon is not None and abandon < 2 * self.load_timeout:
            raise ValueError(
                f"abandon_timeout_ms ({abandon}) must be at least twice "
                f"operation_timeout_ms ({self.load_timeout}); leave it out to "
                "have it follow"
            )
        ports = self.control_ports or ()
        if len(set(ports)) != len(ports):
            raise ValueError(
                f"control_ports ({list(ports)}): two local ranks cannot share a port"
            )
        if self.serves_peers and self.router_capabilities is not None:
            missing = ROUTER_HINT_CAPABILITIES - set(self.router_capabilities)
            if missing:
                raise ValueError(
                    f"router_capabilities ({list(self.router_capabilities)}) lacks "
                    f"{sorted(missing)}, which serving peers (control_ports) needs; "
                    "add it, or leave control_ports out to serve no peers"
                )
        if self.kvcr_service_socket_path is not None and not self.serves_peers:
            raise ValueError(
                "kvcr_service_socket_path needs control_ports: the service answers on "
                "that port when this engine is gone"
            )
        if self.kvcr_service_socket_path is not None and self.control_secret_file:
            raise ValueError(
                "control_secret_file cannot be combined with kvcr_service_socket_path: "
                "the service, which answers peers when this engine is gone, knows no "
                "secret; leave one of them out"
            )
        if not self.serves_peers and not self.secondary_g2_slots:
            raise ValueError(
                "nothing to do: give secondary_g2_slots (a pool in host DRAM), "
                "control_ports (serve peers), or both"
            )
        if self.g3 is not None and not self.has_own_storage:
            raise ValueError(
                "g3 needs secondary_g2_slots (or kvcr_service_socket_path): files hold "
                "what the pool evicts"
            )
        return self

    @property
    def serves_peers(self) -> bool:
        return self.control_ports is not None

    @property
    def has_own_storage(self) -> bool:
        """Whether stores have somewhere to go. A landing pool is not for them."""
        return self.secondary_g2_slots > 0 or self.kvcr_service_socket_path is not None

    @property
    def owns_inventory(self) -> bool:
        return self.has_own_storage or self.g3 is not None

    @property
    def load_timeout(self) -> int:
        """How long a load waits."""
        return self.operation_timeout_ms or _LOAD_TIMEOUT_MS

    @property
    def operation_timeout(self) -> int:
        """What KVCR is told."""
        timeout = self.load_timeout
        if self.operation_timeout_ms is None and self.serves_peers:
            given = self.abandon_timeout_ms
            most = self.introduction_timeout_ms
            timeout = max(timeout, most if given is None else min(most, given // 2))
        return max(timeout, 0 if self.g3 is None else _LEAST_FILE_TIMEOUT_MS)

    @property
    def introduction_timeout(self) -> int:
        return min(self.introduction_timeout_ms, self.operation_timeout)

    @property
    def abandon_timeout(self) -> int:
        """What KVCR is told."""
        return max(self.abandon_timeout_ms or 5000, 2 * self.operation_timeout)

    @property
    def pull_timeout(self) -> int:
        timeout = self.pull_timeout_ms or self.load_timeout
        return min(timeout, self.operation_timeout)

    def control_port(self, local_rank: int | None) -> int | None:
        """The port of data-parallel rank ``local_rank`` on this machine.

        Raises:
            OptionError: there is not one port for that rank.
        """
        ports = self.control_ports
        if ports is None:
            return None
        if local_rank is None:
            if len(ports) != 1:
                raise OptionError(
                    f"control_ports ({list(ports)}): exactly one port is needed "
                    "without local data-parallel ranks"
                )
            return ports[0]
        if not 0 <= local_rank < len(ports):
            raise OptionError(
                f"control_ports ({list(ports)}): local data-parallel rank {local_rank} "
                f"needs at least {local_rank + 1} ports, one for each local rank"
            )
        return ports[local_rank]


def parse_options(options: Mapping[str, Any]) -> TierConfig:
    """Validate what an operator wrote.

    Raises:
        OptionError: an option is unknown, has a bad value or contradicts another.
        OptionTypeError: an option has a value of a wrong type.
    """
    try:
        return TierConfig.model_validate(dict(options))
    except ValidationError as error:
        faults = error.errors(include_url=False, include_context=True)
        raise _option_error(faults) from error


def telemetry_enabled(options: Mapping[str, Any]) -> bool:
    """Read the one option that is needed before a tier exists."""
    value = options.get("enable_telemetry", False)
    try:
        return TypeAdapter(bool).validate_python(value)
    except ValidationError as error:
        raise OptionTypeError(
            f"enable_telemetry: {value!r} is neither true nor false"
        ) from error


def _option_error(faults: list[Any]) -> OptionError:
    messages = [_describe(fault) for fault in faults]
    wrong_type = all(fault["type"].endswith("_type") for fault in faults)
    kind = OptionTypeError if wrong_type else OptionError
    return kind("kvcr tier: " + "; ".join(messages))


def _describe(fault: Any) -> str:
    path = [part for part in fault["loc"] if isinstance(part, str)]
    name = ".".join(path)
    if not name.isprintable():
        name = repr(name)
    if fault["type"] == "extra_forbidden":
        model: type[BaseModel] = G3Config if path[:1] == ["g3"] else TierConfig
        prefix = "g3." if model is G3Config else ""
        known = sorted(model.model_fields)
        near = difflib.get_close_matches(path[-1], known, n=1, cutoff=0.5)
        if near:
            return f"unknown option {name}, did you mean {prefix}{near[0]}?"
        return f"unknown option {name}; known are {', '.join(known)}"
    if fault["type"] == "missing":
        return f"{name} is required"
    reason = fault["msg"].removeprefix("Value error, ")
    return f"{name} = {fault['input']!r}: {reason}" if name else reason
