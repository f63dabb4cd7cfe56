# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Every option of the tier: typed, validated and documented in one place.

Options are the keys beside ``"type": "kvcr"`` in the tier's configuration. They are
checked before anything native starts, and each refusal, an ``OptionError``, names the
option, the value, what is allowed and what to do.
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

# Must exceed every read and write that the disk still completes: NIXL can crash the
# process when a file operation in progress is cancelled.
_LEAST_FILE_TIMEOUT_MS = 60_000
# How long a request waits for a load before it recomputes.
_LOAD_TIMEOUT_MS = 1000
# How long a request waits for a peer. Only one that hangs takes that long, because one
# that dies closes its connection. Must exceed the stalls of a busy host: 4 s were
# measured.
_PULL_TIMEOUT_MS = 10_000

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
    """An option that cannot be used; the message names it and says what to do."""


class OptionTypeError(OptionError, TypeError):
    """An option whose value has the wrong type."""


class _Options(BaseModel):
    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        coerce_numbers_to_str=True,
        # The docstrings below become the options reference and the JSON schema.
        use_attribute_docstrings=True,
    )


class G3Config(_Options):
    """The option ``g3``: files in which KVCR keeps the blocks that its pool evicts."""

    paths: values.G3Paths
    """One path, several paths, or a list of paths for each local data-parallel rank;
    ``{rank}`` in a path stands for that rank. Each file is used by one engine only. It
    is created if it does not exist, but its folder must exist. Its contents are
    overwritten."""

    capacity_bytes_per_file: values.Size
    """Size of each file, in bytes or as ``"100GiB"``; rounded down to whole chunks."""

    backend: values.Plugin | None = None
    """The NIXL plugin for files. Default: ``GDS_MT``, which needs GPUDirect Storage, or
    ``POSIX`` if ``GDS_MT`` cannot be used."""

    backend_options: values.PluginOptions = {}
    """Options for that plugin, such as ``{"use_uring": true}``."""


