# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The part of KVCR that the tier calls."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Protocol

from kvcr.types import CacheTier, OpEntryResult, QueryStatus, ReleaseHandle

Completed = tuple[int, Mapping[bytes, OpEntryResult]]
"""An operation's handle, and the results of some or all of its blocks."""


class KvcrApi(Protocol):
    """Every method raises once KVCR's progress thread has died."""

    def query(
        self, keys: Collection[bytes], request_id: str | None = None
    ) -> Sequence[tuple[QueryStatus, CacheTier | None]]: ...

    def deliver(
        self, blocks: Mapping[bytes, list[Any]], request_id: str | None = None
    ) -> int: ...

    def deposit(self, blocks: Mapping[bytes, list[Any]]) -> int: ...

    def fetch(self, keys: Collection[bytes], request_id: str | None = None) -> int: ...

    def release(self, handles: Collection[ReleaseHandle]) -> object: ...

    def poll_completed(self) -> Iterable[Completed]: ...

    def submit_hint(self, hints: Mapping[str, object], request_id: str) -> None: ...

    def discard_hint(self, request_id: str) -> None: ...

    def get_stats(self) -> Any: ...

    def close(self) -> None: ...
