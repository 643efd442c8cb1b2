"""Predictors: how long will an output be? Called by the scheduler when a request is queued and when it has ended.

A tenant's requests of one kind are alike: one application summarises, another classifies. So `OnlinePredictor` has, for each
tenant, a curve for each prompt length (in powers of two) and one for all; what is not known of a tenant is taken from all
tenants together. It is deterministic, in bounded memory.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field

from penstock.sched.policies.base import Prediction, Predictor
from penstock.types.request import FinishReason, Request

MAX_TOKENS = 1 << 20
_BINS_PER_OCTAVE = 4
BOUNDS = tuple(sorted({round(2 ** (step / _BINS_PER_OCTAVE)) for step in range(20 * _BINS_PER_OCTAVE + 1)}))
"""Bin k holds the lengths in (BOUNDS[k - 1], BOUNDS[k]]; the first those up to BOUNDS[0] = 1."""
MAX_WEIGHT = 1024.0
"""Observations at which all are halved, so that the last thousand or so count."""
ASSUMED_TOKENS = 256
"""Worth of the tail beyond all observations before there is any: one end in so many tokens."""
_STALE_SHARE = 16
"""The curve is computed anew when one observation in so many is new."""

LOW_SHARE, HIGH_SHARE = 0.1, 0.9
"""Quantiles of a prediction's spread."""


class NoPredictions(Predictor):
    """Has no idea of any request."""

    def predict(self, request: Request) -> Prediction | None:
        del request
        return None


class LengthCurve:
    """Share of the outputs that are longer than so many tokens, learned from those that ended.

    An output that was cut short, by its own limit or by its client, tells only that it would have been at least so long.
    Leaving such outputs out, or counting them as whole, makes the estimate too short, the more so the lower the limits are. So
    this is a life table (the actuarial form of Kaplan and Meier's estimator, 1958): in each bin, of those that came so far,
    which share ended here by itself? Those cut short in a bin count as having seen half of it.

        up to          4    5    6    7    8   10   11   13   16   19 ...     tokens; bins, four per octave
        ended here     0    0    2    1    0    3    5    2    1    0
        cut short      0    0    0    1    0    0    0    0    9    0

    Observing is O(1); asking is O(log bins), and O(bins) once in a while.
    """

    __slots__ = ("_cut", "_ended", "_means", "_num_tokens", "_num_unseen", "_shares", "_tail_rate", "weight")

    def __init__(self) -> None:
        self._ended = [0.0] * len(BOUNDS)
        self._cut = [0.0] * len(BOUNDS)
        self._num_tokens = 0.0
        """Tokens in all observed outputs."""
        self.weight = 0.0
        """Observations, the older ones counting less."""
        self._num_unseen = 0
        """Observations since the curve was computed."""
        self._shares: list[float] = []
        """Share of outputs longer than BOUNDS[k], up to the longest observed."""
        self._means: list[float] = []
        """Tokens that an output has on average within the first BOUNDS[k]."""
        self._tail_rate = 0.0
        """Ends per token beyond the longest observed."""

    def observe(self, num_tokens: int, *, is_whole: bool) -> None:
        """An output of `num_tokens` >= 1 that ended by itself, or was cut short there."""
        num_tokens = min(num_tokens, MAX_TOKENS)
        (self._ended if is_whole else self._cut)[bisect_left(BOUNDS, num_tokens)] += 1
        self._num_tokens += num_tokens
        self.weight += 1
        self._num_unseen += 1
        if self.weight >= MAX_WEIGHT:
            self._ended = [count / 2 for count in self._ended]
            self._cut = [count / 2 for count in self._cut]
            self._num_tokens /= 2
            self.weight /= 2

    def mean(self, max_tokens: int) -> float:
        """Expected length of an output that is cut at `max_tokens`. Raises IndexError if nothing was observed."""
        self._refresh()
        idx = bisect_left(BOUNDS, min(max_tokens, MAX_TOKENS))
        if idx >= len(self._means):
            room = max_tokens - BOUNDS[len(self._means) - 1]
            return self._means[-1] - self._shares[-1] * math.expm1(-self._tail_rate * room) / self._tail_rate
        bound, before = BOUNDS[idx], BOUNDS[idx - 1] if idx else 0
        mean_before = self._means[idx - 1] if idx else 0.0
        return mean_before + (self._means[idx] - mean_before) * (max_tokens - before) / (bound - before)

    def quantile(self, share: float, max_tokens: int) -> int:
        """The upper bound of the bin below which this share of the outputs ends, or `max_tokens` if that is less.

        Raises IndexError if nothing was observed.
        """
        self._refresh()
        for idx, longer in enumerate(self._shares):
            if longer <= 1 - share:
                return min(BOUNDS[idx], max_tokens)
        tail_tokens = math.log(self._shares[-1] / (1 - share)) / self._tail_rate
        return min(BOUNDS[len(self._shares) - 1] + math.ceil(tail_tokens), max_tokens)

    def _refresh(self) -> None:
        if self._shares and self._num_unseen * _STALE_SHARE < self.weight:
            return
        self._num_unseen = 0
        self._shares, self._means = [], []
        at_risk, longer, mean, before = self.weight, 1.0, 0.0, 0
        for bound, ended, cut in zip(BOUNDS, self._ended, self._cut, strict=True):
            if at_risk < 0.25:  # no output came so far; less than one, since halves of halves remain
                break
            left = longer * (1 - min(1.0, ended / (at_risk - cut / 2)))
            mean += (bound - before) * (longer + left) / 2
            at_risk -= ended + cut
            longer, before = left, bound
            self._shares.append(longer)
            self._means.append(mean)
        self._tail_rate = (sum(self._ended) + 1) / (self._num_tokens + ASSUMED_TOKENS)


