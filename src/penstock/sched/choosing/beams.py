"""Beam search over running requests: gives each beam a request that carries it, and forks requests where a search goes on with
several beams of one. Called by the scheduler as the `Chooser` of groups; takes no block but through forks, and leaves the
choice of tokens to `beam_search.py`.

The choices of one call are the requests of its group (`groups.py`), as many as the search has beams. The first is queued like
any other; the others wait until its prompt is computed. Then each beam is a row:

    prompt           r0 computes it, and finds the most likely next tokens
    fork             r1, r2, ... share r0's blocks; a request that writes to a block which others hold gets a copy first
    step             all compute one token; when the last has, the search chooses, and beams that end are replaced by forks
    preemption       of one is that of all. One of them comes back as any request does, the others are forked from it
    end              each request gets one hypothesis, all at once

A request whose token was computed while another of its group has to catch up keeps its row and waits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from penstock.kv.manager import KVManager
from penstock.sched import progress
from penstock.sched.choosing.beam_search import Beam
from penstock.sched.choosing.chooser import Answer
from penstock.sched.choosing.groups import BeamGroup, Groups
from penstock.sched.running import Running
from penstock.types.request import Request, RequestStatus
from penstock.types.result import StepResult, TokenLogprobs


class Beams:
    """Chooses the tokens of every search that runs."""

    def __init__(self, kv: KVManager, running: Running, groups: Groups) -> None:
        self._kv = kv
        self._running = running
        self._groups = groups
        self._ready: list[BeamGroup] = []
        """Groups all of whose carriers have computed their last token in this step, in that order."""

    def take(self, request: Request, result: StepResult) -> None:
        """A request has computed all its tokens."""
        group = self._groups.by_id[request.request_id]
        (group.tops[request.request_id],) = result.logprobs[request.request_id]
        self._kv.look_again(request.request_id)
        if group.num_running < len(group.carriers):
            self._unfold(group)
        if len(group.tops) == len(group.carriers):
            self._ready.append(group)

    def choose(self, now_ns: int) -> Iterator[Answer]:
        """Let each search that has all it needs go on by one token."""
        ready, self._ready = self._ready, []
        for group in ready:
            for member in group.members:
                progress.note_first_token(member, now_ns)
            if not group.members:  # a row of it has failed
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
        """Let every beam of a search have a request."""
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
        """The carrier that goes on with each beam: one whose own the beam continues, if there is one; None: a fork.

        Best is the carrier whose token the executor has appended to its row by itself.
        """
        placed: list[Request | None] = [None] * len(beams)
        for idx, (carrier, top) in enumerate(zip(carriers, tops, strict=True)):
            own = [number for number, beam in enumerate(beams) if beam.parent_idx == idx]
            if own:
                as_sampled = [number for number in own if beams[number].token_ids[-1] == top.token_id]
                placed[(as_sampled or own)[0]] = carrier
                if not as_sampled:
                    self._running.tell_again(carrier)
        return placed

    def _fork(self, parent: Request, child: Request, num_tokens: int) -> None:
        """The child has no blocks, and gets those of the parent's first tokens."""
        self._kv.free(child.request_id)
        self._kv.fork(parent.request_id, child.request_id, num_tokens)
        if child.status is RequestStatus.RUNNING:
            self._running.tell_again(child)
        else:
            self._running.join(child, is_fork=True)
        progress.fork(child, num_tokens)

    def _fold(self, member: Request) -> None:
        """The request carries no beam for now."""
        if member.status is RequestStatus.RUNNING:
            self._running.leave(member)
            self._kv.free(member.request_id)
            progress.fold(member)

    def _unfold(self, group: BeamGroup) -> None:
        """One of a group that was preempted is back: the others follow from where they part from it, in whole blocks."""
        first = group.carriers[0]
        for other, num_shared_blocks in group.forks:
            self._fork(first, other, num_shared_blocks * self._kv.block_size)
        group.forks = ()
