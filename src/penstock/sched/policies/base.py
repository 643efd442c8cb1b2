"""The seams: what a policy is shown and what it answers. Contracts only; the scheduler calls them, in the order in which they
stand here.

A policy sees values and returns a value. It never touches a queue, a block or a request's progress, so a new one is a class of
a few lines: it inherits from the class of its seam, and overrides what it wants to decide. Anything it does not declare has
a default that is safe. docs/how-to/policy.md shows the whole way.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import ClassVar, Protocol

from penstock.kv.eviction import EvictionPolicy
from penstock.types.plan import Capacity, RowPlan
from penstock.types.request import Request

OrderKey = tuple[int, ...]
"""Compared like any tuple; the smallest is served first."""


@dataclass(frozen=True, slots=True)
class BucketView:
    """The requests of one bucket that wait for the gate; there is at least one."""

    bucket: int
    num_waiting: int
    oldest_ns: int
    """Arrival of the one that was queued first."""


@dataclass(frozen=True, slots=True)
class GateView:
    now_ns: int
    num_running: int
    num_joining: int
    """Requests that were called to a batch, or preempted, and do not run. They join when there is room, without asking the
    gate."""
    max_rows: int
    """Requests that may run at once: the gate's own answer to `max_running`."""
    buckets: tuple[BucketView, ...]
    """Not empty; ascending."""


@dataclass(frozen=True, slots=True)
class GateDecision:
    max_admissions: int
    """Requests that may join in this step; 0 keeps the gate closed."""
    wakeup_ns: int | None = None
    """When to ask again although nothing happened (a window ends); None: only when something happens."""
    bucket: int = 0
    """The bucket that they come from, one of those in the view."""
    is_batch: bool = False
    """They are called now, all at once, as a batch: their prompts are padded, and their rows run until the last of them has
    finished. Only while no request runs or joins, and never by a gate that is continuous."""
    pad_to_tokens: int = 0
    """The least length of a batch's prompts; they are padded to the longest in any case."""


