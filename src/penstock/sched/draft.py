"""A step in the making: its rows, tokens, blocks and counts until the plan is built. Filled by the scheduler and its
planners (`extending.py`, `joining.py`, `padding.py`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from penstock.kv.prefix_cache import PrefixHit
from penstock.sched.policies.base import GateDecision, StepLimits
from penstock.types.adapter import BASE, PackedAdapter
from penstock.types.plan import AdmitRow, RowPlan
from penstock.types.request import Request
from penstock.types.stats import Admission, Preemption, StepCounts, WaitReason


@dataclass(slots=True)
class TokenBudget:
    """The step's tokens: how many are left for prefills, and how many one prefill may take."""

    limits: StepLimits
    """Limits for prefills. Decodes are planned before these are known."""
    counts: StepCounts
    """The step's counts, with the tokens already given away."""
    takes_whole_texts: bool = False
    """No request is split."""
    long_prefills: list[Request] = field(default_factory=list)
    """Long prefills that run, including those that this step admits."""
    late: list[Request] = field(default_factory=list)
    """Running long prefills that let others pass. The others leave them a share of the tokens."""
    num_kept_tokens: int = 0
    """That share, while others are planned."""

    @property
    def tokens_left(self) -> int:
        return max(0, self.limits.max_tokens - self.counts.num_tokens - self.num_kept_tokens)

    @property
    def has_tokens(self) -> bool:
        """True if tokens are left, even if kept for long prefills."""
        return self.counts.num_tokens < self.limits.max_tokens

    def is_long(self, num_behind: int) -> bool:
        return num_behind > self.limits.long_prefill_tokens and not self.takes_whole_texts

    def chunk(self, num_behind: int) -> int:
        """Return how many tokens a prefill may compute in this step; 0: it has to wait.

        A text that is never split may take the whole step if it is the first, even above the limit.
        """
        limits = self.limits
        if self.takes_whole_texts:
            return num_behind if num_behind <= self.tokens_left or not self.counts.num_tokens else 0
        room = self.tokens_left
        if self.is_long(num_behind):
            room = min(room, limits.max_chunk_tokens)
        if num_behind > room and not limits.splits_prompts and self.counts.num_tokens > self.counts.num_decodes:
            return 0
        return min(num_behind, room)


@dataclass(slots=True)
class Candidate:
    """A waiting request that is next, with what its first step would compute."""

    request: Request
    hit: PrefixHit
    query_len: int
    """Length of its first row."""
    packed: PackedAdapter | None = None
    """Its adapter, if not in the pool."""


@dataclass(slots=True)
class StepDraft:
    now_ns: int
    budget: TokenBudget
    gate: GateDecision
    """How many requests may join."""
    is_ahead: bool = False
    """A step is in flight with rows of the running requests, so nobody is preempted."""
    num_scored_left: int = 0
    """Prompt positions whose log-probabilities the step can still return."""
    counts: StepCounts = field(init=False)
    rows: list[RowPlan] = field(default_factory=list)
    num_decode_rows: int = 0
    """The first rows are decodes, this many."""
    padding_rows: list[RowPlan] = field(default_factory=list)
    """These come last in the plan."""
    admits: dict[str, AdmitRow] = field(default_factory=dict)
    num_let_in: int = 0
    """Requests admitted or held back of those that the gate lets in."""
    num_promised_blocks: int = 0
    """Free blocks needed by running prefills, and by requests that stand aside, for the tokens they have."""
    num_promised_rows: int = 0
    """Rows of requests that stand aside."""
    lacks_memory: bool = False
    """A running request had to be preempted for another, so nobody joins."""
    puts_off_pause: bool = False
    """A request should be paused for another, which must wait because the step is planned ahead."""
    admissions: list[Admission] = field(default_factory=list)
    preemptions: list[Preemption] = field(default_factory=list)
    set_aside: list[tuple[str, WaitReason]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.counts = self.budget.counts

    def chunk(self, request: Request, num_computed_tokens: int) -> int:
        """Return how many tokens a prefill may compute, given those computed or found; 0: it has to wait."""
        num_behind = request.num_tokens - num_computed_tokens
        query_len = self.budget.chunk(num_behind)
        scored = request.positions_to_score(num_computed_tokens, query_len)
        if len(scored) > self.num_scored_left:
            query_len = scored[0] + self.num_scored_left - num_computed_tokens
        return query_len

    def admit(self, request: Request, block_ids: tuple[int, ...]) -> None:
        """Send the request in full. Its blocks have KV up to `num_computed_tokens`."""
        token_ids = request.prompt_token_ids
        if request.output_token_ids:
            token_ids = (*token_ids, *request.output_token_ids)
        self.admits[request.request_id] = AdmitRow(
            request.request_id,
            token_ids,
            request.num_prompt_tokens,
            block_ids,
            request.num_computed_tokens,
            request.sampling,
            request.second_at,
            request.adapter_number,
            len(request.prompt_logprobs),
        )

    def add_row(
        self,
        request: Request,
        query_len: int,
        new_block_ids: tuple[int, ...] = (),
        *,
        is_prefill: bool,
        max_samples: int = 1,
    ) -> None:
        """Plan the request's next `query_len` tokens, and up to `max_samples` new ones if it has caught up with them.

        `is_prefill`: also if it is one token, the last.
        """
        context_len = request.num_computed_tokens
        samples = max_samples if context_len + query_len == request.num_tokens else 0
        row = RowPlan(request.request_id, context_len, query_len, new_block_ids, samples)
        self.rows.append(row)
        counts = self.counts
        counts.num_tokens += row.num_positions
        if is_prefill:
            counts.prefills.append(row)
            self.num_scored_left -= len(request.positions_to_score(context_len, query_len))
        if query_len > 1:
            counts.num_prefill_pairs += num_pairs(row)
        if request.max_computed_tokens:
            counts.num_recomputed_tokens += num_recomputed(request, row)

    def group_by_adapter(self, running: Mapping[str, Request]) -> None:
        """Put decodes of one adapter side by side, so that its weights are read once. O(rows)."""
        numbers = {
            row.request_id: request.adapter.number
            for row in self.rows
            if (request := running[row.request_id]).adapter is not None
        }
        self.counts.num_adapter_rows, self.counts.num_adapters = len(numbers), len(set(numbers.values()))
        first, rest = self.rows[: self.num_decode_rows], self.rows[self.num_decode_rows :]
        self.rows = sorted(first, key=lambda row: numbers.get(row.request_id, BASE)) + rest

    def take_back(self, request: Request) -> None:
        """Remove a victim's row and admission from the step. O(rows)."""
        self.admits.pop(request.request_id, None)
        counts = self.counts
        for idx, row in enumerate(self.rows):
            if row.request_id == request.request_id:
                counts.num_tokens -= row.num_positions
                if idx < self.num_decode_rows:
                    self.num_decode_rows -= 1
                    counts.num_decodes -= row.num_positions
                if row in counts.prefills:
                    counts.prefills.remove(row)
                    self.num_scored_left += len(request.positions_to_score(row.context_len, row.query_len))
                counts.num_prefill_pairs -= num_pairs(row) if row.query_len > 1 else 0
                counts.num_recomputed_tokens -= num_recomputed(request, row)
                del self.rows[idx]
                return


def num_pairs(row: RowPlan) -> int:
    return row.query_len * row.context_len + row.query_len * (row.query_len - 1) // 2


def num_recomputed(request: Request, row: RowPlan) -> int:
    """Return the row's positions that were computed before the request was preempted."""
    return max(0, min(request.max_computed_tokens, row.context_len + row.query_len) - row.context_len)
