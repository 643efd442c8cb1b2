"""The state of a request while `waiting` repeats its endpoint: its waits, its route's choice, its pipeline."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from starlette.types import Scope

from penstock.deploy.running import ServedModel
from penstock.routes.prices import Bill, Cost
from penstock.serve.ensembles import Ensemble
from penstock.serve.trials import Check, Trial
from penstock.types.adapter import AdapterRef
from penstock.types.request import NO_WAITS, WaitTimes

if TYPE_CHECKING:  # with NumPy
    from penstock.search.index import Hit

COURSE_KEY = "penstock.course"
"""Key of a scope: the request's `Course`. No client can set it."""
LookedUp = tuple[str, tuple[ServedModel, AdapterRef] | None]
"""An adapter's name, and the adapter with its model, or None."""


@dataclass(frozen=True, slots=True)
class Routed:
    """The model that a route chose for a request, why, and what the answer costs."""

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
    discarded_usd: float = 0.0
    """Paid for answers that were begun and not kept, and for judging."""
    cost: Cost | None = None
    """Known at the end of the answer."""

    @property
    def header(self) -> bytes:
        parts = [self.route, f"model={self.model}", self.why, "" if self.cost is None else self.cost.words]
        return "; ".join(filter(None, parts)).encode("ascii", "backslashreplace")

    def pay_discarded(self, num_prompt_tokens: int, num_tokens: int, *, model: str | None = None) -> Routed:
        """Charge the route for an answer that is discarded. Return this choice with the cost added. Each call charges again.

        `model`: the model that wrote the answer, if not `self.model`.
        """
        if self.bill is None or not num_tokens:
            return self
        return replace(
            self, discarded_usd=self.discarded_usd + self.bill.pay(model or self.model, num_prompt_tokens, num_tokens)
        )


@dataclass(slots=True)
class Course:
    """The state of one request. The event loop writes it, and threads may read it."""

    is_background: bool = False
    """A line of a batch, sent by the server itself."""
    is_local_only: bool = False
    """A line of a batch that must not be sent to an upstream."""
    elsewhere: Callable[[], AbstractContextManager[None]] = nullcontext
    """Context to enter while waiting for an upstream: frees a batch line's place."""
    response_name: str | None = None
    """The part after `resp_` of the response's id, if the request may be a repetition: the server repeats it after a restart,
    the client by `Idempotency-Key`."""
    created_unix_s: int | None = None
    """When the response was created, if an earlier process did that."""
    age_ns: int = 0
    """How long before its arrival here an earlier process had the request."""
    arrival_ns: int | None = None
    """The time of arrival, if the request has waited."""
    waits: WaitTimes = NO_WAITS
    chosen_ns: int | None = None
    """When the request's route last chose a model."""
    loads: Counter[str] = field(default_factory=Counter)
    """How often the request has waited for the load of each model."""
    looked_up: LookedUp | None = None
    """The adapter's name that was looked up on the disk, if any."""
    hits: Sequence[Hit] | None = None
    """Results of the pipeline's search, kept for the next call of the endpoint: loading the reranker may have unloaded the
    embedding model."""
    check: Check | None = None
    """The check of a pipeline's answer."""
    filled: str = ""
    """The name of the pipeline that has put its sources into the body."""
    sent: bytes | None = None
    """The body as the client sent it, if a pipeline has changed it since."""
    kept_from: Collection[str] = ()
    """Names of the upstreams that must not see the request."""
    routed: Routed | None = None
    """The choice of the request's route."""
    decided: Routed | None = None
    """The choice when the small model of a cascade was unsure. A line of a batch that is then refused begins with it again."""

    def charge(self, routed: Routed, num_prompt_tokens: int, num_tokens: int, *, failed: bool) -> Cost | None:
        """Pay for an answer that has ended, and note its cost. If it failed, count its tokens as paid in vain."""
        assert routed.bill is not None
        if failed:
            self.routed = routed.pay_discarded(num_prompt_tokens, num_tokens)
            return None
        cost = routed.bill.answered(routed.model, num_prompt_tokens, num_tokens, discarded_usd=routed.discarded_usd)
        self.routed = replace(routed, cost=cost)
        return cost


def course_of(scope: Scope) -> Course:
    """Return the request's course, which begins with the first call."""
    course: Course | None = scope.get(COURSE_KEY)
    if course is None:
        course = scope[COURSE_KEY] = Course()
    return course
