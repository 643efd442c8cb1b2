"""The checks of the door: each sees one call and says why it may not come in, or nothing. `door` asks them in turn.

A check sees values and returns a value, so a new one is a class of a few lines here and a line in `door`. The check of what a
tenant may use counts for itself, and lies in `tenants`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from penstock.admission.estimates import Margin
from penstock.types.adapter import AdapterRef
from penstock.types.errors import RejectReason, counted

LEAST_SHARE = 0.75
"""A first token that comes sooner than this share of the expected time is luck."""
NEW_SHARE = 0.8
"""Share of the target that new calls may use. Calls that come back as told may use all of it, since they come in bunches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantLimits:
    """The use that one tenant may make of a model; None: no such limit."""

    max_concurrent: int | None = None
    """Requests that may run or wait at once."""
    tokens_per_minute: int | None = None
    """Tokens of prompts and answers."""
    requests_per_minute: int | None = None
    """Calls that come in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """A call at the door: all that is known of it before its prompt is tokenised. Made by the server."""

    num_requests: int = 1
    """Choices that it wants generated."""
    num_chars: int = 0
    """Characters of its prompts, where they are text."""
    num_token_ids: int = 0
    """Tokens of its prompts, where they are token ids."""
    max_new_tokens: int | None = None
    """Limit of one choice; None: the rest of the context."""
    min_new_tokens: int = 1
    """One choice has at least so many, as far as that is known beforehand."""
    tenant: str = ""
    limits: TenantLimits | None = None
    """Its tenant's own; None: those of all."""
    priority: int = 0
    """Lower is served first, if the waiting order looks at it."""
    deadline_ns: int | None = None
    """When its answer must be complete."""
    queue_deadline_ns: int | None = None
    """When it must have begun to run."""
    first_token_deadline_ns: int | None = None
    slo_ttft_ns: int | None = None
    """Its own target of the time to first token; None: the server's alone."""
    claim: bytes | None = None
    """Says that two calls are the same one, sent again; None if that is not known."""
    is_retry: bool = False
    """The client says that it sends this again."""
    arm: str = ""
    """Arm of the A/B test; empty where there is none."""
    adapter: AdapterRef | None = None
    """The adapter that it asks for."""


@dataclass(slots=True, kw_only=True)
class DoorView:
    """One call at the door, and what is expected of it. Nothing in it counts on `max_tokens`.

    Nobody writes to one after it was made; not frozen, as that doubles the time to make one.
    """

    ask: Ask
    now_ns: int
    is_expected: bool
    """It comes back as it was told to: its place has been kept for it, and it may use the room that others must leave."""
    is_idle: bool
    """No request runs, waits or is on the way in."""
    starts_at_once: bool
    """No request waits for a row or for a first token, a row is free, and its adapter is there."""
    num_waiting: int
    """Requests that wait and that the next step can't take, and places kept for other calls that were told to come back."""
    target_ttft_ns: int | None
    """The stricter one of the call's own target and the server's; None: the call may wait as long as it takes."""
    num_prompt_tokens: int
    num_new_tokens: int
    """Predicted length of one choice."""
    ttft_ns: int
    """Expected time from now to the first token; 0 if nothing was measured yet."""
    own_prefill_ns: int
    """The part of `ttft_ns` that is the call's own prompt."""
    step_ns: int
    """Expected time from one token to the next."""
    ns_per_request: int | None
    """Expected time from one end to the next while others wait; None if nothing was measured yet."""
    num_blocks_demanded: int
    """KV blocks of all running requests and of this call at their predicted lengths, with those of their adapters, or the
    blocks that are held already if they are more; and those kept for other calls that were told to come back."""
    num_blocks_own: int
    """Those of this call, and of its adapter if no other has it."""
    num_blocks_freed: int
    """Blocks that the end of one running request frees, mean; >= 1."""
    num_blocks_total: int


@dataclass(frozen=True, slots=True)
class Refusal:
    reason: RejectReason
    detail: str
    """With the numbers, in words for the user."""
    wait_ns: int | None = None
    """Until the check would pass if no other call came; None if that can't be said."""


