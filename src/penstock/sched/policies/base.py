"""The seams of the scheduler: what a policy sees and what it answers, in the order in which the scheduler asks.

A policy sees values and returns a value. A new policy inherits from its seam's class and overrides what it wants to decide;
everything else has a safe default. See docs/how-to/policy.md.
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
"""The smallest is served first."""


@dataclass(frozen=True, slots=True)
class BucketView:
    """One bucket's requests that wait for the gate; at least one."""

    bucket: int
    num_waiting: int
    oldest_ns: int
    """Arrival of the request that was queued first."""


@dataclass(frozen=True, slots=True)
class GateView:
    now_ns: int
    num_running: int
    num_joining: int
    """Requests called to a batch, or preempted, that do not run. They join when there is room, without asking the gate."""
    max_rows: int
    """The gate's answer to `max_running`."""
    buckets: tuple[BucketView, ...]
    """Not empty; ascending."""


@dataclass(frozen=True, slots=True)
class GateDecision:
    max_admissions: int
    """Requests that may join in this step; 0 keeps the gate closed."""
    wakeup_ns: int | None = None
    """When to ask again if nothing happens before; None: only when something happens."""
    bucket: int = 0
    is_batch: bool = False
    """Call them now as a batch: prompts are padded, and rows run until the last request has finished. Only while no request
    runs or joins, and never for a continuous gate."""
    pad_to_tokens: int = 0
    """Least padded length of the batch's prompts; the longest prompt counts in any case."""


