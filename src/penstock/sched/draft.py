"""A step in the making: owns the rows, admissions and counters of one step until the plan is built, and what its commit did.
Written by the scheduler and by who plans for it; decides nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from penstock.sched.policies.base import StepLimits
from penstock.types.events import TokenEvent
from penstock.types.plan import AdmitRow, RowPlan
from penstock.types.request import Request
from penstock.types.stats import Admission, Preemption, WaitReason


@dataclass(slots=True)
class StepCounts:
    """What a step did that its plan does not tell.

    Nobody writes to one after it was made; not frozen for the reason in `RowPlan`.
    """

    num_tokens: int = 0
    """Positions that it computes, padding included."""
    num_decodes: int = 0
    """Rows of requests that were one token behind, and of padding after the end of one."""
    num_prefill_pairs: int = 0
    """Of a token of another row and one before it in its request."""
    num_padding_tokens: int = 0
    num_padding_rows: int = 0
    num_preemptions: int = 0
    num_swaps: int = 0
    """Preemptions of which the tier below the pool keeps the blocks."""
    num_recomputed_tokens: int = 0
    """Positions that had been computed before a preemption and are computed again."""
    num_prefix_query_tokens: int = 0
    """Tokens looked up in the prefix cache by this step's admissions."""
    num_prefix_hit_tokens: int = 0
    waits_for: WaitReason = WaitReason.NOTHING
    """What the first of those who wait lacks."""
    max_prefill_tokens: int = 0
    """What the budget left to prompts."""
    admissions: Sequence[Admission] = ()


@dataclass(slots=True)
class StepOutcome:
    """What a commit did."""

    counts: StepCounts
    """Of the step."""
    void: Collection[str]
    """Ids of its rows whose requests had ended before."""
    events: list[TokenEvent] = field(default_factory=list)
    """One per row that sampled or failed, in the order of the plan."""
    ended: list[Request] = field(default_factory=list)
    num_sampled_tokens: int = 0


