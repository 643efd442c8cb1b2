"""Limits per tenant: concurrent calls, calls per minute and tokens per minute.

A call of several requests to the engine, such as texts or choices, is one call until the last of them ends. A request takes its
predicted tokens from its tenant's token bucket on admission, and the difference to its real tokens when it ends. One that is
larger than the bucket is admitted when the bucket is full. A refused call is promised a time to return, and newcomers get only
what such calls leave. `on_finish` runs on the engine thread, or on the event loop for a request that the engine refuses; all
else on the event loop.
"""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from dataclasses import dataclass, field, replace
from itertools import islice

from penstock.admission.ask import Refusal
from penstock.admission.estimates import SPREAD, Promise, Promises
from penstock.types.errors import RejectReason, counted
from penstock.types.tenant_limits import UNLIMITED, TenantLimits

MAX_TENANTS = 1024
"""Most accounts. Beyond it an idle one is forgotten. If none is found, new tenants without limits of their own share one."""
OTHERS = ""
"""The name of tenants beyond `MAX_TENANTS`, and of calls without a tenant."""
_MINUTE_NS = 60_000_000_000


@dataclass(frozen=True, slots=True)
class Demand:
    """A call that its tenant's limits may refuse."""

    tenant: str
    limits: TenantLimits | None
    """None: the default limits."""
    num_tokens: int
    """Predicted tokens of all its requests, prompt and output."""
    now_ns: int
    claim: bytes | None = None
    """Equal for all retries of the call. If it is None, no place is kept until the call returns."""
    is_retry: bool = False


@dataclass(slots=True)
class Account:
    limits: TenantLimits
    num_open_calls: int = 0
    """Calls that run or wait."""
    num_entering_tokens: int = 0
    num_correction_tokens: int = 0
    """Tokens of ended requests beyond their predictions."""
    level_tokens: float = math.inf
    level_requests: float = math.inf
    looked_ns: int = 0
    num_settled_tokens: int = 0
    """The part of `num_correction_tokens` already taken from `level_tokens`."""
    promises: Promises = field(default_factory=Promises)
    """Times at which refused calls should return. `num_needed` of each is in tokens."""


@dataclass(slots=True, eq=False)
class Held:
    """An admitted call and its tenant's account."""

    account: Account
    demand: Demand
    num_open: int = 0
    """Its requests that have not ended, and one more until `release`."""