class Gate(Protocol):
    """May a batch start, or grow, now? Asked in each step while a request waits that was not called.

    A gate that inherits from this one needs no more than `decide`. One that keeps the gate closed while nothing runs has to say
    when to ask again (`wakeup_ns`), or its requests wait until something else happens.
    """

    is_continuous: ClassVar[bool] = False
    """True if it never calls a batch: requests join and leave one by one. Only then beam searches are taken, whose rows come
    and go, and only then a waiting request may pause a running one."""
    may_plan_ahead: ClassVar[bool] = False
    """True if a step may be planned while the one before it is in flight, as executors of a depth of 2 ask for. The view then
    counts requests as running that end with that step."""

    def max_running(self, capacity: Capacity) -> int:
        """How many requests may run at once, so that no plan exceeds the capacity: a row that decodes needs one of its rows
        and one of its tokens per step, a batch as many rows again for the padding of its prompts.

        Asked once. Raises ConfigError, with a remedy, if the gate's settings ask for more.
        """
        max_rows = capacity.max_rows if self.is_continuous else max(1, capacity.max_rows // 2)
        return min(max_rows, capacity.max_step_tokens)

    def bucket_of(self, request: Request) -> int:
        """The bucket in which it waits: only requests of one bucket join together. Must not change while it waits."""
        del request
        return 0

    @abstractmethod
    def decide(self, view: GateView) -> GateDecision: ...


class Order(Protocol):
    """Which request is next in the waiting queue? An order that inherits from this one needs no more than a `key`.

    Requests wait in lanes. The lane with the smallest key is next, and in it the request with the smallest key; of equals
    the first that came. Most orders have one lane; an order that keeps accounts has a lane for each account.
    """

    reads_priority: ClassVar[bool] = False
    """True if it looks at `Request.priority`. Where it is false, clients that send one are refused rather than ignored."""

    has_ranks: ClassVar[bool] = False
    """True if `outranks` may say yes; where it is false it is never asked."""

    suits: ClassVar[Mapping[str, str]] = {}
    """Seam (`victim`, `eviction`) -> name of the policy that a server takes with this order, unless another is asked for. So a
    request that is favoured in the queue is favoured in memory."""

    is_preemptive: bool = False
    """True if a waiting request may pause a running one; where it is false `pauses` is never asked."""

    @abstractmethod
    def key(self, request: Request, now_ns: int) -> OrderKey:
        """Place within the lane. May only grow while the request waits: it is asked again before the request is served, and
        no sooner.

        Ageing at the same rate for all needs no growth: the arrival time in the key is enough.
        """
        ...

    def lane(self, request: Request) -> str:
        """The lane in which it waits. Must not change."""
        del request
        return ""

    def lane_key(self, lane: str) -> OrderKey:
        """Place among the lanes with waiting requests. May only grow while the lane is open; asked again before it counts."""
        del lane
        return ()

    def queued(self, request: Request) -> None:
        """It begins to wait and never ran. Called before it is asked for its lane and keys."""
        del request

    def unqueued(self, request: Request) -> None:
        """It waits no more: it is admitted next, or has ended."""
        del request

    def outranks(self, request: Request, other: Request, now_ns: int) -> bool:
        """Does `request` go before `other`, although that was let in already?

        `other` was preempted, held back or called to a batch, or it runs and has not computed all its tokens. In the last case
        the tokens of a step are meant: a request that has a row keeps it. Must not be true both ways, nor in a circle.
        """
        del request, other, now_ns
        return False

    def pauses(self, waiting: Request, running: Request, now_ns: int) -> bool:
        """Is `running` to be preempted if `waiting`, which is next, lacks a row or memory?

        Implies that `waiting` outranks `running` when that waits, and must not be true both ways.
        """
        del waiting, running, now_ns
        return False

    def admitted(self, request: Request) -> None:
        """It left the queue to run, or to go on after a preemption (`num_preemptions` > 0). `num_computed_tokens` is its prefix
        found in the cache; the step will compute `num_inflight_tokens` of it first."""
        del request

    def left(self, request: Request) -> None:
        """It runs no more: it was preempted, or has ended. Called early, too, if it ends with the step in flight for certain
        and gets no row in the next."""
        del request

    def served(
        self,
        rows: Sequence[RowPlan],
        requests: Mapping[str, Request],
        last_step: StepRecord | None,
        num_decodes: int = 0,
    ) -> None:
        """Once per planned step: which request is given what, for orders that keep accounts.

        `last_step` is the last that was committed; None before the first. The first `num_decodes` rows are of all requests that
        decode, but for those that end with the step in flight; so an order that knows which requests decode need
        not look at them.
        """
        del rows, requests, last_step, num_decodes


@dataclass(slots=True)
class StepRecord:
    """A step that was computed. Nobody writes to one after it was made; not frozen for the reason in `RowPlan`."""

    num_decodes: int
    """Tokens of requests that decoded: one each, and those that their grammars forced."""
    num_prefill_tokens: int
    """All its other tokens."""
    duration_ns: int
    """From the commit before to its own, which is the latency between two tokens of the requests that decode. If none did, from
    its plan, unless that was made before: there may have been a pause. Without `waited_ns`."""
    num_prefill_pairs: int = 0
    """Pairs of a prefill token and one before it in its request: the work of attention."""
    waited_ns: int = 0
    """For how long the machine was another model's meanwhile."""


@dataclass(slots=True)
class BudgetView:
    """A step in which every decode has its token already.

    Nobody writes to one after it was made; not frozen for the reason in `RowPlan`.
    """

    max_step_tokens: int
    num_decodes: int
    """Tokens that are given away."""
    prefill_context_len: int
    """Computed tokens of the first running request that is more than one token behind; 0 without one."""
    last_step: StepRecord | None
    """The last that was committed; the same object until there is another. None before the first."""
    most_ns: int = 0
    """The step should not take longer, since others want the machine; 0: it may take as long as it likes."""


UNLIMITED = 1 << 30
"""Tokens or requests: more than any step has."""


@dataclass(slots=True)
class StepLimits:
    """Nobody writes to one after it was made; not frozen for the reason in `RowPlan`."""

    max_tokens: int
    """Tokens up to which prefills may fill the step, decodes included, at most `max_step_tokens`. Decodes get theirs in any
    case."""
    max_chunk_tokens: int = UNLIMITED
    """Tokens of one long prefill in this step, >= 1."""
    long_prefill_tokens: int = 0
    """A prefill that is further behind than this is long."""
    max_long_prefills: int = UNLIMITED
    """Long prefills at the same time; shorter ones may pass those that wait for it. Never keeps a preempted request waiting."""
    long_prefill_share: int | None = None
    """Long prefills take the tokens that all others leave, new ones too, and so many at least; None: they take their turn."""
    splits_prompts: bool = True
    """False: a prefill that does not fit the rest of the step waits for the next, unless it would be the step's only one."""


class Budget(Protocol):
    """How are the step's tokens split? Each decode gets its token first: no more rows run than a step has tokens."""

    @abstractmethod
    def limits(self, view: BudgetView) -> StepLimits:
        """Asked once per step, after the decodes were planned."""
        ...


@dataclass(slots=True)
class AdmissionView:
    """One request that is next. Blocks are those to be taken from the free list: a prefix hit that is in use costs none.

    Nobody writes to one after it was made; not frozen for the reason in `RowPlan`.
    """

    request: Request
    running: Collection[Request]
    """Not empty: a request that would run alone is admitted without asking."""
    num_chunk_blocks: int
    """Blocks to compute its first chunk."""
    num_prompt_blocks: int
    """Blocks to compute all tokens that it has (after a preemption, those it had generated too). For a beam search that comes
    back: those of all its beams, here and in the next."""
    num_final_blocks: int
    """Blocks to reach its limit of tokens. Where every layer has a window, this and the above are no more than it holds at one
    time."""
    num_running: int
    """Requests that run, and those that follow as soon as it does."""
    num_growth_blocks: int
    """Blocks that the running requests can ask for at most before all reach their limits, without those promised to
    prefills."""
    num_total_blocks: int
    block_size: int
    num_peak_blocks: int = UNLIMITED
    """Blocks by which the request and the running ones can grow at one time, if all go on at the same pace and none beyond its
    limit: those that end make room for the others. Counted only where memory is short."""
    swaps: bool = False
    """A preempted request loses little: a tier below the pool brings it back sooner than it could be computed."""


class Reserve(Protocol):
    """How many free blocks, not promised to running prefills, must an admission find?

    A request that was preempted must in any case find those of its tokens and room to grow (`scheduler.py`).
    """

    @abstractmethod
    def required_blocks(self, view: AdmissionView) -> int: ...


class PreemptMethod(StrEnum):
    """How a victim's blocks are taken back."""

    RECOMPUTE = "recompute"
    SWAP = "swap"
    """Its full blocks go to the tier below the pool when others need the place, and come back from there."""


def cheaper_method(prefill_ns_per_token: float, load_ns_per_token: float | None) -> PreemptMethod:
    """The cheaper one by the measured times: 0.0 is not measured yet, a `load_ns_per_token` of None is no tier."""
    if load_ns_per_token is None or 0 < prefill_ns_per_token < load_ns_per_token:
        return PreemptMethod.RECOMPUTE
    return PreemptMethod.SWAP


@dataclass(frozen=True, slots=True)
class Eviction:
    request: Request
    method: PreemptMethod


@dataclass(frozen=True, slots=True)
class VictimView:
    """Requests that may be preempted: for another running one all but the most senior, for a waiting one those that it may
    pause."""

    candidates: Sequence[Request]
    """Not empty; in the order of admission."""
    num_needed_blocks: int
    """Blocks to be found now."""
    num_freed_blocks: Callable[[Request], int]
    """Blocks that a candidate holds and no other request does. O(its blocks)."""
    num_lost_tokens: Callable[[Request], int]
    """Tokens that a candidate would have to compute again: those whose blocks no other request holds. O(its blocks)."""
    prefill_ns_per_token: float
    """As the last step without decodes said that had a good part of the tokens of a full one; 0.0 before the first."""
    load_ns_per_token: float | None = None
    """To bring a token of a full block back from the tier below the pool, as measured (0.0: not yet); None: there is none."""
    block_size: int = 1

    @property
    def method(self) -> PreemptMethod:
        return cheaper_method(self.prefill_ns_per_token, self.load_ns_per_token)


class Victim(Protocol):
    """Which running request is preempted, and how? Asked again until there is enough."""

    @abstractmethod
    def choose(self, view: VictimView) -> Eviction:
        """One of the candidates, and usually the view's method."""
        ...


@dataclass(frozen=True, slots=True)
class Prediction:
    """How many tokens a request will generate, its limit considered, and how sure that is."""

    num_tokens: int
    """Expected, >= 1."""
    low_tokens: int
    """One in ten generates no more."""
    high_tokens: int
    """Nine in ten generate no more."""
    num_observations: int
    """Outputs from which this was learned."""


class Predictor(Protocol):
    """How long will an output be?"""

    @abstractmethod
    def predict(self, request: Request) -> Prediction | None:
        """Asked when a request is queued; its `max_total_tokens` is known. None: no idea."""
        ...

    def ended(self, request: Request) -> None:
        """Called for every request that was queued, at its end. Only an output that ended with STOP is whole; any other would
        have been at least so long.
        """
        del request


@dataclass(frozen=True, slots=True)
class Policies:
    """One answer to every seam."""

    gate: Gate
    order: Order
    budget: Budget
    reserve: Reserve
    victim: Victim
    predictor: Predictor
    eviction: EvictionPolicy
    words: Mapping[str, str] = field(default_factory=dict, compare=False)
    """Seam -> its policy's name and arguments, for people."""
