"""Admission control: accepts or refuses a call before any costly work, by estimates (`estimates`) and checks.

The expected time to first token is that of the call's own prompt plus the longest of three waits that overlap: for earlier
requests to end, for their prompts, for the adapter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice

from penstock.admission.ask import Ask, DoorView, Refusal
from penstock.admission.estimates import Backlog, DrainMeter, Entry, Lengths, Margin, Pace, Promise, Promises
from penstock.admission.tenants import Demand, Held, Tenants
from penstock.types.adapter import AdapterOutlook, AdapterRef, AdapterSource
from penstock.types.errors import TENANT_REASONS, Rejected, RejectReason, counted
from penstock.types.plan import Capacity
from penstock.types.request import FinishReason, Request
from penstock.types.stats import EngineLoad, RequestStats, StepStats, WaitReason
from penstock.types.tenant_limits import UNLIMITED, TenantLimits

DEFAULT_KV_HEADROOM = 0.2
MIN_RETRY_AFTER_S = 1.0
MAX_RETRY_AFTER_S = 600.0
DEFAULT_RETRY_AFTER_S = 10.0
"""`Retry-After` before anything was measured."""
UNAVAILABLE_RETRY_AFTER_S = 5.0
"""`Retry-After` while the engine takes no requests: about as long as its restart takes. If it drains instead, another server
may answer by then."""

LEAST_SHARE = 0.75
"""No first token is assumed to come sooner than this share of its expected time."""
NEW_SHARE = 0.8
"""Share of the target that a new call may wait. A call that returns at its `Retry-After` time may wait all of it."""

_UNAVAILABLE_DETAILS = {
    RejectReason.DRAINING: "the model is being unloaded, or the server is shutting down",
    RejectReason.UNAVAILABLE: "no engine is running that could answer",
}
_KEEPS_PLACES = (RejectReason.QUEUE_FULL, RejectReason.QUEUE_DELAY, RejectReason.KV_HEADROOM)
"""Refusals after which a place is kept for the call's return."""
_NEEDS_END = (WaitReason.ROWS, WaitReason.MEMORY, WaitReason.GATE)
"""Reasons to wait that last until a running request ends."""
_NO_OUTLOOK = AdapterOutlook()


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionLimits:
    max_queue: int = 1024
    """Requests that may wait at once, >= 1."""
    slo_ttft_ns: int | None = None
    """Target for the first token. None: calls are not refused for a long queue."""
    kv_headroom: float = DEFAULT_KV_HEADROOM
    """Share of the KV blocks kept free for growth, [0, 1)."""
    tenant: TenantLimits = UNLIMITED
    """Limits of tenants that have none of their own."""

    def __post_init__(self) -> None:
        if self.max_queue < 1:
            raise ValueError(f"max_queue ({self.max_queue}) must be at least 1")


@dataclass(frozen=True, slots=True)
class Entering:
    """An admitted call whose requests are not all submitted yet. `Admission` makes it."""

    view: DoorView
    held: Held | None
    """The call in its tenant's account, if limits apply to it."""


