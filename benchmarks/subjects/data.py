# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Data plane: how fast blocks go out of the primary tier and come back."""

import contextlib
import shutil
import time
from typing import Any

from benchmarks.harness.contenders import Contender
from benchmarks.subjects.memory import Keys, Primary
from benchmarks.subjects.movers import BareKvcr, Mover, PlainCopy, TierMover

_PAUSE_S = 0.0001
_DEADLINE_S = 50.0
_FIRST_STORES = 4


class DataPlane:
    """One contender at one block size."""

    def __init__(self, contender: Contender, rows: int, row_bytes: int) -> None:
        self._contender = contender
        self._primary = Primary(rows, row_bytes)
        self._keys = Keys()
        self._mover: Mover | None = None

    def first_stores(self) -> list[float]:
        """Seconds for storing all rows, several times, from a start on."""
        self._close_mover()
        blocks = len(self._primary.rows)
        seconds = [self._store(blocks)[0] for _ in range(_FIRST_STORES)]
        self._close_mover()
        return seconds

    def there_and_back(
        self, blocks: int, step_s: float = _PAUSE_S
    ) -> tuple[float, float]:
        """Seconds for storing ``blocks`` rows in one job, and for loading them.

        Args:
            step_s: Between two polls.
        """
        stored, keys = self._store(blocks, step_s)
        rows = self._primary.rows[:blocks]
        expected = rows[:, 0].copy()
        rows[:, 0] = 0
        job = self._open().prepare(keys, range(blocks), True)
        loaded = _run(self._open(), job, step_s)
        if not (rows[:, 0] == expected).all():
            raise AssertionError("other bytes came back than were stored")
        self._remove_files()
        return stored, loaded

    def load_beside_store(self, blocks: int) -> float:
        """Seconds for one block's load that is submitted after a big store."""
        mover = self._open()
        (key,) = keys = self._keys.fresh(1)
        _run(mover, mover.prepare(keys, [0], False))
        store = mover.prepare(self._keys.fresh(blocks), range(blocks), False)
        load = mover.prepare([key], [0], True)
        if not isinstance(mover, TierMover):
            raise TypeError("only a tier tells which of its jobs has ended")
        mover.submit(store)
        started = time.perf_counter()
        mover.submit(load)
        ended: set[int] = set()
        seconds = 0.0
        while len(ended) < 2:
            ended |= {result.job_id for result in mover.tier.get_finished_jobs()}
            if not seconds and load.job_id in ended:
                seconds = time.perf_counter() - started
            if time.perf_counter() > started + _DEADLINE_S:
                raise TimeoutError("a job did not end")
            time.sleep(_PAUSE_S)
        return seconds

    def close(self) -> None:
        self._close_mover()

    def _store(self, blocks: int, step_s: float = _PAUSE_S) -> tuple[float, list[Any]]:
        mover = self._open()
        keys = self._keys.fresh(blocks)
        return _run(mover, mover.prepare(keys, range(blocks), False), step_s), keys

    def _open(self) -> Mover:
        if self._mover is None:
            self._mover = _make(self._contender, self._primary)
        return self._mover

    def _close_mover(self) -> None:
        if self._mover is not None:
            self._mover.close()
            self._mover = None
        if self._contender.folder is not None:
            shutil.rmtree(self._contender.folder, ignore_errors=True)

    def _remove_files(self) -> None:
        """What the fs tier wrote, which it never removes itself."""
        if self._contender.folder is not None and not self._contender.file_blocks:
            for file in self._contender.folder.rglob("*.bin"):
                with contextlib.suppress(FileNotFoundError):
                    file.unlink()


def _run(mover: Mover, job: Any, step_s: float = _PAUSE_S) -> float:
    started = time.perf_counter()
    mover.submit(job)
    while not mover.poll():
        time.sleep(step_s)
        if time.perf_counter() > started + _DEADLINE_S:
            raise TimeoutError("a job did not end")
    return time.perf_counter() - started


def _make(contender: Contender, primary: Primary) -> Mover:
    row_bytes = primary.rows.shape[1]
    file = None
    if contender.folder is not None:
        contender.folder.mkdir(exist_ok=True)
        file = contender.folder / "file"
    if contender.kind == "copy":
        return PlainCopy(primary, contender.slots)
    if contender.kind == "bare":
        return BareKvcr(
            primary,
            contender.slots,
            populate=contender.populate,
            file=file if contender.file_blocks else None,
            file_bytes=contender.file_blocks * row_bytes,
            operation_blocks=contender.slots // 2 if contender.file_blocks else None,
        )
    options = dict(contender.options)
    if options["type"] == "fs":
        options["root_dir"] = str(contender.folder)
    else:
        options["secondary_g2_slots"] = contender.slots
    if contender.file_blocks:
        options["g3"] = {
            "paths": [str(file)],
            "capacity_bytes_per_file": contender.file_blocks * row_bytes,
            "backend": "POSIX",
        }
    return TierMover(primary, options)
