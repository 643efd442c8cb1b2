"""Turns between calls: a list of many texts holds up nobody who asks for one. Called by the waiting queue and the scheduler;
knows of tokens, not of time.

A call is what one client asks for at once: its requests have the same `Request.parent_id`. The tenant that was given least is
next, and of its requests the one that is due first: a new call's at once, each later one after the tokens of those before it.
They are due by a virtual time, which passes by the tokens that the tenant is given, divided by its calls that wait (weighted
fair queueing: Demers, Keshav and Shenker, SIGCOMM 1989). So of n calls that wait each gets one in n tokens, and no stream of
new calls keeps an old one waiting for ever. Tenants are due in the same way.

    tokens    0      24      48      72      96           all requests have 24 tokens
    list      a0     a1      a2      a3      a4  ...
    single           |b comes: due now, so it is next, before a1 .. a2047
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from penstock.sched.policies.base import Order, OrderKey
from penstock.types.request import Request

_UNIT = 1_000_000
"""Units of virtual time per token, so that a token divided by many calls is an integer."""
MIN_IDLE_TO_SWEEP = 64
"""Calls, or tenants, of which nothing waits, before any is forgotten."""


@dataclass(slots=True)
class Call:
    """The requests of one call that wait, at one time or again."""

    due: int
    """When the next request to come is due, in its tenant's virtual time."""
    num_waiting: int = 0


@dataclass(slots=True)
class Tenant:
    """The calls of one tenant."""

    share: int
    due: int = 0
    """When its next request is due, in the virtual time of all."""
    now: int = 0
    """Virtual time of its calls."""
    num_waiting: int = 0
    """Requests."""
    num_calls: int = 0
    """Calls of which requests wait."""
    calls: dict[str, Call] = field(default_factory=dict)
    """By id: those with requests that wait, and those that were given more than their part."""

    def come(self, name: str, num_tokens: int) -> int:
        """A request of a call begins to wait. Returns when it is due."""
        call = self.calls.get(name)
        if call is None:
            call = self.calls[name] = Call(self.now)
        due = max(call.due, self.now)
        call.due = due + num_tokens * _UNIT
        self.num_calls += not call.num_waiting
        call.num_waiting += 1
        self.num_waiting += 1
        return due

    def go(self, name: str) -> None:
        """A request of a call waits no more."""
        self.num_waiting -= 1
        call = self.calls[name]
        call.num_waiting -= 1
        if call.num_waiting:
            return
        self.num_calls -= 1
        if not self.num_waiting:  # none is ahead of another any more
            self.calls.clear()
        elif len(self.calls) > 2 * self.num_calls + MIN_IDLE_TO_SWEEP:
            self.calls = {name: call for name, call in self.calls.items() if call.num_waiting or call.due > self.now}


class FairCalls(Order):
    """The tenant that was given the fewest tokens first, and of it the call that was; what is given counts from when they come.

    Tokens are those of prompts. A request of a new call waits for one request of each other call of its tenant at most, or for
    as many as they lag behind it.
    """

    def __init__(self, *, shares: Mapping[str, int] | None = None) -> None:
        """`shares`: tenant -> its share >= 1; others have 1."""
        self._shares = dict(shares or {})
        self._tenants: dict[str, Tenant] = {}
        """Those with requests that wait, and those that were given more than their part."""
        self._num_shares = 0
        """Shares of the tenants whose requests wait."""
        self._num_tenants = 0
        """Those tenants."""
        self._now = 0
        """Virtual time of the tenants."""
        self._due: dict[str, OrderKey] = {}
        """Keys of requests that wait, by their ids."""

    def key(self, request: Request, now_ns: int) -> OrderKey:
        del now_ns
        return self._due.get(request.request_id, (0,))  # one that was preempted has had its turn

    def lane(self, request: Request) -> str:
        return request.tenant

    def lane_key(self, lane: str) -> OrderKey:
        return (self._tenants[lane].due,)

    def queued(self, request: Request) -> None:
        tenant = self._tenants.get(request.tenant)
        if tenant is None:
            tenant = self._tenants[request.tenant] = Tenant(self._shares.get(request.tenant, 1))
        if not tenant.num_waiting:
            tenant.due = max(tenant.due, self._now)
            self._num_shares += tenant.share
            self._num_tenants += 1
        due = tenant.come(request.parent_id or request.request_id, len(request.prompt_token_ids))
        self._due[request.request_id] = (due,)

    def unqueued(self, request: Request) -> None:
        del self._due[request.request_id]
        tenant = self._tenants[request.tenant]
        tenant.go(request.parent_id or request.request_id)
        if not tenant.num_waiting:
            self._num_shares -= tenant.share
            self._num_tenants -= 1
            if len(self._tenants) > 2 * self._num_tenants + MIN_IDLE_TO_SWEEP:
                tenants = self._tenants
                self._tenants = {name: one for name, one in tenants.items() if one.num_waiting or one.due > self._now}

    def admitted(self, request: Request) -> None:
        tenant = self._tenants.get(request.tenant)
        if request.num_preemptions or tenant is None:  # it was served before, or nobody of its tenant waits
            return
        given = len(request.prompt_token_ids) * _UNIT
        tenant.due += given // tenant.share
        tenant.now += given // (tenant.num_calls or 1)
        self._now += given // (self._num_shares or tenant.share)
