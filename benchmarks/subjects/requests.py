# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Requests with a router's hint, and vLLM's manager as a tier sees it."""

from collections.abc import Collection, Sequence
from dataclasses import fields
from typing import Any

import msgspec
import numpy as np

from vllm.v1.core.kv_cache_utils import BlockHash, maybe_convert_block_hash
from vllm.v1.kv_offload.base import (
    LookupResult,
    OffloadKey,
    ReqContext,
    RequestOffloadingContext,
    get_offload_block_hash,
)
from vllm.v1.kv_offload.tiering.base import ParentManager, TransferJob

_FIRST_JOB = 10_000_000


class Parent(ParentManager):
    """A primary tier that answers every lookup alike."""

    def __init__(self, rows: int, answer: LookupResult = LookupResult.HIT) -> None:
        self._rows = rows
        self._answer = answer
        self._jobs = _FIRST_JOB

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        return RequestOffloadingContext()

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        return self._answer

    def create_store_job(
        self, keys: Collection[OffloadKey], req_context: ReqContext
    ) -> TransferJob:
        self._jobs += 1
        chunks = np.array([chunk_of(key, self._rows) for key in keys], dtype=np.int32)
        return TransferJob(self._jobs, list(keys), chunks, False, req_context)

    def on_request_finished(self, req_context: ReqContext) -> None:
        return


def chunk_of(key: OffloadKey, rows: int) -> int:
    """Where ``Parent`` has a key."""
    return int.from_bytes(key[8:16], "big") % rows


def hinted_request(
    request_id: str, endpoint: str, keys: Sequence[OffloadKey]
) -> ReqContext:
    """A request for which a router says that ``endpoint`` has ``keys``."""
    hashes = [
        maybe_convert_block_hash(BlockHash(get_offload_block_hash(key))) for key in keys
    ]
    hint: dict[str, Any] = {
        "protocol_version": "0.1",
        "message_id": "message",
        "actions": [
            {
                "action_id": "action",
                "action_type": "kv.fetch",
                "action_version": "1.0",
                "payload": {
                    "source_control_endpoint": endpoint,
                    "block_hashes": hashes,
                },
            }
        ],
    }
    # From vLLM 0.31 on hints have a place of their own.
    if "kv_hints" in {field.name for field in fields(ReqContext)}:
        from vllm.v1.kv_hints.protocol import KvHintsEnvelope

        return ReqContext(request_id, kv_hints=msgspec.convert(hint, KvHintsEnvelope))
    return ReqContext(request_id, kv_transfer_params={"kv_hint": hint})
