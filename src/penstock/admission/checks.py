"""The checks of admission, in the order in which `door` runs them: each returns why a call may not come in, or None."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.types.adapter import AdapterRef
from penstock.types.errors import RejectReason, counted

LEAST_SHARE = 0.75
"""No first token is assumed to come sooner than this share of its expected time."""
NEW_SHARE = 0.8
"""Share of the target that a new call may wait. A call that returns at its `Retry-After` time may wait all of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantLimits:
    max_concurrent: int | None = None
    tokens_per_minute: int | None = None
    requests_per_minute: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """A call that asks for admission, before its prompt is tokenised."""

    num_requests: int = 1
    num_chars: int = 0
    num_token_ids: int = 0
    max_new_tokens: int | None = None
    """Limit of each choice. None: the rest of the context."""
    min_new_tokens: int = 1
    tenant: str = ""
    limits: TenantLimits | None = None
    """Limits of the call's tenant. None: the defaults."""
    priority: int = 0
    """Lower is served first, if the scheduling order reads priorities."""
    deadline_ns: int | None = None
    queue_deadline_ns: int | None = None
    first_token_deadline_ns: int | None = None
    slo_ttft_ns: int | None = None
    claim: bytes | None = None
    """Equal for all retries of the same call. None if unknown."""
    is_retry: bool = False
    adapter: AdapterRef | None = None


@dataclass(slots=True, kw_only=True)
class DoorView:
    """A call and the estimates that decide its admission. Treat as frozen."""

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
    step_ns: int
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


def check_deadlines(view: DoorView) -> Refusal | None:
    """Refuse a call that can't meet one of its deadlines.

    The estimates are optimistic. An idle server refuses a call only once its deadline has passed.
    """
    ask = view.ask
    ttft_ns = int(LEAST_SHARE * view.ttft_ns)
    wait_ns = max(0, ttft_ns - view.own_prefill_ns)
    total_ns = ttft_ns + (ask.min_new_tokens - 1) * view.step_ns
    for reason, what, deadline_ns, least_ns in (
        (RejectReason.QUEUE_TIMEOUT, "the wait", ask.queue_deadline_ns, wait_ns),
        (RejectReason.FIRST_TOKEN_TIMEOUT, "the first token", ask.first_token_deadline_ns, ttft_ns),
        (RejectReason.DEADLINE, "the whole answer", ask.deadline_ns, total_ns),
    ):
        if deadline_ns is None:
            continue
        if view.now_ns >= deadline_ns or (not view.is_idle and view.now_ns + least_ns > deadline_ns):
            left_ms = max(0.0, (deadline_ns - view.now_ns) / 1e6)
            least = f"{what} would take at least {least_ns / 1e6:.0f} ms"
            return Refusal(reason, f"The deadline can't be met: {least}, and {left_ms:.0f} ms are left.")
    return None


def check_queue_length(view: DoorView, max_queue: int) -> Refusal | None:
    num_excess = view.num_waiting + 1 - max_queue
    if num_excess <= 0 or view.is_idle:  # places may be kept, but no request is here
        return None
    wait_ns = None if view.ns_per_request is None else num_excess * view.ns_per_request
    waiting = counted(view.num_waiting, "request is", "requests are")
    detail = f"the queue is full: {waiting} waiting or expected back, at most {max_queue} may"
    return Refusal(RejectReason.QUEUE_FULL, detail, wait_ns)


def check_queue_delay(view: DoorView, margin: float) -> Refusal | None:
    """Refuse a call if its first token is expected later than the target.

    `margin` is the worst recent error of that expectation. Half of the allowed time is for waiting, however long the prompt
    takes.
    """
    target_ns = view.target_ttft_ns
    if target_ns is None or view.is_idle or view.starts_at_once:
        return None
    allowed_ns = target_ns * (1.0 if view.is_expected else NEW_SHARE) / margin
    excess_ns = view.ttft_ns - view.own_prefill_ns - max(allowed_ns - view.own_prefill_ns, allowed_ns / 2)
    if excess_ns <= 0:
        return None
    detail = (
        f"the queue's delay is over its target: the first token is expected after {view.ttft_ns / 1e9:.2f} s, or "
        f"{view.ttft_ns * margin / 1e9:.2f} s with the worst recent error; the target is {target_ns / 1e9:g} s"
    )
    return Refusal(RejectReason.QUEUE_DELAY, detail, int(excess_ns))


def check_kv_headroom(view: DoorView, headroom: float) -> Refusal | None:
    """Refuse a call if less than `headroom`, a share in (0, 1), of the KV blocks would stay free at predicted lengths.

    Only a call with a target is refused. Freed blocks are kept for its return: otherwise small calls would keep taking them.
    """
    num_excess = view.num_blocks_demanded - (1 - (headroom / 2 if view.is_expected else headroom)) * view.num_blocks_total
    if view.target_ttft_ns is None or view.is_idle or num_excess <= 0:
        return None
    num_ends = -(-num_excess // view.num_blocks_freed)
    wait_ns = None if view.ns_per_request is None else int(num_ends * view.ns_per_request)
    detail = (
        f"the KV cache's headroom is gone: what runs or is expected back needs {view.num_blocks_demanded} of "
        f"{view.num_blocks_total} blocks with this request, and {headroom:.0%} are kept free"
    )
    return Refusal(RejectReason.KV_HEADROOM, detail, wait_ns)
