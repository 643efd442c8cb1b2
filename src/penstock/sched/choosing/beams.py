"""The beams of every search that runs: owns which requests belong together, and which of them carries which beam. Called by the
scheduler; takes no block but through forks, and never chooses a token itself (`beam_search.py` does).

The choices of one call are the requests of its group, as many as the search has beams. The first is queued like any
other; the others wait until its prompt is computed. Then each beam is a row:

    prompt           r0 computes it, and finds the most likely next tokens
    fork             r1, r2, ... share r0's blocks; whoever writes to a block that others hold gets a copy first
    step             all compute one token; when the last has, the search chooses, and beams that end are replaced by forks
    preemption       of one is that of all. One of them comes back as any request does, the others are forked from it
    end              each request gets one hypothesis, all at once

A request whose token was computed while another of its group has to catch up keeps its row and waits.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from penstock.kv.manager import KVManager
from penstock.sched.choosing.beam_search import Beam, BeamSearch
from penstock.types.request import Request, RequestStatus
from penstock.types.result import TokenLogprobs

if TYPE_CHECKING:
    from penstock.sched.running import Running

MAX_BROKEN = 1000
"""Searches that ended before all their requests had come, of which that is remembered."""


@dataclass(slots=True)
class BeamGroup:
    """The requests of one search."""

    members: list[Request]
    search: BeamSearch
    carriers: list[Request] = field(default_factory=list)
    """Who carries which beam, in the order of the search's beams; empty until all requests are there."""
    tops: dict[str, TokenLogprobs] = field(default_factory=dict)
    """Of those that have computed their last token, by request id."""
    forks: Sequence[tuple[Request, int]] = ()
    """Of one that was preempted: who follows when the first carrier is back, and how many whole blocks they will share."""

    @property
    def is_complete(self) -> bool:
        return bool(self.carriers)

    @property
    def num_running(self) -> int:
        return sum(member.status is RequestStatus.RUNNING for member in self.members)


