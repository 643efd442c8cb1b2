"""The interfaces of the scheduler's policies: the arguments and the answers of each. See docs/how-to/policy.md.

A new policy inherits from one interface's class and overrides what it wants to decide; everything else has a safe default.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import ClassVar, Protocol

from penstock.kv.eviction import EvictionPolicy
from penstock.types.plan import Capacity, RowPlan
from penstock.types.request import Request

OrderKey = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BucketView:
    """The waiting requests of one bucket (such as similar prompt lengths), as a gate sees them."""

    bucket: int
    num_waiting: int
    oldest_ns: int


@dataclass(frozen=True, slots=True)
class GateView:
    """The requests of one class, as a gate sees them: either background requests, or all others."""

    now_ns: int
    num_running: int
    num_joining: int
    """Requests that join without asking the gate: called to a batch, preempted, held back for a long prompt, or set aside
    until a prefix or an adapter is ready."""
    max_rows: int
    buckets: tuple[BucketView, ...]


@dataclass(frozen=True, slots=True)
class GateDecision:
    max_admissions: int
    """Requests that may join in this step; 0 keeps the gate closed."""
    wakeup_ns: int | None = None
    """When to ask again if nothing happens before; None: only when something happens."""
    bucket: int = 0
    is_batch: bool = False
    """Call the joining requests as a batch. Its rows run until the last has finished. Only while no request runs or joins."""
    pad_to_tokens: int = 0
    """Least padded length of the batch's prompts."""


