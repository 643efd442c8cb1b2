"""Those who run: owns who they are, from admission to end or preemption, and what the executor has yet to forget. Called by the
scheduler and by who plans for it (`extending.py`, `joining.py`); never decides when.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from penstock.kv.manager import KVManager
from penstock.sched.beams import Beams
from penstock.sched.draft import StepDraft
from penstock.sched.policies.base import Eviction, Policies, PreemptMethod, cheaper_method
from penstock.sched.preemption import victim_view
from penstock.sched.queues import WaitingQueue
from penstock.sched.room import Room
from penstock.types.request import Request, RequestStatus
from penstock.types.stats import Preemption, PreemptReason


class Running:
    """Requests that hold a row and blocks."""

    def __init__(self, kv: KVManager, policies: Policies, waiting: WaitingQueue, max_rows: int) -> None:
        self.max_rows = max_rows
        """How many may run at once."""
        self.requests: dict[str, Request] = {}
        """In the order of admission. Changed here alone."""
        self.room = Room(kv, policies.reserve)
        self.beams = Beams(kv, self)
        self.releases: list[str] = []
        """Requests that the executor has yet to forget; emptied with each plan."""
        self.untold: set[str] = set()
        """Who runs and is not known to the executor, once it has forgotten those: it gets them in full with their next row."""
        self.prefill_ns_per_token = 0.0
        """As the last step without decodes said that had a good part of the tokens of a full one; written by the scheduler."""
        self._kv = kv
        self._order = policies.order
        self._victim = policies.victim
        self._waiting = waiting

    def __len__(self) -> int:
        return len(self.requests)

    @property
    def swaps(self) -> bool:
        """Who is preempted comes back from the tier below the pool, since that is cheaper than to compute."""
        return cheaper_method(self.prefill_ns_per_token, self._kv.load_ns_per_token) is PreemptMethod.SWAP

    def join(self, request: Request) -> None:
        self.requests[request.request_id] = request
        self.room.join(request)

    def leave(self, request: Request) -> None:
        """A running request stops running; the executor will be told to forget it."""
        del self.requests[request.request_id]
        self._order.left(request)
        self.room.leave(request)
        if request.request_id in self.untold:
            self.untold.remove(request.request_id)
        else:
            self.releases.append(request.request_id)

    def tell_again(self, request: Request) -> None:
        """What the executor knows of a running request is out of date: it forgets the row, and gets it in full."""
        if request.request_id not in self.untold:
            self.untold.add(request.request_id)
            self.releases.append(request.request_id)

    def with_beams(self, requests: Iterable[Request]) -> Collection[Request]:
        """These, and who runs of their searches: who leaves if these do."""
        leaving = {member.request_id: member for request in requests for member in self.beams.members(request)}
        return [member for member in leaving.values() if member.status is RequestStatus.RUNNING]

    def may_lose(self) -> Sequence[Request]:
        """Who may be preempted for another that runs: all but the most senior, unless it is alone."""
        running = list(self.requests.values())
        if len(running) > 1:
            reads_priority = self._order.reads_priority
            senior = min(running, key=lambda request: (reads_priority and request.priority, request.arrival_ns))
            spared = self.beams.members(senior)
            return [request for request in running if request not in spared] or running
        return running

    def choose_victim(self, candidates: Collection[Request], num_needed_blocks: int) -> Eviction:
        view = victim_view(candidates, self._kv, num_needed_blocks, self.prefill_ns_per_token)
        return self._victim.choose(view)

    def preempt(self, draft: StepDraft, eviction: Eviction, reason: PreemptReason) -> None:
        """Take a running request's row and blocks, also what this step planned for it. It waits again, and so do all beams of
        its search.
        """
        assert not draft.is_ahead, "a row in flight must not be preempted"
        victim = eviction.request
        draft.num_preemptions += 1
        is_swap = eviction.method is PreemptMethod.SWAP
        draft.num_swaps += is_swap
        for request in self.beams.members(victim):
            draft.preemptions.append(Preemption(request.request_id, reason, request.num_computed_tokens, is_swap))
            if request.status is RequestStatus.RUNNING:
                self._suspend(draft, request)
        self._waiting.push_preempted(self.beams.preempted(victim))

    def _suspend(self, draft: StepDraft, victim: Request) -> None:
        draft.take_back(victim)
        self.leave(victim)
        self._kv.publish_tail(victim)
        self._kv.suspend(victim.request_id)
        victim.status = RequestStatus.PREEMPTED
        victim.max_computed_tokens = max(victim.max_computed_tokens, victim.num_computed_tokens)
        victim.num_computed_tokens = victim.num_inflight_tokens = 0
        victim.num_preemptions += 1

    def check(self) -> None:
        """Verify the laws of those who run. Raises AssertionError. O(blocks + requests)."""
        assert len(self.requests) <= self.max_rows, "more requests run than rows exist"
        tables = self._kv.tables()
        for request_id, request in self.requests.items():
            assert request.status is RequestStatus.RUNNING, f"{request_id!r} runs and is {request.status.name}"
            num_tokens = len(request.prompt_token_ids) + len(request.output_token_ids)
            assert request.num_tokens == num_tokens, f"{request_id!r} has {num_tokens} tokens and counts {request.num_tokens}"
            is_waiting_for_beams = request.sampling.beams is not None and request.num_computed_tokens == num_tokens
            assert 0 <= request.num_computed_tokens < num_tokens + is_waiting_for_beams, (
                f"{request_id!r} has nothing to compute"
            )
            num_held = len(tables[request_id].block_ids) * self._kv.block_size
            assert request.num_computed_tokens + request.num_inflight_tokens <= num_held, f"{request_id!r} lacks blocks"
        final, noted = sum(map(self.room.final_blocks, self.requests.values())), self.room.num_final_blocks
        assert final == noted, f"the running can grow to {final} blocks, {noted} are noted"
        holders = {request_id for request_id, table in tables.items() if table.block_ids}
        assert holders <= self.requests.keys(), f"{holders - self.requests.keys()} hold blocks and do not run"
        assert self.untold <= self.requests.keys(), "who does not run is to be told to the executor"
        self.beams.check()