class Beams:
    """Groups by request id."""

    def __init__(self, kv: KVManager, running: Running) -> None:
        self.groups: dict[str, BeamGroup] = {}
        """By the ids of their requests."""
        self._kv = kv
        self._running = running
        self._incomplete: dict[str, BeamGroup] = {}
        """By the id of their parent."""
        self._broken: OrderedDict[str, int] = OrderedDict()
        """Id of a parent one of whose requests ended before all had come -> how many are yet to come; the newest last."""

    def members(self, request: Request) -> Sequence[Request]:
        """Who begins, waits and ends together with a request: itself, or its group."""
        group = self.groups.get(request.request_id)
        return (request,) if group is None else tuple(group.members)

    @property
    def num_unqueued(self) -> int:
        """Requests that neither run nor are queued."""
        if not self.groups:
            return 0
        return sum(len(group.members) - (group.num_running or group.is_complete) for group in self._all())

    @property
    def num_kept_rows(self) -> int:
        """For the forks of those that run."""
        if not self.groups:
            return 0
        running = ((group, group.num_running) for group in self._all())
        return sum(group.search.params.width - count for group, count in running if count)

    def num_rows(self, running: Iterable[Request]) -> int:
        """Rows of these, with those that are kept for their forks; of a search, all that run are among them."""
        found = ((request.request_id, self.groups.get(request.request_id)) for request in running)
        widths = {
            request_id if group is None else id(group): 1 if group is None else group.search.params.width
            for request_id, group in found
        }
        return sum(widths.values())

    def _all(self) -> Iterator[BeamGroup]:
        """Each once."""
        return iter({id(group): group for group in self.groups.values()}.values())

    def add(self, request: Request) -> Request | None:
        """A request of a group. Returns the one that is to be queued, once all are there."""
        params = request.sampling.beams
        assert params is not None, "asked for a beam search"
        group = self._incomplete.get(request.parent_id)
        if group is None:
            max_tokens = request.max_total_tokens - request.num_prompt_tokens
            search = BeamSearch(params, frozenset(request.sampling.stop_token_ids), max_tokens)
            group = self._incomplete[request.parent_id] = BeamGroup([], search)
        group.members.append(request)
        self.groups[request.request_id] = group
        if len(group.members) < params.width:
            return None
        del self._incomplete[request.parent_id]
        group.carriers = [group.members[0]]
        return group.members[0]

    def is_broken(self, request: Request) -> bool:
        """Has another of its group ended already, so that it would wait for ever? Asked once, when it comes."""
        num_missing = self._broken.pop(request.parent_id, 0)
        if num_missing > 1:
            self._broken[request.parent_id] = num_missing - 1
        return num_missing > 0

    def _break(self, parent_id: str, num_missing: int) -> None:
        self._broken[parent_id] = num_missing
        if len(self._broken) > MAX_BROKEN:
            self._broken.popitem(last=False)

    def is_queued(self, request: Request) -> bool:
        """Does it wait in the queue, rather than for another of its group?"""
        group = self.groups.get(request.request_id)
        if group is None:
            return True
        return group.is_complete and not group.num_running and group.carriers[0] is request

    def forget(self, request: Request) -> None:
        """It has ended."""
        group = self.groups.pop(request.request_id, None)
        if group is None:
            return
        if self._incomplete.get(request.parent_id) is group:
            del self._incomplete[request.parent_id]
            self._break(request.parent_id, group.search.params.width - len(group.members))
        group.members.remove(request)

    def preempted(self, request: Request) -> Request:
        """Its group runs no more. Returns who is to be queued."""
        group = self.groups.get(request.request_id)
        if group is None:
            return request
        group.tops.clear()
        first, *others = group.carriers
        group.forks = [(other, self._num_shared_blocks(first, other)) for other in others]
        return first

    def forks(self, request: Request) -> Sequence[tuple[Request, int]]:
        """Who runs soon after one that waits, and needs all blocks but so many of its own."""
        group = self.groups.get(request.request_id)
        return () if group is None else group.forks

    def waiting_for(self, parent_id: str) -> Sequence[Request]:
        """The requests of a group of which some have not come yet."""
        group = self._incomplete.get(parent_id)
        return () if group is None else tuple(group.members)

    def begun(self, request: Request) -> None:
        """The first of a group was admitted: nobody of it waits for its turn any more."""
        for member in self.groups[request.request_id].members:
            if member.first_scheduled_ns is None:
                member.first_scheduled_ns, member.num_cached_tokens = request.first_scheduled_ns, request.num_cached_tokens

    # after a step

    def report(self, request: Request, top: TokenLogprobs) -> BeamGroup | None:
        """A request has computed all its tokens. Returns its group if it was the last of it."""
        group = self.groups[request.request_id]
        group.tops[request.request_id] = top
        self._kv.look_again(request.request_id)
        if group.num_running < len(group.carriers):
            self._unfold(group)
        return group if len(group.tops) == len(group.carriers) else None

    def advance(self, group: BeamGroup) -> bool:
        """Choose the next tokens, and let every beam have a request. False if the search has ended."""
        search, carriers = group.search, group.carriers
        tops = [group.tops[carrier.request_id] for carrier in carriers]
        group.tops.clear()
        search.advance(tops)
        if search.is_done:
            return False
        placed = self._place(search.beams, carriers, tops)
        spare = [member for member in group.members if member not in placed]
        for member in spare:
            if member.status is RequestStatus.RUNNING:
                self._kv.free(member.request_id)
        parents = [carriers[beam.parent_idx] for beam in search.beams]
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
        for carrier, beam in zip(group.carriers, search.beams, strict=True):
            carrier.output_token_ids = list(beam.token_ids)
            carrier.num_tokens = num_computed + 1
        return True

    def _place(self, beams: Sequence[Beam], carriers: Sequence[Request], tops: Sequence[TokenLogprobs]) -> list[Request | None]:
        """Who goes on with which beam: each with one that continues its own, if there is one; None: a fork.

        Best with the one whose token the executor has appended to its row by itself.
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
        child.num_computed_tokens = num_tokens
        if child.status is RequestStatus.RUNNING:
            self._running.tell_again(child)
        else:
            child.status = RequestStatus.RUNNING
            self._running.join(child)
            self._running.untold.add(child.request_id)

    def _fold(self, member: Request) -> None:
        """It carries no beam for now."""
        if member.status is RequestStatus.RUNNING:
            self._running.leave(member)
            self._kv.free(member.request_id)
            member.status, member.num_computed_tokens = RequestStatus.WAITING, 0

    def _unfold(self, group: BeamGroup) -> None:
        """One of a group that was preempted is back: the others follow from where they part from it, in whole blocks."""
        first = group.carriers[0]
        for other, num_shared_blocks in group.forks:
            self._fork(first, other, num_shared_blocks * self._kv.block_size)
        group.forks = ()

    def _num_shared_blocks(self, one: Request, other: Request) -> int:
        """Before the two beams part."""
        num_equal = one.num_prompt_tokens + _num_equal(one.output_token_ids, other.output_token_ids)
        return num_equal // self._kv.block_size

    def check(self) -> None:
        """Verify the laws. Raises AssertionError. O(beams)."""
        for group in self._all():
            carriers = {carrier.request_id for carrier in group.carriers}
            running = {member.request_id for member in group.members if member.status is RequestStatus.RUNNING}
            assert running <= carriers, f"{running - carriers} run and carry no beam"
            assert len(running) in (0, 1, len(carriers)), "a part of a group runs"
            assert group.tops.keys() <= running, "a token is known of who does not run"
            assert len(group.tops) < max(1, len(carriers)), "a search has all that it needs, and does not go on"


def _num_equal(one: Sequence[int], other: Sequence[int]) -> int:
    return next((idx for idx, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
