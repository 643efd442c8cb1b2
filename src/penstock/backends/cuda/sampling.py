"""Owns how all rows of a step that sample get their tokens, on the device: what changes their logits, and the draw.

Called by the executor: `admit` and `prepare` on the host, before the step's message; `choose` queues the work. Nothing here
waits for the device, and nothing depends on what it computed. The specification is `backends/reference/sampling.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import triton
from numpy.typing import NDArray

from penstock.backends.cuda.kernels import sample as kernels
from penstock.backends.cuda.staging import aligned
from penstock.backends.cuda.tables import Patches, RowTables, allowed_words, param_words
from penstock.types.plan import AdmitRow
from penstock.types.sampling import MAX_LOGPROBS, SamplingParams

MAX_BLOCK = 4096
"""Logits that a program of the kernels looks at together."""
NUM_WARPS = 16
NUM_PIVOTS = 4
"""Thresholds that are tried in one pass: what that many sums take of the registers."""
NUM_PIVOTS_INTERPRETED = 16
"""Where a pass costs the same, however many they are."""
NO_TOKEN_BEFORE = -1
"""In a banned sequence, where it is shorter than others: any token, or none."""
LARGEST = float(np.finfo(np.float32).max)

I32 = NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False)
class _Changes:
    """What changes one row's logits, in arrays."""

    params: SamplingParams
    num_prompt_tokens: int
    is_penalized: bool
    bias_ids: I32
    bias_values: NDArray[np.float32]
    banned: I32
    """The last token of each banned sequence."""
    before: tuple[tuple[int, ...], ...]
    """The others of it."""
    stop_ids: I32

    def bans_stops(self, position: int) -> bool:
        return position - self.num_prompt_tokens < self.params.min_tokens and len(self.stop_ids) > 0

    def applies(self, position: int) -> bool:
        """Whether anything changes the logits of the token at this position."""
        return (
            self.is_penalized
            or len(self.bias_ids) > 0
            or len(self.banned) > 0
            or self.params.allowed_token_ids is not None
            or self.bans_stops(position)
        )


