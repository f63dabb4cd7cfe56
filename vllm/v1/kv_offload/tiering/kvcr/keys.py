# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Converts between vLLM's offload keys, KVCR's block keys and routers' block hashes.

An offload key is a block hash followed by the index of the KV-cache group. A block key
is the namespace followed by an offload key.

The namespace keeps the blocks of one model from being mistaken for those of another.
vLLM's block hash covers the tokens, but not the model that turned them into KV. The
namespace covers everything else that defines the bytes, as far as vLLM's offloading
configuration contains it. Operators use the option to distinguish what it does not
contain, such as revisions of a model under the same name.
"""

import hashlib
import os
from dataclasses import dataclass
from typing import Any

from kvcr.types import BlockKey

from vllm.v1.core.kv_cache_utils import BlockHash, maybe_convert_block_hash
from vllm.v1.kv_offload.base import OffloadKey, get_offload_block_hash

_TOTAL_BYTES = 8
_FIELDS = (
    "model",
    "revision",
    "kv_dtype",
    "groups",
    "parallel",
    "block_bytes",
    "layout",
    "hash",
)
_AUTO = ("auto", "true", "on", "yes", "1")
_OFF = ("", "off", "false", "no", "none", "null", "0")
SIZE = _TOTAL_BYTES + len(_FIELDS)
"""Bytes of a prefix: a digest of everything, then one byte for each field. The latter
only serve to name the field that differs."""
# A 32-byte hash and a 4-byte group. A hash algorithm with shorter hashes only costs the
# name of the field that differs.
_OFFLOAD_KEY_BYTES = 36


@dataclass(frozen=True)
class KeyCodec:
    """Converts keys. Safe on every thread.

    KVCR calls ``encode`` and ``decode`` as its key adapter.
    """

    prefix: bytes = b""
    """The namespace; empty if there is none."""

    def encode(self, framework_key: object) -> BlockKey:
        """The block key of an offload key.

        Raises:
            TypeError: ``framework_key`` is not ``bytes``.
        """
        if not isinstance(framework_key, bytes):
            raise TypeError(
                f"an offload key is bytes, not {type(framework_key).__name__}"
            )
        return BlockKey(self.prefix + framework_key)

    def decode(self, key: BlockKey) -> int | bytes:
        """The block hash as KV events carry it, and as routers therefore know it.

        It is the same for all KV-cache groups of a block.
        ``VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES`` decides whether it is an int or bytes.
        """
        block_hash = get_offload_block_hash(OffloadKey(key[len(self.prefix) :]))
        return maybe_convert_block_hash(BlockHash(block_hash))

    def offload_key(self, key: BlockKey) -> OffloadKey | None:
        """The offload key in a block key; ``None`` if it is of another namespace."""
        if not key.startswith(self.prefix):
            return None
        return OffloadKey(key[len(self.prefix) :])

    @property
    def digest(self) -> str:
        """Hex text for the service's compatibility check; empty without a namespace."""
        return self.prefix.hex()

    def difference(self, foreign_key: bytes) -> str:
        """Name the fields in which a peer's key from another namespace differs."""
        if len(foreign_key) != SIZE + _OFFLOAD_KEY_BYTES or not self.prefix:
            return "the namespace option, or the hash algorithm"
        theirs = foreign_key[_TOTAL_BYTES:SIZE]
        ours = self.prefix[_TOTAL_BYTES:]
        names = [n for n, a, b in zip(_FIELDS, ours, theirs, strict=True) if a != b]
        return ", ".join(names) or "the model"


def is_derived(option: str | bool | None) -> bool:
    """Whether the option ``namespace`` asks for one that is derived from the model."""
    return str(option).strip().lower() in _AUTO


def make_codec(option: str | bool | None, spec: Any, row_bytes: int) -> KeyCodec:
    """Make the codec for the namespace that ``option`` asks for.

    Args:
        option: ``auto`` (or a word like it) derives the namespace from ``spec``, and
            ``off`` (or a word like it) means none; their case and spaces around them do
            not matter. Any other text is the namespace itself.
        spec: vLLM's offloading spec. A partial one without a model gives no namespace.
    """
    if str(option).strip().lower() in _OFF:
        return KeyCodec()
    if is_derived(option):
        return _derived(spec, row_bytes)
    return _assemble({name: str(option) for name in _FIELDS})


def _derived(spec: Any, row_bytes: int) -> KeyCodec:
    config = spec.config
    model = getattr(config, "model", None)
    name = getattr(model, "name", None)
    if not isinstance(name, str):
        return KeyCodec()
    groups = [group.tokens_per_block for group in getattr(config, "groups", ())]
    cache = _read(getattr(config, "cache", None), "tokens_per_hash", "blocks_per_chunk")
    # Parallelism-agnostic bytes are the same in every layout; if they were not,
    # block_bytes would still tell them apart.
    sizes = ("world_size", "tp_size", "pp_size", "pcp_size", "dcp_size")
    agnostic = getattr(config.parallel, "is_parallelism_agnostic", False) is True
    layouts = ("canonical_layout", "kv_cache_layout", "replicated_layout")
    return _assemble(
        {
            "model": name,
            "revision": _read(model, "revision"),
            "kv_dtype": _read(model, "dtype"),
            "groups": f"{groups}/{cache}",
            "parallel": "agnostic" if agnostic else _read(config.parallel, *sizes),
            "block_bytes": f"{_read(config, 'worker_kv_bytes_per_block')}/{row_bytes}",
            "layout": _read(config, *layouts),
            "hash": str(os.getenv("PYTHONHASHSEED")),
        }
    )


def _read(part: Any, *names: str) -> str:
    """What a configuration, which may be partial, says of these."""
    return "/".join(str(getattr(part, name, None)) for name in names)


def _assemble(values: dict[str, str]) -> KeyCodec:
    fields = tuple((name, values[name]) for name in _FIELDS)
    total = hashlib.sha256(repr(fields).encode()).digest()[:_TOTAL_BYTES]
    tags = bytes(hashlib.sha256(repr(pair).encode()).digest()[0] for pair in fields)
    return KeyCodec(total + tags)
