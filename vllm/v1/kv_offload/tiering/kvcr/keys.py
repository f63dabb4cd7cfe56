# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Converts between vLLM's offload keys, KVCR's block keys and routers' block hashes.

An offload key is a block hash followed by the index of the KV-cache group. A block key
is the namespace's prefix followed by an offload key.
"""

from kvcr.types import BlockKey

from vllm.v1.core.kv_cache_utils import BlockHash, maybe_convert_block_hash
from vllm.v1.kv_offload.base import OffloadKey, get_offload_block_hash


class KeyCodec:
    """Converts keys. Stateless and safe on every thread.

    KVCR calls ``encode`` and ``decode`` as its key adapter.
    """

    def __init__(self, prefix: bytes = b"") -> None:
        self.prefix = prefix

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
        return OffloadKey(key.removeprefix(self.prefix))
