# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Whatever KVCR answers, in whatever pieces: one result for each job, and true."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from kvcr.types import OpEntryStatus

from tests.v1.kv_offload.tiering.kvcr.builders import key
from tests.v1.kv_offload.tiering.kvcr.rig import ROW_BYTES, StandinRig
from tests.v1.kv_offload.tiering.kvcr.staging_rigs import FILES
from tests.v1.kv_offload.tiering.kvcr.standin import (
    ANSWERS,
    FAILED,
    SUCCESS,
    FetchingStandin,
    KvcrStandin,
)

KEYS = st.lists(st.integers(0, 11).map(key), max_size=9, unique=True)
STATUSES = st.sampled_from(list(OpEntryStatus))


class Given(NamedTuple):
    """A job that has no result yet."""

    is_load: bool
    keys: list[bytes]
    request_id: str
    operations_before: int


class Jobs(RuleBasedStateMachine):
    """Two blocks an operation, four under way; the answers are hypothesis'."""

    standin: type[KvcrStandin] = KvcrStandin
    options: dict[str, Any] = {}  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self.rig = StandinRig(
            kvcr=self.standin,
            max_operation_bytes=2 * ROW_BYTES,
            max_inflight_bytes=4 * ROW_BYTES,
            **self.options,
        )
        self.jobs: dict[int, Given] = {}
        # What KVCR said first of each block of each operation.
        self.said: dict[tuple[int, bytes], OpEntryStatus] = {}

    @rule(chosen=KEYS, is_load=st.booleans())
    def submit(self, chosen: list[Any], is_load: bool) -> None:
        submit = self.rig.load if is_load else self.rig.store
        request_id = f"request {len(self.rig.given)}"
        before = len(self.rig.kvcr.operations)
        job = submit(chosen, range(len(chosen)), request_id)
        self.jobs[job] = Given(is_load, list(chosen), request_id, before)

    @rule(number=st.integers(0, 11), status=st.sampled_from(ANSWERS))
    def move_a_block(self, number: int, status: Any) -> None:
        self.rig.kvcr.statuses[key(number)] = status

    @precondition(lambda self: self.rig.kvcr.operations)
    @rule(data=st.data(), surplus=st.lists(st.integers(50, 60).map(key), max_size=1))
    def answer_some(self, data: st.DataObject, surplus: list[Any]) -> None:
        """A piece of any operation: new, repeated, too much, or of one long over."""
        handle = data.draw(st.sampled_from(sorted(self.rig.kvcr.operations)))
        blocks = sorted(self.rig.kvcr.operations[handle].blocks)
        chosen = data.draw(st.lists(st.sampled_from(blocks), unique=True))
        self._answer(handle, {block: data.draw(STATUSES) for block in chosen}, surplus)

    @rule(
        handle=st.integers(-5, 0) | st.integers(10**6, 10**6 + 5), number=st.integers()
    )
    def answer_for_somebody_else(self, handle: int, number: int) -> None:
        self.rig.kvcr.complete(handle, {key(number % 12): FAILED})

    @rule()
    def step(self) -> None:
        for result in self.rig.poll():
            job = self.jobs.pop(result.job_id)  # each one once
            if not job.is_load:
                continue
            arrived = set(job.keys if result.success else result.successful_keys or ())
            assert arrived <= set(job.keys)
            for each in arrived:
                assert self._was_delivered(job, each), f"{each!r} never arrived"

    @invariant()
    def what_is_outstanding_is_pending(self) -> None:
        if self.jobs:
            assert self.rig.tier.has_pending_work()

    def teardown(self) -> None:
        for _ in range(200):
            if not self.jobs:
                break
            for handle, operation in list(self.rig.kvcr.operations.items()):
                self._answer(handle, dict.fromkeys(operation.blocks, SUCCESS))
            self.step()
        assert self.jobs == {}
        assert not self.rig.tier.has_pending_work()
        assert all(not n for n in self.rig.staging_tables().values())

    def _answer(
        self,
        handle: int,
        statuses: dict[bytes, OpEntryStatus],
        surplus: Sequence[bytes] = (),
    ) -> None:
        for block, status in statuses.items():
            self.said.setdefault((handle, block), status)
        self.rig.kvcr.complete(handle, statuses | dict.fromkeys(surplus, FAILED))

    def _was_delivered(self, job: Given, block: bytes) -> bool:
        return any(
            op.kind == "deliver"
            and op.handle > job.operations_before
            and op.request_id in (job.request_id, None)
            and self.said.get((op.handle, block)) is SUCCESS
            for op in self.rig.kvcr.operations.values()
        )


class LandingJobs(Jobs):
    """The same where blocks from files land in KVCR's pool first."""

    standin = FetchingStandin
    options = FILES


SETTINGS = settings(max_examples=60, stateful_step_count=30, deadline=None)

TestJobs = Jobs.TestCase
TestJobs.settings = SETTINGS
TestLandingJobs = LandingJobs.TestCase
TestLandingJobs.settings = SETTINGS
