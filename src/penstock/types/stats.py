"""The engine's reports: a record per step, one per finished request, and its load on demand."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from penstock.types.plan import RowPlan
from penstock.types.request import NO_WAITS, FinishReason, WaitTimes

PLANNING_PARTS = ("schedule", "draft")
"""Parts of a step before the executor gets it. `draft`: a small model makes guesses."""
HOST_PARTS = (*PLANNING_PARTS, "commit", "grammar", "output")
"""Parts of a step outside the executor. `grammar`: masks of allowed tokens. `output`: text and its delivery."""


class WaitReason(StrEnum):
    """The resource that the first waiting request lacks after planning; the value appears in metrics."""

    NOTHING = ""
    ROWS = "rows"
    TOKENS = "tokens"  # other requests, mostly prefills, took the step's tokens
    MEMORY = "memory"
    LOADING = "loading"  # the rest of its prefix is being loaded from the tier below the pool
    PREFIX = "prefix"  # another request is computing part of its prompt
    ADAPTER = "adapter"  # its adapter is being loaded, or the maximum number of adapters runs
    GATE = "gate"  # the batch is closed, or waits for more requests


class PrefixEnd(StrEnum):
    """Why a lookup in the prefix cache found no more tokens."""

    WHOLE = "whole"  # everything possible was found: the last token is always computed
    OFF = "caching off"
    EVICTED = "evicted"
    DIFFERS = "differs"  # the cache continues with other tokens
    ANSWER = "answer differs"  # the cache continues with an answer that an earlier request generated
    SALT = "different salt or adapter"
    """The same tenant sent the same tokens under another salt, or for another adapter."""
    UNSEEN = "never seen"
    STATE = "no state"  # the cache continues, and no recurrent state was saved there
    SCORED = "log-probabilities of the prompt"  # the request asks for these, which needs every token computed


@dataclass(frozen=True, slots=True)
class PrefixStop:
    reason: PrefixEnd
    position: int  # the first token not found; for `differs` and `answer differs`, the first that differs
    evicted_ns: int | None = None  # when that token's block was evicted
    num_same_after: int = 0  # for `differs`: later tokens that the cached prompt has at the same positions


@dataclass(slots=True)
class Admission:
    """A record that a request began to run, or resumed after preemption. Treat as frozen."""

    request_id: str
    num_tokens: int
    num_hit_tokens: int
    stop: PrefixStop | None = None  # set on the first admission, if somebody keeps request histories


class PreemptReason(StrEnum):
    MEMORY = "memory"
    ORDER = "order"  # a request of a higher class took its place


@dataclass(slots=True)
class Preemption:
    """A record that a running request was preempted. Treat as frozen."""

    request_id: str
    reason: PreemptReason
    num_computed_tokens: int
    is_swap: bool = False  # its blocks are kept in the tier below the pool


@dataclass(slots=True)
class PlanNews:
    """The effects of a plan, or of the lack of one, on requests: admissions, preemptions and waits. Treat as frozen."""

    planned_ns: int
    waits_for: WaitReason
    admissions: Sequence[Admission]
    preemptions: Sequence[Preemption]  # before the admissions, except pauses in their favour
    set_aside: Sequence[tuple[str, WaitReason]] = ()
    """Requests that others may pass from now on, and why: a long prompt, or a prefix or an adapter that is not ready."""


@dataclass(slots=True)
class StepCounts:
    """The work of one step, counted while it is planned and committed. Written by the scheduler alone."""

    num_rows: int = 0  # without padding rows
    num_tokens: int = 0  # positions computed, padding included
    num_decodes: int = 0  # positions of decodes: one each, plus forced tokens, guesses, and padding after a request's end
    num_background_tokens: int = 0  # of background requests; included in the other counts
    num_prefill_pairs: int = 0  # (prefill token, earlier token of its request) pairs: the work of attention
    num_sampled_tokens: int = 0  # known once the step is committed
    num_padding_tokens: int = 0
    num_preemptions: int = 0
    num_swaps: int = 0
    num_recomputed_tokens: int = 0  # positions computed again after a preemption
    num_prefix_query_tokens: int = 0  # tokens that this step's admissions looked up in the prefix cache
    num_prefix_hit_tokens: int = 0
    most_ns: int = 0
    """How long the step should take at most, since other models want the machine. 0: no limit."""
    max_prefill_tokens: int = 0
    waits_for: WaitReason = WaitReason.NOTHING
    waited_for: WaitReason = WaitReason.NOTHING
    """The reason at the last attempt to plan before this step, which may have made no plan."""
    num_blocks_held: int = 0
    """Blocks held by requests and adapters while the step is computed, including requests that end with it."""
    num_repeated: int = 0  # as in `StepPlan`
    rested: Sequence[str] = ()
    """Ids of decoding requests that got no row: the step had no time for them, or was reserved for background requests or
    prompts."""
    sat_out: Sequence[str] = ()
    forced: dict[str, int] = field(default_factory=dict)
    """Request id -> tokens that its grammar forced after the sampled one; included in `num_sampled_tokens`."""
    guesses: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Request id -> (its guesses, how many were accepted). The latter are included in `num_sampled_tokens`, unless they follow
    a stop string."""
    guess_sources: dict[str, str] = field(default_factory=dict)
    """Request id -> who made its guesses: a guesser's `source`, or `draft` for a small model."""
    prefills: list[RowPlan] = field(default_factory=list)
    """Rows of prompts and of recomputed tokens, except a prompt's last token computed alone."""


