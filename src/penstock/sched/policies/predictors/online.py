"""Predicts output lengths from those that ended, by tenant and prompt length. Called by the scheduler when a request is queued
and when it has ended; deterministic, in bounded memory.

A tenant's requests of one kind are alike: one application summarises, another classifies. So each tenant has a curve for each
prompt length (in powers of two) and one for all; what is not known of a tenant is taken from all tenants together.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field

from penstock.sched.policies.base import Prediction
from penstock.sched.policies.predictors.length_curve import LengthCurve
from penstock.types.request import FinishReason, Request

LOW_SHARE, HIGH_SHARE = 0.1, 0.9
"""Quantiles of a prediction's spread."""


@dataclass(slots=True)
class Curves:
    """Of one tenant, or of all."""

    total: LengthCurve = field(default_factory=LengthCurve)
    by_prompt: dict[int, LengthCurve] = field(default_factory=dict)
    """Bits of the prompt's length -> curve; some twenty at most."""


class OnlinePredictor:
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
