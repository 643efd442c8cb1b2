"""Fair shares between tenants by virtual token counters (VTC: Sheng et al., OSDI 2024, arXiv 2401.00588). Called by the
waiting queue and the scheduler; knows of tokens, not of time.

Each tenant has a counter: `input_weight` for each prompt token that its admissions compute, `output_weight` for each token
that it is given. The tenant with the least counter among those who wait is next, and within it who came first. A tenant that
comes back from idle is lifted to the least counter of those who wait (if nobody does, to that of the tenant who waited
last), so that idling earns no credit.

    heavy  ####################|        light 3 was idle: it starts where light 1 stands,
    light1 #########|                   not at what it had when it went
    light2 ###########|
    light3 ##.......^
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from penstock.sched.policies.base import Order, OrderKey, StepRecord
from penstock.types.plan import RowPlan
from penstock.types.request import Request

_UNIT = 1_000_000
"""Of a counter, per token and weight; divided by the tenant's share, so that counters are integers."""


@dataclass(slots=True)
class Account:
    """What one tenant has been given, per unit of its share."""

    counter: int
    input_charge: int
    """Per token."""
    output_charge: int
    num_waiting: int = 0
    """Requests that never ran."""
    waiting_since_ns: int = 0
    """When the first of them came, or the one before it was admitted."""
    turn: int = 0
    """Of equal counters the least is next: 2 n after the n-th admission of all, if it was this tenant's."""


class FairShares(Order):
    """While two tenants both wait, what they are given differs by at most 2 U, whatever they ask for.

    Given is counted in weighted tokens per share; U = max(input_weight * L, output_weight * M), with L the longest
    prompt and M the tokens that the KV cache holds (the paper's section 4, for input_weight <= output_weight; no
    work-conserving order without preemption is better than half of it). So from one admission of a tenant that waits to
    its next, each other tenant is given at most U more than it. An endless stream of new tenants could still starve it;
    therefore those that come later than `max_wait_ns` after its last admission are lifted to it and go after it. Within a
    tenant nobody is overtaken.

    What is computed again after a preemption is not charged, nor what the prefix cache holds.
    """

    def __init__(
        self,
        *,
        input_weight: int = 1,
        output_weight: int = 2,
        shares: Mapping[str, int] | None = None,
        max_tenants: int = 4096,
        max_wait_ns: int = 60_000_000_000,
    ) -> None:
        """`shares`: tenant -> its share >= 1; others have 1. `max_tenants`: accounts kept of tenants that do not wait.

        `max_wait_ns`: after which a tenant that waits is not overtaken by any that comes, or comes back, later.
        """
        self._weights = (input_weight, output_weight)
        self._shares = dict(shares or {})
        self._max_tenants = max_tenants
        self._accounts: dict[str, Account] = {}
        self._waiting: dict[str, Account] = {}
        """Those of tenants that wait."""
        self._max_wait_ns = max_wait_ns
        self._now_ns = 0
        """The latest arrival: there is no other clock here."""
        self._num_admissions = 0
        self._last = Account(0, 0, 0)
        """Of the tenant that waited last."""

    def key(self, request: Request, now_ns: int) -> OrderKey:
        del now_ns
        return (request.arrival_ns,)

    def lane(self, request: Request) -> str:
        return request.tenant

    def lane_key(self, lane: str) -> OrderKey:
        account = self._waiting[lane]
        return (account.counter, account.turn)

    def queued(self, request: Request) -> None:
        """Lift the tenant if nobody of it was waiting."""
        account = self._account(request.tenant)
        self._now_ns = max(self._now_ns, request.arrival_ns)
        if not account.num_waiting:
            account.counter = max(account.counter, self._floor())
            account.waiting_since_ns = self._now_ns
            # Where it was lifted to, it stands equal with a tenant that is being served: it goes first, but only once.
            account.turn = max(account.turn, 2 * self._num_admissions - 1)
            self._waiting[request.tenant] = account
        account.num_waiting += 1

    def _floor(self) -> int:
        """To which a tenant is lifted."""
        if not self._waiting:
            return self._last.counter
        aged_ns = self._now_ns - self._max_wait_ns
        least = min(account.counter for account in self._waiting.values())
        aged = (account.counter for account in self._waiting.values() if account.waiting_since_ns <= aged_ns)
        return max(aged, default=least)

    def unqueued(self, request: Request) -> None:
        account = self._waiting[request.tenant]
        account.num_waiting -= 1
        if not account.num_waiting:
            self._last = self._waiting.pop(request.tenant)

    def outranks(self, fresh: Request, joining: Request, now_ns: int) -> bool:
        """Tenants take turns at what was preempted, too."""
        del now_ns
        own, other = self._account(fresh.tenant), self._account(joining.tenant)
        return own is not other and own.counter < other.counter

    def admitted(self, request: Request) -> None:
        """Charge the prompt at once, so that the next admission of the same step sees it."""
        account = self._account(request.tenant)
        self._num_admissions += 1
        account.turn = 2 * self._num_admissions
        account.waiting_since_ns = self._now_ns
        if not request.num_preemptions:
            account.counter += account.input_charge * (request.num_prompt_tokens - request.num_computed_tokens)

    def served(self, rows: Sequence[RowPlan], requests: Mapping[str, Request], last_step: StepRecord | None) -> None:
        """Charge the tokens that the step will bring."""
        del last_step
        find, make = self._accounts.get, self._account
        for row in rows:
            if row.samples:
                tenant = requests[row.request_id].tenant
                account = find(tenant) or make(tenant)
                account.counter += account.output_charge

    def counter(self, tenant: str) -> float:
        """Weighted tokens per share that a tenant stands at; tenants that are not known stand at 0."""
        account = self._accounts.get(tenant)
        return 0.0 if account is None else account.counter / _UNIT

    def _account(self, tenant: str) -> Account:
        account = self._accounts.get(tenant)
        if account is None:
            if len(self._accounts) >= len(self._waiting) + self._max_tenants:
                self._forget_idle()
            input_charge, output_charge = (_UNIT * weight // self._shares.get(tenant, 1) for weight in self._weights)
            account = self._accounts[tenant] = Account(0, input_charge, output_charge)
        return account

    def _forget_idle(self) -> None:
        """Half of the accounts of tenants that do not wait, the least first: when they come back they are lifted anyway."""
        idle = [(account.counter, tenant) for tenant, account in self._accounts.items() if tenant not in self._waiting]
        for _, tenant in sorted(idle)[: -(self._max_tenants // 2) or None]:
            del self._accounts[tenant]