class Admission:
    """Admission control of one engine. Also an observer, called on the engine's thread.

    The life of a call: `decide`, `add_requests`, `end_entering`, then `on_finish` for each request.
    """

    def __init__(
        self,
        limits: AdmissionLimits,
        capacity: Capacity,
        *,
        reads_priority: bool = False,
        tenants: Tenants | None = None,
        adapters: AdapterSource | None = None,
        max_adapters: int = 0,
    ) -> None:
        """`reads_priority`: the scheduler serves requests by priority. `tenants`: usage counted by an earlier engine of the
        same model. `max_adapters`: adapters that can run at once."""
        self.limits = limits
        self._reads_priority = reads_priority
        self.on_call: Callable[[int, int], None] = lambda *_: None
        """Called with the time of each call and its number of requests, except for returns of refused calls."""
        self.num_engines = 1
        """Engines that share the requests, and so compute waiting prompts in parallel."""
        self.drain = DrainMeter()
        self.pace = Pace(capacity.max_step_tokens)
        self.lengths = Lengths()
        self.margin = Margin()
        self._capacity = capacity
        self._adapters = adapters
        self._max_adapters = max_adapters
        self._max_model_len = capacity.max_model_len
        self._backlog = Backlog()
        self._promises = Promises()
        self._tenants = tenants or Tenants(limits.tenant)
        self._waits_for = WaitReason.NOTHING
        self._num_entering = 0
        """Requests of admitted calls that are not submitted yet."""
        self._num_entering_tokens = 0

    # For the event loop.

    def decide(self, ask: Ask, load: EngineLoad, now_ns: int, *, refuses_with: RejectReason | None = None) -> Entering:
        """Admit a call, and keep places in the queue for its requests until `end_entering`. Raises `Rejected`.

        Room for one of its requests is enough. `refuses_with`: DRAINING or UNAVAILABLE if the engine takes no requests.
        Background calls are always admitted, and no other call waits for them.
        """
        if refuses_with is not None:
            raise Rejected(refuses_with, _UNAVAILABLE_DETAILS[refuses_with], retry_after_s=UNAVAILABLE_RETRY_AFTER_S)
        if ask.background:
            return Entering(self._view(ask, load, now_ns, is_expected=True), None)
        promise = self._promises.find(ask.claim, is_retry=ask.is_retry, now_ns=now_ns)
        view = self._view(ask, load, now_ns, is_expected=promise is not None and promise.due_ns <= now_ns)
        is_limited = ask.is_limited and (self._tenants.has_default or ask.limits is not None)
        refusal = (
            check_deadlines(view)
            or (self._tenants.refusal(_demand(view)) if is_limited else None)
            or check_queue_length(view, self.limits.max_queue)
            or check_queue_delay(view, self.margin.factor)
            or (check_kv_headroom(view, self.limits.kv_headroom) if self.limits.kv_headroom else None)
        )
        if promise is None and (refusal is None or refusal.reason not in TENANT_REASONS):
            self.on_call(now_ns, ask.num_requests)
        if refusal is not None:
            raise self._rejected(refusal, view, promise)
        if promise is not None:
            self._promises.settle(promise)
        self._num_entering += ask.num_requests
        self._num_entering_tokens += view.num_prompt_tokens
        return Entering(view, self._tenants.hold(_demand(view)) if is_limited else None)

    def add_requests(self, entering: Entering, requests: Sequence[Request], now_ns: int) -> None:
        """Count all of an admitted call's requests before they are submitted."""
        view = entering.view
        if not (view.ask.num_token_ids or view.ask.leaves_out_files):
            num_tokens, most = sum([_num_prompt_tokens(request) for request in requests]), view.ask.max_prompt_tokens
            if most is None or max(num_tokens, view.num_prompt_tokens) < most:  # nothing was cut off
                self.lengths.on_prompt(view.ask.num_chars, num_tokens)
        self.add_some_requests(entering, requests, now_ns)

    def add_some_requests(self, entering: Entering, requests: Sequence[Request], now_ns: int, *, is_first: bool = True) -> None:
        """Count some of an admitted call's requests before they are submitted. `is_first`: the call's first is one of them.
        The caller reports text lengths to `lengths.on_prompt`."""
        view = entering.view
        if view.ask.background:
            return
        for idx, request in enumerate(requests):
            num_new_tokens = min(view.num_new_tokens, request.sampling.max_tokens)
            num_prompt_tokens = _num_prompt_tokens(request)
            num_prefill_tokens = round(self.lengths.computed_share * num_prompt_tokens)
            is_known = is_first and not idx and request.sampling.beams is None  # beams send all tokens at their end
            expected_ttft_ns = view.ttft_ns + now_ns - request.arrival_ns if is_known else 0
            num_blocks = self._num_blocks(num_prefill_tokens + num_new_tokens)
            entry = Entry(num_prefill_tokens, num_blocks, expected_ttft_ns, request.priority)
            if request.adapter is not None:
                entry.adapter = request.adapter.number
                entry.num_adapter_blocks = self._outlook(request.adapter).likely_pages
            self._backlog.enter(request.request_id, entry)
            if entering.held is not None:
                self._tenants.enter(entering.held, request.request_id, num_prompt_tokens + num_new_tokens, now_ns)

    def end_entering(self, entering: Entering) -> None:
        """Stop counting the call as entering: its requests were submitted, or it failed."""
        if entering.view.ask.background:
            return
        self._num_entering -= entering.view.ask.num_requests
        self._num_entering_tokens -= entering.view.num_prompt_tokens
        if entering.held is not None:
            self._tenants.release(entering.held)

    def forget(self, request_ids: Sequence[str]) -> None:
        """Stop counting requests that ended without a report from the engine. Idempotent."""
        for request_id in request_ids:
            self._backlog.on_finish(request_id)
            self._tenants.forget(request_id)

    def max_len(self, adapter: AdapterRef | None) -> int:
        """Return how many tokens (prompt and output) a request can have with this adapter, which takes KV blocks too."""
        if adapter is None:
            return self._max_model_len
        num_blocks = self._capacity.num_blocks - 1 - self._outlook(adapter).num_pages
        if self._capacity.most_blocks(self._max_model_len - 1) <= num_blocks:
            return self._max_model_len
        num_blocks -= self._capacity.num_state_blocks
        return max(0, num_blocks) * self._capacity.block_size + 1  # the last token is never computed

    # For the engine thread.

    def on_step(self, stats: StepStats) -> None:
        self.drain.on_step(stats)
        self.pace.on_step(stats)
        self._waits_for = stats.counts.waits_for

    def on_tokens(self, first: Sequence[Request], gaps_ns: Sequence[int]) -> None:
        del gaps_ns
        for request in first:
            entry = self._backlog.on_first_token(request.request_id)
            if entry is not None and request.first_token_ns is not None and self._is_significant(entry):
                self.margin.observe(entry.expected_ttft_ns, request.first_token_ns - request.arrival_ns)

    def on_itl(self, num_gaps: int, num_late: int) -> None: ...

    def on_finish(self, stats: RequestStats) -> None:
        if stats.background:
            return
        self.drain.on_finish(stats)
        self._backlog.on_finish(stats.request_id)
        num_prompt_tokens = _num_prompt_tokens(stats)
        if self._tenants.entered:
            # A request cut off before it began has cost nothing.
            num_tokens = stats.num_generated_tokens + (0 if stats.first_scheduled_ns is None else num_prompt_tokens)
            self._tenants.on_finish(stats.request_id, num_tokens, stats.ended_ns - stats.arrival_ns)
        if stats.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
            self.lengths.on_end(num_prompt_tokens, stats.num_cached_tokens, stats.num_generated_tokens)

    def _is_significant(self, entry: Entry) -> bool:
        """Return whether the expected time to first token was long enough for its error to matter."""
        target_ns = self.limits.slo_ttft_ns
        return target_ns is not None and entry.expected_ttft_ns * self.margin.factor >= target_ns / 2

    # What is expected.

    def _view(self, ask: Ask, load: EngineLoad, now_ns: int, *, is_expected: bool) -> DoorView:
        # A longer prompt is refused or cut once its tokens are counted, whatever the load.
        computed_share = self.lengths.computed_share
        most = ask.num_requests * self._max_model_len
        if ask.max_prompt_tokens is not None:
            most = min(most, ask.max_prompt_tokens)
        num_prompt_tokens = min(ask.num_token_ids + self.lengths.prompt_tokens(ask.num_chars), most)
        num_new_tokens = self.lengths.new_tokens(ask.min_new_tokens, ask.max_new_tokens)
        num_ahead = load.num_waiting + self._num_entering
        num_kept = 0 if is_expected else self._promises.num_due(now_ns)
        own_prefill_ns = self.pace.prefill_ns(computed_share * num_prompt_tokens)
        num_own_tokens = round(computed_share * num_prompt_tokens) + ask.num_requests * num_new_tokens
        num_blocks_own = self._num_blocks(num_own_tokens, ask.num_requests)
        num_blocks_kept = 0 if is_expected else self._promises.num_needed_now(now_ns)
        num_blocks_demanded = self._num_blocks_demanded(load)
        load_ns = 0
        if ask.adapter is not None:
            outlook = self._outlook(ask.adapter)
            load_ns = 0 if ask.adapter.number in load.adapters.numbers else outlook.load_ns
            if ask.adapter.number not in self._adapter_blocks(load):
                num_blocks_own += outlook.likely_pages
        ns_per_request = self._ns_per_request(load, now_ns)
        return DoorView(
            ask=ask,
            now_ns=now_ns,
            is_expected=is_expected,
            is_idle=load.num_running + num_ahead == 0,
            starts_at_once=num_ahead + self._num_prefill_tokens + load_ns == 0 and load.num_rows_free > 0,
            num_waiting=max(0, num_ahead + num_kept - load.num_rows_free),
            target_ttft_ns=self._target_ttft_ns(ask),
            num_prompt_tokens=num_prompt_tokens,
            num_new_tokens=num_new_tokens,
            ttft_ns=max(load_ns, self._expect_ns(ask, load, ns_per_request or 0, num_kept)) + own_prefill_ns,
            own_prefill_ns=own_prefill_ns,
            token_ns=self.pace.token_ns,
            ns_per_request=ns_per_request,
            num_blocks_demanded=num_blocks_demanded + num_blocks_kept + num_blocks_own,
            num_blocks_own=num_blocks_own,
            num_blocks_freed=max(1, num_blocks_demanded // max(1, load.num_running)),
            num_blocks_total=load.num_blocks_total,
        )

    def _target_ttft_ns(self, ask: Ask) -> int | None:
        targets_ns = [target_ns for target_ns in (ask.slo_ttft_ns, self.limits.slo_ttft_ns) if target_ns is not None]
        return min(targets_ns, default=None)

    def _expect_ns(self, ask: Ask, load: EngineLoad, ns_per_request: int, num_kept: int) -> int:
        """Return the expected time until a call that comes now starts, plus one step. `num_kept` returning calls go first."""
        num_waiting, num_prefill_tokens = load.num_waiting, self._num_prefill_tokens
        if self._reads_priority:
            num_before, num_tokens_before = self._backlog.ahead_of(ask.priority)
            num_waiting = min(num_waiting, num_before)
            num_prefill_tokens = num_tokens_before + self._num_entering_tokens
        num_ahead = num_waiting + self._num_entering + num_kept
        num_rows_free = load.num_rows_free
        if load.num_waiting and (self._waits_for in _NEEDS_END or self._waits_for_adapters(load)):
            num_rows_free = 0
            if self._waits_for is WaitReason.GATE:  # the batch must end first
                num_ahead += load.num_running
        num_ends = num_ahead + 1 - num_rows_free
        rows_ns = max(0, num_ends) * ns_per_request
        prompts_ns = self.pace.prefill_ns(num_prefill_tokens / self.num_engines)
        return max(rows_ns, prompts_ns) + (self.pace.step_ns if load.num_running else 0)

    def _waits_for_adapters(self, load: EngineLoad) -> bool:
        return self._waits_for is WaitReason.ADAPTER and load.adapters.num_running >= self._max_adapters

    def _ns_per_request(self, load: EngineLoad, now_ns: int) -> int | None:
        num_running = max(1, load.num_running)
        forecast_ns = self.lengths.new_tokens(1, None) * self.pace.token_ns / num_running
        return self.drain.ns_per_request(now_ns, forecast_ns, num_running)

    @property
    def _num_prefill_tokens(self) -> int:
        return self._backlog.num_prefill_tokens + self._num_entering_tokens

    def _num_blocks_demanded(self, load: EngineLoad) -> int:
        """Return how many blocks running requests, and waiting ones with a free batch row, are predicted to need."""
        num_rows = load.num_running + load.num_rows_free
        num_requests = len(self._backlog)
        share = min(1.0, num_rows / num_requests) if num_requests else 1.0
        num_adapter_blocks = sum(self._adapter_blocks(load).values()) if self._adapters is not None else 0
        return max(
            int(share * self._backlog.num_blocks) + num_adapter_blocks, load.num_blocks_held - load.num_blocks_background
        )

    def _adapter_blocks(self, load: EngineLoad) -> dict[int, int]:
        blocks = self._backlog.adapter_blocks(load.num_running + load.num_rows_free)
        return dict(islice(blocks.items(), self._max_adapters))

    def _outlook(self, adapter: AdapterRef) -> AdapterOutlook:
        return _NO_OUTLOOK if self._adapters is None else self._adapters.outlook(adapter.number)

    def _num_blocks(self, num_tokens: int, num_requests: int = 1) -> int:
        """Return the most blocks that `num_requests` equal requests hold, with `num_tokens` tokens in all."""
        each = self._capacity.most_blocks(-(-num_tokens // num_requests))
        num_state_blocks = num_requests * self._capacity.num_state_blocks
        return min(-(-num_tokens // self._capacity.block_size) + num_state_blocks, num_requests * each)

    # What is answered.

    def _rejected(self, refusal: Refusal, view: DoorView, promise: Promise | None) -> Rejected:
        reason, wait_ns = refusal.reason, refusal.wait_ns
        if reason in _KEEPS_PLACES:
            self.drain.note_refusal(view.now_ns)
            wait_ns = self._promised_wait_ns(refusal, view, promise) if view.ask.returns else wait_ns
        if reason.is_deadline:
            return Rejected(reason, refusal.detail)
        seconds = DEFAULT_RETRY_AFTER_S if wait_ns is None else wait_ns / 1e9
        return Rejected(reason, refusal.detail, retry_after_s=min(max(seconds, MIN_RETRY_AFTER_S), MAX_RETRY_AFTER_S))

    def _promised_wait_ns(self, refusal: Refusal, view: DoorView, promise: Promise | None) -> int:
        """Return the wait (`Retry-After`) that this refused call was promised before, or promise a new one."""
        if promise is not None and promise.due_ns > view.now_ns:
            return promise.due_ns - view.now_ns
        seconds = DEFAULT_RETRY_AFTER_S if refusal.wait_ns is None else refusal.wait_ns / 1e9
        wait_ns = int(max(seconds, MIN_RETRY_AFTER_S) * 1e9)
        max_wait_ns = int(MAX_RETRY_AFTER_S * 1e9)
        num_blocks = view.num_blocks_own if refusal.reason is RejectReason.KV_HEADROOM else 0
        if promise is not None and num_blocks:
            wait_ns = min(wait_ns, max_wait_ns)
            self._promises.renew(promise, view.now_ns, wait_ns, num_blocks)
            return wait_ns
        if promise is not None:
            self._promises.settle(promise)
        ask, spacing_ns = view.ask, view.ns_per_request
        return self._promises.make(
            ask.claim, view.now_ns, wait_ns, spacing_ns, max_wait_ns, num_needed=num_blocks, tenant=ask.tenant
        )


def _num_prompt_tokens(request: Request | RequestStats) -> int:
    """Return the prompt tokens that this request adds to those of its call, as `DoorView` counts them."""
    return 0 if request.shares_prompt else request.num_prompt_tokens


# The checks, in the order in which they run. Each returns why a call is refused, or None.


def _demand(view: DoorView) -> Demand:
    ask = view.ask
    num_tokens = view.num_prompt_tokens + ask.num_requests * view.num_new_tokens
    return Demand(ask.tenant, ask.limits, num_tokens, view.now_ns, ask.claim, ask.is_retry)


def check_deadlines(view: DoorView) -> Refusal | None:
    """Refuse a call that can't meet one of its deadlines.

    The estimates are optimistic. An idle server refuses a call only once its deadline has passed.
    """
    ask = view.ask
    ttft_ns = int(LEAST_SHARE * view.ttft_ns)
    wait_ns = max(0, ttft_ns - view.own_prefill_ns)
    total_ns = ttft_ns + (ask.min_new_tokens - 1) * view.token_ns
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
    """Refuse a call if its first token is expected later than its target.

    `margin` is the worst recent ratio of real to expected time. At least half of the allowed time is for waiting,
    however long the prompt takes.
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
    """Refuse a call if less than `headroom`, a share in (0, 1), of the KV blocks would stay free at predicted answer lengths.

    Only a call with a latency target is refused. Freed blocks are kept for its return: otherwise small calls would keep taking
    them.
    """
    num_excess = view.num_blocks_demanded - (1 - (headroom / 2 if view.is_expected else headroom)) * view.num_blocks_total
    if view.target_ttft_ns is None or view.is_idle or num_excess <= 0:
        return None
    num_ends = -(-num_excess // view.num_blocks_freed)
    wait_ns = None if view.ns_per_request is None else int(num_ends * view.ns_per_request)
    detail = (
        f"the KV cache is too full: running and returning requests, with this one, need {view.num_blocks_demanded} of "
        f"{view.num_blocks_total} blocks, and {headroom:.0%} must stay free"
    )
    return Refusal(RejectReason.KV_HEADROOM, detail, wait_ns)
