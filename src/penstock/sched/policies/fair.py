"""Fair shares between tenants by virtual token counters (VTC: Sheng et al., OSDI 2024, arXiv 2401.00588).

Next is the oldest request of the waiting tenant with the smallest counter of weighted tokens. A tenant that returns is lifted
to the smallest counter among waiting tenants, less a credit of about one prompt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from penstock.sched.policies.base import Order, OrderKey, StepRecord
from penstock.types.plan import RowPlan
from penstock.types.request import Request, RequestStatus

UNIT = 1_000_000
"""Counter units per weighted token. Divided by the tenant's share, so counters stay integers."""


@dataclass(slots=True)
class Account:
    """A tenant's counter: weighted tokens that it was given, per unit of its share."""

    counter: int
    input_charge: int
    output_charge: int
    base: int = 0
    """The value that the counter would have been lifted to without credit."""
    num_waiting: int = 0
    waiting_since_ns: int = 0
    num_decoding: int = 0
    """Requests that run and have computed all tokens but one."""
    turn: int = 0
    """Tie-breaker, smaller is first. Set to 2 * n if the n-th admission of all tenants is this tenant's."""


def _admitted_ns(request: Request) -> int:
    assert request.first_scheduled_ns is not None, "it runs"
    return request.first_scheduled_ns


