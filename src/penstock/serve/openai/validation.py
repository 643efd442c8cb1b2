"""From the fields of a body to `SamplingParams`: the rules that need more than one field, the model or the tokenizer.

Called by the endpoints with bodies whose types and ranges were checked already. Never touches prompts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from penstock.deploy.running import ModelInfo, SamplingDefaults
from penstock.serve.openai.errors import ApiError, invalid, model_not_found, shorten, too_long
from penstock.serve.openai.schemas import MAX_TEXT_CHARS, ChatCompletionBody, CompletionBody, GenerationBody
from penstock.text.tokenizer import Tokenizer
from penstock.types.errors import counted
from penstock.types.sampling import MAX_LOGPROBS, MIN_TEMPERATURE, BeamParams, EarlyStopping, SamplingParams

MAX_BIAS = 100

_WITHOUT_BEAMS: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "temperature": (0, 1),
        "top_p": (1,),
        "top_k": (0, -1),
        "min_p": (0,),
        "repetition_penalty": (1,),
        "presence_penalty": (0,),
        "frequency_penalty": (0,),
        "logit_bias": ({},),
        "allowed_token_ids": (),
        "bad_words": ([],),
        "min_tokens": (0,),
        "stop": ([],),
        "seed": (),
    }
)
"""Fields that a beam search does not know, and their values that ask for nothing."""

_ONLY_WITH_BEAMS: Mapping[str, Any] = MappingProxyType({"length_penalty": 1.0, "early_stopping": False})
"""Fields that only a beam search knows, and vLLM's defaults of them."""

DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's default of `max_tokens` for completions; chat answers may use the rest of the context."""


def check_model(body_model: str | None, model: ModelInfo) -> str:
    """The name to answer with. No name means the model that is served. Raises 404."""
    if body_model is None:
        return model.name
    if body_model not in model.served_names + model.aliases:
        raise model_not_found(body_model, model.served_names)
    return body_model


def base_sampling(body: GenerationBody, model: ModelInfo, defaults: SamplingDefaults, tokenizer: Tokenizer) -> SamplingParams:
    """All that is the same for every prompt and choice of a call; `max_tokens` and `seed` are set later."""
    stop_token_ids = _token_ids(body.stop_token_ids or [], "stop_token_ids", model.vocab_size)
    if not body.ignore_eos:
        stop_token_ids += tuple(token_id for token_id in model.eos_token_ids if token_id < model.vocab_size)
    if body.use_beam_search:
        return _beam_sampling(body, tuple(sorted(set(stop_token_ids))), model.max_beams)
    for field, neutral in _ONLY_WITH_BEAMS.items():
        if getattr(body, field) not in (None, neutral):
            raise invalid(f"'{field}' needs 'use_beam_search': true.", field)
    return SamplingParams(
        min_tokens=body.min_tokens or 0,
        temperature=_temperature(body.temperature, defaults),
        top_k=max(0, defaults.top_k if body.top_k is None else body.top_k),
        top_p=defaults.top_p if body.top_p is None else body.top_p,
        min_p=defaults.min_p if body.min_p is None else body.min_p,
        repetition_penalty=defaults.repetition_penalty if body.repetition_penalty is None else body.repetition_penalty,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        logprobs=num_logprobs(body),
        logit_bias=_logit_bias(body.logit_bias or {}, model.vocab_size),
        allowed_token_ids=_allowed(body.allowed_token_ids, model.vocab_size),
        banned_token_sequences=_banned_sequences(body.bad_words or [], tokenizer, model.vocab_size),
        stop_token_ids=tuple(sorted(set(stop_token_ids))),
        stop=tuple(body.stop or ()),
        include_stop_str_in_output=bool(body.include_stop_str_in_output),
        skip_special_tokens=body.skip_special_tokens is not False,
    )


