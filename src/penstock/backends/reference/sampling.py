"""The specification of sampling, one function per step of `types/sampling.py`.

Changes to logits are float32; weights, sums and probabilities are float64, added in ascending order of token id (for `top_p`,
in order of likelihood). A logit that is NaN counts as -inf. A row with a +inf that may be drawn has no answer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.types.result import TokenLogprobs
from penstock.types.sampling import SamplingParams

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
Ids = NDArray[np.int64]

_WORD = 0xFFFFFFFF
_PHILOX_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_PHILOX_WEYL = (0x9E3779B9, 0xBB67AE85)


LARGEST = np.finfo(np.float32).max


class NoCandidateError(ValueError):
    """No logit is a number above -inf, or one is +inf: the model's output is broken."""


@dataclass(frozen=True, slots=True)
class Sample:
    token_id: int
    logprobs: TokenLogprobs | None  # None unless the request asked for them


def sample(
    logits: F32, params: SamplingParams, token_ids: Sequence[int], num_prompt_tokens: int, *, mask: bytes | None = None
) -> Sample:
    """Choose the token after `token_ids` (prompt, then output). Raises NoCandidateError.

    `mask` has a bit for each token that the grammar allows.
    """
    raw = np.where(np.isnan(logits), np.float32(-np.inf), logits)
    changed = restrict(raw, params, token_ids, len(token_ids) - num_prompt_tokens, mask=mask)
    changed = add_bias(changed, params)
    changed = penalize(changed, params, token_ids, num_prompt_tokens)
    if not np.isfinite(changed.max()):
        raise NoCandidateError("no token can be sampled: every logit is -inf or NaN, or one is +inf")
    if params.temperature == 0.0:
        token_id = int(np.argmax(changed))  # the first of equals, so the lowest id
    else:
        token_id = draw(*narrow(changed, params), uniform(params.seed, len(token_ids)))
    return Sample(token_id, None if params.logprobs is None else token_logprobs(raw, token_id, params.logprobs))


def token_logprobs(raw: F32, token_id: int, num_top: int) -> TokenLogprobs:
    """Step 1: log-softmax of the model's own logits [vocab_size], for one token and the `num_top` most likely.

    If no logit is a number, or one is +inf, the log-probability is -inf.
    """
    raw = np.where(np.isnan(raw), np.float32(-np.inf), raw)
    if not np.isfinite(raw.max()):
        return TokenLogprobs(token_id, -math.inf, 1, ())
    x = raw.astype(np.float64)
    logprobs = x - x.max() - np.log(np.exp(x - x.max()).sum())
    top = by_likelihood(raw)[:num_top]
    return TokenLogprobs(
        token_id=token_id,
        logprob=float(logprobs[token_id]),
        rank=int((raw > raw[token_id]).sum()) + 1,
        top=tuple((int(i), float(logprobs[i])) for i in top),
    )


def restrict(
    logits: F32, params: SamplingParams, token_ids: Sequence[int], num_output_tokens: int, *, mask: bytes | None = None
) -> F32:
    """Step 2: set logits to -inf for tokens that are not allowed, banned ones, and stop tokens before `min_tokens`.

    If no token would be left, banned and stop tokens are allowed.
    """
    allowed = logits.copy()
    if mask is not None:
        allowed[np.unpackbits(np.frombuffer(mask, np.uint8), count=len(logits), bitorder="little") == 0] = -np.inf
    if params.allowed_token_ids is not None:
        allowed_ids, masked = list(params.allowed_token_ids), allowed
        allowed = np.full_like(logits, -np.inf)
        allowed[allowed_ids] = masked[allowed_ids]
    result = allowed.copy()
    for *before, banned in params.banned_token_sequences:
        if not before or list(token_ids[-len(before) :]) == before:
            result[banned] = -np.inf
    if num_output_tokens < params.min_tokens:
        result[list(params.stop_token_ids)] = -np.inf
    return result if (result > -np.inf).any() else allowed


def add_bias(logits: F32, params: SamplingParams) -> F32:
    """Step 3: add `logit_bias`."""
    result = logits.copy()
    for token_id, bias in params.logit_bias:
        result[token_id] += np.float32(bias)
    return result