class Tenants:
    def __init__(self, default: TenantLimits) -> None:
        """`default`: limits of tenants without their own."""
        self._default = default
        self.has_default = default != UNLIMITED
        """Whether tenants without limits of their own have any."""
        self._accounts: OrderedDict[tuple[str, bool], Account] = OrderedDict()
        """Key: (tenant, whether it has its own limits), as an X-Tenant may be a key's name. `_forget_one` tries the first."""
        self.entered: dict[str, tuple[Held, int]] = {}
        """Request id -> (its call, its predicted tokens)."""
        self._duration_ns = 0.0
        self._ending = threading.Lock()
        """Guards what the end of a request writes: `num_open`, `num_open_calls`, `num_correction_tokens` and `_duration_ns`."""

    def refusal(self, demand: Demand) -> Refusal | None:
        """Return why the call is refused, or None. Most refused calls get a time of their own, within a minute."""
        account, now_ns = self._account(demand.tenant, demand.limits, demand.now_ns), demand.now_ns
        promise = _promise(account, demand)
        is_expected = promise is not None and promise.due_ns <= now_ns
        num_calls, num_tokens = (0, 0) if is_expected else account.promises.expected(now_ns)
        checks = self._too_many(account), _too_often(account, num_calls), _too_fast(account, demand, num_tokens)
        refusals = [refusal for refusal in checks if refusal is not None]
        if not refusals:
            return None
        wait_ns = max([refusal.wait_ns or 0 for refusal in refusals])
        if promise is not None and not is_expected:
            wait_ns = promise.due_ns - now_ns
        elif demand.claim is not None:
            if promise is not None:
                account.promises.settle(promise)
            spacing_ns, max_wait_ns = self._spacing_ns(account, demand), max(wait_ns, _MINUTE_NS)
            wait_ns = account.promises.make(
                demand.claim, now_ns, wait_ns, spacing_ns, max_wait_ns, num_needed=_num_needed(account, demand), spread=1.0
            )
        return replace(refusals[0], wait_ns=wait_ns)

    def _spacing_ns(self, account: Account, demand: Demand) -> int | None:
        """Return the time in which the tenant's limits let in another such call, or None if it is unknown.

        Buckets fill as they are said to; a larger spacing would waste what they get.
        """
        limits = account.limits
        times_ns = [
            SPREAD * self._duration_ns / (limits.max_concurrent or math.inf),
            _MINUTE_NS / (limits.requests_per_minute or math.inf),
            _num_needed(account, demand) * _MINUTE_NS / (limits.tokens_per_minute or math.inf),
        ]
        return int(max(times_ns)) or None

    def hold(self, demand: Demand) -> Held:
        """Charge a call to its tenant. It has all its predicted tokens until `release`; after that each request has its own."""
        account = self._account(demand.tenant, demand.limits, demand.now_ns)
        account.level_requests -= 1
        account.num_entering_tokens += demand.num_tokens
        if (promise := _promise(account, demand)) is not None:
            account.promises.settle(promise)
        held = Held(account, demand)
        self._begin_one(held)
        return held

    def release(self, held: Held) -> None:
        held.account.num_entering_tokens -= held.demand.num_tokens
        with self._ending:
            self._end_one(held)

    def enter(self, held: Held, request_id: str, num_tokens: int, now_ns: int) -> None:
        """Charge a request's predicted tokens to its call's tenant. The call may be released already, as for later texts."""
        self._refill(held.account, now_ns)
        held.account.level_tokens -= num_tokens
        self._begin_one(held)
        self.entered[request_id] = held, num_tokens

    def on_finish(self, request_id: str, num_tokens: int, duration_ns: int) -> None:
        """Charge an ended request's real tokens (prompt and output) instead of the predicted ones."""
        entered = self.entered.pop(request_id, None)
        if entered is not None:
            held, num_predicted = entered
            with self._ending:
                held.account.num_correction_tokens += num_tokens - num_predicted
                self._end_one(held)
                if not held.num_open:
                    self._duration_ns += (duration_ns - self._duration_ns) * (0.1 if self._duration_ns else 1.0)

    def forget(self, request_id: str) -> None:
        """Stop counting a request that ended without a report. Its predicted tokens stay charged."""
        entered = self.entered.pop(request_id, None)
        if entered is not None:
            with self._ending:
                self._end_one(entered[0])

    def _begin_one(self, held: Held) -> None:
        with self._ending:
            held.account.num_open_calls += not held.num_open
            held.num_open += 1

    def _end_one(self, held: Held) -> None:
        """Count the end of a request of the call. The caller holds the lock."""
        held.num_open -= 1
        held.account.num_open_calls -= not held.num_open

    def _too_many(self, account: Account) -> Refusal | None:
        num_open, most = account.num_open_calls, account.limits.max_concurrent
        if most is None or num_open < most:
            return None
        # No place is kept for returns here: nobody knows when calls end, and the place would stay empty.
        detail = f"the tenant has {counted(num_open, 'request')} already, at most {most} may run or wait"
        return Refusal(RejectReason.TENANT_CONCURRENCY, detail, int(self._duration_ns / most))

    def _account(self, tenant: str, limits: TenantLimits | None, now_ns: int) -> Account:
        """Return the tenant's account, with these limits and its buckets refilled."""
        key = tenant, limits is not None
        account = self._accounts.get(key)
        if account is None:
            account = self._open(tenant, limits, now_ns)
        else:
            self._accounts.move_to_end(key)
            account.limits = limits or self._default  # a key's may have been edited
        self._refill(account, now_ns)
        return account

    def _refill(self, account: Account, now_ns: int) -> None:
        """Refill the account's buckets, at most to its limits. Levels start at infinity, so new buckets are full."""
        limits, passed_ns = account.limits, now_ns - account.looked_ns
        num_correction = account.num_correction_tokens
        level = account.level_tokens - (num_correction - account.num_settled_tokens)
        account.num_settled_tokens = num_correction
        account.level_tokens = _refilled(level, limits.tokens_per_minute, passed_ns)
        account.level_requests = _refilled(account.level_requests, limits.requests_per_minute, passed_ns)
        account.looked_ns = now_ns

    def _open(self, tenant: str, limits: TenantLimits | None, now_ns: int) -> Account:
        if len(self._accounts) >= MAX_TENANTS and not self._forget_one(now_ns) and limits is None:
            tenant = OTHERS
        fresh = Account(limits or self._default, looked_ns=now_ns)
        return self._accounts.setdefault((tenant, limits is not None), fresh)

    def _forget_one(self, now_ns: int) -> bool:
        """Remove the first idle account with full buckets among the first 16, and move those before it to the end."""
        for key, account in list(islice(self._accounts.items(), 16)):
            self._refill(account, now_ns)
            limits = account.limits
            has_tokens = account.level_tokens >= (limits.tokens_per_minute or 0)
            has_requests = account.level_requests >= (limits.requests_per_minute or 0)
            if has_tokens and has_requests and not account.num_open_calls:
                del self._accounts[key]
                return True
            self._accounts.move_to_end(key)
        return False


def _refilled(level: float, most: int | None, passed_ns: int) -> float:
    return math.inf if most is None else min(level + most * passed_ns / _MINUTE_NS, most)


def _promise(account: Account, demand: Demand) -> Promise | None:
    return account.promises.find(demand.claim, is_retry=demand.is_retry, now_ns=demand.now_ns)


def _num_needed(account: Account, demand: Demand) -> int:
    """Return how many tokens the account must have for this call, at most a full bucket."""
    return min(demand.num_tokens, account.limits.tokens_per_minute or 0)


def _too_often(account: Account, num_expected: float) -> Refusal | None:
    """Refuse a call that would take the place of one that is expected back. A full bucket is enough for any call."""
    most, level = account.limits.requests_per_minute, account.level_requests
    if most is None or level >= (num_needed := min(1 + num_expected, most)):
        return None
    wait_ns = int((num_needed - level) * _MINUTE_NS / most)
    return Refusal(RejectReason.TENANT_REQUESTS, f"the tenant's {most} requests per minute are used", wait_ns)


def _too_fast(account: Account, demand: Demand, num_expected: float) -> Refusal | None:
    """Refuse a call that would take tokens from calls that are expected back. A full bucket is enough for any call."""
    most = account.limits.tokens_per_minute
    if most is None:
        return None
    num_needed = _num_needed(account, demand)
    num_left = account.level_tokens - account.num_entering_tokens
    if num_left >= min(num_needed + num_expected, most):
        return None
    wait_ns = int((min(num_needed + num_expected, most) - num_left) * _MINUTE_NS / most)
    detail = (
        f"the tenant's {most} tokens per minute are used: the request needs about {num_needed}, "
        f"with {max(0, int(num_left - num_expected))} left"
    )
    return Refusal(RejectReason.TENANT_TOKENS, detail, wait_ns)
