"""Beam search over running requests: each beam is computed by one request (its carrier). Requests are forked where beams
branch.

The first request of a search computes the prompt; the others are forked from it and share its blocks. When each has computed a
token, the best beams go on. All end at once, each with one hypothesis.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from penstock.kv.manager import KVManager
from penstock.sched import progress
from penstock.sched.choosing.beam_search import Beam
from penstock.sched.choosing.groups import BeamGroup, Groups
from penstock.sched.running import Running
from penstock.types.request import Request, RequestStatus
from penstock.types.result import StepResult, TokenLogprobs


@dataclass(frozen=True, slots=True)
class Answer:
    request: Request
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    is_stopped: bool
    """The last token is a stop token. Otherwise the answer reached its limit."""


class Beams:
    def __init__(self, kv: KVManager, running: Running, groups: Groups) -> None:
        self._kv = kv
        self._running = running
        self._groups = groups
        self._ready: list[BeamGroup] = []

    def take(self, request: Request, result: StepResult) -> None:
        """Note that a beam's request has computed all its tokens. Call this after its blocks are published."""
        group = self._groups.by_id[request.request_id]
        (group.tops[request.request_id],) = result.logprobs[request.request_id]
        self._kv.require_extend(request.request_id)
        if group.num_running < len(group.carriers):
            self._unfold(group)
        if len(group.tops) == len(group.carriers):
            self._ready.append(group)

    def choose(self) -> Iterator[Answer]:
        """Advance each search once all its beams have their tokens. Yield the answers of requests that the caller must end."""
        ready, self._ready = self._ready, []
        for group in ready:
            if not group.members:  # one of its rows failed
                continue
            tops = [group.tops[carrier.request_id] for carrier in group.carriers]
            group.tops.clear()
            group.search.advance(tops)
            if group.search.is_done:
                for request, beam in zip(tuple(group.members), group.search.finished, strict=True):
                    yield Answer(request, beam.token_ids, beam.entries, beam.is_stopped)
            else:
                self._go_on(group, tops)

    def _go_on(self, group: BeamGroup, tops: Sequence[TokenLogprobs]) -> None:
        beams, carriers = group.search.beams, group.carriers
        placed = self._place(beams, carriers, tops)
        spare = [member for member in group.members if member not in placed]
        for member in spare:
            if member.status is RequestStatus.RUNNING:
                self._kv.free(member.request_id)
        parents = [carriers[beam.parent_idx] for beam in beams]
        num_computed = carriers[0].num_computed_tokens
        forks: list[Request] = []
        for parent, carrier in zip(parents, placed, strict=True):
            if carrier is None:
                forks.append(spare.pop(0))
                self._fork(parent, forks[-1], num_computed)
        for member in spare:
            self._fold(member)
        nexts = iter(forks)
        group.carriers = [carrier or next(nexts) for carrier in placed]
        for carrier, beam in zip(group.carriers, beams, strict=True):
            progress.replace_output(carrier, beam.token_ids)

    def _place(self, beams: Sequence[Beam], carriers: Sequence[Request], tops: Sequence[TokenLogprobs]) -> list[Request | None]:
        """Return the request that continues each new beam, or None where one must be forked."""
        placed: list[Request | None] = [None] * len(beams)
        for idx, (carrier, top) in enumerate(zip(carriers, tops, strict=True)):
            own = [number for number, beam in enumerate(beams) if beam.parent_idx == idx]
            if own:
                as_sampled = [number for number in own if beams[number].token_ids[-1] == top.token_id]
                placed[(as_sampled or own)[0]] = carrier
                if not as_sampled:
                    self._running.resend(carrier)
        return placed

    def _fork(self, parent: Request, child: Request, num_tokens: int) -> None:
        self._kv.free(child.request_id)
        self._kv.fork(parent.request_id, child.request_id, num_tokens)
        if child.status is RequestStatus.RUNNING:
            self._running.resend(child)
        else:
            self._running.join(child, is_fork=True)
        progress.fork(child, num_tokens)

    def _fold(self, member: Request) -> None:
        if member.status is RequestStatus.RUNNING:
            self._running.leave(member)
            self._kv.free(member.request_id)
            progress.fold(member)

    def _unfold(self, group: BeamGroup) -> None:
        first = group.carriers[0]
        for other, num_shared_blocks in group.forks:
            self._fork(first, other, num_shared_blocks * self._kv.block_size)
        group.forks = ()
