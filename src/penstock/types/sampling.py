"""How the next token of a request is chosen.

The order is the same in every backend (`backends/reference/sampling.py` is the specification):

1.  `logprobs` are taken from the model's own logits, before anything below.
2.  The grammar's mask or `allowed_token_ids` (all others become -inf), `banned_token_sequences`, and `min_tokens`
    (stop tokens are -inf until then). Bans that would leave no token are lifted.
3.  `logit_bias` is added.
4.  `repetition_penalty` (prompt and output), `frequency_penalty`, `presence_penalty` (output only), each over the last
    `penalty_window` tokens.
5.  `temperature` 0: the largest logit, the lowest id among equals. Otherwise divide by it.
6.  `top_n_sigma`, which looks at the logits before the division, then `top_k`, `top_p` and `min_p` narrow the candidates. One
    is drawn, in ascending order of token id, with the uniform number that the generator gives for (seed, number of tokens so
    far).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Any, Protocol, Self


class Matcher(Protocol):
    """The state of one request's grammar. Methods raise `GrammarFailure` once the grammar can't continue; `forced` and
    `mask` only on the first call after `accept`."""

    def accept(self, token_ids: Sequence[int]) -> None: ...

    def copy(self) -> Self:
        """Return a matcher in the same state, to try tokens with."""
        ...

    def forced(self) -> Sequence[int]:
        """Return the next tokens that the grammar leaves no choice about, as the mask would say. More may follow.

        The answer is the same whether they are sampled one by one or appended at once.
        """
        ...

    def mask(self) -> bytes | None:
        """Return the tokens allowed next as bits: bit i % 8 of byte i // 8 is token i. None: any token. [ceil(vocab / 32) * 4]

        At least one token is allowed: a complete answer may be followed by an end token.
        """
        ...


MIN_TEMPERATURE = 1e-4
"""A temperature below this counts as 0, because divided logits could no longer be told apart."""

MAX_LOGPROBS = 20
"""Most alternatives that a request may ask for (OpenAI's limit)."""


class EarlyStopping(StrEnum):
    """When a beam search that has as many hypotheses as beams ends."""

    ALWAYS = "always"
    HEURISTIC = "heuristic"
    """When the best running beam, at its present length, would not be among the best."""
    NEVER = "never"
    """When no running beam can get among the best, even at full length if the length penalty is positive."""

    @classmethod
    def of(cls, value: bool | str) -> EarlyStopping:
        """Return the member for a value as in transformers: True, False or "never"."""
        if isinstance(value, bool):
            return cls.ALWAYS if value else cls.HEURISTIC
        return cls(value)


@dataclass(frozen=True, slots=True)
class Spelling:
    """A parameter's name and bounds in one API."""

    name: str
    low: float
    high: float
    excludes_low: bool = False


@dataclass(frozen=True, slots=True)
class Parameter:
    """A numeric setting of a request that changes how tokens are chosen, such as `top_p`."""

    kind: type[int] | type[float]
    neutral: float | None
    """The value that changes nothing: the default, unless the model's files name another. None: only an unset value changes
    nothing."""
    also_neutral: tuple[float, ...]
    spellings: Mapping[str, Spelling]
    """Name and bounds by API, including `python` and `cli`. APIs not listed lack the parameter."""
    text: str
    """One sentence for the docs and the OpenAPI document."""
    sampler: str
    """llama.cpp's name of the sampler that the parameter belongs to, or an empty text."""
    narrows: bool
    """Whether the parameter drops unlikely tokens."""

    def is_neutral(self, value: float) -> bool:
        return value == self.neutral or value in self.also_neutral


def _number(
    neutral: float | None,
    bounds: tuple[float, float] | tuple[float, float, bool],
    names: str,
    text: str,
    *,
    sampler: str = "",
    narrows: bool = False,
    kind: type[int] | type[float] = float,
    also_neutral: tuple[float, ...] = (),
    **others: tuple[float, float] | tuple[float, float, bool],
) -> Parameter:
    """Return a sampling parameter. Arguments that are not listed here are fields of `Parameter`.

    - `neutral`, `also_neutral`: values that change nothing, such as 0 and -1 for `top_k`, which then keeps all tokens
    - `bounds`: (least, most), or (least, most, True) if values must be greater than the least
    - `names`: the parameter's name, then the APIs that have it, such as "top_k openai cohere=k" for `top_k`, which is also
      `top_k` in OpenAI's API, but `k` in Cohere's
    - `text`: a sentence for the docs
    - `others`: bounds of single APIs in place of `bounds`, such as `cohere=(0, 500)`
    """
    name, *apis = names.split()
    spelled = [(api, own or name) for api, _, own in (word.partition("=") for word in apis)]
    spellings = {api: Spelling(own, *others.get(api, bounds)) for api, own in spelled}
    return Parameter(kind, neutral, also_neutral, MappingProxyType(spellings), text, sampler, narrows)


_EVERYWHERE = "openai responses ollama llama_cpp python"
_INT32_MAX, _INT64_MAX = 2**31 - 1, 2**63 - 1
_NUMBERS = (
    _number(
        1.0,
        (0.01, 100),
        "repetition_penalty openai responses ollama=repeat_penalty tgi llama_cpp=repeat_penalty python",
        "Makes tokens of the prompt and the answer less likely if above 1, more likely if below.",
        sampler="penalties",
    ),
    _number(
        0.0,
        (-2, 2),
        f"presence_penalty {_EVERYWHERE} cohere",
        "Subtracted from the logits of the answer's tokens.",
        sampler="penalties",
        cohere=(0, 1),
    ),
    _number(
        0.0,
        (-2, 2),
        f"frequency_penalty {_EVERYWHERE} tgi cohere",
        "Subtracted from the logits of the answer's tokens once for each use.",
        sampler="penalties",
        cohere=(0, 1),
    ),
    _number(
        0.0,
        (-1, 1000),
        "top_n_sigma openai llama_cpp",
        "Keeps tokens whose logit is at most this many standard deviations below the largest. 0 and -1 keep all.",
        sampler="top_n_sigma",
        narrows=True,
        also_neutral=(-1,),
    ),
    _number(
        1.0,
        (0, 2),
        f"temperature {_EVERYWHERE} anthropic cohere tgi cli",
        "Divides the logits. Below 0.0001, the likeliest token is taken.",
        sampler="temperature",
        tgi=(0, 2, True),
        llama_cpp=(-math.inf, 2),
    ),
    _number(
        0,
        (-1, _INT32_MAX),
        f"top_k {_EVERYWHERE} anthropic cohere=k tgi cli",
        "Keeps the k likeliest tokens. 0 and -1 keep all.",
        sampler="top_k",
        narrows=True,
        kind=int,
        also_neutral=(-1,),
        tgi=(1, _INT32_MAX),
        cohere=(0, 500),
    ),
    _number(
        1.0,
        (0, 1),
        f"top_p {_EVERYWHERE} anthropic cohere=p tgi cli",
        "Keeps the smallest set of likeliest tokens with at least this probability.",
        sampler="top_p",
        narrows=True,
        tgi=(0, 1, True),
    ),
    _number(
        0.0,
        (0, 1),
        f"min_p {_EVERYWHERE} cli",
        "Drops tokens that are less likely than this share of the likeliest one.",
        sampler="min_p",
        narrows=True,
    ),
    _number(
        -1,
        (-1, _INT32_MAX),
        "repeat_last_n openai ollama llama_cpp python",
        "The penalties count only this many last tokens. -1: all; 0: no penalties.",
        kind=int,
    ),
    _number(0, (0, _INT32_MAX), "min_tokens openai python", "No stop token comes before this many tokens.", kind=int),
    _number(
        None,
        (-(2**63), _INT64_MAX),
        f"seed {_EVERYWHERE} cohere tgi cli",
        "The same seed gives the same answer, whatever else runs. Without it one is drawn.",
        kind=int,
        cohere=(0, _INT64_MAX),
        tgi=(0, 2**64 - 1),
        llama_cpp=(-(2**63), 2**64 - 1),
    ),
)
PARAMETERS: Mapping[str, Parameter] = MappingProxyType({one.spellings["openai"].name: one for one in _NUMBERS})
"""The numbers that say how tokens are chosen, by name, in the order in which they apply. Every API, the Python interface and
the docs take them from here."""


MAX_LENGTH_PENALTY = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamParams:
    """Beam search instead of sampling. The choices of a call are its hypotheses, best first."""

    width: int
    """Beams, >= 1. As many requests share a `Request.parent_id` and these parameters."""
    length_penalty: float = 1.0
    """A hypothesis' log-probability is divided by its length to this power; within +-`MAX_LENGTH_PENALTY`."""
    early_stopping: EarlyStopping = EarlyStopping.HEURISTIC
    num_logprobs: int | None = None
    """The log-probabilities that the user asked for. `SamplingParams.logprobs` is larger here: the width plus the number of
    stop tokens."""

    def __post_init__(self) -> None:
        """Raise ValueError for a width below 1 or a length penalty with which scores can't be compared."""
        if self.width < 1:
            raise ValueError(f"a beam search has a width of at least 1, not {self.width}")
        if not abs(self.length_penalty) <= MAX_LENGTH_PENALTY:
            raise ValueError(
                f"length_penalty must lie in [-{MAX_LENGTH_PENALTY}, {MAX_LENGTH_PENALTY}], not {self.length_penalty}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class LineLimits:
    """Limits for code editors. The answer ends with a whole line, by `FinishReason.LENGTH`."""

    min_indent: int = 0
    """End before a line, other than the first, that is indented by fewer spaces and tabs."""
    max_ns: int | None = None
    """End once this much time has passed since the first token and the answer has a whole line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingDefaults:
    """Defaults of sampling parameters from a model's files; None: not named there."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_tokens: int | None = None
    """Limit of requests without one, where the API has no default either."""
    banned_token_sequences: tuple[tuple[int, ...], ...] = ()
    """Tokens that no answer contains, unless the request lists the allowed ones."""

    def named(self) -> dict[str, Any]:
        """Return the parameters that the files name, without the banned tokens."""
        names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_tokens")
        return {name: value for name in names if (value := getattr(self, name)) is not None}

    def words(self) -> str:
        """Return the values as text for the log; empty if there are none."""
        words = [f"{name} {round(value, 6)}" for name, value in self.named().items()]
        if self.banned_token_sequences:
            words.append(f"without tokens {', '.join(str(ids[-1]) for ids in self.banned_token_sequences[:8])}")
            words[-1] += f" and {len(self.banned_token_sequences) - 8} more" if len(self.banned_token_sequences) > 8 else ""
        return ", ".join(words)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to choose a request's tokens. Validated where the request enters (`serve`), trusted everywhere else."""

    max_tokens: int = 16
    """>= 1."""
    min_tokens: int = 0
    """No stop token is sampled before this many tokens, unless a grammar allows nothing else."""
    temperature: float = 1.0
    """0 is greedy."""
    top_k: int = 0
    """Keep the k largest; 0 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of most likely tokens whose probability reaches this; (0, 1]."""
    top_n_sigma: float = 0.0
    """Drop tokens whose logit is more than this many standard deviations below the largest; <= 0 drops none."""
    min_p: float = 0.0
    """Drop tokens less likely than this share of the most likely one; [0, 1]."""
    repetition_penalty: float = 1.0
    """> 0; logits of tokens seen in prompt or output are divided (if positive) or multiplied (if negative) by it."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    penalty_window: int | None = None
    """The penalties count only this many last tokens, >= 1. None: all."""
    seed: int = 0
    """64-bit unsigned. The maker of the request draws one if the user gave none."""
    logprobs: int | None = None
    """None: none. k >= 0: the sampled token's log-probability and those of the k most likely tokens."""
    prompt_logprobs: int | None = None
    """The same for each prompt token after the first; at most `MAX_LOGPROBS`."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token_id, bias), ids ascending and unique."""
    allowed_token_ids: tuple[int, ...] | None = None
    """If given, only these can be sampled. Ascending, unique, not empty."""
    follows_grammar: bool = False
    """Each step's allowed tokens come as a mask (`Executor.restrict`). Excludes `allowed_token_ids`."""
    banned_token_sequences: tuple[tuple[int, ...], ...] = ()
    """The last token of each sequence is banned right after the others."""
    beams: BeamParams | None = None
    """Tokens are chosen by beam search. Parameters that narrow the choice, and `stop`, keep their defaults."""
    stop_token_ids: tuple[int, ...] = ()
    """Sampling one of these ends the request. Includes the model's end tokens unless `ignore_eos`."""
    stop: tuple[str, ...] = ()
    lines: LineLimits | None = None
    """Also checked by the output stage."""
    include_stop_str_in_output: bool = False
    shown_special_ids: tuple[int, ...] | None = ()
    """Special tokens that write their name into the text. None: all."""
