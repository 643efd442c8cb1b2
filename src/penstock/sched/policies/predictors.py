"""Predictors of output lengths. They predict when a request is queued, and learn when it ends.

`OnlinePredictor` has a curve for each tenant and prompt length (in powers of two), one for each tenant, and one for all
tenants.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field

from penstock.sched.policies.base import Predictor
from penstock.types.request import FinishReason, Request

BOUNDS = tuple(sorted({round(2 ** (step / 4)) for step in range(20 * 4 + 1)}))
"""Bin k holds lengths in (BOUNDS[k - 1], BOUNDS[k]], four bins per octave; the first holds those up to 1."""
MAX_WEIGHT = 1024.0
"""All counts are halved at this weight, so that about the last thousand outputs count."""
_ASSUMED_TOKENS = 256
"""Before any observation: one end per this many tokens in the tail."""


class NoPredictions(Predictor):
    def predict(self, request: Request) -> int | None:
        del request
        return None


class LengthCurve:
    """Learns the distribution of output lengths: the share of outputs longer than a number of tokens.

    An output cut short would have been at least that long. So this is a life table (the actuarial form of the Kaplan-Meier
    estimator, 1958). An output cut short counts as half an output in its bin of lengths.
    """

    __slots__ = ("_cut", "_ended", "_means", "_num_tokens", "_num_unseen", "_shares", "_tail_rate", "weight")

    def __init__(self) -> None:
        self._ended = [0.0] * len(BOUNDS)
        self._cut = [0.0] * len(BOUNDS)
        self._num_tokens = 0.0
        self.weight = 0.0
        """Observations, older ones counting less."""
        self._num_unseen = 0
        self._shares: list[float] = []
        """Share of outputs longer than BOUNDS[k], up to the longest observed."""
        self._means: list[float] = []
        """Mean tokens of an output within the first BOUNDS[k]."""
        self._tail_rate = 0.0
        """Ends per token beyond the longest observed."""

    def observe(self, num_tokens: int, *, is_whole: bool) -> None:
        """Learn from an output of `num_tokens` >= 1. `is_whole`: it ended by itself, and was not cut short. O(1)."""
        num_tokens = min(num_tokens, BOUNDS[-1])
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
        """Return the expected length of an output limited to `max_tokens`. Raises IndexError without observations."""
        if not self._shares or self._num_unseen * 16 >= self.weight:
            self._compute()
        idx = bisect_left(BOUNDS, min(max_tokens, BOUNDS[-1]))
        if idx >= len(self._means):
            room = max_tokens - BOUNDS[len(self._means) - 1]
            return self._means[-1] - self._shares[-1] * math.expm1(-self._tail_rate * room) / self._tail_rate
        bound, before = BOUNDS[idx], BOUNDS[idx - 1] if idx else 0
        mean_before = self._means[idx - 1] if idx else 0.0
        return mean_before + (self._means[idx] - mean_before) * (max_tokens - before) / (bound - before)

    def _compute(self) -> None:
        self._num_unseen = 0
        self._shares, self._means = [], []
        at_risk, longer, mean, before = self.weight, 1.0, 0.0, 0
        for bound, ended, cut in zip(BOUNDS, self._ended, self._cut, strict=True):
            if at_risk < 0.25:  # no output came this far; less than one, since counts are halved
                break
            left = longer * (1 - min(1.0, ended / (at_risk - cut / 2)))
            mean += (bound - before) * (longer + left) / 2
            at_risk -= ended + cut
            longer, before = left, bound
            self._shares.append(longer)
            self._means.append(mean)
        self._tail_rate = (sum(self._ended) + 1) / (self._num_tokens + _ASSUMED_TOKENS)


@dataclass(slots=True)
class Curves:
    total: LengthCurve = field(default_factory=LengthCurve)
    by_prompt: dict[int, LengthCurve] = field(default_factory=dict)
    """Bit length of the prompt's length -> curve; about twenty at most."""


class OnlinePredictor(Predictor):
    """Predicts from earlier outputs: of the tenant's prompts of similar length, else all its prompts, else all tenants."""

    def __init__(self, *, min_observations: int = 16, max_tenants: int = 256) -> None:
        """`min_observations`: curves of fewer outputs are not used. `max_tenants`: beyond it, the least recently seen are
        forgotten."""
        self._min_observations = min_observations
        self._max_tenants = max_tenants
        self._everyone = Curves()
        self._tenants: OrderedDict[str, Curves] = OrderedDict()

    def predict(self, request: Request) -> int | None:
        limit = max(1, request.max_total_tokens - request.num_prompt_tokens)
        for curve in self._candidates(request):
            if curve.weight >= self._min_observations:
                return max(1, round(curve.mean(limit)))
        return None

    def _candidates(self, request: Request) -> Iterator[LengthCurve]:
        bits = request.num_prompt_tokens.bit_length()
        for curves in (self._tenants.get(request.tenant), self._everyone):
            if curves is not None:
                if bits in curves.by_prompt:
                    yield curves.by_prompt[bits]
                yield curves.total

    def ended(self, request: Request) -> None:
        num_tokens = len(request.output_token_ids)
        if num_tokens == 0:
            return  # refused, or gave up in the queue
        tenants, tenant = self._tenants, request.tenant
        if tenant not in tenants:
            tenants[tenant] = Curves()
            if len(tenants) > self._max_tenants:
                tenants.popitem(last=False)
        tenants.move_to_end(tenant)
        is_whole = request.finish_reason is FinishReason.STOP
        bits = request.num_prompt_tokens.bit_length()
        for curves in (self._everyone, tenants[tenant]):
            curves.total.observe(num_tokens, is_whole=is_whole)
            if bits not in curves.by_prompt:
                curves.by_prompt[bits] = LengthCurve()
            curves.by_prompt[bits].observe(num_tokens, is_whole=is_whole)


PREDICTORS = {
    "none": "penstock.sched.policies.predictors:NoPredictions",
    "online": "penstock.sched.policies.predictors:OnlinePredictor",
}