def _make_changes(params: SamplingParams, num_prompt_tokens: int) -> _Changes | None:
    """None if the row's logits are never changed."""
    penalties = (params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
    is_penalized = penalties != (1.0, 0.0, 0.0)
    has_early_stops = params.min_tokens > 0 and params.stop_token_ids
    lists = (params.logit_bias, params.banned_token_sequences)
    if not (is_penalized or has_early_stops or any(lists) or params.allowed_token_ids is not None):
        return None
    sequences = params.banned_token_sequences
    return _Changes(
        params,
        num_prompt_tokens,
        is_penalized,
        np.array([token_id for token_id, _ in params.logit_bias], np.int32),
        np.array([bias for _, bias in params.logit_bias], np.float32),
        np.array([sequence[-1] for sequence in sequences], np.int32),
        tuple(sequence[:-1] for sequence in sequences),
        np.array(params.stop_token_ids, np.int32),
    )


@dataclass(slots=True)
class SamplePlan:
    """What the sampler needs of one step, on the host; `arrays` go into the step's message."""

    num_samples: int
    num_tops: I32
    """For each sample with log-probabilities, how many of the most likely tokens. [L]"""
    logprob_samples: I32
    """Indices into the samples. [L]"""
    changed: I32
    """Samples whose logits are changed; what follows counts within them. [A]"""
    restricted: I32
    """Of those, with a list of allowed tokens."""
    penalized: I32
    ban_rows: I32
    """One entry for each token that may be banned. [B]"""
    ban_ids: I32
    """[B]"""
    before: I32
    """The tokens that must come before it, the last one first, then `NO_TOKEN_BEFORE`. [B, longest]"""
    bias_rows: I32
    bias_ids: I32
    bias_values: NDArray[np.float32]
    max_penalized_tokens: int = 0
    """Of the longest penalized row."""
    arrays: list[NDArray[Any]] = field(init=False)

    def __post_init__(self) -> None:
        self.arrays = [self.logprob_samples, self.num_tops]
        if len(self.changed):
            self.arrays += [self.changed, self.restricted, self.penalized, self.ban_rows, self.ban_ids]
            self.arrays += [self.bias_rows, self.bias_ids, self.before, self.bias_values]


class Sampler:
    """Parameters of every slot, and the buffers for what a step samples."""

    def __init__(self, tables: RowTables, *, vocab_size: int) -> None:
        self._tables = tables
        self._vocab_size = vocab_size
        self._block = min(MAX_BLOCK, triton.next_power_of_2(vocab_size))
        self._num_pivots = NUM_PIVOTS if tables.tokens.is_cuda else NUM_PIVOTS_INTERPRETED
        self._changes: dict[int, _Changes] = {}
        """By slot; only of rows that have any."""
        self._num_tops: dict[int, int] = {}
        """By slot; only of rows that want log-probabilities."""

    def release(self, slot: int) -> None:
        self._changes.pop(slot, None)
        self._num_tops.pop(slot, None)

    def admit(self, slot: int, row: AdmitRow, patches: Patches) -> None:
        """Take over a row's parameters; what the device must know goes into `patches`."""
        params, tables = row.sampling, self._tables
        patches.add(tables.at(tables.params, slot), param_words(params, row.num_prompt_tokens))
        if params.allowed_token_ids is not None:
            patches.add(tables.at(tables.allowed, slot), allowed_words(params.allowed_token_ids, self._vocab_size))
        if (changes := _make_changes(params, row.num_prompt_tokens)) is not None:
            self._changes[slot] = changes
        if params.logprobs is not None:
            self._num_tops[slot] = params.logprobs

    def prepare(self, slots: I32, positions: I32) -> SamplePlan:
        """For samples of the rows in `slots`, whose new tokens come to `positions`. [S] each"""
        wants: list[tuple[int, int]] = []
        if self._num_tops:
            wants = [(i, self._num_tops[slot]) for i, slot in enumerate(slots.tolist()) if slot in self._num_tops]
        changed: list[tuple[int, int, _Changes]] = []
        if self._changes:
            for i, (slot, position) in enumerate(zip(slots.tolist(), positions.tolist(), strict=True)):
                changes = self._changes.get(slot)
                if changes is not None and changes.applies(position):
                    changed.append((i, position, changes))
        rows = [changes for _, _, changes in changed]
        bans = _Bans()
        for row, (_, position, changes) in enumerate(changed):
            bans.add(row, changes, position)
        return SamplePlan(
            num_samples=len(slots),
            num_tops=_i32([num_top for _, num_top in wants]),
            logprob_samples=_i32([i for i, _ in wants]),
            changed=_i32([i for i, _, _ in changed]),
            restricted=_i32([row for row, changes in enumerate(rows) if changes.params.allowed_token_ids is not None]),
            penalized=_i32([row for row, changes in enumerate(rows) if changes.is_penalized]),
            ban_rows=_i32(bans.rows),
            ban_ids=_i32(bans.ids),
            before=bans.before_matrix(),
            bias_rows=np.repeat(np.arange(len(rows), dtype=np.int32), [len(changes.bias_ids) for changes in rows]),
            bias_ids=_joined([changes.bias_ids for changes in rows], np.int32),
            bias_values=_joined([changes.bias_values for changes in rows], np.float32),
            max_penalized_tokens=max((position for _, position, changes in changed if changes.is_penalized), default=0),
        )

    def choose(
        self,
        logits: torch.Tensor,
        slots: torch.Tensor,
        positions: torch.Tensor,
        plan: SamplePlan,
        arrays: list[torch.Tensor],
        results: torch.Tensor,
    ) -> SampledWords:
        """Queue it: append each row's token to the tables, and write what the host wants to know to `results`, int32 words.

        `logits` [S, vocab_size] float32 are left as they are. `arrays` are the plan's, on the device.
        """
        words = SampledWords(plan.num_samples, len(plan.num_tops))
        tokens = results[: plan.num_samples]
        changed = logits
        if len(plan.changed):
            changed = self._change(logits, slots, positions, plan, arrays[2:])
        if plan.num_samples:
            kernels.choose[(plan.num_samples,)](
                changed,
                changed.stride(0),
                slots,
                positions,
                self._tables.params,
                self._tables.params_f64,
                self._tables.tokens,
                self._tables.table_width,
                tokens,
                VOCAB_SIZE=self._vocab_size,
                BLOCK=self._block,
                NUM_PIVOTS=self._num_pivots,
                num_warps=NUM_WARPS,
            )
        if words.num_logprobs:
            kernels.logprobs[(words.num_logprobs,)](
                logits,
                logits.stride(0),
                arrays[0],
                arrays[1],
                tokens,
                results[words.logprobs_begin : words.logprobs_end].view(torch.float64),
                results[words.ids_begin : words.end],
                VOCAB_SIZE=self._vocab_size,
                MAX_TOP=MAX_LOGPROBS,
                BLOCK=self._block,
                num_warps=NUM_WARPS,
            )
        return words

    def _change(
        self,
        logits: torch.Tensor,
        slots: torch.Tensor,
        positions: torch.Tensor,
        plan: SamplePlan,
        arrays: list[torch.Tensor],
    ) -> torch.Tensor:
        """Steps 2 to 4 of `types/sampling.py`, in a copy of the logits."""
        changed, restricted, penalized, ban_rows, ban_ids, bias_rows, bias_ids = [array.long() for array in arrays[:7]]
        before, bias_values = arrays[7:]
        x = logits.index_select(0, changed)
        x.masked_fill_(x.isnan(), -torch.inf)
        slots, positions = slots.index_select(0, changed), positions.index_select(0, changed)
        if len(plan.restricted):
            x[restricted] = self._restricted(x.index_select(0, restricted), slots.index_select(0, restricted))
        if len(plan.ban_ids):
            is_met = self._is_met(slots.index_select(0, ban_rows), positions.index_select(0, ban_rows), before)
            banned = x.clone()
            # A logit is never inf: adding -inf bans it, and adding 0 leaves it, however often a token is listed.
            addends = torch.where(is_met, -torch.inf, 0.0)
            _add_at(banned, ban_rows, ban_ids, addends)
            x = torch.where((banned > -torch.inf).any(1, keepdim=True), banned, x)
        if len(plan.bias_ids):
            _add_at(x, bias_rows, bias_ids, bias_values)
        if len(plan.penalized):
            part = x.index_select(0, penalized)
            who = slots.index_select(0, penalized), positions.index_select(0, penalized)
            x[penalized] = self._penalized(part, *who, plan.max_penalized_tokens)
        result = logits.clone()
        result[changed] = x
        return result

    def _restricted(self, x: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        words = self._tables.allowed.index_select(0, slots)
        bits = words[:, :, None] >> torch.arange(32, dtype=torch.int32, device=x.device) & 1
        is_allowed = bits.view(len(x), -1)[:, : self._vocab_size] == 1
        return torch.where(is_allowed, x, -torch.inf)

    def _is_met(self, slots: torch.Tensor, positions: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        """Whether the row's last tokens are those of `before`. [B]"""
        back = torch.arange(1, before.shape[1] + 1, dtype=torch.int32, device=before.device)
        at = positions[:, None] - back
        last = self._tables.tokens[slots.long()[:, None], at.clamp(min=0).long()]
        is_same = (last == before) & (at >= 0)
        return (is_same | (before == NO_TOKEN_BEFORE)).all(1)

    def _penalized(self, x: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor, max_tokens: int) -> torch.Tensor:
        params = self._tables.params.index_select(0, slots)
        repetition, frequency, presence = params[:, 10:13].contiguous().view(torch.float32).unsqueeze(2).unbind(1)
        ids = self._tables.tokens[:, :max_tokens].index_select(0, slots).long()
        place = torch.arange(max_tokens, dtype=torch.int32, device=x.device)
        is_token = place < positions[:, None]
        is_output = is_token & (place >= params[:, 9:10])
        is_seen = torch.zeros_like(x).scatter_add_(1, ids, is_token.to(x.dtype)) > 0
        counts = torch.zeros_like(x).scatter_add_(1, ids, is_output.to(x.dtype))
        repeated = torch.where(x > 0, x / repetition, x * repetition).clamp(-LARGEST, LARGEST)
        x = torch.where(is_seen & x.isfinite() & (repetition != 1.0), repeated, x)
        is_in_output = counts > 0
        x = torch.where(is_in_output, x - frequency * counts, x)
        return torch.where(is_in_output, x - presence, x)


def _add_at(x: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor, addends: torch.Tensor) -> None:
    """x[rows, columns] += addends, x contiguous. Not `index_put_`, which reads its indices on the host to check them."""
    x.view(-1).scatter_add_(0, rows * x.shape[1] + columns, addends)


@dataclass(frozen=True, slots=True)
class SampledWords:
    """Where the results of a step lie among int32 words."""

    num_samples: int
    num_logprobs: int

    @property
    def logprobs_begin(self) -> int:
        return aligned(self.num_samples)

    @property
    def logprobs_end(self) -> int:
        return self.logprobs_begin + 2 * self.num_logprobs * (1 + MAX_LOGPROBS)

    @property
    def ids_begin(self) -> int:
        return aligned(self.logprobs_end)

    @property
    def end(self) -> int:
        if not self.num_logprobs:
            return self.num_samples
        return self.ids_begin + self.num_logprobs * (1 + MAX_LOGPROBS)

    def tokens(self, words: I32) -> I32:
        """[S]; `NO_TOKEN` where no logit is a number."""
        return words[: self.num_samples]

    def logprobs(self, words: I32) -> tuple[NDArray[np.float64], I32]:
        """Log-probabilities of the token and of the most likely; the token's rank and their ids. ([L, 1 + 20], the same)"""
        shape = (self.num_logprobs, 1 + MAX_LOGPROBS)
        numbers = words[self.logprobs_begin : self.logprobs_end].view(np.float64).reshape(shape)
        return numbers, words[self.ids_begin : self.end].reshape(shape)


class _Bans:
    """Collects the tokens that may be banned in a step."""

    def __init__(self) -> None:
        self.rows: list[int] = []
        self.ids: list[int] = []
        self._before: list[tuple[int, ...]] = []

    def add(self, row: int, changes: _Changes, position: int) -> None:
        self.ids += changes.banned.tolist()
        self._before += changes.before
        if changes.bans_stops(position):
            self.ids += changes.stop_ids.tolist()
            self._before += [()] * len(changes.stop_ids)
        self.rows += [row] * (len(self.ids) - len(self.rows))

    def before_matrix(self) -> I32:
        matrix = np.full((len(self._before), max(map(len, self._before), default=0)), NO_TOKEN_BEFORE, np.int32)
        for line, tokens in zip(matrix, self._before, strict=True):
            line[: len(tokens)] = tokens[::-1]
        return matrix


def _i32(values: list[int]) -> I32:
    return np.array(values, np.int32)


def _joined(parts: list[Any], dtype: type) -> Any:
    return np.concatenate([np.empty(0, dtype), *parts])
