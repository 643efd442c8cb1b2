"""A wrapper that breaks: passes calls on to another executor and fails at one chosen step. Called by tests through the
`Executor` port.
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.engine.ports import Executor
from penstock.types.errors import ExecutorFailure
from penstock.types.plan import Capacity, StepPlan, Ticket
from penstock.types.result import StepResult


class FailingExecutor:
    """Fails in the `fail_at_step`-th step (from 0) and in all after it: in `collect`, or already in `submit`."""

    def __init__(self, inner: Executor, *, fail_at_step: int, is_in_submit: bool = False) -> None:
        self._inner = inner
        self._steps_left = fail_at_step
        self._is_in_submit = is_in_submit

    @property
    def capacity(self) -> Capacity:
        return self._inner.capacity

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        self._inner.copy_blocks(pairs)

    def submit(self, plan: StepPlan) -> Ticket:
        if self._is_in_submit and self._steps_left == 0:
            raise ExecutorFailure("the device failed, as it was told to")
        return self._inner.submit(plan)

    def collect(self, ticket: Ticket) -> StepResult:
        if self._steps_left == 0:
            raise ExecutorFailure("the device failed, as it was told to")
        self._steps_left -= 1
        return self._inner.collect(ticket)

    def close(self) -> None:
        self._inner.close()
