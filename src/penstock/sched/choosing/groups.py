"""Groups of requests that run together: one request for each beam of a beam search."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from penstock.sched.choosing.beam_search import BeamSearch
from penstock.types.request import Request, RequestStatus
from penstock.types.result import TokenLogprobs

MAX_BROKEN = 1000
"""Searches remembered that ended before all their requests arrived."""


@dataclass(slots=True, eq=False)
class BeamGroup:
    members: list[Request]
    search: BeamSearch
    carriers: list[Request] = field(default_factory=list)
    """The request that carries each beam; empty until all requests have arrived."""
    tops: dict[str, TokenLogprobs] = field(default_factory=dict)
    """Request id -> most likely next tokens, of carriers that have computed their last token."""
    forks: Sequence[tuple[Request, int]] = ()
    """After a preemption: the carriers that follow the first, and the whole blocks that they share with it."""

    @property
    def width(self) -> int:
        return self.search.params.width

    @property
    def is_complete(self) -> bool:
        return bool(self.carriers)

    @property
    def num_running(self) -> int:
        return sum(member.status is RequestStatus.RUNNING for member in self.members)

    @property
    def num_unqueued(self) -> int:
        """Number of waiting members that are in no queue."""
        return len(self.members) - (self.num_running or self.is_complete)


class Groups:
    def __init__(self, block_size: int) -> None:
        self.by_id: dict[str, BeamGroup] = {}
        self.running: list[BeamGroup] = []
        self._block_size = block_size
        self._incomplete: dict[str, BeamGroup] = {}
        self._broken: OrderedDict[str, int] = OrderedDict()
        """Parent id -> requests still to arrive, of searches that have already ended; newest last."""

    def members(self, request: Request) -> Sequence[Request]:
        """Return the requests of this request's group, itself included: they begin, wait and end together."""
        group = self.by_id.get(request.request_id)
        return (request,) if group is None else tuple(group.members)

    def running_members(self, requests: Iterable[Request]) -> Collection[Request]:
        """Return these running requests and all running members of their groups."""
        if not self.by_id:
            return list(requests)
        leaving = {member.request_id: member for request in requests for member in self.members(request)}
        return [member for member in leaving.values() if member.status is RequestStatus.RUNNING]

    @property
    def num_kept_rows(self) -> int:
        """Number of batch rows reserved for forks of running groups."""
        return sum(group.width - group.num_running for group in self.running)

    def num_rows(self, running: Collection[Request]) -> int:
        """Return the number of batch rows of these requests and their groups, reserved ones included."""
        if not self.by_id:
            return len(running)
        found = ((request.request_id, self.by_id.get(request.request_id)) for request in running)
        widths = {
            request_id if group is None else id(group): 1 if group is None else group.width for request_id, group in found
        }
        return sum(widths.values())

    def forks(self, request: Request) -> Sequence[tuple[Request, int]]:
        """Return (request, number of shared blocks) for the requests to fork from this one as soon as it runs."""
        group = self.by_id.get(request.request_id)
        return () if group is None else group.forks

    def waiting_for(self, parent_id: str) -> Sequence[Request]:
        group = self._incomplete.get(parent_id)
        return () if group is None else tuple(group.members)

    def add(self, request: Request) -> Request | None:
        """Add a request of a beam search. Once its group is complete, return the group's first request, which is to be
        queued."""
        params = request.sampling.beams
        assert params is not None, "asked for a beam search"
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
        """Return whether another request of its group ended before this one arrived. Call once per request."""
        num_missing = self._broken.pop(request.parent_id, 0)
        if num_missing > 1:
            self._broken[request.parent_id] = num_missing - 1
        return num_missing > 0

    def is_queued(self, request: Request) -> bool:
        """Return whether this request waits in the queue. Others of a group wait for their first request."""
        group = self.by_id.get(request.request_id)
        if group is None:
            return True
        return group.is_complete and not group.num_running and group.carriers[0] is request

    def forget(self, request: Request) -> None:
        group = self.by_id.pop(request.request_id)
        if self._incomplete.get(request.parent_id) is group:
            del self._incomplete[request.parent_id]
            self._broken[request.parent_id] = group.width - len(group.members)
            if len(self._broken) > MAX_BROKEN:
                self._broken.popitem(last=False)
        if group in self.running:  # all its requests end now
            self.running.remove(group)
        group.members.remove(request)

    def start(self, request: Request) -> Sequence[Request]:
        """Reserve rows for the group of a request that begins to run. Return the group's requests."""
        group = self.by_id[request.request_id]
        self.running.append(group)
        return tuple(group.members)

    def preempted(self, request: Request) -> Request:
        """Note that the group no longer runs. Return its first request, which is to be queued."""
        group = self.by_id.get(request.request_id)
        if group is None:
            return request
        self.running.remove(group)
        group.tops.clear()
        first, *others = group.carriers
        group.forks = [(other, _num_equal_tokens(first, other) // self._block_size) for other in others]
        return first

    def check(self, num_unqueued: int) -> None:
        """`num_unqueued`: waiting requests that are in no queue, since they wait for the first of their group."""
        groups = list({id(group): group for group in self.by_id.values()}.values())
        assert num_unqueued == sum(group.num_unqueued for group in groups), "a request that waits is in no queue"
        assert {id(group) for group in groups if group.num_running} == set(map(id, self.running)), (
            "other groups run than listed"
        )
        for group in groups:
            carriers = {carrier.request_id for carrier in group.carriers}
            running = {member.request_id for member in group.members if member.status is RequestStatus.RUNNING}
            assert running <= carriers, f"{running - carriers} run and carry no beam"
            assert len(running) in (0, 1, len(carriers)), "a part of a group runs"
            assert group.tops.keys() <= running, "a token is known of a request that does not run"
            assert len(group.tops) < max(1, len(carriers)), "a search has all that it needs, and does not go on"


def _num_equal_tokens(one: Request, other: Request) -> int:
    pairs = enumerate(zip(one.output_token_ids, other.output_token_ids, strict=False))
    shorter = min(len(one.output_token_ids), len(other.output_token_ids))
    return one.num_prompt_tokens + next((idx for idx, (a, b) in pairs if a != b), shorter)
