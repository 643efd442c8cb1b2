"""The predictor that knows nothing. Called by the scheduler; for those who want no books kept."""

from __future__ import annotations

from penstock.sched.policies.base import Prediction
from penstock.types.request import Request


class NoPredictions:
    """Says nothing."""

    def predict(self, request: Request) -> Prediction | None:
        del request
        return None

    def ended(self, request: Request) -> None:
        del request
