"""One sequence being served: what it asked for and how far it has come.

Owned by the scheduler from `Add` until its finish event; `sched/progress.py` alone writes the progress fields.
`n > 1` is n requests that share a prompt.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum

from penstock.types.adapter import BASE, AdapterRef
from penstock.types.plan import scored_positions
from penstock.types.result import TokenLogprobs
from penstock.types.sampling import Matcher, SamplingParams

ARM_A, ARM_B = "A", "B"
"""Arms of an A/B test: requests as the server's settings say, and those under the other settings."""


class RequestStatus(IntEnum):
    WAITING = 0
    RUNNING = 1
    PREEMPTED = 2
    FINISHED = 3


class FinishReason(IntEnum):
    """Why a request ended. OpenAI's words for these live in `serve` alone."""

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
    """Id that the requests of one call share: the beams of a search, the texts of a list. Empty: it is alone."""
    arm: str = ""
    """Arm of the A/B test that it belongs to, `ARM_A` or `ARM_B`; empty where there is no test."""
    priority: int = 0
    """Lower is served first (as in vLLM)."""
    deadline_ns: int | None = None
    """When it must have ended; this and the two below: if not, it is aborted."""
    queue_deadline_ns: int | None = None
    """When its first step must have begun."""
    first_token_deadline_ns: int | None = None
    slo_ttft_ns: int | None = None
    """Target of its time to first token; missing a target is counted and has no consequence."""
    slo_itl_ns: int | None = None
    """Target of its inter-token latency, kept if 99 % of its gaps are no longer."""
    tenant: str = ""
    cache_salt: bytes = b""
    """Requests share cached prefixes only with requests of the same salt."""
    conversation: bytes = b""
    """Name of the conversation that the client says it belongs to, hashed with the tenant; empty: the client says nothing."""
    predicted_new_tokens: int | None = None
    """The output's length as a policy may know it; never the true one."""
    matcher: Matcher | None = None
    """Matcher of the grammar that the answer follows; there is one if and only if `sampling.follows_grammar`."""
    second_at: int = 0
    """Position of the first token of a pair's second text; 0: the prompt is one text."""
    model_wait_ns: int = 0
    """The time after its arrival in which it waited for its model to be loaded."""
    grammar_wait_ns: int = 0
    """The time before it was queued in which it waited for its grammar to be compiled."""
    adapter: AdapterRef | None = None
    """The adapter that its tokens are computed with; None: the model as it is."""

    # Progress: written by `sched/progress.py` alone.
    status: RequestStatus = RequestStatus.WAITING
    output_token_ids: list[int] = field(default_factory=list)
    num_tokens: int = field(init=False)
    """Prompt + generated so far. A field, since it is read for every row of every step."""
    max_total_tokens: int = 0
    """`num_tokens` at which it has reached its limit; 0 before it was queued."""
    num_computed_tokens: int = 0
    """Tokens whose KV is present and committed; moves only in commit, but while a step is planned with one in flight."""
    num_inflight_tokens: int = 0
    """Tokens scheduled and not yet committed; added in schedule, taken off in commit."""
    num_pending_samples: int = 0
    """Tokens among `num_tokens` whose value is not known yet. 0, but while a step is planned with one in flight."""
    forced_from: int = 0
    """`num_tokens` before its grammar last forced tokens that were appended at once; 0: not since it was admitted."""
    num_cached_tokens: int = 0
    """Tokens that the first admission found in the prefix cache (for `usage`)."""
    num_preemptions: int = 0
    max_computed_tokens: int = 0
    """Most that `num_computed_tokens` was when it was preempted: up to there, tokens are computed again."""
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    """The entries of its prompt's tokens in order, without the first, if `sampling.prompt_logprobs` asks for them."""
    first_scheduled_ns: int | None = None
    first_token_ns: int | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    """The stop token id or stop string that ended it, if one did."""

    def __post_init__(self) -> None:
        self.num_tokens = len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def num_behind(self) -> int:
        """Tokens that it has and that are not computed: 1 for a decode."""
        return self.num_tokens - self.num_computed_tokens

    @property
    def is_jumping(self) -> bool:
        """All that it is behind, but the first token, was forced by its grammar; asked where that is more than one token."""
        return 0 < self.forced_from <= self.num_computed_tokens + 1

    @property
    def adapter_number(self) -> int:
        """The number of its adapter, as plans name it."""
        return BASE if self.adapter is None else self.adapter.number

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def is_scored(self) -> bool:
        """Nothing of its prompt's log-probabilities is left to tell, so it may pass over what others have computed."""
        return self.sampling.prompt_logprobs is None or len(self.prompt_logprobs) >= self.num_prompt_tokens - 1

    def positions_to_score(self, context_len: int, query_len: int) -> range:
        """Positions of a step's row whose logits tell of its prompt; empty unless it asks for that."""
        if self.sampling.prompt_logprobs is None:
            return range(0)
        return scored_positions(context_len, query_len, self.num_prompt_tokens, len(self.prompt_logprobs))