class TierConfig(_Options):
    """All options. Times are in milliseconds, sizes in bytes, pools in chunks."""

    # --- peers -------------------------------------------------------------------
    control_ports: values.Ports | None = None
    """One control port for each local data-parallel rank. Without it, the engine serves
    no peers and listens on no port."""

    control_host: values.Host = "0.0.0.0"
    """The IPv4 address to listen on for peers."""

    control_advertise_host: values.DialableHost | None = None
    """The host that peers dial, without scheme or port: an IPv4 address, or a name that
    resolves to one. Default: this machine's host name."""

    router_capabilities: values.Names | None = None
    """What the router can do. Default: what KVCR's hints need; a list without that is
    refused. Dynamo's router sends hints only to workers that list ``router_hint``, so
    set ``["router_hint"]`` with it."""

    allowed_peers: values.Peers | None = None
    """The hosts that a hint may name: host names, IPv4 addresses and IPv4 networks.
    Names are compared with what the hint says, without being resolved. Default: any
    host; see [security](security.md#which-peers-may-be-pulled-from)."""

    control_secret_file: values.FilePath | None = None
    """The file with a secret of at least 16 bytes. Control messages are signed with
    it, and messages without that signature are ignored; see
    [security](security.md#a-shared-secret). Cannot be combined with
    ``kvcr_service_socket_path``."""

    eager_ctrl_connect: bool = True
    """Connect to a hinted peer when the hint arrives instead of at the first load."""

    opportunistic_query: bool = False
    """Ask a hinted peer for every block of the request, even for those that the hint
    does not name. Up to ``max_pull_blocks`` blocks that the peer does not have then
    cost primary slots and a wait."""

    max_pull_blocks: values.Count | None = None
    """The most blocks that one request may pull from a peer. Default: half of the
    primary tier."""

    metadata_retry_interval_ms: values.Count = 100
    """How long a peer may leave an exchange of NIXL's metadata unanswered before it is
    repeated."""

    remote_landing: Literal["pool", "primary"] = "pool"
    """Where a peer's blocks land first. ``pool``: in KVCR's memory, so that a late
    write can hit nothing else. ``primary``: directly in vLLM's primary tier, which
    saves a copy; but if a peer's write cannot be stopped, its load keeps its slots
    until the peer answers again."""

    landing_slots: values.Count | None = None
    """Size of the landing pool in chunks, if KVCR has no other pool. Default: as many
    as fit in 256 MiB, but at least 8 and at most 256."""

    remote_fw_dram_backend: values.Plugin = "UCX"
    """The NIXL plugin for transfers between peers."""

    # --- storage -----------------------------------------------------------------
    secondary_g2_slots: values.CountOrNone = 0
    """Size of KVCR's own pool in host DRAM, in chunks; 0 means no pool."""

    secondary_g2_bytes: values.SizeOrNone = 0
    """The same in bytes, such as ``"64GiB"``, rounded down to whole chunks. Set only
    one of the two."""

    g3: Annotated[G3Config | None, values.MAPPING] = None
    """Files below that pool; see below."""

    policy: values.Text | None = None
    """How KVCR chooses what to evict: ``lru`` or ``fifo``; with files ``g3_lru`` or
    ``g3_fifo``; or the ``module.Class`` of a ``KVCachePolicy``. Default: the least
    recently used block goes first; with files, a block that is in a file already counts
    as a minute older, so that reads need not wait for writes."""

    kvcr_service_socket_path: values.FilePath | None = None
    """Use the pool of the KVCR service that listens on this socket instead of a pool of
    this engine's own. Takes precedence over ``secondary_g2_slots`` and
    ``secondary_g2_bytes``; needs ``control_ports``."""

    compatibility_digest: values.Text | None = None
    """The text that all engines that share the service's pool must agree on; set it
    together with the socket's path. ``auto`` stands for the namespace."""

    local_dram_backend: values.Plugin = "UCX"
    """The NIXL plugin for copies to and from the pool."""

    populate_pool: bool = True
    """Back the pool with memory at start instead of during the first stores. A pool
    that does not fit is refused, with its size and the memory that is available."""

    verify_blocks: bool = True
    """With ``g3``, check every loaded block against a checksum of what was stored."""

    # --- limits ------------------------------------------------------------------
    operation_timeout_ms: values.Count | None = None
    """How long a load waits for a file, and how long KVCR works on one operation before
    it cancels it. Default: 1000. If it is left out and peers are served, KVCR gets
    ``introduction_timeout_ms`` instead. With ``g3``, KVCR always gets at least a
    minute: NIXL can crash the process when a file operation in progress is
    cancelled."""

    pull_timeout_ms: values.Count | None = None
    """How long a request waits for a block from a peer before it goes on without it.
    Default: the same as ``operation_timeout_ms``, or 10000 if that is left out as well.
    Nobody waits for a peer whose process has ended."""

    introduction_timeout_ms: values.Count = 15_000
    """How long the first contact with a peer may take. Meanwhile, requests that are
    hinted at the peer run as if they had no hint. Without ``g3``, it cannot exceed
    ``operation_timeout_ms``, or half of ``abandon_timeout_ms``, if one of them is
    set."""

    abandon_timeout_ms: values.Count | None = None
    """How long KVCR waits for a peer's write that it could not stop before it gives up
    on it. Default: 5000, or twice the time that KVCR gets for an operation if that is
    longer; a shorter time than the latter is raised to it."""

    max_operation_bytes: values.Size = 32 << 20
    """Jobs are split into operations of at most this size."""

    max_inflight_bytes: values.Size = 128 << 20
    """The most bytes that may be in flight at a time, for loads and for stores each. An
    engine step can move no more."""

    # --- the rest ----------------------------------------------------------------
    namespace: Annotated[str | bool | None, AfterValidator(values.no_variable)] = "auto"
    """Keeps the blocks of different models apart. ``auto``, ``on`` or ``true``: derived
    from everything that defines a block's bytes. ``off``, ``false`` or ``null``: no
    namespace, as in kvcr tiers that lack this option. Any other text is the namespace
    itself. Give each version of a model's weights its own."""

    nixl_progress_delay_ms: values.Delay = 1
    """How long NIXL's progress thread may sleep while no data arrives. With 0 it never
    sleeps and takes a core, as it does without this tier."""

    enable_telemetry: bool = False
    """Export the metrics of KVCR and of the tier."""

    locality: Literal["LOCAL", "REMOTE"] | None = None
    """The locality that vLLM reports for this tier's blocks."""

    @model_validator(mode="after")
    def _fits_together(self) -> "TierConfig":
        has_service = self.kvcr_service_socket_path is not None
        if has_service != (self.compatibility_digest is not None):
            raise ValueError(
                "kvcr_service_socket_path and compatibility_digest must be configured "
                "together: blocks outlive the engine in the service's pool, and the "
                'digest says which engines may share them ("auto" derives it)'
            )
        abandon = self.abandon_timeout_ms
        if abandon is not None and abandon < 2 * self.load_timeout:
            raise ValueError(
                f"abandon_timeout_ms ({abandon}) must be at least twice "
                f"operation_timeout_ms ({self.load_timeout}); leave it out to have it "
                "derived"
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
                    f"{sorted(missing)}, which is needed to serve peers "
                    "(control_ports); add it, or leave control_ports out"
                )
        if has_service and not self.serves_peers:
            raise ValueError(
                "kvcr_service_socket_path needs control_ports: the service answers on "
                "that port when this engine is gone"
            )
        if has_service and self.control_secret_file:
            raise ValueError(
                "control_secret_file cannot be combined with kvcr_service_socket_path: "
                "the service, which answers peers when this engine is gone, does not "
                "know the secret; leave one of them out"
            )
        if self.secondary_g2_slots and self.secondary_g2_bytes:
            raise ValueError(
                f"secondary_g2_slots ({self.secondary_g2_slots}) and "
                f"secondary_g2_bytes ({self.secondary_g2_bytes}) both set the pool's "
                "size; give only one"
            )
        # KVCR itself refuses files without a pool; see ``start_messages.explain``.
        if not self.serves_peers and not self.owns_inventory:
            raise ValueError(
                "the tier would have nothing to do: give secondary_g2_slots or "
                "secondary_g2_bytes (a pool in host DRAM), control_ports (serve "
                "peers), or both"
            )
        return self

    @property
    def serves_peers(self) -> bool:
        return self.control_ports is not None

    @property
    def has_own_storage(self) -> bool:
        """Whether stores have somewhere to go; they never go to the landing pool."""
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
        """The operation timeout that KVCR is given."""
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
        """The abandon timeout that KVCR is given."""
        return max(self.abandon_timeout_ms or 5000, 2 * self.operation_timeout)

    @property
    def pull_timeout(self) -> int:
        given = self.pull_timeout_ms or self.operation_timeout_ms
        return min(given or _PULL_TIMEOUT_MS, self.operation_timeout)

    @property
    def derives_digest(self) -> bool:
        """Whether the service's digest is that of the namespace."""
        return (self.compatibility_digest or "").strip().lower() == "auto"

    def for_rank(self, local_rank: int | None) -> "TierConfig":
        """Return a copy that has only the files of one local data-parallel rank."""
        if self.g3 is None:
            return self
        paths: tuple[Any, ...] = self.g3.paths
        rank = local_rank or 0
        if isinstance(paths[0], tuple):
            if local_rank is None and len(paths) != 1:
                raise OptionError(
                    f"kvcr tier: g3.paths has {len(paths)} lists, one for each local "
                    "data-parallel rank, but this engine has no such ranks; give one "
                    "list of paths"
                )
            if rank >= len(paths):
                raise OptionError(
                    f"kvcr tier: g3.paths has {len(paths)} lists, but local "
                    f"data-parallel rank {rank} needs at least {rank + 1}, one for "
                    "each local rank"
                )
            paths = paths[rank]
        elif rank or len(self.control_ports or ()) > 1:
            for path in paths:
                if values.RANK not in str(path):
                    raise OptionError(
                        f"kvcr tier: g3.paths: local data-parallel rank {rank} would "
                        f"share {str(path)!r} with the other ranks; put {values.RANK} "
                        "into the path, or give a list of paths for each rank"
                    )
        own = tuple(Path(str(path).replace(values.RANK, str(rank))) for path in paths)
        g3 = self.g3.model_copy(update={"paths": own})
        return self.model_copy(update={"g3": g3})

    def control_port(self, local_rank: int | None) -> int | None:
        """The control port of one local data-parallel rank."""
        ports = self.control_ports
        if ports is None:
            return None
        if local_rank is None and len(ports) != 1:
            raise OptionError(
                f"control_ports ({list(ports)}): exactly one port is needed "
                "without local data-parallel ranks"
            )
        rank = local_rank or 0
        if not 0 <= rank < len(ports):
            raise OptionError(
                f"control_ports ({list(ports)}): local data-parallel rank {rank} "
                f"needs at least {rank + 1} ports, one for each local rank"
            )
        return ports[rank]


