"""The checks of what each tenant may use: requests at the same time, and tokens per minute. Kept by `door`.

The tokens are a bucket that holds one minute's worth and refills steadily. A request takes its predicted tokens (prompt and
output) when it comes in; when it ends, what it really used is settled, so the bucket may be in debt for a while. One
that needs more than the bucket holds comes in when the bucket is full.

`refusal` and `enter` belong to the event loop, `on_finish` to the engine thread: each number has one writer.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from itertools import islice

from penstock.admission.checks import DoorView, Refusal
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
    num_entering: int = 0
    """Requests of calls that were let in and are not submitted yet, and the tokens that they are expected to use."""
    num_entering_tokens: int = 0
    num_entered: int = 0
    num_left: int = 0
    num_correction_tokens: int = 0
    """Used beyond what was predicted, of all that have ended."""
    level_tokens: float = 0.0
    """In the bucket when last looked at."""
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
        """None: no such limit."""
        self._max_concurrent = max_concurrent
        self._tokens_per_minute = tokens_per_minute
        self._accounts: OrderedDict[str, Account] = OrderedDict()
        self._entered: dict[str, tuple[Account, int]] = {}
        """request_id -> its account, and the tokens that it took out."""
        self._duration_ns = 0.0
        """Mean duration of a request."""

    def refusal(self, view: DoorView) -> Refusal | None:
        account = self._account(view.ask.tenant, view.now_ns)
        return self._too_many(account, view) or self._too_fast(account, view)

    def hold(self, view: DoorView) -> Account:
        """A call comes in, and is on its way until `release`."""
        account = self._account(view.ask.tenant, view.now_ns)
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
        account = self._account(tenant, now_ns)
        account.num_entered += 1
        account.level_tokens -= num_tokens
        self._entered[request_id] = account, num_tokens

    def on_finish(self, request_id: str, num_tokens: int, duration_ns: int) -> None:
        """A request has ended after so many tokens, prompt and output. Unknown ones are ignored."""
        entered = self._entered.pop(request_id, None)
        if entered is not None:
            account, num_predicted = entered
            account.num_left += 1
            account.num_correction_tokens += num_tokens - num_predicted
            self._duration_ns += (duration_ns - self._duration_ns) * (_DURATION_WEIGHT if self._duration_ns else 1.0)

    def forget(self, request_id: str) -> None:
        """It ended and nobody said how: it counts as having used its predicted tokens. Unknown ones are ignored."""
        entered = self._entered.pop(request_id, None)
        if entered is not None:
            entered[0].num_left += 1

    def _too_many(self, account: Account, view: DoorView) -> Refusal | None:
        num_running = account.num_running
        num_after = num_running + view.ask.num_requests
        if self._max_concurrent is None or num_after <= self._max_concurrent or num_running == 0:
            return None  # a call of more choices than the limit comes in alone
        # One end apart. By the longest of these times all that run now have ended, however many ask.
        next_ns = max(view.now_ns, account.announced_ns) + int(self._duration_ns / self._max_concurrent)
        wait_ns = min(next_ns - view.now_ns, int(self._duration_ns))
        account.announced_ns = view.now_ns + wait_ns
        detail = f"the tenant has {counted(num_running, 'request')} already, at most {self._max_concurrent} may run or wait"
        return Refusal(RejectReason.TENANT_CONCURRENCY, detail, wait_ns)

    def _too_fast(self, account: Account, view: DoorView) -> Refusal | None:
        if self._tokens_per_minute is None:
            return None
        num_needed = min(_num_tokens(view), self._tokens_per_minute)
        num_left = account.level_tokens - account.num_entering_tokens
        if num_left >= num_needed:
            return None
        wait_ns = int((num_needed - num_left) * _MINUTE_NS / self._tokens_per_minute)
        detail = (
            f"the tenant's {self._tokens_per_minute} tokens per minute are used: the request needs about {num_needed}, "
            f"with {max(0, int(num_left))} left"
        )
        return Refusal(RejectReason.TENANT_TOKENS, detail, wait_ns)

    def _account(self, tenant: str, now_ns: int) -> Account:
        account = self._accounts.get(tenant)
        if account is None:
            account = self._open(tenant, now_ns)
        else:
            self._accounts.move_to_end(tenant)
        self._refill(account, now_ns)
        return account

    def _refill(self, account: Account, now_ns: int) -> None:
        if self._tokens_per_minute is None:
            return
        num_correction = account.num_correction_tokens
        level = account.level_tokens - (num_correction - account.num_settled_tokens)
        account.num_settled_tokens = num_correction
        level += self._tokens_per_minute * (now_ns - account.looked_ns) / _MINUTE_NS
        account.level_tokens = min(level, self._tokens_per_minute)
        account.looked_ns = now_ns

    def _open(self, tenant: str, now_ns: int) -> Account:
        if len(self._accounts) >= MAX_TENANTS and not self._forget_one(now_ns):
            tenant = OTHERS
        fresh = Account(level_tokens=self._tokens_per_minute or 0, looked_ns=now_ns)
        return self._accounts.setdefault(tenant, fresh)

    def _forget_one(self, now_ns: int) -> bool:
        """Forget the account that was unused for longest, if one is: a full bucket, and nothing running."""
        for tenant, account in list(islice(self._accounts.items(), _NUM_LOOKED_AT)):
            self._refill(account, now_ns)
            is_full = self._tokens_per_minute is None or account.level_tokens >= self._tokens_per_minute
            if is_full and not account.num_running:
                del self._accounts[tenant]
                return True
        return False


def _num_tokens(view: DoorView) -> int:
    """Prompt and output tokens that the call is expected to use."""
    return view.num_prompt_tokens + view.ask.num_requests * view.num_new_tokens
