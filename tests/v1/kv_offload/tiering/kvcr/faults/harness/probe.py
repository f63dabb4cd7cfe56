# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Looking inside a tier: the one place that knows its, and KVCR's, private names."""

import ctypes
from collections import Counter
from collections.abc import Callable, Sized
from dataclasses import replace
from typing import Any

import numpy as np

from vllm.v1.kv_offload.tiering.kvcr.backend.pool import address_of


class Probe:
    """What a test wants to know of a tier that vLLM does not ask."""

    def __init__(self, tier: Any) -> None:
        self._tier = tier
        self._lost: Counter[str] = Counter()
        self._ignored_hints: Counter[str] = Counter()

    @property
    def state(self) -> str:
        return str(self._tier._health.state.value)

    @property
    def reason(self) -> str:
        return str(self._tier._health.reason.label)

    @property
    def landing_room(self) -> int:
        """Slots of the pool that a peer's blocks may still land in."""
        return int(self._tier._staging.peer_room)

    @property
    def introducing(self) -> bool:
        """Whether a source is being introduced."""
        return bool(self._tier._staging.introducing)

    def set_pull_timeout(self, seconds: float) -> None:
        """Change how long pulls wait that begin from now on."""
        staging = self._tier._staging
        staging._limits = replace(staging._limits, pull_timeout_s=seconds)

    @property
    def unstopped(self) -> bool:
        """Whether, for all KVCR knows, a peer may still write or read here."""
        core = self._tier._kvcr._core
        return not self._tier._quarantine.is_empty or core._outstanding_operations > 0

    def know(self, hint: object) -> None:
        """Count the peer that a hint names as introduced, if it is a new one."""
        try:
            endpoint = hint["actions"][0]["payload"]["source_control_endpoint"]  # type: ignore[index]
        except (KeyError, IndexError, TypeError):
            return
        liveness = self._tier._staging._liveness
        if isinstance(endpoint, str) and endpoint not in liveness._sources:
            liveness.heard(endpoint)

    @property
    def pins(self) -> int:
        """Pins held for peers."""
        return int(self._tier._pins.outstanding)

    @property
    def pins_asked(self) -> int:
        """Requests for pins that have no answer yet."""
        pins = self._tier._pins
        return len(pins._asked) + len(pins._waiting)

    def lost(self) -> dict[str, int]:
        """Blocks lost so far, by reason."""
        self._take()
        return dict(self._lost)

    def ignored_hints(self) -> dict[str, int]:
        """Hints not used so far, by reason."""
        self._take()
        return dict(self._ignored_hints)

    def pool(self, row_bytes: int) -> np.ndarray:
        """The tier's pool, one row a slot. Not to be kept beyond the tier."""
        memory = self._tier._backend._pool
        whole = (ctypes.c_uint8 * len(memory)).from_address(address_of(memory))
        return np.ctypeslib.as_array(whole).reshape(-1, row_bytes)

    def tables(self) -> dict[str, int]:
        """How many entries the tables of the tier's parts have."""
        tier = self._tier
        parts = {
            "transfers": tier._transfers,
            "results": tier._results,
            "pins": tier._pins,
            "hints": tier._hints,
            "backoff": tier._backoff,
            "liveness": tier._staging._liveness,
            "inventory": tier._inventory,
            "staging": tier._staging,
            "quarantine": tier._quarantine,
        }
        return {
            f"{name}.{attribute}": len(value)
            for name, part in parts.items()
            for attribute, value in vars(part).items()
            if isinstance(value, Sized) and not isinstance(value, (bytes, str))
        }

    @property
    def known_blocks(self) -> int:
        """Blocks of which the tier remembers what was stored."""
        return len(self._tier._transfers._sums._residency)

    def held_blocks(self) -> set[bytes]:
        """Blocks that KVCR has, or is working on."""
        skip = len(self._tier._prefix)
        return {key[skip:] for key in self._tier._kvcr._core._block_record_map}

    def only_in_files(self) -> dict[bytes, int]:
        """Blocks that are not in the pool, by key, with their slots in the files."""
        skip = len(self._tier._prefix)
        records = self._tier._kvcr._core._block_record_map
        return {
            key[skip:]: record.g3.slot
            for key, record in records.items()
            if record.g3 is not None and record.local_dram is None
        }

    def watch_checks(self, judged: Callable[[list[bytes], list[bytes]], None]) -> None:
        """Have ``judged`` told of the blocks found corrupt, and not verified."""
        sums = self._tier._transfers._sums
        take_done = sums.take_done
        skip = len(self._tier._prefix)

        def watched() -> Any:
            done = take_done()
            for _, corrupt, unverified in done:
                judged([k[skip:] for k in corrupt], [k[skip:] for k in unverified])
            return done

        sums.take_done = watched

    def set_operation_timeout(self, seconds: float) -> None:
        """Change how long KVCR works on operations that begin from now on."""
        core = self._tier._kvcr._core
        core.config = replace(core.config, operation_timeout_ms=int(1000 * seconds))

    def kill_progress(self, error: BaseException) -> None:
        """Have KVCR's progress thread die of ``error`` in its next iteration."""
        progress = self._tier._kvcr._core._progress
        poll = progress._poll

        def die(*arguments: Any) -> Any:
            # Once: the thread polls again while it cleans up.
            progress._poll = poll
            raise error

        progress._poll = die

    def _take(self) -> None:
        lost, hints = self._tier._losses.take()
        self._lost.update(lost)
        self._ignored_hints.update(hints)


def state_samples(metrics: dict[str, float]) -> dict[str, float]:
    """The samples of the tier's state gauge, by state and reason."""
    prefix = "vllm:kvcr_tier_state:"
    return {
        name.removeprefix(prefix): value
        for name, value in metrics.items()
        if name.startswith(prefix)
    }