@dataclass(slots=True)
class Curves:
    """The curves of one tenant, or of all."""

    total: LengthCurve = field(default_factory=LengthCurve)
    by_prompt: dict[int, LengthCurve] = field(default_factory=dict)
    """Bits of the prompt's length -> curve; some twenty at most."""


class OnlinePredictor(Predictor):
    """The mean of what is known of the tenant's prompts of this length; else of all its prompts; else of all tenants."""

    def __init__(self, *, min_observations: int = 16, max_tenants: int = 256) -> None:
        """`min_observations`: a curve with fewer is not asked. `max_tenants`: the least recently seen are forgotten."""
        self._min_observations = min_observations
        self._max_tenants = max_tenants
        self._everyone = Curves()
        self._tenants: OrderedDict[str, Curves] = OrderedDict()

    def predict(self, request: Request) -> Prediction | None:
        """None until `min_observations` outputs have ended."""
        limit = max(1, request.max_total_tokens - request.num_prompt_tokens)
        bits = request.num_prompt_tokens.bit_length()
        for curve in self._candidates(request.tenant, bits):
            if curve.weight >= self._min_observations:
                return Prediction(
                    num_tokens=max(1, round(curve.mean(limit))),
                    low_tokens=curve.quantile(LOW_SHARE, limit),
                    high_tokens=curve.quantile(HIGH_SHARE, limit),
                    num_observations=int(curve.weight),
                )
        return None

    def ended(self, request: Request) -> None:
        num_tokens = len(request.output_token_ids)
        if num_tokens == 0:
            return  # refused, or gave up in the queue: that tells nothing
        is_whole = request.finish_reason is FinishReason.STOP
        bits = request.num_prompt_tokens.bit_length()
        for curves in (self._everyone, self._touch(request.tenant)):
            curves.total.observe(num_tokens, is_whole=is_whole)
            by_prompt = curves.by_prompt
            if bits not in by_prompt:
                by_prompt[bits] = LengthCurve()
            by_prompt[bits].observe(num_tokens, is_whole=is_whole)

    def _candidates(self, tenant: str, bits: int) -> Iterator[LengthCurve]:
        for curves in (self._tenants.get(tenant), self._everyone):
            if curves is not None:
                if bits in curves.by_prompt:
                    yield curves.by_prompt[bits]
                yield curves.total

    def _touch(self, tenant: str) -> Curves:
        curves = self._tenants.get(tenant)
        if curves is None:
            curves = self._tenants[tenant] = Curves()
            if len(self._tenants) > self._max_tenants:
                self._tenants.popitem(last=False)
        self._tenants.move_to_end(tenant)
        return curves


PREDICTORS = {
    "none": "penstock.sched.policies.predictors:NoPredictions",
    "online": "penstock.sched.policies.predictors:OnlinePredictor",
}
