"""Bodies of llama.cpp's server (https://github.com/ggml-org/llama.cpp/blob/master/tools/server/README.md), read into
requests common to all APIs. May run on any thread and never waits.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import combinations
from types import MappingProxyType
from typing import Annotated, Any

from pydantic import Field, WithJsonSchema

from penstock.calls.call import Call, CompletionRequest, InfillPrompt, MixedPrompt, Names, Prompt, TextPrompt
from penstock.calls.check import MAX_BIAS, MAX_CHOICES
from penstock.deploy.running import RunningModel
from penstock.serve.asking import Asked
from penstock.serve.bodies import (
    INT32_MAX,
    MAX_BAD_WORD_CHARS,
    MAX_BAD_WORDS,
    MAX_BIASED_TOKENS,
    MAX_SUFFIX_CHARS,
    Body,
    NotYet,
    NumLogprobs,
    Schema,
    StopStrings,
    Unread,
    grammar_of,
    has_not_yet,
    has_sampling,
    has_unread,
    json_grammar,
    sampling_of,
)
from penstock.serve.errors import ApiError, invalid, refuse_unknown, shorten
from penstock.serve.llama_cpp.write import NOT_SUPPORTED, LlamaWriter
from penstock.serve.streams import NewWriter
from penstock.text.fim import NAMES as FIM_NAMES
from penstock.text.fim import find_fim
from penstock.text.grammar import MAX_LARK_CHARS, Grammar, GrammarKind
from penstock.types.errors import counted
from penstock.types.sampling import PARAMETERS, LineLimits, SamplingParams

MAX_FILES = 1024
MAX_FILE_NAME_CHARS = 4096
MAX_TEXTS_BETWEEN = 1024
"""Most texts between token ids in all prompts. Each text is tokenised by itself."""
MAX_RESPONSE_FIELDS, MAX_RESPONSE_FIELD_CHARS = 64, 256
MAX_INDENT = 4096
MAX_PREDICT_MS = 24 * 3600 * 1000
_INTEGER = re.compile(r"-?[0-9]{1,10}")
RANDOM_SEEDS = (-1, 2**32 - 1)

SAMPLERS: Mapping[str, Mapping[str, float]] = MappingProxyType(
    {
        sampler: {name: one.neutral for name, one in PARAMETERS.items() if one.sampler == sampler and one.neutral is not None}
        for sampler in dict.fromkeys(one.sampler for one in PARAMETERS.values() if one.sampler)
    }
)
"""Samplers in the order of their use -> the fields of `SamplingParams` that switch them off, with the values."""
_LLAMA_ORDER = ("penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature")
"""llama.cpp's default order."""
_OTHER_SAMPLERS = tuple(name for name in (*_LLAMA_ORDER, "adaptive_p") if name not in SAMPLERS)
"""Samplers without effect, since the fields that switch them on are refused."""
_INFILL = "infill"
"""A sampler that keeps little but the likeliest token. Here it means greedy sampling."""
_LETTERS: Mapping[str, str] = MappingProxyType(
    {
        "e": "penalties",
        "k": "top_k",
        "p": "top_p",
        "m": "min_p",
        "t": "temperature",
        "d": "dry",
        "s": "top_n_sigma",
        "y": "typ_p",
        "x": "xtc",
        "a": "adaptive_p",
        "i": _INFILL,
    }
)
_INTERCHANGEABLE = ({"top_k", "temperature"}, {"top_k", "min_p"}, {"top_n_sigma", "temperature"})
"""Pairs of samplers that may be in either order."""

_LIMITS, _CHOICES, _PROBS = ("n_predict", "max_completion_tokens", "max_tokens"), ("n_cmpl", "n"), ("n_probs", "logprobs")
"""Each tuple has the names of one field."""

Limit = Annotated[int, Field(ge=-2, le=INT32_MAX)]
Choices = Annotated[int, Field(ge=1, le=MAX_CHOICES)]