@dataclass(slots=True)
class StepStats:
    """The state right after a step was committed. Treat as frozen (see `RowPlan`)."""

    step_id: int
    started_ns: int
    """When it was planned, or when the step before it ended if that was later."""
    ended_ns: int
    num_running: int  # without background requests, as the next
    num_waiting: int
    num_blocks_total: int  # without the null block: free + cached + held
    num_blocks_free: int  # free blocks without reusable content
    num_blocks_cached: int  # free blocks with content that a prefix hit may revive
    counts: StepCounts = field(default_factory=StepCounts)
    parts_ns: Mapping[str, int] = field(default_factory=dict)
    """Nanoseconds by part: `execute`, the executor's own parts, which are included in `execute`, and `HOST_PARTS`."""
    void: Collection[str] = ()
    """Ids of rows whose requests had ended before. A new request may have taken the id since."""
    planned_ns: int = 0
    rows: Sequence[RowPlan] = ()
    waited_ns: int = 0  # time in which other models used the machine
    num_blocks_background: int = 0  # as in `EngineLoad`


@dataclass(slots=True)
class RequestStats:
    """The life of one request, reported at its end. Treat as frozen."""

    request_id: str
    tenant: str
    arrival_ns: int
    first_scheduled_ns: int | None
    first_token_ns: int | None
    ended_ns: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_generated_tokens: int
    num_preemptions: int
    finish_reason: FinishReason
    reject_reason: str = ""
    is_beam: bool = False  # a hypothesis of a beam search: all tokens come at its end
    shares_prompt: bool = False  # as in `Request`
    waits: WaitTimes = NO_WAITS
    background: bool = False
    key: str = ""  # as in `Request`


@dataclass(frozen=True, slots=True, kw_only=True)
class UpstreamStats:
    """Totals of a model of another server."""

    name: str
    results: Mapping[str, int]
    """Requests by how they ended: ok, busy, invalid, late, left, failed, or refused without asking."""
    tokens: Mapping[str, int]
    """Tokens of `prompt` and `completion`, as it counts them."""
    is_resting: bool
    """It failed, and is left alone for a while."""


class RouteStats(NamedTuple):
    """Costs of a route so far, in USD, and its drift."""

    name: str
    paid: Mapping[str, float]
    """By model, including discarded answers. Empty without prices."""
    full: float
    """USD that the same tokens would have cost at the route's dearest model."""
    drift: float | None = None
    """Distance from 0 to 1, as in `routes.drift`. None: not known."""


class BatchStats(NamedTuple):
    """Totals of batches since the server's start, and what is left of them."""

    num_unfinished: int
    num_lines_left: int
    lines: Mapping[str, int]
    """Lines that were `completed` or `failed`."""
    tokens: Mapping[str, int]
    """Tokens of prompts (`input`), those of them found in the cache (`cached`), and of answers (`output`)."""


@dataclass(slots=True)
class TierStats:
    """Totals of the tier below the KV pool. Written by one thread; readers may see fields a step apart."""

    medium: str = "disk"  # `disk` or `host`
    num_slots: int = 0
    num_present: int = 0  # slots with content that can be loaded
    is_open: bool = False
    num_spilled_blocks: int = 0
    num_loaded_blocks: int = 0
    num_dropped_blocks: int = 0  # not written, because too many were on their way
    num_declined_blocks: int = 0  # present, but not loaded, because that takes longer than to compute them
    num_written_bytes: int = 0
    num_read_bytes: int = 0
    failures: dict[str, int] = field(default_factory=dict)  # failed blocks by `FailureReason`


@dataclass(frozen=True, slots=True)
class AdapterCounts:
    """The adapters in the KV pool at one moment."""

    num_resident: int = 0
    num_running: int = 0  # those that running requests use
    num_blocks: int = 0
    num_placements: int = 0  # totals since the engine started
    num_evictions: int = 0
    numbers: Collection[int] = field(default=(), compare=False)  # in a running engine a live view, only for `in`


@dataclass(frozen=True, slots=True)
class AdapterStats:
    """Adapters in host memory: totals since the start, and what is there now."""

    num_registered: int = 0
    num_in_memory: int = 0
    num_bytes: int = 0
    num_loads: int = 0
    load_ns: int = 0  # time of all successful loads: reading, checking and packing
    num_failures: int = 0
    num_evictions: int = 0


class EngineLoad(NamedTuple):
    """How busy the engine is. All 0 before anything is known. Background requests count only where they are named."""

    num_running: int = 0
    num_waiting: int = 0  # in the inbox, queued or preempted
    waits_for: WaitReason = WaitReason.NOTHING
    num_prompt_tokens: int = 0
    num_blocks_total: int = 0  # without the null block: free + cached + held
    num_blocks_free: int = 0
    num_blocks_cached: int = 0
    num_blocks_shared: int = 0
    num_rows_free: int = 0  # how many more may run at once, given enough blocks
    adapters: AdapterCounts = AdapterCounts()
    num_background: int = 0  # background requests that run or wait
    num_blocks_background: int = 0
    """Held blocks that background requests allocated. Others get them when they need them, as they do the background's rows;
    with `--background-share` except those of one request."""
    served_ns: int = -1 << 62  # end of the last step while requests ran that are not of the background

    @property
    def num_blocks_held(self) -> int:
        return self.num_blocks_total - self.num_blocks_free - self.num_blocks_cached


class ReplicaLoad(NamedTuple):
    """One replica of a cluster, as the server before it knows it."""

    name: str
    address: str
    load: EngineLoad
    num_in_flight: int  # requests that were sent to it and have not ended
    num_tokens_left: int  # of prompts and expected answers, which it has yet to compute
    silent_ns: int  # time since its last report
    num_copied_tokens: int  # whose KV it has copied from others so far
    is_ready: bool = True  # it takes requests


class ScalingDecision(NamedTuple):
    age_ns: int
    num_replicas: int
    reason: str
