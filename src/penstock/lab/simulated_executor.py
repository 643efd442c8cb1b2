"""An executor that computes nothing: its steps take as long as a cost model says, its outputs end where an oracle says. Called
through the `Executor` port, by the simulation's driver.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from penstock.lab.cost_model import CostModel, shape_of
from penstock.types.plan import AdmitRow, Capacity, PaddingId, StepPlan, Ticket
from penstock.types.result import StepResult, StepTiming

EOS_TOKEN_ID = 0
"""Ends an output; requests must have it among their `stop_token_ids`."""
TOKEN_ID = 1
"""Any other token."""

_TOKEN, _EOS = (TOKEN_ID,), (EOS_TOKEN_ID,)


class SimulatedExecutor:
    """Virtual: `submit` returns at once, and its ticket says when the step is done."""

    def __init__(self, capacity: Capacity, cost: CostModel, output_lens: Mapping[str, int], *, depth: int = 1) -> None:
        """`output_lens`: request_id -> tokens after which its output ends by itself, >= 1."""
        self.depth = depth
        self._capacity = capacity
        self._cost = cost
        self._output_lens = output_lens
        self._num_left: dict[str, float] = {}
        """Tokens that each known row will still generate."""
        self._results: dict[int, StepResult] = {}
        self._ready_ns = 0
        """When the last step is done."""

    @property
    def capacity(self) -> Capacity:
        return self._capacity

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Costs nothing."""

    @property
    def block_bytes(self) -> int:
        """Nothing is stored."""
        return 1

    def read_blocks(self, block_ids: Sequence[int], out: Sequence[memoryview]) -> None:
        """Costs nothing."""

    def write_blocks(self, block_ids: Sequence[int], contents: Sequence[memoryview]) -> None:
        """Costs nothing."""

    def submit(self, plan: StepPlan) -> Ticket:
        num_left = self._num_left
        for request_id in plan.releases:
            del num_left[request_id]
        for admit in plan.admits:
            num_left[admit.request_id] = self._num_left_of(admit)
        token_ids: dict[str, tuple[int, ...]] = {}
        for row in plan.rows:
            if row.samples:
                num_left[row.request_id] -= 1
                token_ids[row.request_id] = _TOKEN if num_left[row.request_id] > 0 else _EOS
        start_ns = max(plan.now_ns, self._ready_ns)
        self._ready_ns = start_ns + self._cost.duration_ns(shape_of(plan))
        self._results[plan.step_id] = StepResult(plan.step_id, token_ids, StepTiming(start_ns, self._ready_ns))
        return Ticket(plan.step_id, self._ready_ns)

    def restrict(self, ticket: Ticket, masks: Mapping[str, bytes]) -> None:
        """Costs nothing, and changes nothing: outputs end where the oracle says."""

    def _num_left_of(self, admit: AdmitRow) -> float:
        if isinstance(admit.request_id, PaddingId):
            return math.inf  # ends with its batch, and not by itself
        num_generated = len(admit.token_ids) - admit.num_prompt_tokens
        return self._output_lens[admit.request_id] - num_generated

    def collect(self, ticket: Ticket) -> StepResult:
        return self._results.pop(ticket.step_id)

    def close(self) -> None:
        self._num_left.clear()