@dataclass(slots=True)
class StepDraft:
    limits: StepLimits
    """Of the prefills; decodes are planned before they are known."""
    is_ahead: bool = False
    """A step is in flight, with rows of those who run: nobody is preempted."""
    puts_off_pause: bool = False
    """Somebody is to be paused for another, which has to wait for that reason."""
    num_tokens: int = 0
    """Positions that the rows compute, padding included."""
    num_decodes: int = 0
    num_prefill_pairs: int = 0
    num_decode_rows: int = 0
    """Of requests; they come first."""
    long_prefills: list[Request] = field(default_factory=list)
    """That run, those that this step admits included."""
    late: list[Request] = field(default_factory=list)
    """Those of them that run already and let others pass, which leave them a share of the tokens."""
    num_kept_tokens: int = 0
    """For long prefills that come after the others."""
    num_let_in: int = 0
    """Of those whom the gate lets in, so many were admitted or held back."""
    lacks_memory: bool = False
    """Somebody who runs had to be preempted for another: nobody joins."""
    num_padding_tokens: int = 0
    padding_rows: list[RowPlan] = field(default_factory=list)
    """Behind the others in the plan."""
    rows: list[RowPlan] = field(default_factory=list)
    admits: dict[str, AdmitRow] = field(default_factory=dict)
    num_promised_blocks: int = 0
    """Free blocks that running prefills will need for the tokens they have."""
    num_kept_rows: int = 0
    """For those who stand aside."""
    num_preemptions: int = 0
    num_swaps: int = 0
    num_admitted: int = 0
    num_recomputed_tokens: int = 0
    num_prefix_query_tokens: int = 0
    num_prefix_hit_tokens: int = 0
    waits_for: WaitReason = WaitReason.NOTHING
    admissions: list[Admission] = field(default_factory=list)
    preemptions: list[Preemption] = field(default_factory=list)
    set_aside: list[tuple[str, WaitReason]] = field(default_factory=list)

    @property
    def tokens_left(self) -> int:
        """What prefills may still take."""
        return max(0, self.limits.max_tokens - self.num_tokens - self.num_kept_tokens)

    @property
    def has_tokens(self) -> bool:
        """For prefills, though they may be kept for long ones."""
        return self.num_tokens < self.limits.max_tokens

    def is_long(self, num_behind: int) -> bool:
        return num_behind > self.limits.long_prefill_tokens

    def chunk(self, num_behind: int) -> int:
        """Tokens that a prefill may compute in this step, of those that it is behind; 0: it has to wait."""
        limits = self.limits
        room = self.tokens_left
        if self.is_long(num_behind):
            room = min(room, limits.max_chunk_tokens)
        if num_behind > room and not limits.splits_prompts and self.num_tokens > self.num_decodes:
            return 0
        return min(num_behind, room)

    def admit(self, request: Request, block_ids: tuple[int, ...]) -> None:
        """Tell the executor of the request in full; what has KV in its blocks is `num_computed_tokens`."""
        token_ids = (*request.prompt_token_ids, *request.output_token_ids)
        num_prompt, num_computed = request.num_prompt_tokens, request.num_computed_tokens
        row = AdmitRow(request.request_id, token_ids, num_prompt, block_ids, num_computed, request.sampling)
        self.admits[request.request_id] = row

    def add_row(self, request: Request, query_len: int, new_block_ids: tuple[int, ...] = ()) -> None:
        """Plan the request's next `query_len` tokens."""
        context_len = request.num_computed_tokens
        samples = context_len + query_len == request.num_tokens
        row = RowPlan(request.request_id, context_len, query_len, new_block_ids, samples)
        self.rows.append(row)
        self.num_tokens += query_len
        if query_len > 1:
            self.num_prefill_pairs += num_pairs(row)
        if request.max_computed_tokens:
            self.num_recomputed_tokens += num_recomputed(request, row)
        request.num_inflight_tokens = query_len

    def add_padding(self, num_tokens: int) -> None:
        self.num_tokens += num_tokens
        self.num_padding_tokens += num_tokens

    def take_back(self, request: Request) -> None:
        """Remove what the step planned for a request, if anything. O(rows): only victims are taken back."""
        self.admits.pop(request.request_id, None)
        for idx, row in enumerate(self.rows):
            if row.request_id == request.request_id:
                self.num_tokens -= row.query_len
                if idx < self.num_decode_rows:
                    self.num_decode_rows -= 1
                    self.num_decodes -= 1
                self.num_prefill_pairs -= num_pairs(row) if row.query_len > 1 else 0
                self.num_recomputed_tokens -= num_recomputed(request, row)
                del self.rows[idx]
                return

    def counts(self) -> StepCounts:
        return StepCounts(
            num_tokens=self.num_tokens,
            num_decodes=self.num_decodes,
            num_prefill_pairs=self.num_prefill_pairs,
            num_padding_tokens=self.num_padding_tokens,
            num_padding_rows=len(self.padding_rows),
            num_preemptions=self.num_preemptions,
            num_swaps=self.num_swaps,
            num_recomputed_tokens=self.num_recomputed_tokens,
            num_prefix_query_tokens=self.num_prefix_query_tokens,
            num_prefix_hit_tokens=self.num_prefix_hit_tokens,
            waits_for=self.waits_for,
            max_prefill_tokens=max(0, self.limits.max_tokens - self.num_decodes),
            admissions=self.admissions,
        )


def num_pairs(row: RowPlan) -> int:
    """Of a token of the row and one before it."""
    return row.query_len * row.context_len + row.query_len * (row.query_len - 1) // 2


def num_recomputed(request: Request, row: RowPlan) -> int:
    """Positions of a row that were computed before the request was preempted."""
    return max(0, min(request.max_computed_tokens, row.context_len + row.query_len) - row.context_len)