class Check(Protocol):
    def refusal(self, view: DoorView) -> Refusal | None:
        """Why the call may not come in; None if it may as far as this check is concerned."""
        ...


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Refuses a call whose answer would come too late: the work on it would be lost, for its client and for all others.

    The expected times are means, and an answer may be shorter than predicted, so only a call without a chance is refused: three
    quarters of the expected time to first token count, and the tokens that the answer has at least. An idle server refuses none
    before its deadline: the times are those of steps that ran, and would stay what they are if no call came in any more.
    """

    def refusal(self, view: DoorView) -> Refusal | None:
        ask = view.ask
        ttft_ns = int(LEAST_SHARE * view.ttft_ns)
        wait_ns = max(0, ttft_ns - view.own_prefill_ns)
        total_ns = ttft_ns + (ask.min_new_tokens - 1) * view.step_ns
        for reason, what, deadline_ns, least_ns in (
            (RejectReason.QUEUE_TIMEOUT, "it would wait for its turn", ask.queue_deadline_ns, wait_ns),
            (RejectReason.FIRST_TOKEN_TIMEOUT, "its first token would take", ask.first_token_deadline_ns, ttft_ns),
            (RejectReason.DEADLINE, "its answer would take", ask.deadline_ns, total_ns),
        ):
            if deadline_ns is None:
                continue
            if view.now_ns >= deadline_ns or (not view.is_idle and view.now_ns + least_ns > deadline_ns):
                left_ms = max(0.0, (deadline_ns - view.now_ns) / 1e6)
                detail = f"The deadline can't be met: {what} {least_ns / 1e6:.0f} ms at least, and {left_ms:.0f} ms are left."
                return Refusal(reason, detail)
        return None


@dataclass(frozen=True, slots=True)
class QueueLength:
    """Bounds the waiting queue."""

    max_queue: int
    """Requests that may wait at the same time, >= 1."""

    def refusal(self, view: DoorView) -> Refusal | None:
        num_excess = view.num_waiting + 1 - self.max_queue
        if num_excess <= 0 or view.is_idle:  # places may be kept, but nobody is there
            return None
        wait_ns = None if view.ns_per_request is None else num_excess * view.ns_per_request
        waiting = counted(view.num_waiting, "request is", "requests are")
        detail = f"the queue is full: {waiting} waiting or expected back, at most {self.max_queue} may"
        return Refusal(RejectReason.QUEUE_FULL, detail, wait_ns)


@dataclass(frozen=True, slots=True)
class QueueDelay:
    """Keeps the time to first token: a call that would wait longer than the target is sent away at once.

    The expected time is a mean, so it is multiplied by the worst recent error (`Margin`) before it is compared. A prompt that
    alone takes most of the target is judged by its wait: coming back would not help it.
    """

    margin: Margin

    def refusal(self, view: DoorView) -> Refusal | None:
        target_ns = view.target_ttft_ns
        if target_ns is None or view.is_idle or view.starts_at_once:
            return None
        allowed_ns = target_ns * (1.0 if view.is_expected else NEW_SHARE) / self.margin.factor
        excess_ns = view.ttft_ns - view.own_prefill_ns - max(allowed_ns - view.own_prefill_ns, allowed_ns / 2)
        if excess_ns <= 0:
            return None
        detail = (
            f"the queue's delay is over its target: the first token is expected after {view.ttft_ns / 1e9:.2f} s, or "
            f"{view.ttft_ns * self.margin.factor / 1e9:.2f} s with the worst recent error; the target is {target_ns / 1e9:g} s"
        )
        return Refusal(RejectReason.QUEUE_DELAY, detail, int(excess_ns))


@dataclass(frozen=True, slots=True)
class KvHeadroom:
    """Keeps KV blocks free for growth: the running requests must fit at the lengths that they are expected to reach.

    Only a call with a target of the time to first token is refused: any other waits in the queue, and the scheduler's reserve
    holds it back. Predicted outputs count, not `max_tokens`: nearly all answers end long before it. Blocks that become free are
    kept for the call that was told to come back for them: a large call would never find its blocks while small ones take each.
    """

    headroom: float
    """Share of the blocks that stays free at the predicted lengths; (0, 1)."""

    def refusal(self, view: DoorView) -> Refusal | None:
        headroom = self.headroom / 2 if view.is_expected else self.headroom
        num_excess = view.num_blocks_demanded - (1 - headroom) * view.num_blocks_total
        if view.target_ttft_ns is None or view.is_idle or num_excess <= 0:
            return None
        num_ends = -(-num_excess // view.num_blocks_freed)
        wait_ns = None if view.ns_per_request is None else int(num_ends * view.ns_per_request)
        detail = (
            f"the KV cache's headroom is gone: what runs or is expected back needs {view.num_blocks_demanded} of "
            f"{view.num_blocks_total} blocks with this request, and {self.headroom:.0%} are kept free"
        )
        return Refusal(RejectReason.KV_HEADROOM, detail, wait_ns)
