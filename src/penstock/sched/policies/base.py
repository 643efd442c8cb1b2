"""The seams: what a policy is shown and what it answers. Contracts only; the scheduler calls them, in the order in which they
stand here.

A policy sees values and returns a value. It never touches a queue, a block or a request's progress, so a
new one is a class of a few lines and a name in the table of its seam.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar, Protocol

from penstock.kv.eviction import EvictionPolicy
from penstock.types.plan import Capacity, RowPlan
from penstock.types.request import Request

OrderKey = tuple[int, ...]
"""Compared like any tuple; the smallest is served first."""


@dataclass(frozen=True, slots=True)
class BucketView:
    """Those of one bucket who wait for the gate; somebody does."""

    bucket: int
    num_waiting: int
    oldest_ns: int
    """Arrival of the one that was queued first."""


@dataclass(frozen=True, slots=True)
class GateView:
    now_ns: int
    num_running: int
    num_joining: int
    """Called to a batch, or preempted, and not running. They join when there is room, without asking the gate."""
    max_rows: int
    """How many may run at once: the gate's own answer."""
    buckets: tuple[BucketView, ...]
    """Not empty; ascending."""


@dataclass(frozen=True, slots=True)
class GateDecision:
    max_admissions: int
    """Requests that may join in this step; 0 keeps the gate closed."""
    wakeup_ns: int | None = None
    """When to ask again although nothing happened (a window ends); None: only when something happens."""
    bucket: int = 0
    """From which of those in the view."""
    is_batch: bool = False
    """They are called now, all at once, as a batch: their prompts are padded, and their rows run until the last of them has
    finished. Only while nobody runs or joins."""
    pad_to_tokens: int = 0
    """Of a batch: the least length of its prompts; they are padded to the longest in any case."""


class Gate(Protocol):
    """May a batch start, or grow, now? Asked in each step while somebody waits who was not called."""

    def max_running(self, capacity: Capacity) -> int:
        """How many requests may run at once, so that no plan exceeds the capacity: a row that decodes needs one of its rows
        and one of its tokens per step, a batch as many rows again for the padding of its prompts.

        Asked once. Raises ConfigError, with a remedy, if the gate's settings ask for more.
        """
        ...

    def bucket_of(self, request: Request) -> int:
        """Where it waits: only requests of one bucket join together. Must not change while it waits."""
        ...

    def decide(self, view: GateView) -> GateDecision: ...


class Order(Protocol):
    """Who is next among the waiting? A class that inherits from this one needs no more than a `key`.

    Requests wait in lanes. The lane with the smallest key is next, and in it the request with the smallest key; of equals
    the first that came. Most orders have one lane; an order that keeps accounts has a lane for each account.
    """

    reads_priority: ClassVar[bool] = False
    """True if it looks at `Request.priority`. Where it is false, clients that send one are refused rather than ignored."""

    is_preemptive: bool = False
    """True if a waiting request may pause a running one."""

    def key(self, request: Request, now_ns: int) -> OrderKey:
        """Place within the lane. May only grow while the request waits: it is asked again before the request is served, and
        no sooner.

        Ageing at the same rate for all needs no growth: the arrival time in the key is enough.
        """
        ...

    def lane(self, request: Request) -> str:
        """Where it waits. Must not change."""
        del request
        return ""

    def lane_key(self, lane: str) -> OrderKey:
        """Place among the lanes in which somebody waits. May only grow while the lane is open; asked again before it counts."""
        del lane
        return ()

    def queued(self, request: Request) -> None:
        """It begins to wait and never ran. Called before it is asked for its lane and keys."""

    def unqueued(self, request: Request) -> None:
        """It waits no more: it is admitted next, or has ended."""

    def outranks(self, request: Request, other: Request, now_ns: int) -> bool:
        """Does `request` go before `other`, although that was let in already, that is, was preempted, held back or called to a
        batch, or has run for a while and not computed all its tokens? Of the latter the tokens of a step are meant: who has a
        row keeps it.

        Asked only of an order that has its own answer. Must not be true both ways, nor in a circle.
        """
        del request, other, now_ns
        return False

    def pauses(self, waiting: Request, running: Request, now_ns: int) -> bool:
        """Is `running` to be preempted if `waiting`, who is next, lacks a row or memory? Asked only if `is_preemptive`.

        Implies that `waiting` outranks `running` when that waits, and must not be true both ways.
        """
        del waiting, running, now_ns
        return False

    def admitted(self, request: Request) -> None:
        """It left the queue to run. `num_computed_tokens` is what it found in the prefix cache, `num_inflight_tokens` what the
        step will compute of it first."""

    def left(self, request: Request) -> None:
        """It runs no more: it was preempted, or has ended. Told before, too, if it ends with the step in flight for certain and
        gets no row in the next."""

    def served(
        self,
        rows: Sequence[RowPlan],
        requests: Mapping[str, Request],
        last_step: StepRecord | None,
        num_decodes: int = 0,
    ) -> None:
        """Once per planned step: what is given to whom, for orders that keep accounts.

        `last_step`: the last that was committed; None before the first. `num_decodes`: the first rows are of all requests that
        were one token behind, but for those who end with the step in flight; so an order that knows who decodes need not look
        at them.
        """