@has_sampling("llama_cpp")
# There are no slots, and no prompt token is dropped. Fields from `dynatemp_exponent` on tune refused samplers.
@has_unread(
    "id_slot n_keep n_discard t_max_prompt_ms n_cache_reuse sse_ping_interval dynatemp_exponent xtc_threshold "
    "mirostat_tau mirostat_eta adaptive_decay dry_base dry_allowed_length dry_penalty_last_n dry_sequence_breakers "
    "return_progress verbose"
)
@has_not_yet(
    "dynatemp_range=0|0.0 typical_p=1|1.0 xtc_probability=0|0.0 mirostat=0 adaptive_target=-1|-1.0 "
    "dry_multiplier=0|0.0 min_keep=0|1 post_sampling_probs=false backend_sampling=false grammar_lazy=false "
    'grammar_triggers=[] preserved_tokens=[] stream_options={}|{"include_usage":false} lora=[]'
)
class LlamaBody(Body):
    """Fields of both `/completion` and `/infill`. Null is the same as absent."""

    model: str | None = None
    """The model's name, as for llama.cpp's router."""
    n_predict: Limit | None = None
    """Most tokens to generate. 0: only compute the prompt. Negative (the default): the rest of the context."""
    max_tokens: Limit | None = None
    max_completion_tokens: Limit | None = None
    """Like `max_tokens`, another name of `n_predict`."""
    n_cmpl: Choices | None = None
    n: Choices | None = None
    """Another name of `n_cmpl`."""
    stream: bool | None = None
    stop: StopStrings | None = None
    n_indent: Annotated[int, Field(ge=0, le=MAX_INDENT)] | None = None
    """The answer ends before a line with less indentation, except the first line."""
    t_max_predict_ms: Annotated[int, Field(ge=-1, le=MAX_PREDICT_MS)] | None = None
    """The answer ends this long after its first token, but not within its first line. 0 and -1: no limit."""

    samplers: Annotated[
        Any, WithJsonSchema({"anyOf": [{"type": "array", "items": {"type": "string"}}, {"type": "string"}]})
    ] = None
    """The samplers to apply, by names or letters. Other samplers are switched off."""
    ignore_eos: bool | None = None
    logit_bias: Annotated[Any, WithJsonSchema({"anyOf": [{"type": "array"}, {"type": "object"}]})] = None
    """`[[token, bias], ...]` or `{token: bias}`. A token is an id or a text; the bias false bans it."""
    grammar: str | None = None
    """GBNF."""
    json_schema: Schema | None = None

    n_probs: NumLogprobs | None = None
    logprobs: NumLogprobs | None = None
    """Another name of `n_probs`."""
    return_tokens: bool | None = None
    timings_per_token: bool | None = None
    response_fields: (
        Annotated[
            list[Annotated[str, Field(max_length=MAX_RESPONSE_FIELD_CHARS)]],
            Field(max_length=MAX_RESPONSE_FIELDS, fail_fast=True),
        ]
        | None
    ) = None
    cache_prompt: bool | None = None
    """False disables the prefix cache."""

    @property
    def limit(self) -> tuple[str, int | None]:
        """Return name and value of the field that limits the answer's tokens."""
        return _said(self, *_LIMITS)

    @property
    def num_probs(self) -> int:
        return _said(self, *_PROBS)[1] or 0

    def names(self) -> Names:
        """Return the names that the client used for fields, so that errors mention these."""
        fields = {"max_tokens": self.limit[0], "logprobs": _said(self, *_PROBS)[0], "n": _said(self, *_CHOICES)[0]}
        return Names("llama_cpp", fields=fields)

    def check_rules(self) -> None:
        for names in (_LIMITS, _CHOICES, _PROBS):
            said = {value: name for name in names if (value := getattr(self, name)) is not None}
            if len(said) > 1:
                raise invalid(f"{' and '.join(map(repr, said.values()))} differ; give one of them.", names[0])


class LlamaCompletionBody(LlamaBody):
    """`POST /completion`."""

    prompt: Annotated[
        Any,
        WithJsonSchema(
            {
                "anyOf": [{"type": "string"}, {"type": "object"}, {"type": "array", "minItems": 1}],
                "description": "A text, token ids, both in one list, {'prompt_string': text}, or a list of those.",
            }
        ),
    ]


class LlamaFileBody(Body):
    """A file of the client's project: context for the hole that `/infill` fills."""

    text: str
    filename: Annotated[str, Field(max_length=MAX_FILE_NAME_CHARS)] | None = None
    time: Unread = None
    """Time at which the editor saw the file. No effect."""


