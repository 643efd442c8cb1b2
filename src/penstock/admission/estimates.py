"""Estimates for admission: durations of steps, lengths of answers, requests not ended, and returns of refused calls.

The event loop writes `Promises`, the engine thread `Pace`, `DrainMeter` and `Margin`. Both write `Lengths`, each its own
fields. `Backlog` has a lock: requests also end on the event loop, if the engine refuses or forgets them.
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass
from heapq import heappop, heappush

from penstock.types.adapter import BASE
from penstock.types.request import FinishReason
from penstock.types.stats import RequestStats, StepStats, WaitReason

STEP_WEIGHT = 0.05
"""Weight of the newest observation in a running mean."""
PREFILL_DECAY = 1 - STEP_WEIGHT
"""Factor on older measurements after each step full of prefill tokens."""

LENGTH_DECAY = 0.98
"""Factor on older observations after each new one: about the last fifty count."""

NUM_ERRORS = 99
"""Errors remembered. The next one exceeds them all with a chance of 1 %."""
FIRST_FACTOR = 1.25
MAX_FACTOR = 4.0
"""Larger errors count as this. Otherwise no call that could correct them would be admitted."""

_BUCKET_NS = 1_000_000_000
DRAIN_WINDOW_S = 30

GRACE_NS = 2_500_000_000
"""Added to promised times: `Retry-After` is in whole seconds, and the network takes time."""
SPREAD = 1.2
"""Promised places are spaced at this many times the mean time between two ends."""
MAX_PROMISES = 16384
"""Most refused calls for which places are kept. A tenant has at most half of them."""
MAX_PER_CLAIM = 8
"""Most places kept for equal calls, so that one impatient client does not delay everyone else."""
MAX_SHARED_PLACES = 64
"""Future places of a tenant that delay other tenants. Its further ones delay only its own calls."""
MIN_SHARE = 0.1
"""Least share of refused calls that are assumed to return."""


class Pace:
    def __init__(self, max_step_tokens: int) -> None:
        self._half_step_tokens = max_step_tokens / 2
        self._step_ns = 0.0
        self._tokens_per_row = 1.0
        """Mean tokens that a row gets in a step: guesses and forced tokens make it more than 1. Rows of prompts count as 1."""
        self._prefill_tokens = 0.0
        self._prefill_ns = 0.0

    @property
    def step_ns(self) -> int:
        return int(self._step_ns)

    @property
    def token_ns(self) -> int:
        """Mean time between two tokens of an answer."""
        return int(self._step_ns / self._tokens_per_row)

    def prefill_ns(self, num_tokens: float) -> int:
        """Return the expected time to compute `num_tokens` prompt tokens while decodes run as recently."""
        return int(num_tokens * self._prefill_ns / self._prefill_tokens) if self._prefill_tokens else 0

    def on_step(self, stats: StepStats) -> None:
        duration_ns = stats.ended_ns - stats.started_ns
        self._step_ns += (duration_ns - self._step_ns) * (STEP_WEIGHT if self._step_ns else 1.0)
        # A row's last token samples like a decode; padding is not a prompt.
        counts = stats.counts
        num_more = sum(counts.forced.values()) + sum([accepted for _, accepted in counts.guesses.values()])
        if counts.num_decodes:
            # Not per sampled token: a row does not sample while it computes many forced tokens.
            self._tokens_per_row += (1 + num_more / max(1, counts.num_rows) - self._tokens_per_row) * STEP_WEIGHT
        num_tokens = counts.num_tokens - sum([num for num, _ in counts.guesses.values()])
        num_prefill_tokens = num_tokens - counts.num_padding_tokens - counts.num_rows
        # Other steps show how many prompts came, not how fast they could be computed. Where background requests got tokens, a
        # prompt would have got them.
        is_full = not counts.num_background_tokens and (
            counts.waits_for is WaitReason.TOKENS or num_tokens >= self._half_step_tokens
        )
        if is_full and num_prefill_tokens > 0:
            self._prefill_tokens = PREFILL_DECAY * self._prefill_tokens + num_prefill_tokens
            self._prefill_ns = PREFILL_DECAY * self._prefill_ns + duration_ns


@dataclass(slots=True)
class _Mean:
    total: float
    weight: float

    def add(self, value: float, weight: float = 1.0) -> None:
        self.total = LENGTH_DECAY * self.total + value
        self.weight = LENGTH_DECAY * self.weight + weight

    @property
    def value(self) -> float:
        return self.total / self.weight


class Lengths:
    def __init__(self) -> None:
        self._tokens_per_char = _Mean(100.0, 400.0)  # assumed at first, as are 128 tokens of an answer
        self._output_tokens = _Mean(128.0, 1.0)
        self._cached_share = _Mean(0.0, 1.0)

    def on_prompt(self, num_chars: int, num_tokens: int) -> None:
        """Learn how many tokens a text has: `num_chars` characters became `num_tokens` tokens, with the chat template."""
        if num_chars:
            self._tokens_per_char.add(num_tokens, num_chars)

    def on_end(self, num_prompt_tokens: int, num_cached_tokens: int, num_generated_tokens: int) -> None:
        """Learn from an answer. Without prompt tokens, as for later choices of a prompt, only its length counts."""
        self._output_tokens.add(num_generated_tokens)
        if num_prompt_tokens:
            self._cached_share.add(num_cached_tokens, num_prompt_tokens)

    def prompt_tokens(self, num_chars: int) -> int:
        return round(num_chars * self._tokens_per_char.value)

    def new_tokens(self, min_tokens: int, max_tokens: int | None) -> int:
        """Return the predicted length of an answer, between the request's limits."""
        predicted = max(min_tokens, round(self._output_tokens.value))
        return predicted if max_tokens is None else min(predicted, max_tokens)

    @property
    def computed_share(self) -> float:
        """Share of prompt tokens that were not found in the prefix cache."""
        return 1.0 - self._cached_share.value