def _beam_sampling(body: GenerationBody, stop_token_ids: tuple[int, ...], max_beams: int | None) -> SamplingParams:
    """A search takes the model's own probabilities: what would change them, or draw from them, is refused."""
    for field, neutral in _WITHOUT_BEAMS.items():
        if getattr(body, field) not in (None, *neutral):
            raise invalid(f"'{field}' is not supported with 'use_beam_search'.", field)
    width, asked = body.num_choices, num_logprobs(body)
    max_width = MAX_LOGPROBS - len(stop_token_ids)
    if max_width < 1:
        raise invalid(
            f"A beam search takes at most {MAX_LOGPROBS - 1} stop tokens, and there are {len(stop_token_ids)}: "
            "name fewer in 'stop_token_ids'.",
            "stop_token_ids",
        )
    if width > max_width:
        stops = counted(len(stop_token_ids), "stop token")
        raise invalid(f"'n' is {width}; with 'use_beam_search' and {stops} it can be at most {max_width}.", "n")
    if max_beams is not None and width > max_beams:
        raise invalid(
            f"'n' is {width}; with 'use_beam_search' it can be at most {max_beams}: so many rows run at once (--max-num-seqs).",
            "n",
        )
    beams = BeamParams(
        width=width,
        length_penalty=1.0 if body.length_penalty is None else body.length_penalty,
        early_stopping=EarlyStopping(body.early_stopping or False),
        num_logprobs=asked,
    )
    return SamplingParams(
        temperature=0.0,
        beams=beams,
        logprobs=max(width + len(stop_token_ids), asked or 0),
        stop_token_ids=stop_token_ids,
        include_stop_str_in_output=bool(body.include_stop_str_in_output),
        skip_special_tokens=body.skip_special_tokens is not False,
    )


def requested_max_tokens(body: GenerationBody) -> int | None:
    """What the client said, under either of its names."""
    if not isinstance(body, ChatCompletionBody) or body.max_completion_tokens is None:
        return body.max_tokens
    if body.max_tokens not in (None, body.max_completion_tokens):
        raise invalid("'max_tokens' and 'max_completion_tokens' differ; give one of them.", "max_tokens")
    return body.max_completion_tokens


def max_tokens_field(body: GenerationBody) -> str:
    """The name under which the client said it."""
    has_newer = isinstance(body, ChatCompletionBody) and body.max_completion_tokens is not None
    return "max_completion_tokens" if has_newer else "max_tokens"


def fit_max_tokens(body: GenerationBody, num_prompt_tokens: int, model: ModelInfo, param: str) -> int:
    """Tokens that may be generated after this prompt, which stands in `param`.

    Raises `context_length_exceeded` with the numbers, and with the field that is too large: the prompt if it leaves no room.
    """
    room = model.max_model_len - num_prompt_tokens
    asked = requested_max_tokens(body)
    if asked is None:
        asked = DEFAULT_COMPLETION_TOKENS if isinstance(body, CompletionBody) else max(1, room)
    elif room > 0:  # the prompt fits: what is too much is what was asked for
        param = max_tokens_field(body)
    if asked > room:
        raise _context_exceeded(model.max_model_len, num_prompt_tokens, asked, param)
    if body.min_tokens is not None and body.min_tokens > asked:
        raise invalid(
            f"'min_tokens' ({body.min_tokens}) is larger than the tokens that may be generated ({asked}).", "min_tokens"
        )
    return asked


def for_choice(base: SamplingParams, *, max_tokens: int, seed: int, choice: int) -> SamplingParams:
    """One choice's own parameters: the n-th choice draws with the seed plus n, so that choices differ and repeat."""
    return dataclasses.replace(base, max_tokens=max_tokens, seed=(seed + choice) % 2**64)


def check_token_ids(token_ids: Sequence[int], vocab_size: int, param: str) -> None:
    """Raise a 400 that names the first id outside the vocabulary."""
    if token_ids and (min(token_ids) < 0 or max(token_ids) >= vocab_size):
        index = next(i for i, token_id in enumerate(token_ids) if not 0 <= token_id < vocab_size)
        raise invalid(f"'{param}[{index}]' is {token_ids[index]}, outside the vocabulary [0, {vocab_size}).", param)


def _context_exceeded(limit: int, num_prompt_tokens: int, asked: int, param: str) -> ApiError:
    return too_long(
        f"The model's context is {limit} tokens. The prompt has {num_prompt_tokens} and the answer may have {asked}, "
        f"{num_prompt_tokens + asked} together. Shorten the prompt or ask for fewer tokens.",
        param,
    )