class LlamaInfillBody(LlamaBody):
    """`POST /infill`."""

    input_prefix: Annotated[str, Field(max_length=MAX_SUFFIX_CHARS)]
    input_suffix: Annotated[str, Field(max_length=MAX_SUFFIX_CHARS)]
    prompt: Annotated[str, Field(max_length=MAX_SUFFIX_CHARS)] | None = None
    """Text between `input_prefix` and the hole, such as the current line."""
    input_extra: Annotated[list[LlamaFileBody], Field(max_length=MAX_FILES, fail_fast=True)] | None = None


def _said(body: LlamaBody, *names: str) -> tuple[str, int | None]:
    """Return name and value of the first field of `names` that is set. If none is, return the first name and None."""
    return next(((name, value) for name in names if (value := getattr(body, name)) is not None), (names[0], None))


def completion(body: LlamaCompletionBody, asked: Asked) -> tuple[Call, NewWriter]:
    """Continue one or more prompts."""
    return _call(body, _running(body, asked), read_prompts(body.prompt, "prompt"), asked)


def infill(body: LlamaInfillBody, asked: Asked) -> tuple[Call, NewWriter]:
    """Fill a hole in a text, with other files as context."""
    running = _running(body, asked)
    if running.model.encoder is None and find_fim(running.tokenizer) is None:
        raise ApiError(
            400,
            f"{running.name} has no tokens for filling in the middle, such as {FIM_NAMES[0][0]}: have a model served that "
            "was trained for it, such as Qwen2.5-Coder.",
            code=NOT_SUPPORTED,
        )
    files = tuple([(file.filename or "file", file.text) for file in body.input_extra or ()])
    prompt = InfillPrompt(body.input_prefix + (body.prompt or ""), body.input_suffix, files, "input_prefix")
    return _call(body, running, (prompt,), asked)


def _running(body: LlamaBody, asked: Asked) -> RunningModel:
    return asked.find(body.model)[0].answerer()


def _call(body: LlamaBody, running: RunningModel, prompts: tuple[Prompt, ...], asked: Asked) -> tuple[Call, NewWriter]:
    _, limit = body.limit
    biases, banned = _biases(body.logit_bias, running)
    samplers = None if body.samplers is None else _sampler_names(body.samplers)
    fields = body.response_fields or ()
    request = CompletionRequest(
        names=body.names(),
        model=body.model,
        prompts=prompts,
        n=_said(body, *_CHOICES)[1] or 1,
        max_tokens=None if limit is None or limit < 0 else limit,
        sampling=_sampling(body, samplers),
        logit_bias=biases,
        banned_token_sequences=banned,
        grammar=_grammar(body),
        stop=body.stop or (),
        ignore_eos=bool(body.ignore_eos),
        lines=_lines(body),
        answer_prefix="cmpl-",
        echo=not fields or "prompt" in fields,
        is_streamed=bool(body.stream),
        has_timings=bool(body.timings_per_token),
        has_token_ids=bool(body.return_tokens),
        logprobs=body.num_probs or None,
        # No other request has this salt.
        cache_salt=asked.reader.deployment.sources.new_request_id() if body.cache_prompt is False else "",
    )
    call = asked.call(request)
    if samplers is not None:
        _check_order(samplers, call.sampling)
    settings = generation_settings(call.sampling, n_predict=-1 if limit is None else limit) | {
        "stream": bool(body.stream),
        "ignore_eos": bool(body.ignore_eos),
        "n_probs": body.num_probs,
        "grammar": body.grammar or "",
        "timings_per_token": bool(body.timings_per_token),
    }
    return call, partial(LlamaWriter, settings=settings, fields=fields)


def read_prompts(value: Any, param: str) -> tuple[Prompt, ...]:
    """Return one or several prompts. A list with a number in it is one prompt. Raises 400."""
    if not isinstance(value, list) or any(type(item) is int for item in value):
        return (_prompt(value, param),)
    if not 0 < len(value) <= MAX_CHOICES:
        raise invalid(f"'{param}' has {len(value)} prompts; 1 to {MAX_CHOICES} are taken at once.", param)
    prompts = tuple([_prompt(item, f"{param}[{index}]") for index, item in enumerate(value)])
    _check_texts(prompts, param)
    return prompts


def _prompt(value: Any, param: str) -> Prompt:
    if isinstance(value, dict):
        refuse_unknown(value, ("prompt_string", "multimodal_data"), param)
        NotYet([]).refuse(value.get("multimodal_data"), f"{param}.multimodal_data")
        value, param = value.get("prompt_string"), f"{param}.prompt_string"
    if isinstance(value, str):
        if not value:
            raise invalid(f"'{param}' is empty.", param)
        return TextPrompt(value, param)
    if not isinstance(value, list):
        raise invalid(f"'{param}' must be a string, or a list of token ids and strings.", param)
    if not value:
        raise invalid(f"'{param}' is empty.", param)
    return read_mixed(value, param)


