"""The engine's reports: a record per step, one per finished request, and its load on demand."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from penstock.types.plan import RowPlan
from penstock.types.request import FinishReason


class WaitReason(StrEnum):
    """The resource that the first waiting request lacks after planning; the value appears in metrics."""

    NOTHING = ""
    ROWS = "rows"
    """The maximum number of requests runs."""
    TOKENS = "tokens"
    """Other requests, mostly prefills, took the step's tokens."""
    MEMORY = "memory"
    LOADING = "loading"
    """The rest of its prefix is being loaded from the tier below the pool."""
    PREFIX = "prefix"
    """Another request is computing part of its prompt."""
    ADAPTER = "adapter"
    """Its adapter is being loaded, or the maximum number of adapters runs."""
    GATE = "gate"
    """The batch is closed, or waits for more requests."""


class PrefixEnd(StrEnum):
    """Why a prefix cache lookup ended."""

    WHOLE = "whole"
    """Everything possible was found: the last token is always computed."""
    OFF = "caching off"
    EVICTED = "evicted"
    """It was cached, and its memory was given to others."""
    DIFFERS = "differs"
    """The cache continues with other tokens."""
    ANSWER = "answer differs"
    """The cache continues with an answer that an earlier request generated."""
    SALT = "different salt or adapter"
    """The same tenant sent the same tokens under another salt, or for another adapter."""
    UNSEEN = "never seen"
    SCORED = "log-probabilities of the prompt"
    """The request asks for these, which needs every token computed."""


@dataclass(frozen=True, slots=True)
class PrefixStop:
    reason: PrefixEnd
    position: int
    """The first token not found; for `differs` and `answer differs`, the first that differs."""
    evicted_ns: int | None = None
    """When that token's block was evicted, if it was."""


@dataclass(slots=True)
class Admission:
    """A request began to run or resumed after preemption. All requests of a beam search do so together. Treat as frozen."""

    request_id: str
    num_tokens: int
    """Prompt and what was generated before."""
    num_hit_tokens: int
    query_len: int
    stop: PrefixStop | None = None
    """Set on the first admission, if somebody keeps request histories."""


class PreemptReason(StrEnum):
    MEMORY = "memory"
    """Another running request lacked blocks."""
    ORDER = "order"
    """A request of a higher class took its place."""


@dataclass(slots=True)
class Preemption:
    """A running request lost its place. Treat as frozen."""

    request_id: str
    reason: PreemptReason
    num_computed_tokens: int
    is_swap: bool = False
    """Its blocks are kept in the tier below the pool."""


@dataclass(slots=True)
class PlanNews:
    """The effect of a plan, or of the lack of one, on requests. Treat as frozen."""

    planned_ns: int
    waits_for: WaitReason
    """As when the step was planned."""
    admissions: Sequence[Admission]
    preemptions: Sequence[Preemption]
    """Before the admissions, except pauses in their favour."""
    set_aside: Sequence[tuple[str, WaitReason]] = ()
    """Requests that let others pass from now on, and why: a long prompt, or a wait for another's."""


@dataclass(slots=True)
class StepCounts:
    """The work of one step, counted while it is planned and committed. Written by the scheduler alone."""

    num_rows: int = 0
    """Without padding rows."""
    num_tokens: int = 0
    """Positions computed, padding included."""
    num_decodes: int = 0
    """Positions of decodes: one each, plus forced tokens, plus padding after a request's end."""
    num_prefill_pairs: int = 0
    """(prefill token, earlier token of its request) pairs: the work of attention."""
    num_sampled_tokens: int = 0
    """Known once the step is committed."""
    num_padding_tokens: int = 0
    num_preemptions: int = 0
    num_swaps: int = 0
    num_recomputed_tokens: int = 0
    """Positions computed again after a preemption: its cost."""
    num_prefix_query_tokens: int = 0
    """Tokens that this step's admissions looked up in the prefix cache."""
    num_prefix_hit_tokens: int = 0
    most_ns: int = 0
    """How long the step should take at most, since others want the machine; 0: no limit."""
    max_prefill_tokens: int = 0
    waits_for: WaitReason = WaitReason.NOTHING
    """As when the step was planned."""
    num_blocks_held: int = 0
    """By requests and adapters while the step is computed, including requests that end with it."""
    num_adapters: int = 0
    num_adapter_rows: int = 0
    sat_out: Sequence[str] = ()
    forced: dict[str, int] = field(default_factory=dict)
    """Request id -> tokens that its grammar forced after the sampled one; included in `num_sampled_tokens`."""
    prefills: list[RowPlan] = field(default_factory=list)
    """Rows of prompts and of recomputed tokens, except a prompt's last token computed alone."""


