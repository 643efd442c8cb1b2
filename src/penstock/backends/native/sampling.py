"""Owns the translation of `SamplingParams` into what the C++ sampler keeps per row; never samples."""

from __future__ import annotations

from penstock.backends.native._native import RowSampling
from penstock.types.sampling import SamplingParams


def make_row_sampling(params: SamplingParams) -> RowSampling:
    """The native form of a request's parameters, for `AdmitRow.sampling`."""
    return RowSampling(
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        repetition_penalty=params.repetition_penalty,
        frequency_penalty=params.frequency_penalty,
        presence_penalty=params.presence_penalty,
        seed=params.seed,
        min_tokens=params.min_tokens,
        num_logprobs=-1 if params.logprobs is None else params.logprobs,
        allowed_ids=None if params.allowed_token_ids is None else list(params.allowed_token_ids),
        bias=list(params.logit_bias),
        banned_sequences=[list(sequence) for sequence in params.banned_token_sequences],
        stop_ids=list(params.stop_token_ids),
    )