def read_mixed(parts: Sequence[Any], param: str) -> MixedPrompt:
    """Return a prompt of token ids and texts. Raises 400."""
    for index, part in enumerate(parts):
        if type(part) is not int and not isinstance(part, str):
            raise invalid(f"'{param}[{index}]' must be a token id or a string.", f"{param}[{index}]")
    prompt = MixedPrompt(tuple(parts), param)
    _check_texts([prompt], param)
    return prompt


def _check_texts(prompts: Sequence[Prompt], param: str) -> None:
    """Raise 400 if the prompts mix token ids with more than `MAX_TEXTS_BETWEEN` texts."""
    parts = [part for prompt in prompts if isinstance(prompt, MixedPrompt) for part in prompt.parts]
    num_texts = sum([isinstance(part, str) for part in parts])
    if num_texts > MAX_TEXTS_BETWEEN:
        raise invalid(f"'{param}' has {num_texts} strings between token ids; at most {MAX_TEXTS_BETWEEN} are taken.", param)


def _sampling(body: LlamaBody, samplers: Sequence[str] | None) -> dict[str, float]:
    """Return the sampling parameters. Samplers outside `samplers` are switched off."""
    values = sampling_of(body, "llama_cpp")
    if "temperature" in values:
        values["temperature"] = max(0.0, values["temperature"])
    if values.get("seed") in RANDOM_SEEDS:
        del values["seed"]
    if samplers is None:
        return values
    for sampler, switched_off in SAMPLERS.items():
        if sampler not in samplers:
            values |= switched_off
    return values | ({"temperature": 0.0} if _INFILL in samplers else {})


def _sampler_names(value: Any) -> list[str]:
    """Return the names of the samplers in a list of names or in a string with a letter for each. Raises 400."""
    if isinstance(value, str):
        if unknown := next((letter for letter in value if letter not in _LETTERS), ""):
            raise invalid(f"'samplers' has the letter {unknown!r}; known are {''.join(_LETTERS)}.", "samplers")
        names = [_LETTERS[letter] for letter in value]
    elif isinstance(value, list) and all(isinstance(name, str) for name in value):
        known = (*SAMPLERS, *_OTHER_SAMPLERS, _INFILL)
        names = ["typ_p" if name == "typical_p" else name for name in value]
        if (other := next((name for name in names if name not in known), None)) is not None:
            raise invalid(f"'samplers' has {shorten(other)!r}; known are {', '.join(known)}.", "samplers")
    else:
        raise invalid("'samplers' must be a list of names, or a string of letters.", "samplers")
    if (twice := next((name for name in names if names.count(name) > 1), None)) is not None:
        raise invalid(f"'samplers' has {twice!r} twice; each is applied once.", "samplers")
    return names


def _check_order(names: Sequence[str], sampling: SamplingParams) -> None:
    """Raise 400 for an order of samplers that would give other answers than this server's order.

    llama.cpp's default is accepted, also from older versions with fewer samplers, since clients send it without choosing it.
    """
    listed = [name for name in names if name in SAMPLERS or name == _INFILL]
    is_default = listed == [name for name in _LLAMA_ORDER if name in listed]
    if is_default and {"top_k", "top_p", "min_p", "temperature"} <= set(listed):
        return
    places = {name: place for place, name in enumerate(SAMPLERS)}
    places[_INFILL] = places["temperature"]
    changing = [name for name in listed if name == _INFILL or _changes(name, sampling)]
    # Only penalties can change which token is the likeliest.
    is_greedy = sampling.temperature == 0 or sampling.top_k == 1
    for first, second in combinations(changing, 2):
        if places[first] <= places[second] or {first, second} in _INTERCHANGEABLE or (is_greedy and second != "penalties"):
            continue
        raise invalid(
            f"'samplers' has {first!r} before {second!r}, which with these values gives other answers than the order of this "
            f"server: {', '.join(SAMPLERS)}. List them so, or leave the field out.",
            "samplers",
        )


def _changes(sampler: str, sampling: SamplingParams) -> bool:
    return any(getattr(sampling, name) != value for name, value in SAMPLERS[sampler].items())


