"""Extending: plans the running requests' rows, decodes first, then prefills as far as the step's tokens last."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from penstock.kv.manager import KVManager
from penstock.sched import progress
from penstock.sched.draft import StepDraft
from penstock.sched.running import Running
from penstock.types.request import Request, RequestStatus
from penstock.types.stats import PreemptReason

MAX_FORCED_TOKENS = 15
"""Forced tokens per request and step. Everybody's next token waits meanwhile."""


class Extending:
    def __init__(self, kv: KVManager, running: Running) -> None:
        self._kv = kv
        self._running = running

    def decodes(self, draft: StepDraft, sitting_out: Collection[str] = ()) -> list[Request]:
        """Plan a row for every running request that decodes, in order of admission. Return the others.

        Requests that sit out get no row, except to compute their prompts.
        """
        counts, running = draft.counts, tuple(self._running)
        counts.sat_out = ()
        if sitting_out:
            staying = {
                request.request_id: request
                for request in running
                if request.request_id in sitting_out and request.num_computed_tokens >= request.num_prompt_tokens
            }
            counts.sat_out = list(staying)
            running = tuple([request for request in running if request.request_id not in staying])
        prefills, num_rows = progress.plan_decodes(
            running, self._kv.num_slots, draft.rows, lambda request: self._extend(draft, request, 1)
        )
        counts.num_tokens += num_rows
        if prefills:
            prefills = self._jumps(draft, prefills)
        counts.num_decodes = counts.num_tokens
        draft.num_decode_rows = len(draft.rows)
        return prefills

    def _jumps(self, draft: StepDraft, behind: Sequence[Request]) -> list[Request]:
        """Plan rows for decodes with forced tokens. Return the prefills.

        All forced tokens together get half of what is left, so that prompts go on.
        """
        jumping = [request for request in behind if request.is_jumping]
        num_spare = (draft.tokens_left - len(jumping)) // 2
        for request in jumping:
            num_forced = min(request.num_behind - 1, MAX_FORCED_TOKENS, num_spare)
            num_spare -= num_forced
            self._extend(draft, request, 1 + num_forced)
        return [request for request in behind if not request.is_jumping]

    def note_long(self, draft: StepDraft, prefills: Sequence[Request]) -> None:
        if draft.limits.long_prefill_share is None:
            draft.long_prefills = [request for request in prefills if draft.is_long(request.num_behind)]
            return
        # Count a long prompt's last piece as long too, or it would block others where chunks are small.
        draft.late = [request for request in prefills if draft.is_long(request.num_tokens - request.num_cached_tokens)]
        draft.long_prefills = list(draft.late)

    def prefill(self, draft: StepDraft, request: Request) -> None:
        """Plan a row for a prefill if tokens are left, unless it resumed in this step."""
        if request.status is not RequestStatus.RUNNING or request.request_id in draft.admits:
            return
        if query_len := draft.chunk_of(request, request.num_computed_tokens):
            draft.num_promised_blocks -= self._running.missing_blocks(request)
            self._extend(draft, request, query_len, is_prefill=True)
            draft.num_promised_blocks += self._running.missing_blocks(request)

    def _extend(self, draft: StepDraft, request: Request, query_len: int, *, is_prefill: bool = False) -> None:
        """Plan a row for a running request, preempting others or the request itself until there are blocks."""
        if request.status is not RequestStatus.RUNNING or not request.num_behind:
            return  # preempted in this step, or a beam that waits for others
        running, context_len = self._running, request.num_computed_tokens
        num_copies = len(self._kv.pending_copies)
        while (blocks := self._kv.extend(request.request_id, context_len, context_len + query_len)) is None:
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
        draft.add_row(request, query_len, blocks, is_prefill=is_prefill)
        progress.plan(request, query_len)
