"""Samples a step's tokens on the device without waiting. The specification is `backends/reference/sampling.py`.

Call `admit` and `prepare` before sending the step's arrays, `choose` afterwards.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from penstock.backends.cuda.kernels import sample as kernels
from penstock.backends.cuda.kernels.launch import cdiv, next_power_of_2
from penstock.backends.cuda.sample_plan import I32, NO_TOKEN_BEFORE, Changes, SamplePlan, make_changes, make_plan
from penstock.backends.cuda.staging import aligned
from penstock.backends.cuda.tables import Patches, RowTables, allowed_words, param_words
from penstock.types.plan import AdmitRow
from penstock.types.sampling import MAX_LOGPROBS

MAX_BLOCK = 4096
"""Most logits that a kernel loads at once."""
NUM_WARPS = 16
NUM_PIVOTS = 4
"""Thresholds that a kernel tries in each pass over the logits; registers limit them."""
NUM_PIVOTS_INTERPRETED = 16
"""The same in Triton's interpreter, where a pass costs the same for any number."""
LARGEST = float(np.finfo(np.float32).max)
MAX_COUNTED_TOKENS = 1 << 19
"""Most tokens counted at once for penalties, in all rows together. They take 10 MB; whole texts could take gigabytes."""


class Sampler:
    def __init__(self, tables: RowTables, *, vocab_size: int) -> None:
        self._tables = tables
        self._vocab_size = vocab_size
        self._block = min(MAX_BLOCK, next_power_of_2(vocab_size))
        self._num_pivots = NUM_PIVOTS if tables.tokens.is_cuda else NUM_PIVOTS_INTERPRETED
        self._changes: dict[int, Changes] = {}
        """Changes by slot, only of rows that have some."""
        self._listed: set[int] = set()
        self._followers: set[int] = set()
        self._num_tops: dict[int, int] = {}
        """Tokens to report by slot, only for rows with log-probabilities."""

    def release(self, slot: int) -> None:
        self._changes.pop(slot, None)
        self._num_tops.pop(slot, None)
        self._listed.discard(slot)
        self._followers.discard(slot)

    def admit(self, slot: int, row: AdmitRow, patches: Patches) -> None:
        params, tables = row.sampling, self._tables
        patches.add(tables.at(tables.params, slot), param_words(params, row.num_prompt_tokens))
        if params.allowed_token_ids is not None:
            patches.add(tables.at(tables.allowed, slot), allowed_words(params.allowed_token_ids, self._vocab_size))
            self._listed.add(slot)
        if params.follows_grammar:
            self._followers.add(slot)
        if (changes := make_changes(params, row.num_prompt_tokens)) is not None:
            self._changes[slot] = changes
        if params.logprobs is not None:
            self._num_tops[slot] = params.logprobs

    def prepare(self, slots: I32, positions: I32) -> SamplePlan:
        return make_plan(
            slots,
            positions,
            changes=self._changes,
            num_tops=self._num_tops,
            listed=self._listed,
            followers=self._followers,
        )

    def choose(
        self, logits: torch.Tensor, plan: SamplePlan, sent: Mapping[str, torch.Tensor], results: torch.Tensor
    ) -> SampledWords:
        """Queue sampling, which appends tokens to the device tables and fills `results`, int32. Return the layout of `results`.

        `logits` [S, vocab_size] float32 stay unchanged. `sent`: device copies of `plan.arrays()`.
        """
        words = SampledWords(len(plan.slots), len(plan.num_tops))
        tokens = results[: words.num_samples]
        changed = self._change(logits, plan, sent) if plan.changes_logits else logits
        if words.num_samples:
            kernels.choose[(words.num_samples,)](
                changed,
                changed.stride(0),
                sent["slots"],
                sent["positions"],
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
                sent["logprob_samples"],
                sent["num_tops"],
                tokens,
                results[words.logprobs_begin : words.logprobs_end].view(torch.float64),
                results[words.ids_begin : words.end],
                VOCAB_SIZE=self._vocab_size,
                MAX_TOP=MAX_LOGPROBS,
                BLOCK=self._block,
                num_warps=NUM_WARPS,
            )
        return words

    def _change(self, logits: torch.Tensor, plan: SamplePlan, sent: Mapping[str, torch.Tensor]) -> torch.Tensor:
        result = logits.clone()
        if len(plan.listed):
            self._restrict(result, sent["listed"], sent["listed_slots"], self._tables.allowed)
        if len(plan.masked):
            self._restrict(result, sent["masked"], sent["mask_lines"], sent["masks"])
        if len(plan.changed):
            changed = sent["changed"].long()
            x = result.index_select(0, changed)
            x.masked_fill_(x.isnan(), -torch.inf)
            slots, positions = sent["slots"].index_select(0, changed), sent["positions"].index_select(0, changed)
            if len(plan.ban_ids):
                x = self._without_banned(x, slots, positions, sent)
            if len(plan.bias_ids):
                _add_at(x, sent["bias_rows"].long(), sent["bias_ids"].long(), sent["bias_values"])
            if len(plan.penalized):
                penalized = sent["penalized"].long()
                who = slots.index_select(0, penalized), positions.index_select(0, penalized)
                x[penalized] = self._penalized(x.index_select(0, penalized), *who, plan.max_penalized_tokens)
            result[changed] = x
        return result

    def _restrict(self, x: torch.Tensor, samples: torch.Tensor, lines: torch.Tensor, bits: torch.Tensor) -> None:
        """Set logits of disallowed tokens to -inf. Set bits in a sample's line of `bits` are allowed tokens."""
        kernels.restrict[(len(samples), cdiv(self._vocab_size, self._block))](
            x,
            x.stride(0),
            samples,
            lines,
            bits,
            VOCAB_SIZE=self._vocab_size,
            BLOCK=self._block,
            num_warps=NUM_WARPS,
        )

    def _without_banned(
        self, x: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor, sent: Mapping[str, torch.Tensor]
    ) -> torch.Tensor:
        """Return logits with banned tokens at -inf. A sample with only banned tokens stays unchanged."""
        rows = sent["ban_rows"].long()
        is_met = self._is_met(slots.index_select(0, rows), positions.index_select(0, rows), sent["before"])
        banned = x.clone()
        # Logits are never inf, so adding -inf bans a token and adding 0 keeps it, however often it is listed.
        _add_at(banned, rows, sent["ban_ids"].long(), torch.where(is_met, -torch.inf, 0.0))
        return torch.where((banned > -torch.inf).any(1, keepdim=True), banned, x)

    def _is_met(self, slots: torch.Tensor, positions: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        back = torch.arange(1, before.shape[1] + 1, dtype=torch.int32, device=before.device)
        at = positions[:, None] - back
        last = self._tables.tokens[slots.long()[:, None], at.clamp(min=0).long()]
        is_same = (last == before) & (at >= 0)
        return (is_same | (before == NO_TOKEN_BEFORE)).all(1)

    def _penalized(self, x: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor, max_tokens: int) -> torch.Tensor:
        params = self._tables.params.index_select(0, slots)
        repetition, frequency, presence = params[:, 10:13].contiguous().view(torch.float32).unsqueeze(2).unbind(1)
        seen, counts = torch.zeros_like(x), torch.zeros_like(x)
        num_columns = max(1, MAX_COUNTED_TOKENS // len(slots))
        for begin in range(0, max_tokens, num_columns):
            place = torch.arange(begin, min(begin + num_columns, max_tokens), dtype=torch.int32, device=x.device)
            ids = self._tables.tokens[:, begin : begin + len(place)].index_select(0, slots).long()
            is_token = (place < positions[:, None]) & (place >= positions[:, None] - params[:, 13:14])
            seen.scatter_add_(1, ids, is_token.to(x.dtype))
            counts.scatter_add_(1, ids, (is_token & (place >= params[:, 9:10])).to(x.dtype))
        repeated = torch.where(x > 0, x / repetition, x * repetition).clamp(-LARGEST, LARGEST)
        x = torch.where((seen > 0) & x.isfinite() & (repetition != 1.0), repeated, x)
        is_in_output = counts > 0
        x = torch.where(is_in_output, x - frequency * counts, x)
        return torch.where(is_in_output, x - presence, x)


def _add_at(x: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor, addends: torch.Tensor) -> None:
    """Add to x[rows, columns]. Unlike `index_put_` this checks no indices on the host."""
    x.view(-1).scatter_add_(0, rows * x.shape[1] + columns, addends)


@dataclass(frozen=True, slots=True)
class SampledWords:
    """The layout of a step's sampling results in one int32 array."""

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
        """Return the sampled token ids [S], `NO_TOKEN` if no logit is a number."""
        return words[: self.num_samples]

    def logprobs(self, words: I32) -> tuple[NDArray[np.float64], I32]:
        """Return log-probabilities and token ids of L samples, each [L, 1 + 20], from a step's results.

        The first column is for the sampled token, the others for the likeliest tokens. The first id is the sampled one's rank.
        """
        shape = (self.num_logprobs, 1 + MAX_LOGPROBS)
        numbers = words[self.logprobs_begin : self.logprobs_end].view(np.float64).reshape(shape)
        return numbers, words[self.ids_begin : self.end].reshape(shape)