def penalize(logits: F32, params: SamplingParams, token_ids: Sequence[int], num_prompt_tokens: int) -> F32:
    """Step 4: apply penalties: repetition (CTRL, arXiv 1909.05858), then frequency and presence (OpenAI's definitions)."""
    start = 0 if params.penalty_window is None else max(0, len(token_ids) - params.penalty_window)
    output_ids, token_ids = token_ids[max(start, num_prompt_tokens) :], token_ids[start:]
    result = logits.copy()
    penalty = np.float32(params.repetition_penalty)
    if penalty != 1:
        for token_id in set(token_ids):
            value = result[token_id]
            if np.isfinite(value):
                with np.errstate(over="ignore"):
                    changed = value / penalty if value > 0 else value * penalty
                # An extreme penalty saturates instead of overflowing to infinity.
                result[token_id] = np.clip(changed, -LARGEST, LARGEST)
    counts = np.bincount(np.array(output_ids, np.int64), minlength=len(logits)).astype(np.float32)
    seen = counts > 0
    result[seen] -= np.float32(params.frequency_penalty) * counts[seen]
    result[seen] -= np.float32(params.presence_penalty)
    return result


def by_likelihood(logits: F32) -> Ids:
    """Return the tokens that can be drawn, the most likely first, the lower id among equals."""
    order = np.argsort(-logits, kind="stable")
    return order[logits[order] > -np.inf]


def near_the_largest(logits: F32, num_sigmas: float) -> F32:
    """Return -inf for logits further below the largest than this many standard deviations (top-n-sigma, arXiv 2411.07641)."""
    x = logits.astype(np.float64)
    possible = x[x > -np.inf]
    mean = np.cumsum(possible)[-1] / len(possible)
    deviation = math.sqrt(np.cumsum((possible - mean) ** 2)[-1] / len(possible))
    return np.where(x < possible.max() - num_sigmas * deviation, np.float32(-np.inf), logits)


def narrow(logits: F32, params: SamplingParams) -> tuple[Ids, F64]:
    """Steps 5 and 6 without the draw: the ids that are left, and weights in proportion to their probabilities."""
    if params.top_n_sigma > 0:
        logits = near_the_largest(logits, params.top_n_sigma)
    ids = by_likelihood(logits)
    if params.top_k > 0:
        ids = ids[: params.top_k]
    x = logits[ids].astype(np.float64)
    with np.errstate(over="ignore"):  # a tiny temperature makes -inf, and weight 0, of all but the largest
        weights = np.exp((x - x[0]) / params.temperature)
    if params.top_p < 1.0:
        cumulative = np.cumsum(weights)
        num_kept = int(np.searchsorted(cumulative, params.top_p * cumulative[-1], side="left")) + 1
        ids, weights = ids[:num_kept], weights[:num_kept]
    is_kept = weights >= params.min_p * weights[0]
    return ids[is_kept], weights[is_kept]


def draw(ids: Ids, weights: F64, u: float) -> int:
    """Return the first token, in ascending order of id, at which the cumulative weight exceeds `u` times the whole."""
    order = np.argsort(ids)
    cumulative = np.cumsum(weights[order])
    idx = int(np.searchsorted(cumulative, u * cumulative[-1], side="right"))
    return int(ids[order][min(idx, len(ids) - 1)])


def uniform(seed: int, position: int) -> float:
    """Return the random number in (0, 1) for a 64-bit seed and a position: 53 random bits."""
    out = philox4x32((position & _WORD, position >> 32, 0, 0), (seed & _WORD, seed >> 32))
    return ((((out[0] << 32) | out[1]) >> 11) + 0.5) * 2.0**-53


def philox4x32(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Return four random words of Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC'11)."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        product0, product1 = _PHILOX_MULTIPLIERS[0] * c0, _PHILOX_MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (product1 >> 32) ^ c1 ^ k0, product1 & _WORD, (product0 >> 32) ^ c3 ^ k1, product0 & _WORD
        k0, k1 = (k0 + _PHILOX_WEYL[0]) & _WORD, (k1 + _PHILOX_WEYL[1]) & _WORD
    return c0, c1, c2, c3