@dataclass(slots=True)
class StepRecord:
    """A step that was computed. Nobody writes to one after it was made; not frozen for the reason in `RowPlan`."""

    num_decodes: int
    """Rows of requests that were one token behind when the step was planned."""
    num_prefill_tokens: int
    """All its other tokens."""
    duration_ns: int
    """From the commit before to its own, which is the latency between two tokens of those that decode. If nobody did, from its
    plan, unless that was made before: there may have been a pause."""
    num_prefill_pairs: int = 0
    """Of a prefill token and one before it in its request: what attention works on."""


@dataclass(slots=True)
class BudgetView:
    """A step in which every decode has its token already.

    Nobody writes to one after it was made; not frozen for the reason in `RowPlan`.
    """

    max_step_tokens: int
    num_decodes: int
    """Tokens that are given away."""
    prefill_context_len: int
    """Tokens computed of the running request that is next of those more than one token behind; 0 without."""
    last_step: StepRecord | None
    """The last that was committed; the same object until there is another. None before the first."""


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
    """Long prefills take what all others leave, new ones too, and so many tokens at least; None: they take their turn."""
    splits_prompts: bool = True
    """False: a prefill that does not fit the rest of the step waits for the next, unless it would be the step's only one."""


class Budget(Protocol):
    """How are the step's tokens split? Each decode gets its token first: no more rows run than a step has tokens."""

    def limits(self, view: BudgetView) -> StepLimits:
        """Asked once per step, after the decodes were planned."""
        ...


@dataclass(slots=True)
class AdmissionView:
    """One request at the door. Blocks are those to be taken from the free list: a prefix hit that is in use costs none.

    Nobody writes to one after it was made; not frozen for the reason in `RowPlan`.
    """

    request: Request
    running: Collection[Request]
    """Not empty: a request that would run alone is admitted without asking."""
    num_chunk_blocks: int
    """To compute its first chunk."""
    num_prompt_blocks: int
    """To compute all tokens that it has (after a preemption, those it had generated too). Of a beam search that comes back: of
    all its beams, as the next two."""
    num_final_blocks: int
    """To reach its limit of tokens."""
    num_running: int
    """Those who run, and who follows as soon as it does."""
    num_growth_blocks: int
    """The running can ask for so many at most before all reach their limits, what is promised to prefills aside."""
    num_total_blocks: int
    block_size: int
    num_peak_blocks: int = UNLIMITED
    """By how many the request and the running can grow at one time, if all go on at the same pace and none beyond its limit:
    who ends makes room for the others. Counted only where memory is short."""
    swaps: bool = False
    """Who is preempted loses little: a tier below the pool brings it back sooner than it could be computed."""


class Reserve(Protocol):
    """How many free blocks, not promised to running prefills, must an admission find?

    A request that was preempted must in any case find those of its tokens and room to grow (`scheduler.py`).
    """

    def required_blocks(self, view: AdmissionView) -> int: ...


class PreemptMethod(StrEnum):
    """How a victim's blocks are taken back."""

    RECOMPUTE = "recompute"
    SWAP = "swap"
    """Its full blocks go to the tier below the pool when others need the place, and come back from there."""


def cheaper_method(prefill_ns_per_token: float, load_ns_per_token: float | None) -> PreemptMethod:
    """As measured. `prefill_ns_per_token`, `load_ns_per_token` 0.0: not yet; the latter None: there is no tier."""
    if load_ns_per_token is None or 0 < prefill_ns_per_token < load_ns_per_token:
        return PreemptMethod.RECOMPUTE
    return PreemptMethod.SWAP


@dataclass(frozen=True, slots=True)
class Eviction:
    request: Request
    method: PreemptMethod


@dataclass(frozen=True, slots=True)
class VictimView:
    """Who may be preempted: for another that runs all but the most senior, for one that waits those whom it may pause."""

    candidates: Sequence[Request]
    """Not empty; in the order of admission."""
    num_needed_blocks: int
    """To be found now."""
    num_freed_blocks: Callable[[Request], int]
    """Blocks that a candidate holds and nobody else does. O(its blocks)."""
    num_lost_tokens: Callable[[Request], int]
    """Tokens that a candidate would have to compute again: those whose blocks nobody else holds. O(its blocks)."""
    prefill_ns_per_token: float
    """As the last step without decodes said that had a good part of the tokens of a full one; 0.0 before the first."""
    load_ns_per_token: float | None = None
    """To bring a token of a full block back from the tier below the pool, as measured (0.0: not yet); None: there is none."""
    block_size: int = 1

    @property
    def method(self) -> PreemptMethod:
        return cheaper_method(self.prefill_ns_per_token, self.load_ns_per_token)


class Victim(Protocol):
    """Whom to preempt, and how? Asked again until there is enough."""

    def choose(self, view: VictimView) -> Eviction:
        """One of the candidates."""
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

    def predict(self, request: Request) -> Prediction | None:
        """Asked when a request is queued; its `max_total_tokens` is known. None: no idea."""
        ...

    def ended(self, request: Request) -> None:
        """Told of every request that was queued, at its end. Only an output that ended with STOP is whole; any other would have
        been at least so long.
        """
        ...


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
