"""The model that a route chose for a request, why, and what the answer costs."""

from __future__ import annotations

from dataclasses import dataclass, replace

from penstock.routes.prices import Bill, Cost
from penstock.serve.ensembles import Ensemble
from penstock.serve.trials import Trial


@dataclass(frozen=True, slots=True)
class Routed:
    route: str
    model: str
    why: str = ""
    asked: str = ""
    """The name in the request: the route's, or that of a pipeline that uses the route."""
    rest: tuple[str, ...] = ()
    """Models to ask one after another if this one refuses."""
    trial: Trial | None = None
    """In a cascade: decides whether this model goes on."""
    ensemble: Ensemble | None = None
    """Chooses among the answers of this model and of others."""
    bill: Bill | None = None
    """The route's, if its models have prices."""
    in_vain: float = 0.0
    """USD paid for answers that were begun and not kept, and for judging."""
    cost: Cost | None = None
    """Known at the end of the answer."""

    @property
    def header(self) -> bytes:
        parts = [self.route, f"model={self.model}", self.why, "" if self.cost is None else self.cost.words]
        return "; ".join(filter(None, parts)).encode("ascii", "backslashreplace")

    def begun_in_vain(self, num_prompt_tokens: int, num_tokens: int, *, model: str | None = None) -> Routed:
        """Pay for an answer that is not kept, if it has any tokens. `model`: the one that wrote it, if not `self.model`."""
        if self.bill is None or not num_tokens:
            return self
        return replace(self, in_vain=self.in_vain + self.bill.pay(model or self.model, num_prompt_tokens, num_tokens))