class Gate(Protocol):
    """Decides when a batch may start or grow. Called in each step while a request waits for the gate's permission.

    A gate that stays closed while nothing runs must set `wakeup_ns`.
    """

    is_continuous: ClassVar[bool] = False
    """The gate never calls a batch. Required for beam search and for `Order.is_preemptive`."""
    may_plan_ahead: ClassVar[bool] = False
    """A step may be planned while the one before is in flight. The view then counts requests that end with that step."""

    def max_running(self, capacity: Capacity) -> int:
        """Return how many requests may run at once: each needs a token per step. A padded batch needs as many rows again.

        Called once, at the start. Raises ConfigError if the gate's settings exceed the capacity.
        """
        max_rows = capacity.max_rows if self.is_continuous else max(1, capacity.max_rows // 2)
        return min(max_rows, capacity.max_step_tokens)

    def bucket_of(self, request: Request) -> int:
        """Return the number of the request's bucket, which must not change. Only requests of one bucket join together."""
        del request
        return 0

    @abstractmethod
    def decide(self, view: GateView) -> GateDecision: ...


class Order(Protocol):
    """Decides which waiting request is next.

    The lane with the smallest key is next, and in it the request with the smallest key. Among equal keys the first to come
    wins. Most orders have one lane.
    """

    reads_priority: ClassVar[bool] = False
    """The order reads `Request.priority`. Otherwise clients that send one are refused."""

    has_ranks: ClassVar[bool] = False
    """`outranks` may return True. Otherwise it is never called."""

    suits: ClassVar[Mapping[str, str]] = {}
    """Seam (`victim`, `eviction`) -> default policy with this order."""

    is_preemptive: bool = False
    """A waiting request may preempt a running one. Otherwise `pauses` is never called."""

    @abstractmethod
    def key(self, request: Request, now_ns: int) -> OrderKey:
        """Return the request's key within its lane. It may only grow while the request waits, and is read again before
        service."""
        ...

    def lane(self, request: Request) -> str:
        """Return the name of the lane in which the request waits. It must not change."""
        del request
        return ""

    def lane_key(self, lane: str) -> OrderKey:
        """Return the key of a lane. It may only grow while the lane has waiting requests."""
        del lane
        return ()

    def queued(self, request: Request) -> None:
        """Note that a request enters the queue, perhaps again after `unqueued`. Called before its lane and keys are read."""
        del request

    def unqueued(self, request: Request) -> None:
        """Note that a request leaves the queue: it is admitted next, has ended, was called to a batch, or waits for a prefix or
        an adapter. In the last two cases it joins later without another look at its key."""
        del request

    def outranks(self, request: Request, other: Request, now_ns: int) -> bool:
        """Return whether `request` goes before `other`, which was admitted earlier. Must be antisymmetric and free of cycles.

        If `other` runs, it keeps its batch row: this only decides which request gets the step's tokens first.
        """
        del request, other, now_ns
        return False

    def pauses(self, waiting: Request, running: Request, now_ns: int) -> bool:
        """Return whether to preempt `running` if `waiting`, which is next, lacks a row, memory or a place for its adapter.

        If True, `waiting` must also outrank `running` once `running` is preempted. Must not be true both ways.
        """
        del waiting, running, now_ns
        return False

    def admitted(self, request: Request) -> None:
        """Note that a request left the queue to run, or to resume (`num_preemptions` > 0). Its first step computes
        `num_inflight_tokens` tokens after `num_computed_tokens`."""
        del request

    def left(self, request: Request) -> None:
        """Note that a request stopped running. Also called early, once it is certain to end with the step in flight."""
        del request

    def served(
        self, rows: Sequence[RowPlan], requests: Mapping[str, Request], last_step: StepRecord | None, num_decodes: int = 0
    ) -> None:
        """Update the order's accounts for a planned step. The first `num_decodes` rows are all decodes."""
        del rows, requests, last_step, num_decodes

    def gained(self, request: Request, num_tokens: int) -> None:
        """Note that a step gave a request so many tokens more than one: right guesses, or tokens that its grammar forces."""
        del request, num_tokens


@dataclass(slots=True)
class StepRecord:
    num_decodes: int
    """Tokens of decodes: one each, forced ones, and guesses."""
    num_prefill_tokens: int
    duration_ns: int
    """From the previous commit, or without decodes from its plan if that was later. Without drafting and `waited_ns`."""
    num_prefill_pairs: int = 0
    """(prefill token, earlier token of its request) pairs: the work of attention."""
    waited_ns: int = 0


CONTESTED_STEP_NS, CONTESTED_WINDOW_NS = 20_000_000, 1_000_000_000
"""Time limit of a step with prompts while other models have or want the machine, or did so within the window."""


@dataclass(slots=True)
class BudgetView:
    """A step as a budget policy sees it: every decode already has its token."""

    max_step_tokens: int
    num_decodes: int
    prefill_context_len: int
    """Computed tokens of the first running prefill; 0 without one."""
    last_step: StepRecord | None
    """The same object until another step is committed. None before the first."""
    most_ns: int = 0
    """The step should not take longer, since others want the machine; 0: no limit."""
    has_background: bool = False
    """Background requests run or wait, so that the `fill_tokens` of the answer matter."""
    is_idle: bool = False
    """Only background requests have rows in this step."""


UNLIMITED = 1 << 30
"""More tokens or requests than any step has."""


@dataclass(slots=True)
class StepLimits:
    max_tokens: int
    """Tokens up to which prefills may fill the step, decodes included, at most `max_step_tokens`."""
    max_chunk_tokens: int = UNLIMITED
    """Tokens of one long prefill in this step, >= 1."""
    long_prefill_tokens: int = 0
    """A prefill that is further behind is long."""
    max_long_prefills: int = UNLIMITED
    """Long prefills at the same time; shorter ones may pass those that wait."""
    long_prefill_share: int | None = None
    """Long prefills get the tokens left by all others, but at least this many; None: they take their turn."""
    fill_tokens: int = UNLIMITED
    """Tokens up to which background requests may fill the step, decodes included."""
    decode_tokens: float = 1.0
    """A background request's decode counts as this many tokens."""
    splits_prompts: bool = True
    """False: a prefill that does not fit waits, unless it would be the only one."""
    most_ns: float = inf
    """Longest time of a step with guesses, drafting included."""


class Budget(Protocol):
    separates_prompts: ClassVar[bool] = False
    """A step has either prompts or decodes, and prompts go first. Then no decode has its token when `limits` is called."""

    @abstractmethod
    def limits(self, view: BudgetView) -> StepLimits: ...


@dataclass(slots=True)
class AdmissionView:
    """The request to admit next, and the free blocks that it needs. Cached blocks that other requests use count as 0."""

    request: Request
    running: Collection[Request]
    """Not empty: a request that would run alone is admitted without asking."""
    num_chunk_blocks: int
    num_prompt_blocks: int
    """Blocks for all its tokens, generated ones included; in a beam search, for all beams."""
    num_final_blocks: int
    """Blocks to reach its limit."""
    num_running: int
    """Running requests, and the forks that start with this request."""
    num_growth_blocks: int
    """Most blocks that running requests may still take, without those promised to prefills."""
    num_total_blocks: int
    block_size: int
    num_peak_blocks: int = UNLIMITED
    """Most blocks that all take at one time if they advance at the same pace. Computed only where memory is short."""
    swaps: bool = False
    """A tier below the pool brings a preempted request back faster than computing it."""


class Reserve(Protocol):
    """Decides how many free blocks must be available to admit a request."""

    @abstractmethod
    def required_blocks(self, view: AdmissionView) -> int: ...


def loads_back(prefill_ns_per_token: float, load_ns_per_token: float | None) -> bool:
    """Return whether a preempted request's full blocks are loaded from the tier below the pool, since computing them again
    takes longer. A time of 0.0 is not measured yet; None: no tier."""
    return load_ns_per_token is not None and not 0 < prefill_ns_per_token < load_ns_per_token


@dataclass(frozen=True, slots=True)
class VictimView:
    """The requests that may be preempted, and the cost of each."""

    candidates: Sequence[Request]
    num_needed_blocks: int
    num_freed_blocks: Callable[[Request], int]
    """Return the blocks that only this candidate holds. O(its blocks)."""
    num_lost_tokens: Callable[[Request], int]
    """Return the tokens that it would compute again. O(its blocks)."""
    prefill_ns_per_token: float
    """From steps without decodes; 0.0 before the first."""
    load_ns_per_token: float | None = None
    """For a token of a full block from the tier below the pool (0.0: not measured yet); None: no tier."""
    block_size: int = 1


class Victim(Protocol):
    @abstractmethod
    def choose(self, view: VictimView) -> Request:
        """Return the candidate to preempt."""
        ...


class Predictor(Protocol):
    @abstractmethod
    def predict(self, request: Request) -> int | None:
        """Return how many tokens (>= 1) a request will generate, or None. Called when it is queued; its `max_total_tokens` is
        known."""
        ...

    def ended(self, request: Request) -> None:
        """Learn from a request that ended. Only an output with reason STOP is whole; others were cut short."""


@dataclass(frozen=True, slots=True)
class Guess:
    """Tokens that may follow a request's last one."""

    token_ids: Sequence[int]
    num_matched: int
    """Length of the match before them. The first guess is assumed right in `num_matched - 1` of `num_matched` cases: with 1 it
    is not tried. For a chance `p`, return about `1 / (1 - p)`."""


class Guesser(Protocol):
    """Guesses how answers go on. The model checks a request's guesses in one step, and keeps those that hold."""

    is_on: bool = True
    """False: it never guesses, and is not asked."""
    source: str = "own"
    """The guesser's name in metrics. It is `own` for all users' guessers."""

    @abstractmethod
    def guess(self, request: Request, most: int) -> Guess | None:
        """Return at most `most` tokens, or None. Called at most once a step, for a request that decodes."""
        ...

    def ended(self, request: Request) -> None:
        """Note that a request ended. Use its answer only to guess for requests of the same `tenant` and `cache_salt`."""
        del request


@dataclass(frozen=True, slots=True)
class Policies:
    gate: Gate
    order: Order
    budget: Budget
    reserve: Reserve
    victim: Victim
    predictor: Predictor
    eviction: EvictionPolicy
    guesser: Guesser
    shares_parts: bool = True
    """A prefix hit may end inside a block."""
    background_share: float = 0.0
    """Share of the time that background requests get at least, [0, 1)."""
    words: Mapping[str, str] = field(default_factory=dict, compare=False)
    """Seam -> the policy's name and arguments, for people."""
