"""Prices of a route's models, the cost of its answers, and the saving against its dearest model."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

_PER = 1_000_000


class Price(NamedTuple):
    """USD per million tokens."""

    prompt: float
    output: float

    def of(self, num_prompt_tokens: int, num_tokens: int) -> float:
        return (self.prompt * num_prompt_tokens + self.output * num_tokens) / _PER


class Cost(NamedTuple):
    """USD for one answer."""

    paid: float
    full: float
    """USD for the same tokens at the route's dearest model."""

    @property
    def saved(self) -> float:
        """Negative if discarded answers and judging cost more than the choice saved."""
        return self.full - self.paid

    @property
    def words(self) -> str:
        return f"cost={_usd(self.paid)}; saved={_usd(self.saved)}"


def _usd(number: float) -> str:
    return f"{round(number, 9) + 0.0:.9f}".rstrip("0").rstrip(".")


@dataclass(slots=True)
class Bill:
    """The costs of a route so far."""

    prices: Mapping[str, Price]
    """Each model of the route, and its price."""
    judges: Collection[str] = ()
    """Models of the route that only judge answers."""
    paid: dict[str, float] = field(default_factory=dict)
    """Model -> USD, for answers and for those begun in vain."""
    full: float = 0.0
    """USD for the kept answers at the dearest model. Discarded ones do not count: that model alone would discard none."""

    def pay(self, model: str, num_prompt_tokens: int, num_tokens: int) -> float:
        """Count tokens of a model, and return what they cost."""
        usd = self.prices[model].of(num_prompt_tokens, num_tokens)
        self.paid[model] = self.paid.get(model, 0.0) + usd
        return usd

    def answered(self, model: str, num_prompt_tokens: int, num_tokens: int, *, discarded_usd: float) -> Cost:
        """Count an answer. `discarded_usd`: paid for discarded answers before it, and for judging."""
        answerers = [price for name, price in self.prices.items() if name not in self.judges]
        full = max(price.of(num_prompt_tokens, num_tokens) for price in answerers)
        self.full += full
        return Cost(discarded_usd + self.pay(model, num_prompt_tokens, num_tokens), full)
