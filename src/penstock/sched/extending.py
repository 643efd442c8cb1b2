"""Extending: plans the running requests' rows, decodes first, then prefills as far as the step's tokens last.

A request that lacks blocks preempts others, or itself if the others are more senior.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType

from penstock.kv.manager import KVManager
from penstock.sched import progress
from penstock.sched.choosing.chooser import Speculation
from penstock.sched.draft import StepDraft
from penstock.sched.running import Running
from penstock.types.request import Request, RequestStatus
from penstock.types.stats import PreemptReason

NO_SLOTS: Mapping[str, int] = MappingProxyType({})
"""Used with a `Speculation`: no decode takes the short way."""

MAX_FORCED_TOKENS = 15
"""Forced tokens per request and step, beside the one before them. Everybody's next token waits meanwhile."""


class Extending:
    def __init__(self, kv: KVManager, running: Running, speculation: Speculation | None = None) -> None:
        self._kv = kv
        self._running = running
        self._speculation = speculation

    def decodes(self, draft: StepDraft, sitting_out: Collection[str] = ()) -> list[Request]:
        """A row for every running request that decodes, in order of admission. Returns the other ones.

        Those that sit out are passed over once they have computed their prompts, for which others may wait.
        """
        counts, running = draft.counts, tuple(self._running)
        counts.sat_out = ()
        if sitting_out:
            staying: list[str] = []
            going: list[Request] = []
            for request in running:
                if request.request_id in sitting_out and request.num_computed_tokens >= request.num_prompt_tokens:
                    staying.append(request.request_id)
                else:
                    going.append(request)
            counts.sat_out, running = staying, tuple(going)
        num_slots = self._kv.num_slots if self._speculation is None else NO_SLOTS
        prefills, num_rows = progress.plan_decodes(
            running, num_slots, draft.rows, lambda request: self._extend(draft, request, 1)
        )
        counts.num_tokens += num_rows
        if prefills:
            prefills = self._jumps(draft, prefills)
        counts.num_decodes = counts.num_tokens
        draft.num_decode_rows = len(draft.rows)
        return prefills

    def _jumps(self, draft: StepDraft, behind: Sequence[Request]) -> list[Request]:
        """Plan rows for decodes with forced tokens. Return the others, which are prefills.

        Each gets one token. All forced tokens together get half of what is left, so that prompts go on.
        """
        jumping = [request for request in behind if request.is_jumping]
        num_spare = (draft.budget.tokens_left - len(jumping)) // 2
        for request in jumping:
            num_forced = min(request.num_behind - 1, MAX_FORCED_TOKENS, num_spare)
            num_spare -= num_forced
            self._extend(draft, request, 1 + num_forced)
        return [request for request in behind if not request.is_jumping]

    def note_long(self, draft: StepDraft, prefills: Sequence[Request]) -> None:
        """Note the long prefills of this step, and those that let others pass."""
        budget = draft.budget
        if budget.limits.long_prefill_share is None:
            budget.long_prefills = [request for request in prefills if budget.is_long(request.num_behind)]
            return
        # Count a long prompt's last piece as long too, or it would block others where chunks are small.
        budget.late = [request for request in prefills if budget.is_long(request.num_tokens - request.num_cached_tokens)]
        budget.long_prefills = list(budget.late)

    def prefill(self, draft: StepDraft, request: Request) -> None:
        """Plan a row for a prefill if tokens are left. If it was paused and resumed in this step, it already has one."""
        if request.status is not RequestStatus.RUNNING or request.request_id in draft.admits:
            return
        if query_len := draft.chunk(request, request.num_computed_tokens):
            draft.num_promised_blocks -= self._running.missing_blocks(request)
            self._extend(draft, request, query_len, is_prefill=True)
            draft.num_promised_blocks += self._running.missing_blocks(request)

    def _extend(self, draft: StepDraft, request: Request, query_len: int, *, is_prefill: bool = False) -> None:
        """Plan a row for a running request, preempting others or the request itself until there are blocks."""
        if request.status is not RequestStatus.RUNNING or not request.num_behind:
            return  # preempted in this step, or a beam that waits for others
        running, context_len = self._running, request.num_computed_tokens
        num_copies = len(self._kv.pending_copies)
        max_samples = 1 if self._speculation is None or is_prefill else self._max_samples(draft, request, self._speculation)
        end = context_len + query_len + max_samples - 1
        while (blocks := self._kv.extend(request.request_id, context_len, end)) is None:
            assert max_samples == 1, "memory for more tokens was found before"
            assert not draft.admissions, "a step must not both admit and preempt"
            draft.lacks_memory = True
            eviction = running.choose_victim(running.may_lose(), request, query_len)
            running.preempt(draft, eviction, PreemptReason.MEMORY)
            if request.status is not RequestStatus.RUNNING:
                return
        if len(self._kv.pending_copies) != num_copies or running.is_untold(request):
            running.tell_again(request)
            draft.admit(request, self._kv.block_table(request.request_id))
            blocks = ()
        draft.add_row(request, query_len, blocks, is_prefill=is_prefill, max_samples=max_samples)
        progress.plan(request, query_len)

    def _max_samples(self, draft: StepDraft, request: Request, speculation: Speculation) -> int:
        """Return how many tokens a decode may get in this step. Every running request first gets a token and a block of its
        own."""
        if request.sampling.follows_grammar or request.sampling.beams is not None:
            return 1
        num_running = len(self._running)
        num_spare_tokens = draft.budget.tokens_left - (num_running - len(draft.rows))
        num_spare_slots = (self._kv.pool.num_available - num_running) * self._kv.block_size
        num_to_limit = request.max_total_tokens - request.num_tokens
        return max(1, min(speculation.max_samples(request), num_to_limit, 1 + num_spare_tokens, 1 + num_spare_slots))