class Margin:
    """The worst recent ratio of real to expected time to first token, from 1 to `MAX_FACTOR`."""

    def __init__(self) -> None:
        self.factor = FIRST_FACTOR
        self._errors = deque([FIRST_FACTOR], maxlen=NUM_ERRORS)

    def observe(self, expected_ns: int, real_ns: int) -> None:
        self._errors.append(real_ns / expected_ns)
        self.factor = min(MAX_FACTOR, max(1.0, *self._errors))


class DrainMeter:
    """Measures how often requests end while others wait.

    The rate is (requests that ended) / (time) over the last `DRAIN_WINDOW_S` seconds, counting only time in which others
    waited or were refused. Only `note_refusal` is for the event loop, all else for the engine thread.
    """

    def __init__(self) -> None:
        self._buckets: dict[int, list[int]] = {}
        """Second (now_ns // 1e9) -> [requests that ended, busy nanoseconds]."""
        self._was_busy = False
        self._last_ns: int | None = None
        self._refused_until_ns = 0

    def rate(self, now_ns: int) -> float:
        """Return requests per second that ended while others waited; 0 if none waited within the window."""
        num_ended, busy_s = self._totals(now_ns)
        return num_ended / busy_s if busy_s >= 1 else 0.0

    def ns_per_request(self, now_ns: int, forecast_ns: float, weight: int) -> int | None:
        """Return the mean time between two ends of requests while others wait, or None.

        `forecast_ns` is an estimate from other measurements, or 0. It counts like `weight` observed ends.
        """
        num_ended, busy_s = self._totals(now_ns)
        if not forecast_ns:
            return int(busy_s * 1e9 / max(1, num_ended)) if busy_s >= 1 else None
        return int((busy_s * 1e9 + weight * forecast_ns) / (num_ended + weight))

    def _totals(self, now_ns: int) -> tuple[int, float]:
        """Return (requests that ended, busy seconds) within the window before `now_ns`."""
        oldest = now_ns // _BUCKET_NS - DRAIN_WINDOW_S
        recent = [bucket for second, bucket in list(self._buckets.items()) if second > oldest]
        return sum([num_ended for num_ended, _ in recent]), sum([busy_ns for _, busy_ns in recent]) / 1e9

    def note_refusal(self, now_ns: int) -> None:
        self._refused_until_ns = now_ns + _BUCKET_NS  # a refusal counts as demand for this long

    def on_step(self, stats: StepStats) -> None:
        """Count the time since the last step as busy if requests were waiting then."""
        end_ns = stats.ended_ns
        if self._was_busy and self._last_ns is not None:
            start_ns = max(self._last_ns, (end_ns // _BUCKET_NS - DRAIN_WINDOW_S + 1) * _BUCKET_NS)
            while start_ns < end_ns:
                until_ns = min(end_ns, (start_ns // _BUCKET_NS + 1) * _BUCKET_NS)
                self._bucket(start_ns)[1] += until_ns - start_ns
                start_ns = until_ns
        self._last_ns = end_ns
        self._was_busy = stats.num_waiting > 0 or end_ns < self._refused_until_ns

    def on_finish(self, stats: RequestStats) -> None:
        """Count the end of a request that had a row. One that was rejected, or left the queue by itself, made none free."""
        if self._was_busy and stats.first_scheduled_ns is not None and stats.finish_reason is not FinishReason.REJECTED:
            self._bucket(stats.ended_ns)[0] += 1

    def _bucket(self, at_ns: int) -> list[int]:
        bucket = self._buckets.setdefault(at_ns // _BUCKET_NS, [0, 0])
        if len(self._buckets) > DRAIN_WINDOW_S:
            del self._buckets[min(self._buckets)]
        return bucket


@dataclass(slots=True)
class Entry:
    num_prefill_tokens: int
    num_blocks: int
    expected_ttft_ns: int
    """0: unknown, as for requests that were submitted behind another one: room for the first was enough to admit them."""
    priority: int = 0
    has_started: bool = False
    adapter: int = BASE
    num_adapter_blocks: int = 0
    """KV blocks of the request's adapter, shared by all requests with it. 0 if unknown."""


class Backlog:
    """Admitted requests that have not ended, with sums of their prompt tokens and blocks. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: dict[str, Entry] = {}
        self.num_prefill_tokens = 0
        """Prompt tokens of requests that have no first token yet. A partly computed prompt counts in full, and that of a beam
        search until its end, when all its tokens come."""
        self.num_blocks = 0

    def __len__(self) -> int:
        return len(self._entries)

    def ahead_of(self, priority: int) -> tuple[int, int]:
        """Return (requests, their prompt tokens) without a first token that are served before a new one of this priority.
        O(requests)."""
        ahead = [entry for entry in list(self._entries.values()) if not entry.has_started and entry.priority <= priority]
        return len(ahead), sum(entry.num_prefill_tokens for entry in ahead)

    def adapter_blocks(self, num_requests: int) -> dict[int, int]:
        """Return adapter number -> its KV blocks, for the first `num_requests` unfinished requests."""
        first = list(self._entries.values())[:num_requests]
        return {entry.adapter: entry.num_adapter_blocks for entry in first if entry.adapter != BASE}

    def enter(self, request_id: str, entry: Entry) -> None:
        """Add a request. Call this before the request is submitted, since it may end at once."""
        with self._lock:
            self.num_prefill_tokens += entry.num_prefill_tokens
            self.num_blocks += entry.num_blocks
            self._entries[request_id] = entry

    def on_first_token(self, request_id: str) -> Entry | None:
        with self._lock:
            entry = self._entries.get(request_id)
            if entry is not None:
                self._start(entry)
        return entry

    def on_finish(self, request_id: str) -> None:
        with self._lock:
            entry = self._entries.pop(request_id, None)
            if entry is not None:
                self._start(entry)
                self.num_blocks -= entry.num_blocks

    def _start(self, entry: Entry) -> None:
        if not entry.has_started:
            entry.has_started = True
            self.num_prefill_tokens -= entry.num_prefill_tokens


@dataclass(slots=True)
class _Line:
    """A tenant's future places."""

    num_places: int = 0
    last_due_ns: int = 0


@dataclass(slots=True, eq=False)
class Promise:
    claim: bytes | None
    due_ns: int
    expires_ns: int
    num_needed: int = 0
    """KV blocks, or tokens of a tenant's bucket, that its call needs."""
    tenant: str = ""
    has_come: bool = False
    """The client returned in time before, so its next return is taken as certain."""
    is_over: bool = False

    def __lt__(self, other: Promise) -> bool:
        """Order promises by the time when they expire."""
        return self.expires_ns < other.expires_ns


class Promises:
    """Promises to refused calls: each gets a time at which to return (`Retry-After`), and a place then. Runs on the event loop.

    Each call's time comes after those of its tenant's earlier calls, and of `MAX_SHARED_PLACES` calls of each other tenant. It
    may coincide with those of their further calls. The place is kept for `GRACE_NS` plus a tenth of the wait. A returning call
    is recognised by its claim, derived from the body. The arithmetic is GCRA's virtual scheduling (ATM Forum, Traffic
    Management 4.1, 1999).
    """

    def __init__(self) -> None:
        self._later: list[tuple[int, Promise]] = []
        """A heap by `due_ns`."""
        self._lines: dict[str, _Line] = {}
        self._due: list[Promise] = []
        self._by_claim: dict[bytes, list[Promise]] = {}
        self._last_due_ns = 0
        self._return_share = 1.0
        self._num_open = 0
        """Promises that are not over, due or not."""
        self._num_open_needed = 0

    def make(
        self,
        claim: bytes | None,
        now_ns: int,
        wait_ns: int,
        ns_per_request: int | None,
        max_wait_ns: int,
        *,
        num_needed: int = 0,
        tenant: str = "",
        spread: float = SPREAD,
    ) -> int:
        """Promise a refused call a place. Return the nanoseconds after which it should return.

        `spread`: 1 if `ns_per_request` is certain.
        """
        ahead = [promise for promise in self._by_claim.get(claim, ()) if promise.due_ns > now_ns] if claim is not None else []
        if len(ahead) >= MAX_PER_CLAIM:
            return ahead[0].due_ns - now_ns
        spacing_ns = int(0.25e9 if ns_per_request is None else spread * self._return_share * ns_per_request)
        line = self._lines.get(tenant) or _Line()
        shared_due_ns = max(now_ns + wait_ns, self._last_due_ns + spacing_ns)
        due_ns = max(shared_due_ns, line.last_due_ns + spacing_ns)
        if due_ns - now_ns > max_wait_ns or max(len(self._later), 2 * line.num_places) >= MAX_PROMISES:
            return min(due_ns - now_ns, max_wait_ns)
        if line.num_places < MAX_SHARED_PLACES:
            self._last_due_ns = shared_due_ns
        line.num_places, line.last_due_ns = line.num_places + 1, due_ns
        self._lines[tenant] = line
        promise = Promise(claim, due_ns, _expires_ns(now_ns, due_ns), num_needed, tenant)
        heappush(self._later, (due_ns, promise))
        self._count(promise, 1)
        if claim is not None:
            self._by_claim.setdefault(claim, []).append(promise)
        return due_ns - now_ns

    def find(self, claim: bytes | None, *, is_retry: bool, now_ns: int) -> Promise | None:
        """Return the promise made to this call before, or None. Before its time, only a declared retry finds it."""
        self._advance(now_ns)
        promises = self._by_claim.get(claim) if claim is not None else None
        if not promises:
            return None
        return promises[0] if is_retry or promises[0].due_ns <= now_ns else None

    def settle(self, promise: Promise) -> None:
        """End a promise, since its call returned."""
        self._end(promise, came_back=True)

    def renew(self, promise: Promise, now_ns: int, wait_ns: int, num_needed: int) -> None:
        """Promise another return to a call that came in time but finds too few free blocks."""
        self._end(promise, came_back=True)
        renewed = Promise(promise.claim, now_ns, _expires_ns(now_ns, now_ns + wait_ns), num_needed, has_come=True)
        heappush(self._due, renewed)
        self._count(renewed, 1)
        if promise.claim is not None:
            self._by_claim.setdefault(promise.claim, []).insert(0, renewed)

    def num_needed_now(self, now_ns: int) -> int:
        """Return what is kept for calls due now, weighted by the share of calls that return."""
        self._advance(now_ns)
        kept = [promise for promise in self._due if promise.num_needed and not promise.is_over]
        return round(sum(promise.num_needed * (1.0 if promise.has_come else self._return_share) for promise in kept))

    def num_due(self, now_ns: int) -> int:
        """Return the places kept for calls due now, weighted by the share of calls that return."""
        self._advance(now_ns)
        return round(self._return_share * sum(not promise.is_over for promise in self._due))

    def expected(self, now_ns: int) -> tuple[float, float]:
        """Return the calls expected back now or later and what they need, both weighted by the share of calls that return."""
        self._advance(now_ns)
        return self._return_share * self._num_open, self._return_share * self._num_open_needed

    def _count(self, promise: Promise, sign: int) -> None:
        self._num_open += sign
        self._num_open_needed += sign * promise.num_needed

    def _advance(self, now_ns: int) -> None:
        while self._later and self._later[0][0] <= now_ns:
            _, promise = heappop(self._later)
            line = self._lines[promise.tenant]
            line.num_places -= 1
            if not line.num_places:
                del self._lines[promise.tenant]
            if not promise.is_over:
                heappush(self._due, promise)
        while self._due and (self._due[0].is_over or self._due[0].expires_ns <= now_ns):
            promise = heappop(self._due)
            if not promise.is_over:
                self._end(promise, came_back=False)

    def _end(self, promise: Promise, *, came_back: bool) -> None:
        promise.is_over = True
        self._count(promise, -1)
        self._return_share += STEP_WEIGHT * (came_back - self._return_share)
        self._return_share = max(MIN_SHARE, self._return_share)
        if promise.claim is not None:
            promises = self._by_claim[promise.claim]
            promises.remove(promise)
            if not promises:
                del self._by_claim[promise.claim]


def _expires_ns(now_ns: int, due_ns: int) -> int:
    return due_ns + GRACE_NS + (due_ns - now_ns) // 10
