"""Who goes on: plans the rows of those who run, first of those who decode, then of prefills, as far as the step's tokens last.
Called by the scheduler; lets nobody join, and takes blocks from those who run only where none are left.

Whoever lacks blocks preempts others until they are found, or itself if the others are more senior.
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.kv.manager import KVManager
from penstock.sched.draft import StepDraft
from penstock.sched.running import Running
from penstock.types.plan import RowPlan
from penstock.types.request import Request, RequestStatus
from penstock.types.stats import PreemptReason


class Extending:
    """The next tokens of each, and the blocks for them."""

    def __init__(self, kv: KVManager, running: Running) -> None:
        self._kv = kv
        self._running = running

    def decodes(self, draft: StepDraft) -> list[Request]:
        """A row for every running request that is one token behind, in order of admission. Returns the other ones."""
        prefills: list[Request] = []
        add_row, num_slots, num_short_cuts = draft.rows.append, self._kv.num_slots, 0
        for request in tuple(self._running.requests.values()):
            request_id, context_len = request.request_id, request.num_computed_tokens
            if request.num_tokens - context_len > 1:
                prefills.append(request)
            elif context_len < num_slots.get(request_id, 0):  # its last block has room: nothing to ask, nothing to tell
                add_row(RowPlan(request_id, context_len, 1, (), True))
                request.num_inflight_tokens = 1
                num_short_cuts += 1
            else:
                self._extend(draft, request, 1)
        draft.num_tokens += num_short_cuts
        draft.num_decodes = draft.num_tokens
        draft.num_decode_rows = len(draft.rows)
        return prefills

    def note_long(self, draft: StepDraft, prefills: Sequence[Request]) -> None:
        """Which of them count as long in this step, and which of those let others pass."""
        share = draft.limits.long_prefill_share
        if share is None:
            draft.long_prefills = [request for request in prefills if draft.is_long(request.num_behind)]
            return
        # Also the last piece of a long one, else that would keep others waiting where chunks are small.
        draft.late = [request for request in prefills if draft.is_long(request.num_tokens - request.num_cached_tokens)]
        draft.long_prefills = list(draft.late)

    def prefill(self, draft: StepDraft, request: Request) -> None:
        """A row for one of them, if tokens are left. Whoever was paused meanwhile, and had room to come back, has its row."""
        if request.status is not RequestStatus.RUNNING or request.request_id in draft.admits:
            return
        missing_blocks = self._running.room.missing_blocks
        if query_len := draft.chunk(request.num_behind):
            draft.num_promised_blocks -= missing_blocks(request)
            self._extend(draft, request, query_len)
            draft.num_promised_blocks += missing_blocks(request)

    def _extend(self, draft: StepDraft, request: Request, query_len: int) -> None:
        """Plan a row for a running request; preempts others, or the request itself, until its blocks are found."""
        if request.status is not RequestStatus.RUNNING or not request.num_behind:
            return  # a victim of this step, or a beam that waits for another
        running, context_len = self._running, request.num_computed_tokens
        num_copies = len(self._kv.pending_copies)
        while (blocks := self._kv.extend(request.request_id, context_len, context_len + query_len)) is None:
            assert not draft.num_admitted, "a step must not both admit and preempt"
            draft.lacks_memory = True
            eviction = running.choose_victim(running.may_lose(), running.room.lacking_blocks(request, query_len))
            running.preempt(draft, eviction, PreemptReason.MEMORY)
            if request.status is not RequestStatus.RUNNING:
                return
        if len(self._kv.pending_copies) != num_copies or request.request_id in running.untold:
            running.tell_again(request)
            draft.admit(request, self._kv.block_table(request.request_id))
            blocks = ()
        draft.add_row(request, query_len, blocks)
