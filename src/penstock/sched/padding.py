"""Padding of a static batch: rows whose results are dropped, as in systems that compute a batch as a rectangle.

Each run of padding tokens is a request of its own to the executor, with a `PaddingId` and null blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import count

from penstock.kv.block_pool import NULL_BLOCK_ID
from penstock.sched.step_builder import StepBuilder, num_pairs
from penstock.types.plan import AdmitRow, Capacity, PaddingId, RowPlan
from penstock.types.request import Request
from penstock.types.sampling import SamplingParams

GREEDY = SamplingParams(temperature=0.0)


@dataclass(slots=True)
class PaddingRow:
    request_id: PaddingId
    owner: str
    context_len: int
    num_tokens: int
    is_known: bool = False


class Padding:
    """Adds padding rows to a static batch. While no batch runs, `is_active` is False, and nothing need be called."""

    def __init__(self, capacity: Capacity, release: Callable[[str], None]) -> None:
        self.is_active = False
        self._capacity = capacity
        self._release = release
        self._numbers = count()
        self._heads: dict[str, PaddingRow] = {}
        """Request id -> the padding before its prompt, until it is computed."""
        self._done: list[PaddingRow] = []
        """Heads completed by the last step."""
        self._tails: dict[str, PaddingRow] = {}
        """Padding row id -> the row, after its request's end."""

    def start(self, batch: Iterable[Request], pad_to_tokens: int) -> None:
        """Begin a batch: pad its prompts to the longest, and to `pad_to_tokens` if the executor can hold as many."""
        prompts = {request.request_id: request.num_tokens for request in batch}
        longest = min(max(pad_to_tokens, *prompts.values()), self._capacity.max_model_len - (not self._capacity.is_one_pass))
        for request_id, num_tokens in prompts.items():
            if num_tokens < longest:
                # One token more than is computed, so that the row never samples.
                self._heads[request_id] = self._new_row(request_id, 0, longest - num_tokens + 1)
        self.is_active = True

    def stop(self) -> None:
        for row in (*self._heads.values(), *self._done, *self._tails.values()):
            self._forget(row)
        self._heads.clear()
        self._done.clear()
        self._tails.clear()
        self.is_active = False

    def begin(self, step: StepBuilder) -> None:
        """Begin a step: rows of ended requests get their padding tokens first."""
        for row in self._done:
            self._forget(row)
        self._done.clear()
        step.counts.num_tokens += len(self._tails)
        step.counts.num_padding_tokens += len(self._tails)

    def pad_prompt(self, request: Request, step: StepBuilder) -> bool:
        """Plan the padding in front of a prompt. Return False if the step has no token left for the prompt itself."""
        row = self._heads.get(request.request_id)
        if row is not None:
            num_missing = row.num_tokens - 1 - row.context_len
            query_len = step.chunk(num_missing)
            if query_len > 0:
                self._plan(row, query_len, step, samples=0)
            if query_len < num_missing:
                return False
            self._done.append(self._heads.pop(request.request_id))
        return step.tokens_left > 0

    def end(self, request: Request) -> None:
        """Note that a request of the batch ended. Padding takes its row, unless the request was a text to embed or score."""
        head = self._heads.pop(request.request_id, None)
        if head is not None:
            self._forget(head)
        elif request.num_computed_tokens and not self._capacity.is_one_pass:
            row = self._new_row(request.request_id, request.num_computed_tokens, request.num_computed_tokens + 1)
            self._tails[row.request_id] = row

    def add_tails(self, step: StepBuilder) -> None:
        """Plan one padding token for each row whose request has ended. `begin` has added these tokens to the step's counts."""
        for row in list(self._tails.values()):
            if row.context_len + 1 >= self._capacity.max_model_len:
                row = self._shorten(row)
            self._plan(row, 1, step, samples=1)

    def fail(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            row = self._tails.pop(request_id, None)
            if row is not None:
                self._forget(row)

    def check(self, num_members: int, max_rows: int) -> None:
        assert self.is_active or not (self._heads or self._done or self._tails), "padding without a batch"
        assert num_members + len(self._tails) <= max_rows or not self.is_active, (
            "a batch and its padding are more than its rows"
        )

    def _new_row(self, owner: str, context_len: int, num_tokens: int) -> PaddingRow:
        return PaddingRow(PaddingId(f"padding {next(self._numbers)} of {owner}"), owner, context_len, num_tokens)

    def _shorten(self, row: PaddingRow) -> PaddingRow:
        """Replace a padding row of maximum length by one of half that length."""
        self._forget(self._tails.pop(row.request_id))
        context_len = (self._capacity.max_model_len - 1) // 2
        shorter = self._new_row(row.owner, context_len, context_len + 1)
        self._tails[shorter.request_id] = shorter
        return shorter

    def _plan(self, row: PaddingRow, query_len: int, step: StepBuilder, *, samples: int) -> None:
        if not row.is_known:
            step.admits[row.request_id] = self._admit_row(row)
            row.is_known = True
        plan = RowPlan(row.request_id, row.context_len, query_len, (), samples)
        step.padding_rows.append(plan)
        row.context_len += query_len
        if not samples:
            step.counts.num_tokens += query_len
            step.counts.num_padding_tokens += query_len
            step.counts.num_prefill_pairs += num_pairs(plan)

    def _admit_row(self, row: PaddingRow) -> AdmitRow:
        capacity = self._capacity
        blocks = (NULL_BLOCK_ID,) * -(-capacity.max_model_len // capacity.block_size)
        return AdmitRow(row.request_id, (0,) * row.num_tokens, row.num_tokens, blocks, row.context_len, GREEDY)

    def _forget(self, row: PaddingRow) -> None:
        if row.is_known:
            self._release(row.request_id)