def _temperature(asked: float | None, defaults: SamplingDefaults) -> float:
    temperature = defaults.temperature if asked is None else asked
    if 0 < temperature < MIN_TEMPERATURE:
        raise invalid(f"'temperature' must be 0 (greedy) or at least {MIN_TEMPERATURE}, not {temperature}.", "temperature")
    return temperature


def check_text_size(text: str, tokenizer: Tokenizer, model: ModelInfo, param: str) -> None:
    """Refuse with `context_length_exceeded` what is larger than `MAX_TEXT_CHARS` and than every text that the context holds."""
    if len(text) > MAX_TEXT_CHARS:
        limit = max(MAX_TEXT_CHARS, model.max_model_len * tokenizer.max_token_bytes)
        if len(text) > limit:
            raise too_long(f"The text has {len(text)} characters; at most {limit} are tokenised at once.", param)


def check_encoded(token_ids: Sequence[int], tokenizer: Tokenizer, vocab_size: int, param: str) -> None:
    """Raise a 400 for a token that the tokenizer makes and the model has no row for: one added without a resize."""
    if token_ids and max(token_ids) >= vocab_size:
        token_id = next(token_id for token_id in token_ids if token_id >= vocab_size)
        text = shorten(tokenizer.token_text(token_id))
        raise invalid(
            f"'{param}' contains {text!r}, token {token_id} of the tokenizer, "
            f"which the model does not have: its vocabulary is [0, {vocab_size}).",
            param,
        )


def num_logprobs(body: GenerationBody) -> int | None:
    """Alternatives to tell beside each sampled token; None if no log-probabilities were asked for."""
    if isinstance(body, CompletionBody):
        return body.logprobs
    assert isinstance(body, ChatCompletionBody)
    if body.logprobs:
        return body.top_logprobs or 0
    if body.top_logprobs:
        raise invalid("'top_logprobs' needs 'logprobs': true.", "top_logprobs")
    return None


def _token_ids(token_ids: Sequence[int], param: str, vocab_size: int) -> tuple[int, ...]:
    check_token_ids(token_ids, vocab_size, param)
    return tuple(token_ids)


def _allowed(token_ids: Sequence[int] | None, vocab_size: int) -> tuple[int, ...] | None:
    if token_ids is None:
        return None
    return tuple(sorted(set(_token_ids(token_ids, "allowed_token_ids", vocab_size))))


def _logit_bias(biases: Mapping[str, Any], vocab_size: int) -> tuple[tuple[int, float], ...]:
    pairs: dict[int, float] = {}
    for key, bias in biases.items():
        if isinstance(bias, bool) or not isinstance(bias, int | float) or not -MAX_BIAS <= bias <= MAX_BIAS:
            param = f"logit_bias.{shorten(key)}"
            raise invalid(f"'{param}' must be a number from {-MAX_BIAS} to {MAX_BIAS}.", param)
        if not (key.isascii() and key.isdigit() and len(key) <= 10 and int(key) < vocab_size):
            raise invalid(f"'logit_bias' has the key {key[:50]!r}; keys are token ids in [0, {vocab_size}).", "logit_bias")
        if int(key) in pairs:
            raise invalid(f"'logit_bias' names token {int(key)} twice.", "logit_bias")
        pairs[int(key)] = float(bias)
    return tuple(sorted(pairs.items()))


def _banned_sequences(words: Sequence[str], tokenizer: Tokenizer, vocab_size: int) -> tuple[tuple[int, ...], ...]:
    """Each word as it is tokenised at the beginning of a text and after a space."""
    sequences: dict[tuple[int, ...], None] = {}
    for index, word in enumerate(words):
        stripped = word.lstrip(" ")
        if not stripped:
            raise invalid("'bad_words' must not be only spaces.", "bad_words")
        for text in (stripped, " " + stripped):
            token_ids = tokenizer.encode(text, add_special_tokens=False)
            check_encoded(token_ids, tokenizer, vocab_size, f"bad_words[{index}]")
            sequences[tuple(token_ids)] = None
    return tuple(sequence for sequence in sequences if sequence)
