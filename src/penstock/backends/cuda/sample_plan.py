"""Plans a step's sampling on the host, as arrays to send to the device."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.types.sampling import SamplingParams

NO_TOKEN_BEFORE = -1
"""Pads short sequences in `SamplePlan.before`; it matches any token."""

I32 = NDArray[np.int32]
_NONE = np.empty(0, np.int32)


@dataclass(frozen=True, slots=True, eq=False)
class Changes:
    """Bans, biases and penalties to apply to a request's logits."""

    params: SamplingParams
    num_prompt_tokens: int
    is_penalized: bool
    bias_ids: I32
    bias_values: NDArray[np.float32]
    banned: I32
    """The last token of each banned sequence."""
    before: tuple[tuple[int, ...], ...]
    """The tokens before the last one, for each banned sequence."""
    stop_ids: I32

    def bans_stops(self, position: int) -> bool:
        return position - self.num_prompt_tokens < self.params.min_tokens and len(self.stop_ids) > 0

    def applies(self, position: int) -> bool:
        return self.is_penalized or len(self.bias_ids) > 0 or len(self.banned) > 0 or self.bans_stops(position)


def make_changes(params: SamplingParams, num_prompt_tokens: int) -> Changes | None:
    penalties = (params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
    is_penalized = penalties != (1.0, 0.0, 0.0)
    has_early_stops = params.min_tokens > 0 and params.stop_token_ids
    if not (is_penalized or has_early_stops or params.logit_bias or params.banned_token_sequences):
        return None
    sequences = params.banned_token_sequences
    return Changes(
        params,
        num_prompt_tokens,
        is_penalized,
        np.array([token_id for token_id, _ in params.logit_bias], np.int32),
        np.array([bias for _, bias in params.logit_bias], np.float32),
        np.array([sequence[-1] for sequence in sequences], np.int32),
        tuple(sequence[:-1] for sequence in sequences),
        np.array(params.stop_token_ids, np.int32),
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SamplePlan:
    """Arrays to sample S tokens of a step. `penalized`, `ban_rows` and `bias_rows` are indices into `changed`."""

    slots: I32
    """[S]"""
    positions: I32
    """Positions of the new tokens. [S]"""
    num_tops: I32
    """Most likely tokens to report for each of `logprob_samples`. [L]"""
    logprob_samples: I32
    """Samples with log-probabilities. [L]"""
    listed: I32
    """Samples with a list of allowed tokens, which is in `RowTables.allowed`. [A]"""
    followers: I32
    """Samples that follow a grammar. `masked_by` adds their masks."""
    masked: I32
    """Samples with a mask. [M]"""
    masks: I32
    """A bit per allowed token, as in `types.sampling`. [M, vocab_size / 32]"""
    changed: I32
    """Samples with bans, biases or penalties. [C]"""
    penalized: I32
    ban_rows: I32
    """The row of each token that may be banned. [B]"""
    ban_ids: I32
    """The token that may be banned. [B]"""
    before: I32
    """The tokens that must precede a banned one, last one first, padded. [B, longest]"""
    bias_rows: I32
    bias_ids: I32
    bias_values: NDArray[np.float32]
    max_penalized_tokens: int

    @property
    def changes_logits(self) -> bool:
        return len(self.listed) + len(self.masked) + len(self.changed) > 0

    def masked_by(self, masks: Mapping[int, bytes]) -> SamplePlan:
        """Return a copy of the plan with grammar masks, given by the sample's index."""
        if not masks:
            return self
        words = np.frombuffer(b"".join(masks.values()), np.int32)
        return replace(self, masked=_i32(list(masks)), masks=words.reshape(len(masks), -1))

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Return the arrays by name, to send to the device. Arrays of unbounded length are last."""
        arrays: dict[str, NDArray[Any]] = {
            "slots": self.slots,
            "positions": self.positions,
            "logprob_samples": self.logprob_samples,
            "num_tops": self.num_tops,
        }
        if len(self.listed):
            arrays |= {"listed": self.listed, "listed_slots": self.slots[self.listed]}
        if len(self.masked):
            arrays |= {"masked": self.masked, "mask_lines": np.arange(len(self.masked), dtype=np.int32), "masks": self.masks}
        if len(self.changed):
            arrays |= {
                "changed": self.changed,
                "penalized": self.penalized,
                "ban_rows": self.ban_rows,
                "ban_ids": self.ban_ids,
                "bias_rows": self.bias_rows,
                "bias_ids": self.bias_ids,
                "before": self.before,
                "bias_values": self.bias_values,
            }
        return arrays


def make_plan(
    slots: I32,
    positions: I32,
    *,
    changes: Mapping[int, Changes],
    num_tops: Mapping[int, int],
    listed: Collection[int],
    followers: Collection[int],
) -> SamplePlan:
    """Plan the sampling of requests in `slots` [S], with new tokens at `positions` [S]. Other arguments are keyed by slot."""
    wants: list[tuple[int, int]] = []
    if num_tops:
        wants = [(i, num_tops[slot]) for i, slot in enumerate(slots.tolist()) if slot in num_tops]
    changed: list[tuple[int, int, Changes]] = []
    if changes:
        for i, (slot, position) in enumerate(zip(slots.tolist(), positions.tolist(), strict=True)):
            row = changes.get(slot)
            if row is not None and row.applies(position):
                changed.append((i, position, row))
    rows = [row for _, _, row in changed]
    bans = _Bans()
    for place, (_, position, row) in enumerate(changed):
        bans.add(place, row, position)
    return SamplePlan(
        slots=slots,
        positions=positions,
        num_tops=_i32([num_top for _, num_top in wants]),
        logprob_samples=_i32([i for i, _ in wants]),
        listed=_samples_of(listed, slots),
        followers=_samples_of(followers, slots),
        masked=_NONE,
        masks=_NONE,
        changed=_i32([i for i, _, _ in changed]),
        penalized=_i32([place for place, row in enumerate(rows) if row.is_penalized]),
        ban_rows=_i32(bans.rows),
        ban_ids=_i32(bans.ids),
        before=bans.before_matrix(),
        bias_rows=np.repeat(np.arange(len(rows), dtype=np.int32), [len(row.bias_ids) for row in rows]),
        bias_ids=_joined([row.bias_ids for row in rows], np.int32),
        bias_values=_joined([row.bias_values for row in rows], np.float32),
        max_penalized_tokens=max((position for _, position, row in changed if row.is_penalized), default=0),
    )


class _Bans:
    def __init__(self) -> None:
        self.rows: list[int] = []
        self.ids: list[int] = []
        self._before: list[tuple[int, ...]] = []

    def add(self, row: int, changes: Changes, position: int) -> None:
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


def _samples_of(chosen: Collection[int], slots: I32) -> I32:
    return _i32([i for i, slot in enumerate(slots.tolist()) if slot in chosen]) if chosen else _NONE


def _i32(values: list[int]) -> I32:
    return np.array(values, np.int32)


def _joined(parts: list[Any], dtype: type) -> Any:
    return np.concatenate([np.empty(0, dtype), *parts])
