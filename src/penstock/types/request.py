"""One sequence being served. The scheduler owns it from `Add` to its finish event."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

from penstock.types.adapter import BASE, AdapterRef
from penstock.types.plan import scored_positions
from penstock.types.result import TokenLogprobs
from penstock.types.sampling import Matcher, SamplingParams


class Owner(NamedTuple):
    """The API key and tenant of a request. Only a client with the same key and tenant can see and cancel it."""

    key: str = ""
    """Short name of the API key. Empty if the server requires none."""
    tenant: str = ""


class WaitTimes(NamedTuple):
    """How long a request waited for each of these between its arrival and the queue, in ns."""

    route: int = 0
    """Time until its route chose a model, including a discarded answer of a cascade's small model."""
    pipeline: int = 0
    """Time in which its pipeline searched for documents."""
    model: int = 0
    """Time in which its model was loaded."""
    grammar: int = 0
    """Time in which its grammar was compiled."""


NO_WAITS = WaitTimes()


class RequestStatus(IntEnum):
    WAITING = 0
    RUNNING = 1
    PREEMPTED = 2
    FINISHED = 3


class FinishReason(IntEnum):
    STOP = 0
    LENGTH = 1
    ABORT = 2
    ERROR = 3
    REJECTED = 4


@dataclass(slots=True, eq=False)
class Request:
    # Identity: written once, by whoever makes the request.
    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    arrival_ns: int
    parent_id: str = ""
    """Shared by the requests of one call: the beams of a search, the texts of a list."""
    shares_prompt: bool = False
    """Another request of its call counts their common prompt, for limits and metrics: it is a later choice or beam."""
    priority: int = 0  # lower is served first (as in vLLM)
    background: bool = False
    """Runs in what other requests leave, whatever their classes."""
    deadline_ns: int | None = None
    """The request is aborted if it has not ended by then."""
    queue_deadline_ns: int | None = None  # for the first step of any request in `call` to begin
    first_token_deadline_ns: int | None = None  # for the first token of any request in `call`
    call: Sequence[Request] = field(default=(), repr=False)
    """The requests that share its limits of waiting, itself included, until it ends. Empty: it is alone."""
    slo_itl_ns: int | None = None
    """Target of its inter-token latency: 99 % of its gaps should be no longer. A miss is only counted."""
    tenant: str = ""
    key: str = ""  # name of the client's API key, for metrics
    cache_salt: bytes = b""  # cached prefixes are shared only among requests of the same salt
    conversation: bytes = b""  # the conversation that the client named, hashed with the tenant
    predicted_new_tokens: int | None = None  # length of the whole answer, predicted once, that policies see
    matcher: Matcher | None = None  # set if and only if `sampling.follows_grammar`
    second_at: int = 0  # as in `AdmitRow`
    waits: WaitTimes = NO_WAITS
    adapter: AdapterRef | None = None

    # Progress: written by `sched/progress.py` alone.
    status: RequestStatus = RequestStatus.WAITING
    output_token_ids: list[int] = field(default_factory=list)
    num_tokens: int = field(init=False)
    """Prompt + generated. A field, since every step reads it for every row."""
    max_total_tokens: int = 0  # limit of `num_tokens`; 0 before it is queued
    num_computed_tokens: int = 0
    """Tokens with committed KV. Changes only in commit, or temporarily while a step is planned ahead (`sched/ahead.py`)."""
    num_inflight_tokens: int = 0  # tokens scheduled and not yet committed
    num_pending_samples: int = 0
    """Tokens counted in `num_tokens` whose value is not known yet, while a step is planned ahead."""
    forced_from: int = 0  # `num_tokens` before its grammar last forced tokens; 0: not since it was admitted
    num_cached_tokens: int = 0  # tokens that the first admission found in the prefix cache
    num_preemptions: int = 0
    max_computed_tokens: int = 0
    """The most that `num_computed_tokens` was at a preemption. Tokens up to there are recomputed."""
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    """Log-probabilities of the prompt's tokens after the first, if `sampling.prompt_logprobs` asks for them."""
    first_scheduled_ns: int | None = None
    first_token_ns: int | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None  # the stop token id or stop string that ended it

    def __post_init__(self) -> None:
        self.num_tokens = len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def num_rows(self) -> int:
        """Rows in a step: one, or one for each beam of its search."""
        return 1 if self.sampling.beams is None else self.sampling.beams.width

    @property
    def num_behind(self) -> int:
        """Tokens not yet computed: 1 for a request in decode."""
        return self.num_tokens - self.num_computed_tokens

    @property
    def is_jumping(self) -> bool:
        """Whether the grammar forced all tokens that are left to compute, except the first. Valid only if `num_behind` > 1."""
        return 0 < self.forced_from <= self.num_computed_tokens + 1

    @property
    def is_decode(self) -> bool:
        """Whether only its last token, and tokens that its grammar forced, are left to compute."""
        return self.num_behind == 1 or self.is_jumping

    @property
    def adapter_number(self) -> int:
        return BASE if self.adapter is None else self.adapter.number

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def lacks_prompt_logprobs(self) -> bool:
        """True while log-probabilities of the prompt are left to compute. Until then, cached tokens can't be skipped."""
        return self.sampling.prompt_logprobs is not None and len(self.prompt_logprobs) < self.num_prompt_tokens - 1

    def positions_to_score(self, context_len: int, query_len: int) -> range:
        """Return the row's `scored_positions`, empty if the request does not ask for them."""
        if self.sampling.prompt_logprobs is None:
            return range(0)
        return scored_positions(context_len, query_len, self.num_prompt_tokens, len(self.prompt_logprobs))
