"""A step while it is planned: the scheduler and its planners (`running.py`, `joining.py`, `padding.py`) add rows to it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from penstock.kv.block_table import BlockTable
from penstock.kv.prefix_cache import PrefixHit
from penstock.sched.policies.base import GateDecision, StepLimits
from penstock.types.adapter import BASE, PackedAdapter
from penstock.types.plan import AdmitRow, RowPlan
from penstock.types.request import Request
from penstock.types.stats import Admission, Preemption, StepCounts, WaitReason


@dataclass(slots=True)
class Candidate:
    request: Request
    hit: PrefixHit
    query_len: int
    packed: PackedAdapter | None = None


@dataclass(slots=True)
class StepBuilder:
    now_ns: int
    limits: StepLimits
    """For prefills. Decodes are planned before these are known."""
    gate: GateDecision
    is_ahead: bool = False
    """A step is in flight, so no request may be preempted."""
    num_scored_left: int = 0
    """Prompt positions whose log-probabilities the step can still return."""
    takes_whole_texts: bool = False
    counts: StepCounts = field(default_factory=StepCounts)
    rows: list[RowPlan] = field(default_factory=list)
    num_decode_rows: int = 0
    """Number of decodes, which are the first of `rows`."""
    padding_rows: list[RowPlan] = field(default_factory=list)
    admits: dict[str, AdmitRow] = field(default_factory=dict)
    long_prefills: list[Request] = field(default_factory=list)
    """Long prefills that run, including those that this step admits."""
    late: list[Request] = field(default_factory=list)
    """Running long prefills that others pass, leaving them a share of the tokens."""
    num_kept_tokens: int = 0
    num_let_in: int = 0
    """How many of the requests that the gate allows this step has admitted, held back or set aside."""
    num_promised_blocks: int = 0
    """Free blocks reserved for the current tokens of running requests and of requests set aside."""
    num_promised_rows: int = 0
    lacks_memory: bool = False
    """A running request was preempted for another's blocks, so no request is admitted."""
    needs_preemption: bool = False
    """A preemption is needed, but a step that is planned ahead can't make one."""
    admissions: list[Admission] = field(default_factory=list)
    preemptions: list[Preemption] = field(default_factory=list)
    set_aside: list[tuple[str, WaitReason]] = field(default_factory=list)

    @property
    def tokens_left(self) -> int:
        return max(0, self.limits.max_tokens - self.counts.num_tokens - self.num_kept_tokens)

    @property
    def has_tokens(self) -> bool:
        """True if tokens are left in the step's budget, even if kept for long prefills."""
        return self.counts.num_tokens < self.limits.max_tokens

    def is_long(self, num_behind: int) -> bool:
        return num_behind > self.limits.long_prefill_tokens and not self.takes_whole_texts

    def chunk(self, num_behind: int) -> int:
        """Return how many of a prefill's `num_behind` missing tokens to compute in this step; 0: it has to wait."""
        counts, limits, room = self.counts, self.limits, self.tokens_left
        if self.takes_whole_texts:
            return num_behind if num_behind <= room or not counts.num_tokens else 0
        if self.is_long(num_behind):
            room = min(room, limits.max_chunk_tokens)
        if num_behind > room and not limits.splits_prompts and counts.num_tokens > counts.num_decodes:
            return 0
        return min(num_behind, room)

    def chunk_of(self, request: Request, num_computed_tokens: int) -> int:
        """Return how many tokens of a request to compute, also limited by the log-probabilities that the step can still
        return."""
        query_len = self.chunk(request.num_tokens - num_computed_tokens)
        scored = request.positions_to_score(num_computed_tokens, query_len)
        if len(scored) > self.num_scored_left:
            query_len = scored[0] + self.num_scored_left - num_computed_tokens
        return query_len

    def admit(self, request: Request, block_ids: tuple[int, ...], table: BlockTable) -> None:
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
            table.state,
            table.source,
        )

    def add_row(self, request: Request, query_len: int, new_block_ids: tuple[int, ...] = (), *, is_prefill: bool) -> None:
        """Add a row for the request's next tokens. `is_prefill` includes the last piece of a prompt."""
        context_len = request.num_computed_tokens
        row = RowPlan(
            request.request_id, context_len, query_len, new_block_ids, int(context_len + query_len == request.num_tokens)
        )
        self.rows.append(row)
        self._count(request, row, 1)
        if is_prefill:
            self.counts.prefills.append(row)
            self.num_scored_left -= len(request.positions_to_score(context_len, query_len))

    def _count(self, request: Request, row: RowPlan, sign: int) -> None:
        counts = self.counts
        counts.num_tokens += sign * row.query_len
        if row.query_len > 1:
            counts.num_prefill_pairs += sign * num_pairs(row)
        if request.max_computed_tokens:
            num_recomputed = min(request.max_computed_tokens, row.context_len + row.query_len) - row.context_len
            counts.num_recomputed_tokens += sign * max(0, num_recomputed)

    def take_back(self, request: Request) -> None:
        """Remove a preempted request's row and admission. Call this before the request's progress changes. O(rows)."""
        self.admits.pop(request.request_id, None)
        counts = self.counts
        for idx, row in enumerate(self.rows):
            if row.request_id == request.request_id:
                self._count(request, row, -1)
                if idx < self.num_decode_rows:
                    self.num_decode_rows -= 1
                    counts.num_decodes -= row.query_len
                if row in counts.prefills:
                    counts.prefills.remove(row)
                    self.num_scored_left += len(request.positions_to_score(row.context_len, row.query_len))
                del self.rows[idx]
                return

    def group_by_adapter(self, running: Mapping[str, Request]) -> None:
        """Put decode rows of one adapter side by side, so that its weights are read once. O(rows)."""
        numbers = {
            row.request_id: request.adapter.number
            for row in self.rows
            if (request := running[row.request_id]).adapter is not None
        }
        first, rest = self.rows[: self.num_decode_rows], self.rows[self.num_decode_rows :]
        self.rows = sorted(first, key=lambda row: numbers.get(row.request_id, BASE)) + rest


def num_pairs(row: RowPlan) -> int:
    return row.query_len * row.context_len + row.query_len * (row.query_len - 1) // 2