class FairShares(Order):
    """While two tenants both wait, what they are given differs by at most 2 (U + C) weighted tokens per share.

    U = max(input_weight * L, output_weight * M), with L the longest prompt and M the tokens in the KV cache (section 4 of
    the paper, for input_weight <= output_weight). C is `max_credit_tokens`, at most U. A new tenant starts at a level that
    rises with every token, so that endless new ones starve nobody. Recomputed and cached tokens are not charged.
    """

    has_ranks: ClassVar[bool] = True
    suits: ClassVar[Mapping[str, str]] = {"eviction": "tenant-fair"}

    def __init__(
        self,
        *,
        input_weight: int = 1,
        output_weight: int = 2,
        shares: Mapping[str, int] | None = None,
        max_tenants: int = 4096,
        max_wait_ns: int = 60_000_000_000,
        max_credit_tokens: int = 2048,
    ) -> None:
        """`shares`: tenant -> its weight >= 1; other tenants have 1. `max_tenants`: accounts kept of tenants that do not wait.

        `max_wait_ns`: after this wait a tenant is not overtaken by later arrivals, nor is a running prompt.
        `max_credit_tokens`: weighted tokens that a returning tenant may get before tenants that were given more.
        """
        self._weights = (input_weight, output_weight)
        self._shares = dict(shares or {})
        self._max_tenants = max_tenants
        self._accounts: dict[str, Account] = {}
        self._waiting: dict[str, Account] = {}
        self._max_wait_ns = max_wait_ns
        self._max_credit = max_credit_tokens * UNIT
        self._now_ns = 0
        self._decoding: dict[str, Account] = {}
        """By request id. A request stays with its account until it leaves."""
        self._serving: dict[str, Account] = {}
        self._joined: set[str] = set()
        self._num_admissions = 0
        self._level = 0
        """The counter that each busy tenant would have if all had recently been given the same."""
        self._last = Account(0, 0, 0)

    def key(self, request: Request, now_ns: int) -> OrderKey:
        del now_ns
        return (request.arrival_ns,)

    def lane(self, request: Request) -> str:
        return request.tenant

    def lane_key(self, lane: str) -> OrderKey:
        account = self._waiting[lane]
        return (account.counter, account.turn)

    def queued(self, request: Request) -> None:
        """Lift the tenant's counter if it had no waiting request. A new tenant gets no credit."""
        credit = self._max_credit if request.tenant in self._accounts else 0
        account = self._account(request.tenant)
        self._now_ns = max(self._now_ns, request.arrival_ns)
        if not account.num_waiting:
            floor, lower = self._floors(credit)
            account.base = max(account.counter, floor)
            account.counter = max(account.counter, lower)
            account.waiting_since_ns = self._now_ns
            # Lifted without credit it ties with a tenant being served: it goes first, but only once.
            account.turn = max(account.turn, 2 * self._num_admissions - 1)
            self._waiting[request.tenant] = account
        account.num_waiting += 1

    def _floors(self, credit: int) -> tuple[int, int]:
        """Return the least counter of a tenant that begins to wait, without credit and with it: its absence earns nothing
        else. O(waiting tenants)."""
        if not self._waiting:
            floor = max(self._last.counter, self._last.base)
            return floor, floor - credit
        aged_ns = self._now_ns - self._max_wait_ns
        least = min(max(account.counter, account.base) for account in self._waiting.values())
        aged = (account.counter for account in self._waiting.values() if account.waiting_since_ns <= aged_ns)
        self._level = min(max(self._level, least), least + self._max_credit)
        oldest = max(aged, default=None)
        return (self._level, self._level - credit) if oldest is None else (oldest, oldest)

    def unqueued(self, request: Request) -> None:
        account = self._waiting[request.tenant]
        account.num_waiting -= 1
        if not account.num_waiting:
            self._last = self._waiting.pop(request.tenant)

    def outranks(self, request: Request, other: Request, now_ns: int) -> bool:
        """Return whether the request's tenant will have fewer tokens than the other's, once both prompts are computed.

        So tenants take turns at resuming and at a step's prompt tokens.
        """
        if request.tenant == other.tenant:
            return False
        if other.status is RequestStatus.RUNNING and _admitted_ns(other) <= now_ns - self._max_wait_ns:
            return False
        return self._finish(request) < self._finish(other)

    def _finish(self, request: Request) -> OrderKey:
        account = self._account(request.tenant)
        num_charged = max(request.num_computed_tokens + request.num_inflight_tokens, request.max_computed_tokens)
        num_left = max(0, request.num_prompt_tokens - num_charged)
        return (account.counter + account.input_charge * num_left, account.turn)

    def admitted(self, request: Request) -> None:
        """Charge the tenant for the first chunk at once, so that the next admission of the step counts it."""
        account = self._account(request.tenant)
        self._num_admissions += 1
        account.turn = 2 * self._num_admissions
        account.waiting_since_ns = self._now_ns
        self._joined.add(request.request_id)
        self._charge_prompt(account, request, request.num_computed_tokens, request.num_inflight_tokens)

    def left(self, request: Request) -> None:
        account = self._decoding.pop(request.request_id, None)
        if account is not None:
            account.num_decoding -= 1
            if not account.num_decoding:
                del self._serving[request.tenant]

    def served(
        self, rows: Sequence[RowPlan], requests: Mapping[str, Request], last_step: StepRecord | None, num_decodes: int = 0
    ) -> None:
        """Charge tenants for the step's tokens. Decodes are counted per tenant, without work per row unless some sit out."""
        del last_step
        if num_decodes < len(self._decoding):  # some have no row, and are not charged
            num_decodes = 0
        if num_decodes:
            num_known = len(self._decoding)
            charged = 0
            for account in self._serving.values():
                charge = account.num_decoding * account.output_charge
                account.counter += charge
                charged += charge
            self._raise_level(charged)
            if num_decodes > num_known:  # a prompt's last token came alone
                for row in rows[:num_decodes]:
                    if row.request_id not in self._decoding:
                        self._charge(row, requests[row.request_id])
        for row in rows[num_decodes:]:
            self._charge(row, requests[row.request_id])
        self._joined.clear()

    def gained(self, request: Request, num_tokens: int) -> None:
        account = self._account(request.tenant)
        charge = num_tokens * account.output_charge
        account.counter += charge
        self._raise_level(charge)

    def _charge(self, row: RowPlan, request: Request) -> None:
        account = self._account(request.tenant)
        if row.request_id not in self._joined:
            self._charge_prompt(account, request, row.context_len, row.query_len)
        if row.samples:
            account.counter += account.output_charge
            self._raise_level(account.output_charge)
            if row.request_id not in self._decoding:
                self._decoding[row.request_id] = account
                self._serving[request.tenant] = account
                account.num_decoding += 1

    def _charge_prompt(self, account: Account, request: Request, context_len: int, query_len: int) -> None:
        start = max(context_len, request.max_computed_tokens)
        stop = min(context_len + query_len, request.num_prompt_tokens)
        charge = account.input_charge * max(0, stop - start)
        account.counter += charge
        self._raise_level(charge)

    def _raise_level(self, charge: int) -> None:
        self._level += charge // (1 + len(self._waiting) + len(self._serving))

    def _account(self, tenant: str) -> Account:
        account = self._accounts.get(tenant)
        if account is None:
            if len(self._accounts) >= len(self._waiting) + len(self._serving) + self._max_tenants:
                self._forget_idle()
            input_charge, output_charge = (UNIT * weight // self._shares.get(tenant, 1) for weight in self._weights)
            account = self._accounts[tenant] = Account(0, input_charge, output_charge)
        return account

    def _forget_idle(self) -> None:
        """Delete all idle accounts but the `max_tenants // 2` with the largest counters.

        A small counter is not missed, since `queued` lifts it anyway when its tenant returns.
        """
        busy = self._waiting.keys() | self._serving.keys()
        idle = [(account.counter, tenant) for tenant, account in self._accounts.items() if tenant not in busy]
        for _, tenant in sorted(idle)[: -(self._max_tenants // 2) or None]:
            del self._accounts[tenant]
