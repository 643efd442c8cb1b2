"""The checks of what each tenant may use: requests at the same time, calls and tokens per minute. Kept by `door`.

The limits are those of all tenants, or the tenant's own, which a call brings along (`Ask.limits`) and which may change.

The tokens are a bucket that holds one minute's worth and refills steadily. A request takes its predicted tokens (prompt and
output) when it comes in; when it ends, what it really used is settled, so the bucket may be in debt for a while. One
that needs more than the bucket holds comes in when the bucket is full.

`refusal` and `enter` belong to the event loop, `on_finish` to the engine thread: each number has one writer.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from itertools import islice

from penstock.admission.checks import DoorView, Refusal, TenantLimits
from penstock.types.errors import RejectReason, counted

MAX_TENANTS = 1024
"""Beyond it, the tenant that has been away longest is forgotten; if none is away, newcomers share an account."""
OTHERS = ""
"""The shared account's name; also that of calls without tenant."""
_MINUTE_NS = 60_000_000_000
_NUM_LOOKED_AT = 16
"""Oldest accounts that are looked at to find one that can be forgotten."""
_DURATION_WEIGHT = 0.1


@dataclass(slots=True)
class Account:
    limits: TenantLimits
    num_entering: int = 0
    """Requests of calls that were let in and are not submitted yet, and the tokens that they are expected to use."""
    num_entering_tokens: int = 0
    num_entered: int = 0
    num_left: int = 0
    num_correction_tokens: int = 0
    """Used beyond what was predicted, of all that have ended."""
    level_tokens: float = 0.0
    """In the bucket when last looked at."""
    level_requests: float = 0.0
    """The same of the bucket of calls."""
    looked_ns: int = 0
    num_settled_tokens: int = 0
    """The part of the correction that `level_tokens` contains."""
    announced_ns: int = 0
    """The last time that was told to a call that found too many running."""

    @property
    def num_running(self) -> int:
        return self.num_entering + self.num_entered - self.num_left


