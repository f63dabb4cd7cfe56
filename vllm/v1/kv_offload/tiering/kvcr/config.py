# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Every option of the tier: typed, validated and documented in one place.

Options are the keys beside ``"type": "kvcr"`` in the tier's configuration. They are
checked before anything native starts, and each refusal names the option, the value,
what is allowed and what to do.
"""

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from kvcr import ROUTER_HINT_CAPABILITIES
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    TypeAdapter,
    ValidationError,
    model_validator,
)

from vllm.v1.kv_offload.tiering.kvcr import values

_LEAST_FILE_TIMEOUT_MS = 60_000
_LOAD_TIMEOUT_MS = 1000

_PRIMARY = "an option of vLLM's primary tier; put it beside secondary_tiers"
_ELSEWHERE = {
    "root_dir": 'an option of the tier type "fs"; here files are given as g3.paths',
    "max_disk_gib": (
        'an option of the tier type "fs"; here it is g3.capacity_bytes_per_file'
    ),
    "n_read_threads": 'an option of the tier type "fs"; KVCR has one thread',
    "n_write_threads": 'an option of the tier type "fs"; KVCR has one thread',
    "enable_kv_events": (
        'an option of the tier types "fs" and "obj"; KVCR\'s blocks are published '
        "wherever vLLM's KV events are on"
    ),
    "store_config": 'an option of the tier type "obj"',
    "host": 'an option of the tier type "p2p"; here it is control_host',
    "port": 'an option of the tier type "p2p"; here it is control_ports',
    "cpu_bytes_to_use": _PRIMARY,
    "block_size": _PRIMARY,
    "blocks_per_chunk": _PRIMARY,
    "eviction_policy": f"{_PRIMARY}. KVCR's own is policy",
}
"""Options that people know from vLLM's other tiers."""


class OptionError(ValueError):
    """An option that cannot be used; the message names it and what to do."""


class OptionTypeError(OptionError, TypeError):
    """An option whose type is the fault."""


class _Options(BaseModel):
    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        coerce_numbers_to_str=True,
        # The reference and the JSON schema are made of what is written below.
        use_attribute_docstrings=True,
    )


class G3Config(_Options):
    """The option ``g3``: files in which KVCR keeps what its pool evicts."""

    paths: values.G3Paths
    """The files: one, several, or a list of them for each local data-parallel rank;
    ``{rank}`` in a path stands for that rank. Each is used by one engine only and
    created if absent, in a folder that exists. What one holds is overwritten."""

    capacity_bytes_per_file: values.Size
    """Size of each file, in bytes or as ``"100GiB"``; rounded down to whole chunks."""

    backend: values.Plugin | None = None
    """NIXL's storage plugin. By default ``GDS_MT``, and ``POSIX`` where that cannot be
    used because it needs GPUDirect Storage."""

    backend_options: values.PluginOptions = {}
    """Passed to that plugin, such as ``{"use_uring": true}``."""

    def for_rank(self, local_rank: int | None, several: bool) -> "G3Config":
        """The same with the files of one local data-parallel rank only.

        Args:
            several: Whether there are other ranks on this machine.

        Raises:
            OptionError: that rank has no files of its own.
        """
        paths: tuple[Any, ...] = self.paths
        rank = local_rank or 0
        if isinstance(paths[0], tuple):
            if local_rank is None and len(paths) != 1:
                raise OptionError(
                    f"kvcr tier: g3.paths has {len(paths)} lists, which are for local "
                    "data-parallel ranks, and there are none; give one list of paths"
                )
            if rank >= len(paths):
                raise OptionError(
                    f"kvcr tier: g3.paths has {len(paths)} lists, and local "
                    f"data-parallel rank {rank} needs at least {rank + 1}, one for "
                    "each local rank"
                )
            paths = paths[rank]
        elif rank or several:
            for path in paths:
                if values.RANK not in str(path):
                    raise OptionError(
                        f"kvcr tier: g3.paths: local data-parallel rank {rank} would "
                        f"share {str(path)!r} with the other ranks; put {values.RANK} "
                        "into the path, or give a list of paths for each rank"
                    )
        own = tuple(Path(str(path).replace(values.RANK, str(rank))) for path in paths)
        return self.model_copy(update={"paths": own})


