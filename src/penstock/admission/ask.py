"""Data types: a call that asks to be admitted, the estimates that decide it, and a refusal."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.types.adapter import AdapterRef
from penstock.types.errors import RejectReason
from penstock.types.tenant_limits import TenantLimits


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """The terms of a call that admission reads."""

    limits: TenantLimits | None = None
    """Limits of the call's tenant. None: the defaults."""
    is_limited: bool = True
    """False: the call counts towards no limit of its tenant."""
    priority: int = 0
    """Lower is served first, if the scheduling order reads priorities."""
    background: bool = False
    """As `Request.background`. Clients cannot set it."""
    deadline_ns: int | None = None
    queue_deadline_ns: int | None = None
    first_token_deadline_ns: int | None = None
    slo_ttft_ns: int | None = None
    """None means the server's."""
    is_retry: bool = False
    """The client says that this request is a retry."""
    returns: bool = True
    """False if a call refused for the load is not repeated: another model is asked next, or the server itself made the call.

    A tenant's limit refuses a call for all models, so the client repeats it in any case.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask(Conditions):
    """A client's call that asks to be admitted, before its prompt is tokenised."""

    num_requests: int = 1
    num_chars: int = 0
    num_token_ids: int = 0
    max_prompt_tokens: int | None = None
    """Longer prompts are truncated, to this many tokens all together. None: they are not truncated."""
    leaves_out_files: bool = False
    """Files before the prompt are left out if they do not fit."""
    max_new_tokens: int | None = None
    """Limit of each choice. None: the rest of the context."""
    min_new_tokens: int = 1
    tenant: str = ""
    key: str = ""
    """Name of the client's API key. Metrics count refusals by it."""
    claim: bytes | None = None
    """Equal for all retries of the same call. None if unknown."""
    adapter: AdapterRef | None = None


@dataclass(slots=True, kw_only=True)
class DoorView:
    """A call and all estimates that decide whether it is admitted. Treat as frozen."""

    ask: Ask
    now_ns: int
    is_expected: bool
    """The call returns at its `Retry-After` time, so it may use room kept for such calls."""
    is_idle: bool
    starts_at_once: bool
    """A row is free, no request waits for a row or a first token, and the call's adapter is loaded."""
    num_waiting: int
    """Waiting requests and places kept for returning calls, less the free rows."""
    target_ttft_ns: int | None
    """The smaller of the call's and the server's targets. None: no target."""
    num_prompt_tokens: int
    num_new_tokens: int
    ttft_ns: int
    """Expected time from now to the first token; 0 before any measurement."""
    own_prefill_ns: int
    token_ns: int
    """Expected time between two tokens."""
    ns_per_request: int | None
    """Expected time between two ends while others wait; None before any measurement."""
    num_blocks_demanded: int
    """Predicted KV blocks of running requests (at least those held now) and of this call, plus blocks kept for other calls."""
    num_blocks_own: int
    """Predicted KV blocks of this call, plus its adapter's if no other request uses it."""
    num_blocks_freed: int
    """Mean blocks freed by the end of one running request, >= 1."""
    num_blocks_total: int


@dataclass(frozen=True, slots=True)
class Refusal:
    reason: RejectReason
    detail: str
    wait_ns: int | None = None
    """Time until the check would pass if no other call came; None if unknown."""