class Tenants:
    def __init__(self, max_concurrent: int | None, tokens_per_minute: int | None) -> None:
        """Limits of the tenants that have none of their own; None: no such limit."""
        self._default = TenantLimits(max_concurrent=max_concurrent, tokens_per_minute=tokens_per_minute)
        self._accounts: OrderedDict[str, Account] = OrderedDict()
        self.entered: dict[str, tuple[Account, int]] = {}
        """request_id -> its account, and the tokens that it took out."""
        self._duration_ns = 0.0
        """Mean duration of a request."""

    def refusal(self, view: DoorView) -> Refusal | None:
        account = self._account(view.ask.tenant, view.now_ns, view.ask.limits or self._default)
        return self._too_many(account, view) or self._too_often(account) or self._too_fast(account, view)

    def hold(self, view: DoorView) -> Account:
        """A call comes in, and is on its way until `release`."""
        account = self._account(view.ask.tenant, view.now_ns, view.ask.limits or self._default)
        account.level_requests -= 1
        self._move(account, view, 1)
        return account

    def release(self, account: Account, view: DoorView) -> None:
        """It was submitted, or will never be."""
        self._move(account, view, -1)

    def _move(self, account: Account, view: DoorView, sign: int) -> None:
        account.num_entering += sign * view.ask.num_requests
        account.num_entering_tokens += sign * _num_tokens(view)

    def enter(self, tenant: str, request_id: str, num_tokens: int, now_ns: int) -> None:
        """A request with so many predicted tokens comes in."""
        account = self._account(tenant, now_ns, None)
        account.num_entered += 1
        account.level_tokens -= num_tokens
        self.entered[request_id] = account, num_tokens

    def on_finish(self, request_id: str, num_tokens: int, duration_ns: int) -> None:
        """A request has ended after so many tokens, prompt and output. Unknown ones are ignored."""
        entered = self.entered.pop(request_id, None)
        if entered is not None:
            account, num_predicted = entered
            account.num_left += 1
            account.num_correction_tokens += num_tokens - num_predicted
            self._duration_ns += (duration_ns - self._duration_ns) * (_DURATION_WEIGHT if self._duration_ns else 1.0)

    def forget(self, request_id: str) -> None:
        """It ended and nobody said how: it counts as having used its predicted tokens. Unknown ones are ignored."""
        entered = self.entered.pop(request_id, None)
        if entered is not None:
            entered[0].num_left += 1

    def _too_many(self, account: Account, view: DoorView) -> Refusal | None:
        num_running, most = account.num_running, account.limits.max_concurrent
        num_after = num_running + view.ask.num_requests
        if most is None or num_after <= most or num_running == 0:
            return None  # a call of more choices than the limit comes in alone
        # One end apart. By the longest of these times all that run now have ended, however many ask.
        next_ns = max(view.now_ns, account.announced_ns) + int(self._duration_ns / most)
        wait_ns = min(next_ns - view.now_ns, int(self._duration_ns))
        account.announced_ns = view.now_ns + wait_ns
        detail = f"the tenant has {counted(num_running, 'request')} already, at most {most} may run or wait"
        return Refusal(RejectReason.TENANT_CONCURRENCY, detail, wait_ns)

    def _too_often(self, account: Account) -> Refusal | None:
        most = account.limits.requests_per_minute
        if most is None or account.level_requests >= 1:
            return None
        wait_ns = int((1 - account.level_requests) * _MINUTE_NS / most)
        return Refusal(RejectReason.TENANT_REQUESTS, f"the tenant's {most} requests per minute are used", wait_ns)

    def _too_fast(self, account: Account, view: DoorView) -> Refusal | None:
        most = account.limits.tokens_per_minute
        if most is None:
            return None
        num_needed = min(_num_tokens(view), most)
        num_left = account.level_tokens - account.num_entering_tokens
        if num_left >= num_needed:
            return None
        wait_ns = int((num_needed - num_left) * _MINUTE_NS / most)
        detail = (
            f"the tenant's {most} tokens per minute are used: the request needs about {num_needed}, "
            f"with {max(0, int(num_left))} left"
        )
        return Refusal(RejectReason.TENANT_TOKENS, detail, wait_ns)

    def _account(self, tenant: str, now_ns: int, limits: TenantLimits | None) -> Account:
        """The tenant's account, refilled. `limits`: None if they are what they were."""
        account = self._accounts.get(tenant)
        if account is None:
            account = self._open(tenant, now_ns, limits or self._default)
        else:
            self._accounts.move_to_end(tenant)
        self._refill(account, now_ns)
        if limits is not None and limits != account.limits:
            _change(account, limits)
        return account

    def _refill(self, account: Account, now_ns: int) -> None:
        limits, passed_ns = account.limits, now_ns - account.looked_ns
        num_correction = account.num_correction_tokens
        level = account.level_tokens - (num_correction - account.num_settled_tokens)
        account.num_settled_tokens = num_correction
        most = limits.tokens_per_minute or 0
        account.level_tokens = min(level + most * passed_ns / _MINUTE_NS, most)
        most = limits.requests_per_minute or 0
        account.level_requests = min(account.level_requests + most * passed_ns / _MINUTE_NS, most)
        account.looked_ns = now_ns

    def _open(self, tenant: str, now_ns: int, limits: TenantLimits) -> Account:
        if len(self._accounts) >= MAX_TENANTS and not self._forget_one(now_ns):
            tenant = OTHERS
        fresh = Account(limits, looked_ns=now_ns)
        _change(fresh, limits)
        return self._accounts.setdefault(tenant, fresh)

    def _forget_one(self, now_ns: int) -> bool:
        """Forget the account that was unused for longest, if one is: full buckets, and nothing running."""
        for tenant, account in list(islice(self._accounts.items(), _NUM_LOOKED_AT)):
            self._refill(account, now_ns)
            limits = account.limits
            has_tokens = account.level_tokens >= (limits.tokens_per_minute or 0) or limits.tokens_per_minute is None
            has_requests = account.level_requests >= (limits.requests_per_minute or 0) or limits.requests_per_minute is None
            if has_tokens and has_requests and not account.num_running:
                del self._accounts[tenant]
                return True
        return False


def _change(account: Account, limits: TenantLimits) -> None:
    """Other limits hold: a bucket that was not there is full, and a smaller one holds no more than it can."""
    before, account.limits = account.limits, limits
    if limits.tokens_per_minute is not None:
        is_new = before.tokens_per_minute is None or before is limits
        account.level_tokens = limits.tokens_per_minute if is_new else min(account.level_tokens, limits.tokens_per_minute)
    if limits.requests_per_minute is not None:
        is_new = before.requests_per_minute is None or before is limits
        account.level_requests = (
            limits.requests_per_minute if is_new else min(account.level_requests, limits.requests_per_minute)
        )


def _num_tokens(view: DoorView) -> int:
    """Prompt and output tokens that the call is expected to use."""
    return view.num_prompt_tokens + view.ask.num_requests * view.num_new_tokens