def parse_options(options: Mapping[str, Any]) -> TierConfig:
    """Validate the options that an operator wrote.

    Raises:
        OptionError: an option is unknown, has a bad value or contradicts another.
        OptionTypeError: an option's value has the wrong type.
    """
    try:
        return TierConfig.model_validate(dict(options))
    except ValidationError as error:
        faults = error.errors(include_url=False)
        wrong_type = all(fault["type"].endswith("_type") for fault in faults)
        kind = OptionTypeError if wrong_type else OptionError
        raise kind(f"kvcr tier: {'; '.join(map(_describe, faults))}") from error


def telemetry_enabled(options: Mapping[str, Any]) -> bool:
    """Read the only option that is needed before a tier exists."""
    value = options.get("enable_telemetry", False)
    try:
        return TypeAdapter(bool).validate_python(value)
    except ValidationError as error:
        raise OptionTypeError(
            f"enable_telemetry: {value!r} is neither true nor false"
        ) from error


def _describe(fault: Any) -> str:
    path = [part for part in fault["loc"] if isinstance(part, str)]
    name = ".".join(path)
    if not name.isprintable():
        name = repr(name)
    if fault["type"] == "extra_forbidden":
        if path[-1] in _ELSEWHERE:
            return f"{name} is {_ELSEWHERE[path[-1]]}"
        prefix = "g3." if path[0] == "g3" else ""
        known = sorted((G3Config if prefix else TierConfig).model_fields)
        near = difflib.get_close_matches(path[-1], known, n=1, cutoff=0.5)
        if near:
            return f"unknown option {name}, did you mean {prefix}{near[0]}?"
        return f"unknown option {name}; the options are {', '.join(known)}"
    if fault["type"] == "missing":
        return f"{name} is required"
    reason = fault["msg"].removeprefix("Value error, ")
    return f"{name} = {fault['input']!r}: {reason}" if name else reason
