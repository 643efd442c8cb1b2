"""The engine's reports: one record per step and one per finished request to its observers, and its load when asked."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from penstock.types.plan import RowPlan
from penstock.types.request import FinishReason


class WaitReason(StrEnum):
    """The thing that the first waiting request lacks after a step was planned; the value is what metrics show."""

    NOTHING = ""
    """Nobody waits."""
    ROWS = "rows"
    """As many run as may."""
    TOKENS = "tokens"
    """The step's tokens are taken, by prefills before all."""
    MEMORY = "memory"
    """KV blocks."""
    LOADING = "loading"
    """The rest of its prefix, which the tier below the pool is bringing."""
    PREFIX = "prefix"
    """A part of its prompt that another computes just now."""
    ADAPTER = "adapter"
    """Its adapter, which is being loaded, or as many different ones run as may."""
    GATE = "gate"
    """The batch is closed, or waits for more."""


class PrefixEnd(StrEnum):
    """Why no more of a request's tokens were found in the prefix cache."""

    WHOLE = "whole"
    """All was found that can be: at least the last token is always computed."""
    OFF = "caching off"
    EVICTED = "evicted"
    """It was there, and its memory was given to others."""
    DIFFERS = "differs"
    """The cache goes on with other tokens."""
    ANSWER = "answer differs"
    """The cache goes on with other tokens of an answer that an earlier request generated there."""
    SALT = "different salt or adapter"
    """The same tenant sent the same tokens under another salt, or for another adapter."""
    UNSEEN = "never seen"
    SCORED = "log-probabilities of the prompt"
    """The request asks for them, and they are computed of each token."""


@dataclass(frozen=True, slots=True)
class PrefixStop:
    """Where a lookup in the prefix cache ended, and why."""

    reason: PrefixEnd
    position: int
    """Position of the first token that was not found; for `differs` and `answer differs`, of the first that is another."""
    evicted_ns: int | None = None
    """When the block with that token was evicted, if it was."""


@dataclass(slots=True)
class Admission:
    """A request began to run, or came back after a preemption; of a beam search all do when the first does.

    Nobody writes to one after it was made, as with `StepStats`.
    """

    request_id: str
    num_tokens: int
    """Prompt and what was generated before."""
    num_hit_tokens: int
    query_len: int
    """Length of its first row."""
    stop: PrefixStop | None = None
    """Told when it first runs, if somebody keeps the history that knows."""


class PreemptReason(StrEnum):
    MEMORY = "memory"
    """Another that ran lacked blocks."""
    ORDER = "order"
    """One of a higher class took its place."""


@dataclass(slots=True)
class Preemption:
    """A running request lost its place. Nobody writes to one after it was made."""

    request_id: str
    reason: PreemptReason
    num_computed_tokens: int
    """Its tokens that had KV."""
    is_swap: bool = False
    """They are kept in the tier below the pool."""


@dataclass(slots=True)
class PlanNews:
    """The meaning of a plan, or of the lack of one, for waiting and running requests. Nobody writes to one after it was
    made."""

    planned_ns: int
    waits_for: WaitReason
    """The thing that the first waiting request lacks."""
    admissions: Sequence[Admission]
    preemptions: Sequence[Preemption]
    """They came before the admissions, unless these paused them."""
    set_aside: Sequence[tuple[str, WaitReason]] = ()
    """Requests whose turn it was and that others may pass from now on, and why: it is a long prompt, or waits for another's."""


@dataclass(slots=True)
class StepCounts:
    """The work of one step, in numbers: counted while it is planned and committed, and told with its `StepStats`.

    Written by the scheduler alone. Counts are of requests, tokens and preemptions.
    """

    num_rows: int = 0
    """Rows of requests; without those of padding."""
    num_tokens: int = 0
    """Positions that the step computes, padding included."""
    num_decodes: int = 0
    """Positions of requests that decode: one each, unless tokens were forced or several may be sampled; and of padding after
    the end of a request."""
    num_prefill_pairs: int = 0
    """Pairs of a prefill token and a token before it in its request: the work of attention."""
    num_sampled_tokens: int = 0
    """Tokens that requests got; known when the step is committed."""
    num_padding_tokens: int = 0
    """Positions computed for nobody, as a batch's padding."""
    num_preemptions: int = 0
    num_swaps: int = 0
    """Preemptions of which the tier below the pool keeps the blocks."""
    num_recomputed_tokens: int = 0
    """Positions that had been computed before a preemption and are computed again: what it costs."""
    num_prefix_query_tokens: int = 0
    """Tokens looked up in the prefix cache by this step's admissions."""
    num_prefix_hit_tokens: int = 0
    most_ns: int = 0
    """How long it should take at most, since others want the machine; 0: as long as it likes."""
    max_prefill_tokens: int = 0
    """Tokens that the budget left to prompts; under `itl` the state of its controller."""
    waits_for: WaitReason = WaitReason.NOTHING
    """The thing that the first waiting request lacked when the step was planned."""
    num_blocks_held: int = 0
    """Blocks that requests and their adapters hold while the step is computed: also of requests that end with it."""
    num_adapters: int = 0
    """Different adapters that rows have."""
    num_adapter_rows: int = 0
    """Rows with an adapter."""
    sat_out: Sequence[str] = ()
    """Ids of running requests without a row, since their masks had taken long and others would have waited for the next."""
    forced: dict[str, int] = field(default_factory=dict)
    """Request id -> tokens that its grammar forced after the sampled one; counted among `num_sampled_tokens`."""
    prefills: list[RowPlan] = field(default_factory=list)
    """Rows of prompts, and of tokens that are computed again; not the last token of a prompt if it is computed alone."""


