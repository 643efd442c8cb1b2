"""Fairness between calls: a call with a list of many texts does not delay a call with one text.

A call's requests share a `Request.parent_id`. Its first request is due at once, and each later one after the tokens of those
before it, in virtual time (weighted fair queueing: Demers, Keshav and Shenker, SIGCOMM 1989).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from penstock.sched.policies.base import Order, OrderKey
from penstock.sched.policies.fair import UNIT
from penstock.sched.queue import MIN_TO_SWEEP
from penstock.types.request import Request


@dataclass(slots=True)
class Call:
    due: int
    num_waiting: int = 0


@dataclass(slots=True)
class Tenant:
    share: int
    due: int = 0
    now: int = 0
    num_waiting: int = 0
    num_calls: int = 0
    calls: dict[str, Call] = field(default_factory=dict)
    """Calls with waiting requests, and calls that got more than their share."""

    def come(self, name: str, num_tokens: int) -> int:
        """Count a waiting request of the call `name`. Return the virtual time when it is due."""
        call = self.calls.get(name)
        if call is None:
            call = self.calls[name] = Call(self.now)
        due = max(call.due, self.now)
        call.due = due + num_tokens * UNIT
        self.num_calls += not call.num_waiting
        call.num_waiting += 1
        self.num_waiting += 1
        return due

    def go(self, name: str) -> None:
        self.num_waiting -= 1
        call = self.calls[name]
        call.num_waiting -= 1
        if call.num_waiting:
            return
        self.num_calls -= 1
        if not self.num_waiting:  # no call is ahead of another now
            self.calls.clear()
        elif len(self.calls) > 2 * self.num_calls + MIN_TO_SWEEP:
            self.calls = {name: call for name, call in self.calls.items() if call.num_waiting or call.due > self.now}


class FairCalls(Order):
    """Next is the tenant that was given the fewest prompt tokens, with its call that was given the fewest."""

    def __init__(self, *, shares: Mapping[str, int] | None = None) -> None:
        """`shares`: tenant -> its weight >= 1; other tenants have 1."""
        self._shares = dict(shares or {})
        self._tenants: dict[str, Tenant] = {}
        self._num_shares = 0
        """Sum of the shares of tenants with waiting requests."""
        self._num_tenants = 0
        self._now = 0
        self._due: dict[str, OrderKey] = {}
        """Request id -> key, while it waits."""

    def key(self, request: Request, now_ns: int) -> OrderKey:
        del now_ns
        return self._due.get(request.request_id, (0,))  # a preempted request had its turn

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
            if len(self._tenants) > 2 * self._num_tenants + MIN_TO_SWEEP:
                tenants = self._tenants
                self._tenants = {name: one for name, one in tenants.items() if one.num_waiting or one.due > self._now}

    def admitted(self, request: Request) -> None:
        tenant = self._tenants.get(request.tenant)
        if request.num_preemptions or tenant is None:  # it was served before, or nobody of its tenant waits
            return
        given = len(request.prompt_token_ids) * UNIT
        tenant.due += given // tenant.share
        tenant.now += given // (tenant.num_calls or 1)
        self._now += given // (self._num_shares or tenant.share)
