"""A step in the making: owns the rows, admissions and counters of one step until the plan is built. Written by the scheduler
alone; decides nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from penstock.sched.policies.base import StepLimits
from penstock.types.plan import AdmitRow, RowPlan


@dataclass(frozen=True, slots=True)
class StepCounts:
    """What a step did that its plan does not tell."""

    num_tokens: int = 0
    """Positions that it computes."""
    num_preemptions: int = 0
    num_prefix_query_tokens: int = 0
    """Tokens looked up in the prefix cache by this step's admissions."""
    num_prefix_hit_tokens: int = 0


@dataclass(slots=True)
class StepDraft:
    limits: StepLimits
    num_tokens: int = 0
    """Positions that the rows compute."""
    rows: dict[str, RowPlan] = field(default_factory=dict)
    """By request id, so that a row can be taken back when its request becomes a victim."""
    admits: dict[str, AdmitRow] = field(default_factory=dict)
    num_promised_blocks: int = 0
    """Free blocks that running prefills will need for the tokens they have."""
    num_preemptions: int = 0
    num_prefix_query_tokens: int = 0
    num_prefix_hit_tokens: int = 0

    @property
    def tokens_left(self) -> int:
        """What prefills may still take."""
        return max(0, self.limits.max_tokens - self.num_tokens)

    def add_row(self, row: RowPlan) -> None:
        self.rows[row.request_id] = row
        self.num_tokens += row.query_len

    def take_back(self, request_id: str) -> None:
        """Remove what the step planned for a request, if anything."""
        self.admits.pop(request_id, None)
        row = self.rows.pop(request_id, None)
        if row is not None:
            self.num_tokens -= row.query_len

    def counts(self) -> StepCounts:
        return StepCounts(self.num_tokens, self.num_preemptions, self.num_prefix_query_tokens, self.num_prefix_hit_tokens)