class TierConfig(_Options):
    """All options. Times are milliseconds, sizes bytes, pools counted in chunks."""

    # --- peers -------------------------------------------------------------------
    control_ports: values.Ports | None = None
    """One control port for each local data-parallel rank; left out, no peers are
    served and nothing listens."""

    control_host: values.Host = "0.0.0.0"
    """The IPv4 address to listen on for peers."""

    control_advertise_host: values.DialableHost | None = None
    """The host that peers dial, without scheme or port: an IPv4 address or a name that
    has one; by default this machine's host name."""

    router_capabilities: values.Names | None = None
    """What the router can do; by default what KVCR's hints need, and a list that lacks
    it is refused. Dynamo's router gives hints only to workers that name it, so give
    ``["router_hint"]`` there."""

    allowed_peers: values.Peers | None = None
    """Host names, IPv4 addresses and networks that a hint may name, as hints write
    them: names are not resolved. By default any, see
    [security](security.md#which-peers-may-be-pulled-from)."""

    control_secret_file: values.FilePath | None = None
    """A file with a secret of at least 16 bytes: control messages are signed with it,
    and others ignored, see [security](security.md#a-shared-secret). Not with
    ``kvcr_service_socket_path``."""

    eager_ctrl_connect: bool = True
    """Connect to a hinted peer when the hint arrives, not at the first load."""

    opportunistic_query: bool = False
    """Ask a hinted peer for every block of the request, hinted or not. Blocks the
    peer does not have cost primary slots and a wait, up to ``max_pull_blocks``."""

    max_pull_blocks: values.Count | None = None
    """Most blocks one request may pull from a peer; by default half the primary."""

    metadata_retry_interval_ms: values.Count = 100
    """How soon an unanswered exchange of NIXL's metadata with a peer is repeated."""

    remote_landing: Literal["pool", "primary"] = "pool"
    """Where a peer's blocks land first. ``pool``: in KVCR's memory, which a late
    write can never leave. ``primary``: straight in vLLM's, one copy less; a load
    whose write cannot be stopped then holds its slots until the peer is heard of."""

    landing_slots: values.Count | None = None
    """Chunks of the landing pool where KVCR has no other pool. Default: what 256 MiB
    hold, at least 8 and at most 256."""

    remote_fw_dram_backend: values.Plugin = "UCX"
    """NIXL's plugin for transfers between peers."""

    # --- storage -----------------------------------------------------------------
    secondary_g2_slots: values.CountOrNone = 0
    """Chunks of KVCR's own pool in host DRAM; 0: no pool."""

    secondary_g2_bytes: values.SizeOrNone = 0
    """The same as a size, such as ``"64GiB"``; rounded down to whole chunks. Give one
    of the two."""

    g3: Annotated[G3Config | None, values.MAPPING] = None
    """Files below that pool, see below."""

    policy: values.Text | None = None
    """What stays: ``lru`` or ``fifo``, with files ``g3_lru`` or ``g3_fifo``, or
    ``module.Class`` of a ``KVCachePolicy``. By default least recently used; with
    files, blocks that are on file already count as a minute older, so that reading
    need not wait for writing."""

    kvcr_service_socket_path: values.SocketPath | None = None
    """Use the pool of the KVCR service behind this socket instead of an own one; goes
    before ``secondary_g2_slots``, needs ``control_ports``."""

    compatibility_digest: values.Text | None = None
    """What engines that share the service's pool must agree on; given together with
    the socket's path. ``auto``: the namespace."""

    local_dram_backend: values.Plugin = "UCX"
    """NIXL's plugin for copies to and from the pool."""

    populate_pool: bool = True
    """Back the pool with memory at start instead of during the first stores. A pool
    that cannot fit is refused with both numbers."""

    verify_blocks: bool = True
    """With ``g3``: check every loaded block against a checksum of what was stored."""

    # --- limits ------------------------------------------------------------------
    operation_timeout_ms: values.Count | None = None
    """How long a load waits for a file, and KVCR works on one operation before it
    cancels it; by default 1000. Left out, KVCR is given ``introduction_timeout_ms``
    where peers are served. With ``g3`` KVCR is given at least a minute in any case:
    NIXL can crash the process when a file operation under way is cancelled."""

    pull_timeout_ms: values.Count | None = None
    """How long a pull from a peer may take before the request goes on without it; by
    default as long as ``operation_timeout_ms``."""

    introduction_timeout_ms: values.Count = 15_000
    """How long the first contact with a peer may take. Requests that are hinted at it
    run meanwhile as if they had no hint. Without
    ``g3``, a given ``operation_timeout_ms``, or half a given ``abandon_timeout_ms``,
    bounds it."""

    abandon_timeout_ms: values.Count | None = None
    """When a peer's unstoppable write is given up; at least, and by default, twice
    what KVCR is given for an operation, and 5000."""

    max_operation_bytes: values.Size = 32 << 20
    """Jobs are cut into operations of at most this size."""

    max_inflight_bytes: values.Size = 128 << 20
    """Most bytes in operations at a time, for loads and for stores each; an engine
    step can move no more."""

    # --- the rest ----------------------------------------------------------------
    namespace: Annotated[str | bool | None, AfterValidator(values.no_variable)] = "auto"
    """Keeps models apart. ``auto``, ``on``, ``true``: from what defines the bytes;
    ``off``, ``false``, ``null``: none, as kvcr tiers without this option; any other
    text: that text. Give each version of a model's weights a text of its own."""

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
        if self.secondary_g2_slots and self.secondary_g2_bytes:
            raise ValueError(
                f"secondary_g2_slots ({self.secondary_g2_slots}) and "
                f"secondary_g2_bytes ({self.secondary_g2_bytes}) are both the pool's "
                "size; give one"
            )
        # Files without a pool are KVCR's to refuse, see ``setup.files_refused``.
        if not self.serves_peers and not self.has_own_storage and self.g3 is None:
            raise ValueError(
                "nothing to do: give secondary_g2_slots or secondary_g2_bytes (a pool "
                "in host DRAM), control_ports (serve peers), or both"
            )
        return self

    @property
    def serves_peers(self) -> bool:
        return self.control_ports is not None

    @property
    def has_own_storage(self) -> bool:
        """Whether stores have somewhere to go. A landing pool is not for them."""
        return self.has_own_pool or self.kvcr_service_socket_path is not None

    @property
    def has_own_pool(self) -> bool:
        return self.secondary_g2_slots > 0 or self.secondary_g2_bytes > 0

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

    def for_rank(self, local_rank: int | None) -> "TierConfig":
        """The same with the files of data-parallel rank ``local_rank`` only.

        Raises:
            OptionError: that rank has no files of its own.
        """
        if self.g3 is None:
            return self
        several = len(self.control_ports or ()) > 1
        g3 = self.g3.for_rank(local_rank, several)
        return self.model_copy(update={"g3": g3})

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
        if path[-1] in _ELSEWHERE:
            return f"{name} is {_ELSEWHERE[path[-1]]}"
        known = sorted(model.model_fields)
        near = difflib.get_close_matches(path[-1], known, n=1, cutoff=0.5)
        if near:
            return f"unknown option {name}, did you mean {prefix}{near[0]}?"
        return f"unknown option {name}; known are {', '.join(known)}"
    if fault["type"] == "missing":
        return f"{name} is required"
    reason = fault["msg"].removeprefix("Value error, ")
    return f"{name} = {fault['input']!r}: {reason}" if name else reason