@dataclass(slots=True)
class StepStats:
    """The state right after a step was committed. Treat as frozen (see `RowPlan`)."""

    step_id: int
    started_ns: int
    """When it was planned, or when the step before it ended if that was later."""
    ended_ns: int
    num_running: int
    num_waiting: int
    num_blocks_total: int
    """Without the null block: free + cached + held."""
    num_blocks_free: int
    """Free blocks without reusable content."""
    num_blocks_cached: int
    """Free blocks with content that a prefix hit may revive."""
    counts: StepCounts = field(default_factory=StepCounts)
    parts_ns: Mapping[str, int] = field(default_factory=dict)
    """Named shares: schedule, execute, commit, and the executor's own parts."""
    void: Collection[str] = ()
    """Ids of rows whose requests had ended before. A new request may have taken the id since."""
    planned_ns: int = 0
    """When it was planned, even if the step before still ran."""
    rows: Sequence[RowPlan] = ()
    waited_ns: int = 0
    """Time in which other models used the machine."""


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
    slo_ttft_ns: int | None = None
    is_beam: bool = False
    """A hypothesis of a beam search: all tokens come at its end."""
    model_wait_ns: int = 0
    grammar_wait_ns: int = 0


@dataclass(slots=True)
class TierStats:
    """Totals of the tier below the KV pool. Written by one thread; readers may see fields a step apart."""

    medium: str = "disk"
    """`disk` or `host`."""
    num_slots: int = 0
    num_present: int = 0
    """Slots with content that can be loaded."""
    is_open: bool = False
    num_spilled_blocks: int = 0
    num_loaded_blocks: int = 0
    """Read intact."""
    num_dropped_blocks: int = 0
    """Not written, because too many were on their way."""
    num_written_bytes: int = 0
    num_read_bytes: int = 0
    failures: dict[str, int] = field(default_factory=dict)
    """Failed blocks by `FailureReason`."""


@dataclass(frozen=True, slots=True)
class AdapterCounts:
    """The adapters in the KV pool at one moment."""

    num_resident: int = 0
    num_running: int = 0
    """Those that running requests use."""
    num_blocks: int = 0
    """Blocks of all of them: held for those in use, cached for the others."""
    num_placements: int = 0
    """Totals since the engine started."""
    num_evictions: int = 0
    numbers: Collection[int] = field(default=(), compare=False)
    """The adapters in the pool: in a running engine a live view, only for `in`."""


@dataclass(frozen=True, slots=True)
class AdapterStats:
    """Adapters in host memory: totals since the start, and what is there now."""

    num_registered: int = 0
    num_in_memory: int = 0
    num_bytes: int = 0
    """Bytes of host memory, packed."""
    num_loads: int = 0
    load_ns: int = 0
    """Time of all successful loads: reading, checking and packing."""
    num_failures: int = 0
    num_evictions: int = 0


class EngineLoad(NamedTuple):
    """How busy the engine is. All 0 before anything is known."""

    num_running: int = 0
    num_waiting: int = 0
    """Submitted and not running: in the inbox, queued or preempted."""
    waits_for: WaitReason = WaitReason.NOTHING
    """The resource that the first queued request lacks."""
    num_prompt_tokens: int = 0
    num_blocks_total: int = 0
    """Without the null block: free + cached + held."""
    num_blocks_free: int = 0
    num_blocks_cached: int = 0
    num_blocks_shared: int = 0
    num_rows_free: int = 0
    """How many more may run at once, given enough blocks."""
    adapters: AdapterCounts = AdapterCounts()

    @property
    def num_blocks_held(self) -> int:
        return self.num_blocks_total - self.num_blocks_free - self.num_blocks_cached
