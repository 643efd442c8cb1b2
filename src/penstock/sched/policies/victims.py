"""Victim policies: which request is preempted when blocks are needed and none are free. Among equals the latest."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from penstock.sched.policies.base import Victim, VictimView, loads_back
from penstock.types.request import Request


class LatestArrived(Victim):
    def choose(self, view: VictimView) -> Request:
        return _choose(view, lambda _: 0)


class LowestPriority(Victim):
    def choose(self, view: VictimView) -> Request:
        return _choose(view, lambda request: request.priority)


class LeastComputed(Victim):
    """Preempts the request with the fewest computed tokens, so that the least work is lost."""

    def choose(self, view: VictimView) -> Request:
        return _choose(view, lambda request: -request.num_computed_tokens)


class LeastOutput(Victim):
    """Preempts the request with the fewest generated tokens, among equals that with the longest prompt (SGLang)."""

    def choose(self, view: VictimView) -> Request:
        return _choose(view, lambda request: (-len(request.output_token_ids), request.num_prompt_tokens))


class Cheapest(Victim):
    """Preempts the request that is fastest to restore. If some free enough blocks, only these are considered."""

    def choose(self, view: VictimView) -> Request:
        return _choose(
            view, lambda request: (view.num_freed_blocks(request) >= view.num_needed_blocks, -_cost_ns(view, request))
        )


def _cost_ns(view: VictimView, request: Request) -> float:
    num_lost, compute_ns = view.num_lost_tokens(request), view.prefill_ns_per_token or 1.0
    if not loads_back(view.prefill_ns_per_token, view.load_ns_per_token):
        return num_lost * compute_ns
    num_behind = num_lost % view.block_size
    return num_behind * compute_ns + (num_lost - num_behind) * (view.load_ns_per_token or 0.0)


def _choose(view: VictimView, key: Callable[[Request], Any]) -> Request:
    _, victim = max(enumerate(view.candidates), key=lambda entry: (key(entry[1]), entry[1].arrival_ns, entry[0]))
    return victim


VICTIMS = {
    "latest": "penstock.sched.policies.victims:LatestArrived",
    "lowest-priority": "penstock.sched.policies.victims:LowestPriority",
    "least-computed": "penstock.sched.policies.victims:LeastComputed",
    "least-output": "penstock.sched.policies.victims:LeastOutput",
    "cheapest": "penstock.sched.policies.victims:Cheapest",
}
