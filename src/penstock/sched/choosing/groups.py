"""Requests that are served as one: owns which requests belong to which beam search. Called by the scheduler and its parts;
takes no blocks and chooses no tokens (`beams.py` does).

Nearly always there is no group, and each question here is answered by a look at an empty dict: a request without beams never
gets as far as `beams.py`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from penstock.sched.choosing.beam_search import BeamSearch
from penstock.types.request import Request, RequestStatus
from penstock.types.result import TokenLogprobs

MAX_BROKEN = 1000
"""Searches that ended before all their requests had come, of which that is remembered."""


@dataclass(slots=True, eq=False)
class BeamGroup:
    """The requests of one search."""

    members: list[Request]
    search: BeamSearch
    carriers: list[Request] = field(default_factory=list)
    """The request that carries each beam, in the order of the search's beams; empty until all requests have come."""
    tops: dict[str, TokenLogprobs] = field(default_factory=dict)
    """The most likely next tokens of carriers that have computed their last token, by request id."""
    forks: Sequence[tuple[Request, int]] = ()
    """After a preemption: the carriers that follow when the first is back, and the number of whole blocks they will share."""

    @property
    def width(self) -> int:
        """Rows that it may need."""
        return self.search.params.width

    @property
    def is_complete(self) -> bool:
        """True once all its requests have come."""
        return bool(self.carriers)

    @property
    def num_running(self) -> int:
        return sum(member.status is RequestStatus.RUNNING for member in self.members)


def num_rows_of(request: Request) -> int:
    """Rows that the request needs, with those of its search."""
    beams = request.sampling.beams
    return 1 if beams is None else beams.width


class Groups:
    """Groups by the ids of their requests."""

    def __init__(self, block_size: int) -> None:
        self.by_id: dict[str, BeamGroup] = {}
        """Written here alone."""
        self._block_size = block_size
        self._incomplete: dict[str, BeamGroup] = {}
        """By the id of their parent."""
        self._broken: OrderedDict[str, int] = OrderedDict()
        """Parents one of whose requests ended before all had come -> the number that is yet to come; the newest last."""

    def members(self, request: Request) -> Sequence[Request]:
        """The requests that begin, wait and end together with this one: itself, or its group."""
        group = self.by_id.get(request.request_id)
        return (request,) if group is None else tuple(group.members)

    def running_members(self, requests: Iterable[Request]) -> Collection[Request]:
        """These running requests, and the running members of their groups: all that leave if these do."""
        if not self.by_id:
            return list(requests)
        leaving = {member.request_id: member for request in requests for member in self.members(request)}
        return [member for member in leaving.values() if member.status is RequestStatus.RUNNING]

    @property
    def num_unqueued(self) -> int:
        """Requests that neither run nor are queued."""
        if not self.by_id:
            return 0
        return sum(len(group.members) - (group.num_running or group.is_complete) for group in self._all())

    @property
    def num_kept_rows(self) -> int:
        """Rows kept for the forks of groups that run."""
        if not self.by_id:
            return 0
        running = ((group, group.num_running) for group in self._all())
        return sum(group.width - count for group, count in running if count)

    def num_rows(self, running: Collection[Request]) -> int:
        """Rows of these, with those that are kept for their forks; of a group, all that run are among them."""
        if not self.by_id:
            return len(running)
        found = ((request.request_id, self.by_id.get(request.request_id)) for request in running)
        widths = {
            request_id if group is None else id(group): 1 if group is None else group.width for request_id, group in found
        }
        return sum(widths.values())

    def forks(self, request: Request) -> Sequence[tuple[Request, int]]:
        """Requests that run soon after one that waits, each with the number of blocks that it will share."""
        group = self.by_id.get(request.request_id)
        return () if group is None else group.forks

    def waiting_for(self, parent_id: str) -> Sequence[Request]:
        """The requests of a group of which some have not come yet."""
        group = self._incomplete.get(parent_id)
        return () if group is None else tuple(group.members)

    def _all(self) -> Iterator[BeamGroup]:
        """Each group once."""
        return iter({id(group): group for group in self.by_id.values()}.values())

    def add(self, request: Request) -> Request | None:
        """A request comes. Returns the one that is to be queued: itself, or the first of its group once all are there."""
        params = request.sampling.beams
        if params is None:
            return request
        group = self._incomplete.get(request.parent_id)
        if group is None:
            max_tokens = request.max_total_tokens - request.num_prompt_tokens
            search = BeamSearch(params, frozenset(request.sampling.stop_token_ids), max_tokens)
            group = self._incomplete[request.parent_id] = BeamGroup([], search)
        group.members.append(request)
        self.by_id[request.request_id] = group
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

    def is_queued(self, request: Request) -> bool:
        """Does a request that does not run wait in the queue, rather than for another of its group?"""
        group = self.by_id.get(request.request_id)
        if group is None:
            return True
        return group.is_complete and not group.num_running and group.carriers[0] is request

    def forget(self, request: Request) -> None:
        """The request has ended."""
        group = self.by_id.pop(request.request_id, None)
        if group is None:
            return
        if self._incomplete.get(request.parent_id) is group:
            del self._incomplete[request.parent_id]
            self._broken[request.parent_id] = group.width - len(group.members)
            if len(self._broken) > MAX_BROKEN:
                self._broken.popitem(last=False)
        group.members.remove(request)

    def preempted(self, request: Request) -> Request:
        """The request and its group run no more. Returns the one that is to be queued."""
        group = self.by_id.get(request.request_id)
        if group is None:
            return request
        group.tops.clear()
        first, *others = group.carriers
        group.forks = [(other, _num_equal_tokens(first, other) // self._block_size) for other in others]
        return first

    def check(self) -> None:
        """Verify the laws. Raises AssertionError. O(beams)."""
        for group in self._all():
            carriers = {carrier.request_id for carrier in group.carriers}
            running = {member.request_id for member in group.members if member.status is RequestStatus.RUNNING}
            assert running <= carriers, f"{running - carriers} run and carry no beam"
            assert len(running) in (0, 1, len(carriers)), "a part of a group runs"
            assert group.tops.keys() <= running, "a token is known of a request that does not run"
            assert len(group.tops) < max(1, len(carriers)), "a search has all that it needs, and does not go on"


def _num_equal_tokens(one: Request, other: Request) -> int:
    """Tokens before two beams of one search part."""
    pairs = enumerate(zip(one.output_token_ids, other.output_token_ids, strict=False))
    shorter = min(len(one.output_token_ids), len(other.output_token_ids))
    return one.num_prompt_tokens + next((idx for idx, (a, b) in pairs if a != b), shorter)
