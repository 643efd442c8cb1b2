"""How the next token of one request is chosen.

The order of operations is fixed, and the same in every backend (`backends/reference/sampling.py`
is the specification):

1.  `logprobs` are taken from the model's own logits, before anything below.
2.  The grammar's mask or `allowed_token_ids` (all others become -inf), `banned_token_sequences`, and `min_tokens`
    (stop tokens are -inf until that many tokens were generated). Bans that would leave no token are lifted for it.
3.  `logit_bias` is added.
4.  `repetition_penalty` (prompt and output), `frequency_penalty`, `presence_penalty` (output only), each over the last
    `penalty_window` tokens.
5.  `temperature` 0: the largest logit, the lowest id among equals. Otherwise divide by it.
6.  `top_k`, then `top_p`, then `min_p` each narrow the candidates; one is drawn, in ascending order of token id, with the
    uniform number that the generator gives for (seed, position), position being the number of tokens before the new one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol


class Matcher(Protocol):
    """The state of one request's grammar. Its methods raise `GrammarFailure` once the grammar can't be followed any further;
    `forced` and `mask` only when they are called for the first time after an `accept`.
    """

    def accept(self, token_ids: Sequence[int]) -> None:
        """The next tokens of the answer, as they were sampled."""
        ...

    def forced(self) -> Sequence[int]:
        """Tokens of which each is the only one that may come next, as its mask would say; none if there is a choice.

        So an answer is the same whether they are sampled one by one or appended at once. There may be more after them.
        """
        ...

    def mask(self) -> bytes | None:
        """The tokens that may be sampled next: bit i % 8 of byte i // 8 is token i; a whole number of 32-bit words,
        little-endian. None: any.

        Never without any token: an answer that is complete may be followed by the model's end tokens. [ceil(vocab / 32) * 4]
        """
        ...


MIN_TEMPERATURE = 1e-4
"""The lowest temperature but 0 (greedy): below it, divided logits leave the range in which they can be told apart."""

MAX_LOGPROBS = 20
"""The largest number of alternatives that a request may ask for (OpenAI's limit)."""


class EarlyStopping(Enum):
    """When a beam search with as many finished hypotheses as beams ends; the values are transformers' names."""

    ALWAYS = True
    """At once."""
    HEURISTIC = False
    """When the best running beam, at its present length, would not be among the best."""
    NEVER = "never"
    """When no running beam can get among the best: with a positive length penalty, were it as long as it may be."""


MAX_LENGTH_PENALTY = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamParams:
    """A beam search instead of sampling. The choices of a call are its hypotheses, the best first."""

    width: int
    """Beams, >= 1: as many requests have the same `Request.parent_id`, and all that is said here in common."""
    length_penalty: float = 1.0
    """The sum of a hypothesis' log-probabilities is divided by its length to the power of it; within +-`MAX_LENGTH_PENALTY`."""
    early_stopping: EarlyStopping = EarlyStopping.HEURISTIC
    num_logprobs: int | None = None
    """The value of `SamplingParams.logprobs` without a request for them. That is large enough here: the width and a place for
    each stop token."""

    def __post_init__(self) -> None:
        """Raises ValueError: a score to such a power is no number that hypotheses could be compared by."""
        if self.width < 1:
            raise ValueError(f"a beam search has a width of at least 1, not {self.width}")
        if not abs(self.length_penalty) <= MAX_LENGTH_PENALTY:
            raise ValueError(
                f"length_penalty must lie in [-{MAX_LENGTH_PENALTY}, {MAX_LENGTH_PENALTY}], not {self.length_penalty}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class LineLimits:
    """Limits of an answer that editors ask for. It ends with a line, by `FinishReason.LENGTH`."""

    min_indent: int = 0
    """It ends before a line, the first one excepted, that begins with fewer spaces and tabs."""
    max_ns: int | None = None
    """It ends when so much time has passed since its first token, and it has a whole line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingDefaults:
    """Values of sampling parameters for requests that leave them out, as a model's files name them. None: they say nothing."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_tokens: int | None = None
    """Tokens of an answer whose request has no limit, where the API has none either."""
    banned_token_sequences: tuple[tuple[int, ...], ...] = ()
    """Tokens that no answer has, unless its request lists those that are allowed."""

    def named(self) -> dict[str, Any]:
        """The parameters that the files name, without the banned tokens."""
        names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_tokens")
        return {name: value for name in names if (value := getattr(self, name)) is not None}

    def words(self) -> str:
        """The values in words, for the log; empty if there are none."""
        words = [f"{name} {round(value, 6)}" for name, value in self.named().items()]
        if self.banned_token_sequences:
            words.append(f"without tokens {', '.join(str(ids[-1]) for ids in self.banned_token_sequences[:8])}")
            words[-1] += f" and {len(self.banned_token_sequences) - 8} more" if len(self.banned_token_sequences) > 8 else ""
        return ", ".join(words)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Frozen per request; validated where it enters (`serve`), trusted everywhere else."""

    max_tokens: int = 16
    """Tokens to generate at most, >= 1."""
    min_tokens: int = 0
    """Stop tokens cannot be sampled before this many tokens were generated, unless a grammar leaves nothing else."""
    temperature: float = 1.0
    """0 is greedy."""
    top_k: int = 0
    """Keep the k largest; 0 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of most likely tokens whose probability reaches this; (0, 1]."""
    min_p: float = 0.0
    """Drop tokens less likely than this share of the most likely one; [0, 1]."""
    repetition_penalty: float = 1.0
    """> 0; logits of tokens seen in prompt or output are divided (if positive) or multiplied (if negative) by it."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    penalty_window: int | None = None
    """The penalties count only the last so many tokens, >= 1. None: all."""
    seed: int = 0
    """64-bit unsigned. The maker of the request draws one if the user gave none."""
    logprobs: int | None = None
    """None: none. k >= 0: the sampled token's log-probability and those of the k most likely tokens."""
    prompt_logprobs: int | None = None
    """The same of each token of the prompt but the first, which nothing comes before; at most `MAX_LOGPROBS`."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token_id, bias) pairs, ids ascending and unique."""
    allowed_token_ids: tuple[int, ...] | None = None
    """If given, no other token can be sampled. Ascending, unique, not empty."""
    follows_grammar: bool = False
    """The tokens that may be sampled are given anew each time, by a mask (`Executor.restrict`). No `allowed_token_ids` beside
    it."""
    banned_token_sequences: tuple[tuple[int, ...], ...] = ()
    """The last token of each sequence is banned where the ones before it were just generated or prompted."""
    beams: BeamParams | None = None
    """Tokens are chosen by a beam search; what narrows the choice of one token is then left at its default, also `stop`."""
    stop_token_ids: tuple[int, ...] = ()
    """Sampling one of these ends the request; includes the model's own end tokens unless `ignore_eos`."""
    stop: tuple[str, ...] = ()
    """Stop strings, found by the output stage, not by the executor."""
    lines: LineLimits | None = None
    """Watched by the output stage, too."""
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
