"""Wrappers that break: pass calls on to another executor and fail at a chosen step or row. Called by tests through the
`Executor` port.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from penstock.engine.ports import Executor, Ready
from penstock.types.adapter import NoAdapters
from penstock.types.errors import ExecutorFailure
from penstock.types.plan import Capacity, StepPlan, Ticket
from penstock.types.result import StepResult


class FailingExecutor(NoAdapters):
    """Fails in the `fail_at_step`-th step (from 0) and in all after it: in `collect`, or already in `submit`."""

    def __init__(self, inner: Executor, *, fail_at_step: int, is_in_submit: bool = False) -> None:
        self._inner = inner
        self._submits_left = fail_at_step if is_in_submit else -1
        self._collects_left = -1 if is_in_submit else fail_at_step

    @property
    def depth(self) -> int:
        return self._inner.depth

    @property
    def capacity(self) -> Capacity:
        return self._inner.capacity

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        self._inner.copy_blocks(pairs)

    @property
    def block_bytes(self) -> int:
        return self._inner.block_bytes

    def read_blocks(self, block_ids: Sequence[int], out: Sequence[memoryview]) -> Ready | None:
        return self._inner.read_blocks(block_ids, out)

    def write_blocks(self, block_ids: Sequence[int], contents: Sequence[memoryview]) -> None:
        self._inner.write_blocks(block_ids, contents)

    def submit(self, plan: StepPlan) -> Ticket:
        if self._submits_left == 0:
            raise ExecutorFailure("the device failed, as it was told to")
        self._submits_left -= 1
        return self._inner.submit(plan)

    def restrict(self, ticket: Ticket, masks: Mapping[str, bytes]) -> None:
        self._inner.restrict(ticket, masks)

    def collect(self, ticket: Ticket) -> StepResult:
        if self._collects_left == 0:
            raise ExecutorFailure("the device failed, as it was told to")
        self._collects_left -= 1
        return self._inner.collect(ticket)

    def close(self) -> None:
        self._inner.close()


class RowFailingExecutor(FailingExecutor):
    """Never fails as a whole; the given requests get no token in its `fail_at_step`-th step (from 0) and after."""

    def __init__(self, inner: Executor, *, request_ids: frozenset[str], fail_at_step: int) -> None:
        super().__init__(inner, fail_at_step=-1)
        self._request_ids = request_ids
        self._steps_before = fail_at_step

    def collect(self, ticket: Ticket) -> StepResult:
        result = super().collect(ticket)
        self._steps_before -= 1
        if self._steps_before >= 0:
            return result
        failed = self._request_ids & result.token_ids.keys()
        kept = {request_id: tokens for request_id, tokens in result.token_ids.items() if request_id not in failed}
        return replace(result, token_ids=kept, failures=dict.fromkeys(sorted(failed), "no usable logit, as it was told"))
