"""Turns between calls: a list of many texts holds up nobody who asks for one. Called by the waiting queue and the scheduler;
knows of tokens, not of time.

A call is what one client asks for at once: its requests have the same `Request.parent_id`. Tenants share as in `fair`. Within
a tenant the request that is due first is next: a new call's at once, each later one after the tokens of those before it. They
are due by a virtual time, which passes by the tokens that the tenant is given, divided by its calls that wait (weighted fair
queueing: Demers, Keshav and Shenker, SIGCOMM 1989). So of n calls that wait each gets one in n tokens, and no stream of new
calls keeps an old one waiting for ever.

    tokens    0      24      48      72      96           all requests have 24 tokens
    list      a0     a1      a2      a3      a4  ...
    single           |b comes: due now, so it is next, before a1 .. a2047
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from penstock.sched.policies.base import OrderKey
from penstock.sched.policies.fair import FairShares
from penstock.types.request import Request

_UNIT = 1_000_000
"""Units of virtual time per token, so that a token divided by many calls is an integer."""
MIN_IDLE_TO_SWEEP = 64
"""Calls of which nothing waits, before any is forgotten."""


@dataclass(slots=True)
class Call:
    """The requests of one call that wait, at one time or again."""

    due: int
    """Virtual time at which the next request to come is due."""
    num_waiting: int = 0


@dataclass(slots=True)
class Turns:
    """The calls of one tenant, while any request of it waits."""

    now: int = 0
    """Virtual time: tokens that were given, each divided by the calls that waited."""
    num_waiting: int = 0
    """Calls with requests that wait."""
    calls: dict[str, Call] = field(default_factory=dict)
    """By id: those with requests that wait, and those that were given more than their share."""

    def come(self, name: str, num_tokens: int) -> int:
        """A request of a call begins to wait. Returns when it is due."""
        call = self.calls.get(name)
        if call is None:
            call = self.calls[name] = Call(self.now)
        due = max(call.due, self.now)
        call.due = due + num_tokens * _UNIT
        self.num_waiting += not call.num_waiting
        call.num_waiting += 1
        return due

    def go(self, name: str) -> None:
        """A request of a call waits no more."""
        call = self.calls[name]
        call.num_waiting -= 1
        if call.num_waiting:
            return
        self.num_waiting -= 1
        if len(self.calls) > 2 * self.num_waiting + MIN_IDLE_TO_SWEEP:
            self.calls = {name: call for name, call in self.calls.items() if call.num_waiting or call.due > self.now}


class FairCalls(FairShares):
    """Within a tenant the call that was given the fewest tokens first; what is given counts from when a call comes.

    Tokens are those of prompts. A request of a new call waits for one request of each other call at most, or for as many as
    they lag behind it. Tenants share as in `FairShares`, with its settings.
    """

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
        """Arguments are those of `FairShares`."""
        super().__init__(
            input_weight=input_weight,
            output_weight=output_weight,
            shares=shares,
            max_tenants=max_tenants,
            max_wait_ns=max_wait_ns,
            max_credit_tokens=max_credit_tokens,
        )
        self._turns: dict[str, Turns] = {}
        """By tenant."""
        self._due: dict[str, OrderKey] = {}
        """Keys of requests that wait, by their ids."""

    def key(self, request: Request, now_ns: int) -> OrderKey:
        del now_ns
        return self._due.get(request.request_id, (0,))  # one that was preempted has had its turn

    def queued(self, request: Request) -> None:
        super().queued(request)
        turns = self._turns.get(request.tenant)
        if turns is None:
            turns = self._turns[request.tenant] = Turns()
        self._due[request.request_id] = (turns.come(_call_of(request), request.num_prompt_tokens),)

    def unqueued(self, request: Request) -> None:
        super().unqueued(request)
        if self._due.pop(request.request_id, None) is None:
            return
        if request.tenant in self._waiting:
            self._turns[request.tenant].go(_call_of(request))
        else:
            del self._turns[request.tenant]

    def admitted(self, request: Request) -> None:
        super().admitted(request)
        turns = self._turns.get(request.tenant)
        if turns is not None:
            turns.now += request.num_prompt_tokens * _UNIT // turns.num_waiting


def _call_of(request: Request) -> str:
    return request.parent_id or request.request_id
