# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Keys: vLLM's, KVCR's, and the block hash that routers know."""

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vllm.v1.core.kv_cache_utils import BlockHash, maybe_convert_block_hash
from vllm.v1.kv_offload.base import make_offload_key
from vllm.v1.kv_offload.tiering.kvcr.keys import KeyCodec

AS_INT = "VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES"

HASHES = st.binary(min_size=8, max_size=40)
GROUPS = st.integers(0, 2**32 - 1)
PREFIXES = st.binary(max_size=20)


@given(block_hash=HASHES, group=GROUPS, prefix=PREFIXES)
def test_a_key_comes_back_whole(block_hash: bytes, group: int, prefix: bytes) -> None:
    codec = KeyCodec(prefix)
    offload_key = make_offload_key(block_hash, group)
    block_key = codec.encode(offload_key)
    assert codec.offload_key(block_key) == offload_key
    assert block_key == prefix + offload_key


@pytest.mark.parametrize("as_int", ["0", "1"])
@given(block_hash=HASHES, groups=st.lists(GROUPS, min_size=2), prefix=PREFIXES)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_decoding_folds_the_groups_into_the_routers_hash(
    as_int: str,
    monkeypatch: pytest.MonkeyPatch,
    block_hash: bytes,
    groups: list[int],
    prefix: bytes,
) -> None:
    monkeypatch.setenv(AS_INT, as_int)
    codec = KeyCodec(prefix)
    decoded = {
        codec.decode(codec.encode(make_offload_key(block_hash, group)))
        for group in groups
    }
    assert decoded == {maybe_convert_block_hash(BlockHash(block_hash))}
    assert {type(each) for each in decoded} == {int if as_int == "1" else bytes}


@pytest.mark.parametrize("prefix", [b"", b"ns"])
@pytest.mark.parametrize("value", [None, 7, "key", bytearray(b"key"), memoryview(b"k")])
def test_only_bytes_can_be_encoded(prefix: bytes, value: Any) -> None:
    with pytest.raises(TypeError, match=type(value).__name__):
        KeyCodec(prefix).encode(value)


@given(prefix=st.binary(min_size=1, max_size=20), foreign=st.binary(max_size=60))
def test_another_namespaces_key_is_nobodys(prefix: bytes, foreign: bytes) -> None:
    found = KeyCodec(prefix).offload_key(foreign)  # type: ignore[arg-type]
    assert found == (
        foreign.removeprefix(prefix) if foreign.startswith(prefix) else None
    )
