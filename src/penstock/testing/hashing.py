"""The hash model: defines what "the right tokens" are without any weights. Called by the hash executor and the oracle; keeps
no state.

The "KV" of a position is a 64-bit hash of the one before it and of the token there, so it names the whole
prefix. The next token is a function of the last position's value. Any wrong block, stale table, early
re-use, lost or doubled token therefore changes everything that is generated after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.types.matcher import Matcher
from penstock.types.request import FinishReason
from penstock.types.result import TokenLogprobs
from penstock.types.sampling import SamplingParams

MASK_64 = 2**64 - 1
ROOT = 0x9E3779B97F4A7C15
"""The value "before" position 0."""


def mix(value: int, word: int) -> int:
    """A 64-bit hash of two numbers, not symmetric. Finaliser of SplitMix64 (Steele et al., OOPSLA 2014)."""
    z = (value * 0xD1342543DE82EF95 + word + ROOT) & MASK_64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK_64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK_64
    return z ^ (z >> 31)


@dataclass(frozen=True, slots=True, kw_only=True)
class HashModel:
    """Samples from tokens [first_token_id, vocab_size); any token of the vocabulary may be in a prompt."""

    vocab_size: int = 1000
    first_token_id: int = 0
    eos_token_id: int | None = None
    """Sampled with probability 1 / `eos_period`; None: only like any other token."""
    eos_period: int = 20

    def __post_init__(self) -> None:
        if not 0 <= self.first_token_id < self.vocab_size - 1:
            raise ValueError(f"at least two tokens must be left of [{self.first_token_id}, {self.vocab_size})")

    def sample(self, value: int, sampling: SamplingParams, num_generated: int, mask: bytes | None = None) -> int:
        """The token after a prefix of this value. Greedy rows ignore the seed; stop tokens wait for `min_tokens`, unless the
        mask (`types.matcher`) allows no other.
        """
        state = mix(value, sampling.seed if sampling.temperature > 0 else 0)
        banned = sampling.stop_token_ids if num_generated < sampling.min_tokens else ()
        if mask is not None:
            allowed = [token_id for token_id in range(self.vocab_size) if mask[token_id // 8] >> token_id % 8 & 1]
            free = [token_id for token_id in allowed if token_id not in banned] or allowed
            return free[state % len(free)]
        token_id = self._draw(state)
        while token_id in banned:
            state = mix(state, 1)
            token_id = self._draw(state)
        return token_id

    def _draw(self, state: int) -> int:
        if self.eos_token_id is not None and (state >> 32) % self.eos_period == 0:
            return self.eos_token_id
        return self.first_token_id + state % (self.vocab_size - self.first_token_id)

    def logprobs(self, token_id: int, num_top: int) -> TokenLogprobs:
        """As if the sampled token had probability 1/2, the next one by id 1/4, and so on."""
        span = self.vocab_size - self.first_token_id
        others = [self.first_token_id + (token_id - self.first_token_id + idx) % span for idx in range(min(num_top, span))]
        top = tuple((other, -0.6931471805599453 * (idx + 1)) for idx, other in enumerate(others))
        return TokenLogprobs(token_id, -0.6931471805599453, 1, top)


@dataclass(frozen=True, slots=True)
class Expected:
    """What a request must answer, whatever else is going on."""

    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stop_reason: int | None


def expected_tokens(
    prompt_token_ids: Sequence[int],
    sampling: SamplingParams,
    *,
    model: HashModel,
    max_model_len: int,
    matcher: Matcher | None = None,
) -> Expected:
    """The oracle: the answer computed from the whole prefix, with no cache, no blocks and no steps. Uses up `matcher`."""
    value = ROOT
    for token_id in prompt_token_ids:
        value = mix(value, token_id)
    generated: list[int] = []
    while True:
        token_id = model.sample(value, sampling, len(generated), None if matcher is None else matcher.mask())
        generated.append(token_id)
        if token_id in sampling.stop_token_ids and (len(generated) > sampling.min_tokens or matcher is not None):
            return Expected(tuple(generated), FinishReason.STOP, token_id)
        if len(generated) == sampling.max_tokens or len(prompt_token_ids) + len(generated) == max_model_len:
            return Expected(tuple(generated), FinishReason.LENGTH, None)
        value = mix(value, token_id)
        if matcher is not None:
            matcher.accept((token_id,))
