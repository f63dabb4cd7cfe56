# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""For a tier that cannot take stores: they are declined before they become jobs."""


class _NothingDropped:
    """The part of a backpressure policy that vLLM's metrics read."""

    def pop_stores_dropped(self) -> tuple[int, int]:
        return 0, 0

    def reset(self) -> None:
        return


class StoreDecliner:
    """Stands where vLLM asks a tier's backpressure detector.

    Declining is no pressure, so nothing is reported as dropped because of it.
    """

    def __init__(self) -> None:
        self.policy = _NothingDropped()
        self.stats: dict[str, float] = {}

    def should_store(self, num_blocks: int) -> bool:
        return False

    def is_under_pressure(self) -> bool:
        return False

    def update(self, submit_time: float, num_bytes: int) -> None:
        return

    def on_store_failed(self) -> None:
        return

    def reset(self) -> None:
        return
