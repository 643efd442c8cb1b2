"""Turns the scheduler's step plans into arrays for an executor, and keeps each request's tokens and block table."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.models.program import Program, States
from penstock.types.adapter import BASE
from penstock.types.plan import AdmitRow, Capacity, PaddingId, RowPlan, StepPlan, num_unread_blocks

NULL_BLOCK = 0
"""Block id for padding, and for a row's blocks before its window."""

NO_TOKEN = -1
"""Token id for a row that failed, and for a token that only the device knows."""

NO_USABLE_LOGIT = "the model gave no usable logit: every one is -inf or NaN, or a sampling parameter made it so"
"""Why a row fails."""
NO_USABLE_STATE = "the model's answer to this text has an entry that is infinite or not a number"


def most_scored(program: Program) -> int:
    """Return the number of positions whose logits fit in 32 MiB, but at least 16 and at most 256.

    It is 0 for a program of whole texts (`is_one_pass`).
    """
    return 0 if program.is_one_pass else min(max(16, (32 << 20) // (4 * program.vocab_size)), 256)


def check_block_id(block_id: int, capacity: Capacity) -> None:
    """Raise ValueError if requests can't hold the block."""
    if not NULL_BLOCK < block_id < capacity.num_blocks:
        raise ValueError(f"there is no block {block_id}: requests can hold 1 to {capacity.num_blocks - 1}")


def capacity_of(
    program: Program,
    *,
    num_blocks: int,
    block_size: int,
    max_rows: int,
    max_step_tokens: int,
    max_model_len: int,
    num_state_blocks: int = 0,
) -> Capacity:
    """Return the capacity of an executor on the CPU."""
    is_one_pass = program.is_one_pass
    assert is_one_pass == isinstance(program.ending, States), "programs of texts end in `States`, others in `Logits`"
    return Capacity(
        num_blocks,
        block_size,
        max_rows,
        max_step_tokens,
        max_model_len,
        has_state=program.state is not None,
        num_state_blocks=num_state_blocks,
        window=program.window,
        max_scored=most_scored(program),
        checks_guesses=not (is_one_pass or program.state or program.paged_state),
        is_one_pass=is_one_pass,
        vocab_size=program.vocab_size,
    )


@dataclass(frozen=True, slots=True, eq=False)
class StepBatch:
    """One step's inputs as C-contiguous arrays, for R rows (one per request), T tokens and S sampled tokens."""

    step_id: int
    request_ids: tuple[str, ...]  # [R]
    row_slots: NDArray[np.int32]  # [R], places in the builder's tables
    query_start_loc: NDArray[np.int32]  # [R + 1], prefix sums of `query_len`
    context_lens: NDArray[np.int32]  # [R]
    token_ids: NDArray[np.int32]  # [T]
    positions: NDArray[np.int32]  # [T]
    slot_mapping: NDArray[np.int64]  # [T], block_id * block_size + offset
    sample_rows: NDArray[np.int32]  # [S], indices of rows that sample, ascending
    num_guesses: NDArray[np.int32]  # [R]
    admitted: tuple[tuple[int, AdmitRow], ...]
    """(slot, row) in the plan's order. Releases come first, so a slot may be in `released`, too."""
    released: tuple[int, ...]  # slots

    @property
    def num_rows(self) -> int:
        return len(self.request_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)


class BatchBuilder:
    """Turns step plans into arrays, and keeps the requests' tokens and block tables.

    An invalid plan raises ValueError. Don't use the builder afterwards.
    """

    def __init__(self, capacity: Capacity, *, vocab_size: int | None = None, placed: Container[int] = ()) -> None:
        """`placed`: numbers (`AdmitRow.adapter`) of the adapters in memory. The backend updates it between steps."""
        # np.zeros maps memory lazily: rows and positions that are never used cost nothing.
        max_rows, max_tokens = capacity.max_rows, capacity.max_model_len + 1
        self.capacity = capacity
        self.tokens: NDArray[np.int32] = np.zeros((max_rows, max_tokens), np.int32)
        """Prompt and output, with room for the token after the longest row. [max_rows, max_model_len + 1]"""
        self.block_tables: NDArray[np.int32] = np.zeros((max_rows, -(-max_tokens // capacity.block_size)), np.int32)
        """Block ids in order, `NULL_BLOCK` after the last. [max_rows, .]"""
        self.num_tokens: NDArray[np.int32] = np.zeros(max_rows, np.int32)
        self.num_prompt_tokens: NDArray[np.int32] = np.zeros(max_rows, np.int32)
        self.second_at: NDArray[np.int32] = np.zeros(max_rows, np.int32)
        """Position of the first token of a pair's second text; 0: the row is one text."""
        self.adapters: NDArray[np.int64] = np.full(max_rows, BASE, np.int64)
        self.num_blocks: NDArray[np.int32] = np.zeros(max_rows, np.int32)
        self._num_computed: NDArray[np.int32] = np.zeros(max_rows, np.int32)
        self._vocab_end = np.iinfo(np.int32).max if vocab_size is None else vocab_size
        self._placed = placed
        self._slots: dict[str, int] = {}
        self._free_slots = list(range(max_rows - 1, -1, -1))

    def slot(self, request_id: str) -> int:
        slot = self._slots.get(request_id)
        if slot is None:
            raise ValueError(f"request {request_id!r} was never admitted, or is released")
        return slot

    def apply(self, plan: StepPlan) -> StepBatch:
        """Release and admit the plan's requests, and return the arrays of its step."""
        released = tuple([self._release(request_id) for request_id in plan.releases])
        admitted = tuple([(self._admit(row), row) for row in plan.admits])
        rows = plan.rows
        row_slots = self._row_slots(rows)
        for row, slot in zip(rows, row_slots.tolist(), strict=True):
            if row.new_block_ids:
                self._append_blocks(slot, row.request_id, row.new_block_ids)
        context_lens = np.array([row.context_len for row in rows], np.int32)
        query_lens = np.array([row.query_len for row in rows], np.int32)
        samples = np.array([row.samples for row in rows], np.bool_)
        num_guesses = self._note_guesses(plan)
        seq_lens = context_lens + query_lens
        query_start_loc = np.zeros(len(rows) + 1, np.int32)
        np.cumsum(query_lens, out=query_start_loc[1:])
        num_tokens = self.num_tokens[row_slots] + num_guesses
        self._check_rows(plan, row_slots, query_lens, seq_lens, samples, num_tokens, int(query_start_loc[-1]))
        token_slots, positions = _token_coordinates(row_slots, context_lens, query_lens, query_start_loc)
        self._num_computed[row_slots] = seq_lens
        return StepBatch(
            step_id=plan.step_id,
            request_ids=tuple([row.request_id for row in rows]),
            row_slots=row_slots,
            query_start_loc=query_start_loc,
            context_lens=context_lens,
            token_ids=self.tokens[token_slots, positions],
            positions=positions,
            slot_mapping=self._slot_mapping(token_slots, positions),
            sample_rows=np.flatnonzero(samples).astype(np.int32),
            num_guesses=num_guesses,
            admitted=admitted,
            released=released,
        )

    def append_sampled(self, batch: StepBatch, token_ids: NDArray[np.int32]) -> None:
        """Append the step's sampled tokens [S] to their requests."""
        if len(token_ids) != len(batch.sample_rows):
            raise ValueError(f"{len(token_ids)} sampled tokens for {len(batch.sample_rows)} rows that sample")
        slots = batch.row_slots[batch.sample_rows]
        self.tokens[slots, self.num_tokens[slots]] = token_ids
        self.num_tokens[slots] += 1

    def append(self, slot: int, token_ids: Sequence[int]) -> None:
        """Append the tokens that a step sampled for a row. The last one has no KV yet."""
        begin = int(self.num_tokens[slot])
        self.tokens[slot, begin : begin + len(token_ids)] = token_ids
        self.num_tokens[slot] += len(token_ids)
        self._num_computed[slot] = self.num_tokens[slot] - 1

    def _note_guesses(self, plan: StepPlan) -> NDArray[np.int32]:
        """Write guesses behind the tokens of their rows. Return how many each row has."""
        for request_id, token_ids in plan.guesses.items():
            if not self.capacity.checks_guesses or min(token_ids) < 0 or max(token_ids) >= self._vocab_end:
                raise ValueError(f"request {request_id!r} has guesses that can't be checked: {token_ids}")
            slot = self.slot(request_id)
            begin = int(self.num_tokens[slot])
            self.tokens[slot, begin : begin + len(token_ids)] = token_ids
        return np.array([len(plan.guesses.get(row.request_id, ())) for row in plan.rows], np.int32)

    def _release(self, request_id: str) -> int:
        slot = self.slot(request_id)
        del self._slots[request_id]
        # Stale tokens are harmless. Block ids are cleared, so that no stale one is mistaken for a row's own.
        self.block_tables[slot, : self.num_blocks[slot]] = NULL_BLOCK
        self.num_tokens[slot] = self.num_blocks[slot] = 0
        self._free_slots.append(slot)
        return slot

    def _admit(self, row: AdmitRow) -> int:
        num_tokens = len(row.token_ids)
        if row.request_id in self._slots:
            raise ValueError(f"request {row.request_id!r} is admitted twice")
        if not self._free_slots:
            raise ValueError(f"request {row.request_id!r} is one more than max_rows = {self.capacity.max_rows}")
        if not 1 <= row.num_prompt_tokens <= num_tokens <= self.capacity.max_model_len:
            raise ValueError(
                f"request {row.request_id!r} has {num_tokens} tokens, {row.num_prompt_tokens} of them prompt;"
                f" max_model_len is {self.capacity.max_model_len}"
            )
        if not 0 <= row.num_computed_tokens < num_tokens:
            raise ValueError(f"request {row.request_id!r} has {row.num_computed_tokens} of {num_tokens} tokens computed")
        if row.num_computed_tokens > len(row.block_ids) * self.capacity.block_size:
            raise ValueError(f"request {row.request_id!r} has more KV ({row.num_computed_tokens} tokens) than its blocks hold")
        if not 0 <= row.second_at < num_tokens:
            raise ValueError(
                f"request {row.request_id!r} has {num_tokens} tokens, and its second text begins at {row.second_at}"
            )
        if row.adapter != BASE and row.adapter not in self._placed:
            raise ValueError(f"request {row.request_id!r} has adapter {row.adapter}, which is not placed")
        slot = self._free_slots.pop()
        self._slots[row.request_id] = slot
        self.second_at[slot] = row.second_at
        self.adapters[slot] = row.adapter
        self.tokens[slot, :num_tokens] = self._checked_tokens(row)
        self.num_tokens[slot] = num_tokens
        self.num_prompt_tokens[slot] = row.num_prompt_tokens
        self._num_computed[slot] = row.num_computed_tokens
        self.num_blocks[slot] = 0
        num_unread = num_unread_blocks(row.num_computed_tokens, self.capacity.block_size, self.capacity.window)
        self._append_blocks(slot, row.request_id, row.block_ids, num_unread)
        return slot

    def _checked_tokens(self, row: AdmitRow) -> NDArray[np.int64]:
        token_ids = np.array(row.token_ids, np.int64)
        if token_ids.min() < 0 or token_ids.max() >= self._vocab_end:
            raise ValueError(f"request {row.request_id!r} has a token outside the vocabulary of {self._vocab_end}")
        return token_ids

    def _append_blocks(self, slot: int, request_id: str, block_ids: Sequence[int], num_unread: int = 0) -> None:
        """Append blocks to a request's table. The first `num_unread` may be null blocks."""
        start, end = int(self.num_blocks[slot]), int(self.num_blocks[slot]) + len(block_ids)
        if end > self.block_tables.shape[1]:
            raise ValueError(f"{end} blocks are more than max_model_len = {self.capacity.max_model_len} tokens need")
        is_padding = isinstance(request_id, PaddingId)
        for idx, block_id in enumerate(block_ids):
            if is_padding and block_id != NULL_BLOCK:
                raise ValueError(f"block {block_id} is given to padding, which must not write to it")
            is_unread = block_id == NULL_BLOCK and idx < num_unread
            if not (is_padding or is_unread or NULL_BLOCK < block_id < self.capacity.num_blocks):
                raise ValueError(f"block {block_id} is not one of 1 to {self.capacity.num_blocks - 1}")
        self.block_tables[slot, start:end] = block_ids
        self.num_blocks[slot] = end

    def _row_slots(self, rows: Sequence[RowPlan]) -> NDArray[np.int32]:
        slots = [self.slot(row.request_id) for row in rows]
        if len(set(slots)) != len(slots):
            raise ValueError("a request has two rows in one step")
        return np.array(slots, np.int32)

    def _slot_mapping(self, token_slots: NDArray[np.int32], positions: NDArray[np.int32]) -> NDArray[np.int64]:
        block_idx, offsets = np.divmod(positions, np.int32(self.capacity.block_size))
        slot_mapping = self.block_tables[token_slots, block_idx].astype(np.int64)
        slot_mapping *= self.capacity.block_size
        slot_mapping += offsets
        return slot_mapping

    def _check_rows(
        self,
        plan: StepPlan,
        row_slots: NDArray[np.int32],
        query_lens: NDArray[np.int32],
        seq_lens: NDArray[np.int32],
        samples: NDArray[np.bool_],
        num_tokens: NDArray[np.int32],
        num_step_tokens: int,
    ) -> None:
        if num_step_tokens > self.capacity.max_step_tokens:
            raise ValueError(f"{num_step_tokens} tokens in a step; max_step_tokens is {self.capacity.max_step_tokens}")
        _require(plan, query_lens > 0, "computes no token")
        _require(plan, seq_lens - query_lens == self._num_computed[row_slots], "has a context_len unlike what was computed")
        _require(plan, seq_lens <= num_tokens, "computes tokens that are not known")
        _require(plan, (seq_lens == num_tokens) | ~samples, "samples before its last token")
        _require(plan, seq_lens <= self.num_blocks[row_slots] * self.capacity.block_size, "writes past its last block")
        _require(plan, seq_lens <= self.capacity.max_model_len, "is longer than max_model_len")
        if self.capacity.is_one_pass:
            is_padding = np.array([isinstance(row.request_id, PaddingId) for row in plan.rows], np.bool_)
            _require(plan, samples & (query_lens == num_tokens) | is_padding, "does not compute its whole text")


def _require(plan: StepPlan, is_kept: NDArray[np.bool_], breach: str) -> None:
    if not is_kept.all():
        row = plan.rows[int(np.argmin(is_kept))]
        raise ValueError(f"step {plan.step_id}: request {row.request_id!r} {breach}: {row}")


def _token_coordinates(
    row_slots: NDArray[np.int32],
    context_lens: NDArray[np.int32],
    query_lens: NDArray[np.int32],
    query_start_loc: NDArray[np.int32],
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    num_step_tokens = int(query_start_loc[-1])
    if num_step_tokens == len(row_slots):  # one token per row: nothing to spread
        return row_slots, context_lens.copy()
    starts = np.repeat(context_lens - query_start_loc[:-1], query_lens)
    return np.repeat(row_slots, query_lens), starts + np.arange(num_step_tokens, dtype=np.int32)