@dataclass(slots=True)
class StepStats:
    """State right after one step was committed. Counts are of requests, tokens and blocks.

    Nobody writes to one after it was made; not frozen for the reason in `RowPlan`.
    """

    step_id: int
    started_ns: int
    """When it was planned; if that was while the step before it ran, when that one ended."""
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
    """Named shares of the step: schedule, execute, commit, and the executor's own parts."""
    void: Collection[str] = ()
    """Ids of rows whose requests had ended before the step did. A new request may have taken such an id since."""
    planned_ns: int = 0
    """The instant for which it was planned, also if that was while the step before it ran."""
    rows: Sequence[RowPlan] = ()
    """Its plan's."""
    waited_ns: int = 0
    """The part of it in which the machine did the work of other models."""


@dataclass(slots=True)
class RequestStats:
    """The life of one request, told at its end. Nobody writes to one after it was made, as with `StepStats`."""

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
    """A hypothesis of a beam search: its tokens came all at once, at its end."""
    arm: str = ""
    """As in the request; so is the next."""
    model_wait_ns: int = 0
    grammar_wait_ns: int = 0


@dataclass(slots=True)
class TierStats:
    """Counts of the tier below the KV pool so far. Written by one thread, read by any; its parts may be a step apart."""

    medium: str = "disk"
    """Where it is: `disk` or `host`."""
    num_slots: int = 0
    num_present: int = 0
    """Slots with content that can be loaded."""
    is_open: bool = False
    num_spilled_blocks: int = 0
    """Written."""
    num_loaded_blocks: int = 0
    """Read, and sound."""
    num_dropped_blocks: int = 0
    """Not written, since too many were on their way."""
    num_written_bytes: int = 0
    num_read_bytes: int = 0
    failures: dict[str, int] = field(default_factory=dict)
    """Blocks by reason (`FailureReason`)."""


@dataclass(frozen=True, slots=True)
class AdapterCounts:
    """The adapters in the KV pool at a moment."""

    num_resident: int = 0
    """Adapters in the pool."""
    num_running: int = 0
    """Those of them that running requests have."""
    num_blocks: int = 0
    """Blocks of all of them. Those of adapters that run count as held, the others as cached."""
    num_placements: int = 0
    """Since the engine began, as below: how often an adapter was put into the pool."""
    num_evictions: int = 0
    numbers: Collection[int] = field(default=(), compare=False)
    """The adapters in the pool. A running engine gives a view that goes on to change, to be asked `in` alone."""


@dataclass(frozen=True, slots=True)
class AdapterStats:
    """The adapters beside the KV pool: counts since the start, and what is there now."""

    num_registered: int = 0
    num_in_memory: int = 0
    num_bytes: int = 0
    """Bytes of host memory that adapters take, packed."""
    num_loads: int = 0
    load_ns: int = 0
    """Time of all loads that ended well: of reading, checking and packing."""
    num_failures: int = 0
    num_evictions: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    """How busy the engine is at a moment. Counts of requests, tokens and blocks; all 0 before anything is known."""

    num_running: int = 0
    num_waiting: int = 0
    """Submitted and not running: in the inbox, queued or preempted."""
    waits_for: WaitReason = WaitReason.NOTHING
    """The thing that the first queued request lacks."""
    num_prompt_tokens: int = 0
    """Prompt tokens of all requests in flight, waiting ones included."""
    num_blocks_total: int = 0
    """Without the null block: free + cached + held."""
    num_blocks_free: int = 0
    num_blocks_cached: int = 0
    num_blocks_shared: int = 0
    """Held by several requests."""
    num_rows_free: int = 0
    """How many more may run at the same time, if there are blocks for them."""
    adapters: AdapterCounts = AdapterCounts()

    @property
    def num_blocks_held(self) -> int:
        """By requests, or by their adapters."""
        return self.num_blocks_total - self.num_blocks_free - self.num_blocks_cached