class Gate(Protocol):
    """Decides when a batch may start or grow. Asked in each step while an uncalled request waits.

    Only `decide` is required. A gate that stays closed while nothing runs must set `wakeup_ns`.
    """

    is_continuous: ClassVar[bool] = False
    """True if it never calls a batch. Required for beam search and for pausing running requests."""
    may_plan_ahead: ClassVar[bool] = False
    """True if a step may be planned while the one before is in flight. The view then counts requests as running that end with
    that step."""

    def max_running(self, capacity: Capacity) -> int:
        """Return how many requests may run at once. Each decode needs a row and a token per step, and a batch as many rows
        again for padding.

        Asked once. Raises ConfigError, with a remedy, if the gate's settings ask for more than the capacity.
        """
        max_rows = capacity.max_rows if self.is_continuous else max(1, capacity.max_rows // 2)
        return min(max_rows, capacity.max_step_tokens)

    def bucket_of(self, request: Request) -> int:
        """Return the request's bucket, which must not change. Only requests of one bucket join together."""
        del request
        return 0

    @abstractmethod
    def decide(self, view: GateView) -> GateDecision: ...


class Order(Protocol):
    """Decides which waiting request is next. Only `key` is required.

    Requests wait in lanes. The lane with the smallest key is next, and in it the request with the smallest key; among equals
    the first that came. Most orders have one lane; an order that keeps accounts has one per account.
    """

    reads_priority: ClassVar[bool] = False
    """True if it reads `Request.priority`. Otherwise clients that send one are refused."""

    has_ranks: ClassVar[bool] = False
    """True if `outranks` may return True; otherwise it is never asked."""

    suits: ClassVar[Mapping[str, str]] = {}
    """Seam (`victim`, `eviction`) -> default policy with this order."""

    is_preemptive: bool = False
    """True if a waiting request may pause a running one; otherwise `pauses` is never asked."""

    @abstractmethod
    def key(self, request: Request, now_ns: int) -> OrderKey:
        """Return the place within the lane. It may only grow while the request waits, and is asked again right before service.

        Ageing at the same rate for all needs no growth: put the arrival time into the key.
        """
        ...

    def lane(self, request: Request) -> str:
        """Return the lane in which the request waits. It must not change."""
        del request
        return ""

    def lane_key(self, lane: str) -> OrderKey:
        """Return the place among lanes with waiting requests. It may only grow while the lane has some."""
        del lane
        return ()

    def queued(self, request: Request) -> None:
        """Note that a new request begins to wait. Called before its lane and keys are asked for."""

    def unqueued(self, request: Request) -> None:
        """Note that a request stops waiting: it is admitted next, or has ended."""

    def outranks(self, request: Request, other: Request, now_ns: int) -> bool:
        """Return whether `request` goes before `other`, which was let in already.

        `other` was preempted, held back or called to a batch, or it runs and has tokens left to compute. In the last case this
        is about the step's tokens: a request that has a row keeps it. Must be antisymmetric and free of circles.
        """
        del request, other, now_ns
        return False

    def pauses(self, waiting: Request, running: Request, now_ns: int) -> bool:
        """Return whether to preempt `running` if `waiting`, which is next, lacks a row or memory.

        Implies that `waiting` outranks `running` once that waits, and must not be true both ways.
        """
        del waiting, running, now_ns
        return False

    def admitted(self, request: Request) -> None:
        """Note that a request left the queue to run, or to resume (`num_preemptions` > 0). `num_computed_tokens` is its cached
        prefix; the step will first compute `num_inflight_tokens`."""

    def left(self, request: Request) -> None:
        """Note that a request stopped running: preempted or ended. Also called early if it certainly ends with the step in
        flight."""

    def served(
        self, rows: Sequence[RowPlan], requests: Mapping[str, Request], last_step: StepRecord | None, num_decodes: int = 0
    ) -> None:
        """Account for a planned step. `last_step` is the last committed one.

        The first `num_decodes` rows are all decodes, so an order that counts decoding requests can skip them.
        """


@dataclass(slots=True)
class StepRecord:
    """A computed step. Treat as frozen (see `RowPlan`)."""

    num_decodes: int
    """Tokens of decodes: one each, and forced ones."""
    num_prefill_tokens: int
    duration_ns: int
    """From the previous commit to its own. Without decodes, from its plan if that was later. Without `waited_ns`."""
    num_prefill_pairs: int = 0
    """(prefill token, earlier token of its request) pairs: the work of attention."""
    waited_ns: int = 0
    """Time in which other models used the machine."""


@dataclass(slots=True)
class BudgetView:
    """A step in which every decode already has its token. Treat as frozen (see `RowPlan`)."""

    max_step_tokens: int
    num_decodes: int
    prefill_context_len: int
    """Computed tokens of the first running prefill; 0 without one."""
    last_step: StepRecord | None
    """The same object until another step is committed. None before the first."""
    most_ns: int = 0
    """The step should not take longer, since others want the machine; 0: no limit."""


UNLIMITED = 1 << 30
"""More tokens or requests than any step has."""


@dataclass(slots=True)
class StepLimits:
    """Limits of a step. Treat as frozen (see `RowPlan`)."""

    max_tokens: int
    """Tokens up to which prefills may fill the step, decodes included, at most `max_step_tokens`. Decodes always get theirs."""
    max_chunk_tokens: int = UNLIMITED
    """Tokens of one long prefill in this step, >= 1."""
    long_prefill_tokens: int = 0
    """A prefill that is further behind is long."""
    max_long_prefills: int = UNLIMITED
    """Long prefills at the same time; shorter ones may pass those that wait. Preempted requests are exempt."""
    long_prefill_share: int | None = None
    """Long prefills get the tokens left by all others, but at least this many; None: they take their turn."""
    splits_prompts: bool = True
    """False: a prefill that does not fit the rest of the step waits, unless it would be the only one."""


class Budget(Protocol):
    """Splits the step's tokens. Each decode gets its token first: no more rows run than a step has tokens."""

    @abstractmethod
    def limits(self, view: BudgetView) -> StepLimits:
        """Return the step's limits. Asked once per step, after the decodes were planned."""
        ...


@dataclass(slots=True)
class AdmissionView:
    """A request that is next. Blocks are counted from the free list: a prefix hit in use costs none. Treat as frozen."""

    request: Request
    running: Collection[Request]
    """Not empty: a request that would run alone is admitted without asking."""
    num_chunk_blocks: int
    num_prompt_blocks: int
    """Blocks for all its tokens, generated ones included. For a beam search that resumes, the blocks of all its beams."""
    num_final_blocks: int
    """Blocks to reach its limit. With a window in every layer, at most what it holds at one time."""
    num_running: int
    """Running requests, and those that follow as soon as it runs."""
    num_growth_blocks: int
    """Most blocks that running requests may still take on the way to their limits, without those promised to prefills."""
    num_total_blocks: int
    block_size: int
    num_peak_blocks: int = UNLIMITED
    """Most blocks that the request and the running ones take at one time if all advance at the same pace. Computed only where
    memory is short."""
    swaps: bool = False
    """A tier below the pool brings a preempted request back faster than computing it."""


class Reserve(Protocol):
    """Decides how many free, unpromised blocks an admission must find.

    A preempted request must in any case find those of its tokens and room to grow (`running.py`).
    """

    @abstractmethod
    def required_blocks(self, view: AdmissionView) -> int: ...


class PreemptMethod(StrEnum):
    RECOMPUTE = "recompute"
    SWAP = "swap"
    """Its full blocks go to the tier below the pool when others need the space, and come back from there."""


def cheaper_method(prefill_ns_per_token: float, load_ns_per_token: float | None) -> PreemptMethod:
    """Return the cheaper method. 0.0 means not measured yet, and a `load_ns_per_token` of None that there is no tier."""
    if load_ns_per_token is None or 0 < prefill_ns_per_token < load_ns_per_token:
        return PreemptMethod.RECOMPUTE
    return PreemptMethod.SWAP


@dataclass(frozen=True, slots=True)
class Eviction:
    request: Request
    method: PreemptMethod


@dataclass(frozen=True, slots=True)
class VictimView:
    """The requests that may be preempted: for a running one all but the most senior, or those that a waiting one pauses."""

    candidates: Sequence[Request]
    """Not empty; in the order of admission."""
    num_needed_blocks: int
    num_freed_blocks: Callable[[Request], int]
    """Return the blocks that only this candidate holds. O(its blocks)."""
    num_lost_tokens: Callable[[Request], int]
    """Return the tokens that it would compute again. O(its blocks)."""
    prefill_ns_per_token: float
    """From steps without decodes; 0.0 before the first."""
    load_ns_per_token: float | None = None
    """Time to load a token of a full block from the tier below the pool (0.0: not measured yet); None: no tier."""
    block_size: int = 1

    @property
    def method(self) -> PreemptMethod:
        return cheaper_method(self.prefill_ns_per_token, self.load_ns_per_token)


class Victim(Protocol):
    """Chooses the running request to preempt, and how. Asked again until there is enough."""

    @abstractmethod
    def choose(self, view: VictimView) -> Eviction:
        """Return one of the candidates, and usually the view's method."""
        ...


class Predictor(Protocol):
    @abstractmethod
    def predict(self, request: Request) -> int | None:
        """Return how many tokens a request that is being queued will generate, >= 1, or None. `max_total_tokens` is known."""
        ...

    def ended(self, request: Request) -> None:
        """Learn from a queued request that ended. Only an output with reason STOP is whole; others were cut short."""


@dataclass(frozen=True, slots=True)
class Policies:
    gate: Gate
    order: Order
    budget: Budget
    reserve: Reserve
    victim: Victim
    predictor: Predictor
    eviction: EvictionPolicy
    words: Mapping[str, str] = field(default_factory=dict, compare=False)
    """Seam -> the policy's name and arguments, for people."""