def _lines(body: LlamaBody) -> LineLimits | None:
    min_indent, max_ms = body.n_indent or 0, body.t_max_predict_ms or 0
    if min_indent == 0 and max_ms <= 0:
        return None
    return LineLimits(min_indent=min_indent, max_ns=max_ms * 1_000_000 if max_ms > 0 else None)


def _grammar(body: LlamaBody) -> Grammar | None:
    if body.json_schema is not None and body.grammar:
        raise invalid("'grammar' and 'json_schema' both say what the answer must be: leave one of them out.", "grammar")
    if body.json_schema is not None:
        return json_grammar(body.json_schema, "json_schema")
    if not body.grammar:
        return None
    if len(body.grammar) > MAX_LARK_CHARS:
        raise invalid(f"'grammar' must have at most {counted(MAX_LARK_CHARS, 'character')}.", "grammar")
    return grammar_of(GrammarKind.GBNF, body.grammar, "grammar")


def _biases(value: Any, running: RunningModel) -> tuple[dict[str, float], tuple[tuple[int, ...], ...]]:
    """Return the biases by token id, and the banned sequences of token ids. Raises 400."""
    if value is None:
        return {}, ()
    if isinstance(value, dict):
        pairs = [(int(key) if _INTEGER.fullmatch(key) else key, bias) for key, bias in value.items()]
    elif isinstance(value, list) and all(isinstance(pair, list) and len(pair) == 2 for pair in value):
        pairs = [(token, bias) for token, bias in value]
    else:
        raise invalid("'logit_bias' must be a list of pairs of a token and a number, or an object.", "logit_bias")
    vocab_size = running.model.vocab_size
    biases: dict[int, float] = {}
    banned: dict[tuple[int, ...], None] = {}
    num_texts = 0
    for token, bias in pairs:
        if bias is not False and (isinstance(bias, bool) or not isinstance(bias, int | float) or abs(bias) > MAX_BIAS):
            raise invalid(f"'logit_bias' must have numbers from {-MAX_BIAS} to {MAX_BIAS}, or false.", "logit_bias")
        if type(token) is int and 0 <= token < vocab_size:
            token_ids = [token]
        elif isinstance(token, str) and len(token) <= MAX_BAD_WORD_CHARS and num_texts < MAX_BAD_WORDS:
            num_texts += 1
            token_ids = running.tokenizer.encode(token, add_special_tokens=False)
        else:
            raise invalid(
                f"'logit_bias' must name tokens by ids in [0, {vocab_size}), or by at most {MAX_BAD_WORDS} texts of "
                f"{MAX_BAD_WORD_CHARS} characters.",
                "logit_bias",
            )
        for token_id in token_ids:
            if bias is False:
                banned[token_id,] = None
            else:
                biases[token_id] = max(-MAX_BIAS, min(biases.get(token_id, 0.0) + bias, MAX_BIAS))
    if (num_tokens := len(biases) + len(banned)) > MAX_BIASED_TOKENS:
        raise invalid(f"'logit_bias' names {num_tokens} tokens; at most {MAX_BIASED_TOKENS} are taken.", "logit_bias")
    return {str(token_id): bias for token_id, bias in biases.items()}, tuple(banned)


_OFF: Mapping[str, Any] = MappingProxyType(
    {name: mark.neutral[0] for name, mark in LlamaBody.unsupported.items() if name != "stream_options"}
    | {"dynatemp_exponent": 1.0, "xtc_threshold": 0.1, "n_keep": 0}
)
"""Settings that no request can change, for `generation_settings`."""


def generation_settings(sampling: SamplingParams, *, n_predict: int) -> dict[str, Any]:
    """Return an answer's settings under llama.cpp's names. `n_predict` is the client's; -1: the rest of the context."""
    lines = sampling.lines
    return {
        **_OFF,
        **{one.spellings["llama_cpp"].name: getattr(sampling, name) for name, one in PARAMETERS.items() if one.sampler},
        "repeat_last_n": -1 if sampling.penalty_window is None else sampling.penalty_window,
        "stop": sampling.stop,
        "logit_bias": [{"bias": bias, "token": token_id} for token_id, bias in sampling.logit_bias],
        "n_predict": n_predict,
        "max_tokens": n_predict,
        "n_indent": 0 if lines is None else lines.min_indent,
        "samplers": tuple(SAMPLERS),
    }
