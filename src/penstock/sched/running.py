"""Those who run: owns who they are, from admission to end or preemption, and what the executor has yet to forget. Called by the
scheduler and by who plans for it (`extending.py`, `joining.py`); never decides when.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from penstock.kv.manager import KVManager
from penstock.kv.prefix_cache import PrefixHit
from penstock.sched.choosing.beams import Beams
from penstock.sched.draft import StepDraft
from penstock.sched.policies.base import AdmissionView, Eviction, Policies, PreemptMethod, Reserve, VictimView, cheaper_method
from penstock.sched.queue import WaitingQueue
from penstock.types.request import Request, RequestStatus
from penstock.types.stats import Preemption, PreemptReason

RESUME_GROWTH_TOKENS = 32
"""Of each running request, when one that was preempted for the first time is admitted again."""
RESUME_SWAP_GROWTH_TOKENS = 16
"""The same, where blocks come back from a tier below the pool."""
MAX_DOUBLINGS = 20


def victim_view(
    candidates: Collection[Request], kv: KVManager, num_needed_blocks: int, prefill_ns_per_token: float
) -> VictimView:
    return VictimView(
        candidates=tuple(candidates),
        num_needed_blocks=num_needed_blocks,
        num_freed_blocks=lambda request: kv.num_own_blocks(request.request_id),
        num_lost_tokens=lambda request: _num_lost_tokens(request, kv),
        prefill_ns_per_token=prefill_ns_per_token,
        load_ns_per_token=kv.load_ns_per_token,
        block_size=kv.block_size,
    )


def _num_lost_tokens(request: Request, kv: KVManager) -> int:
    """Tokens to compute again if the request were preempted now: others keep the blocks that it shares with them."""
    num_shared = len(kv.block_table(request.request_id)) - kv.num_own_blocks(request.request_id)
    return max(0, request.num_computed_tokens - num_shared * kv.block_size)


def blocks_to_resume(view: AdmissionView) -> int:
    """What a preempted request must find, whatever the reserve says: blocks for all its tokens, and room for everybody to grow.

    The room doubles with each preemption, up to all that they can ever need: who was preempted often waits until it can end.
    `tests/sched/test_preemption.py` counts what that saves: with a quarter of the memory, and admissions that look for the
    first chunk only, 0.5 positions are computed again for each one needed instead of 3.4, and nobody is preempted more than
    4 times instead of 42.
    """
    first_tokens = RESUME_SWAP_GROWTH_TOKENS if view.swaps else RESUME_GROWTH_TOKENS
    growth_tokens = first_tokens << min(view.request.num_preemptions - 1, MAX_DOUBLINGS)
    num_growth = (view.num_running + 1) * -(-growth_tokens // view.block_size)
    own_growth = view.num_final_blocks - view.num_prompt_blocks
    return view.num_prompt_blocks + min(num_growth, view.num_growth_blocks + own_growth)


def peak_growth_tokens(requests: Collection[Request]) -> int:
    """By how many tokens requests grow at most at one time, if each gets one a step and none goes beyond its limit: what one
    held when it ends is free for the others. O(n log n)."""
    ends = sorted([(request.max_total_tokens - request.num_tokens, request.num_tokens) for request in requests])
    num_left, num_freed, peak = len(ends), 0, 0
    for num_steps, num_tokens in ends:
        peak = max(peak, num_left * num_steps - num_freed)
        num_left -= 1
        num_freed += num_tokens
    return peak


class Room:
    """Numbers of blocks."""

    def __init__(self, kv: KVManager, reserve: Reserve) -> None:
        self._kv = kv
        self._reserve = reserve
        self.num_final_blocks = 0
        """What the running would hold if all reached their limits and shared nothing."""

    def final_blocks(self, request: Request) -> int:
        """Of a request at its limit; its last token is never computed and takes no place."""
        return self._kv.num_blocks_for(request.max_total_tokens - 1)

    def missing_blocks(self, request: Request) -> int:
        """Those that a running request does not hold yet for the tokens that it has."""
        num_planned = request.num_computed_tokens + request.num_inflight_tokens
        return self._kv.num_blocks_for(request.num_tokens) - self._kv.num_blocks_for(num_planned)

    def lacking_blocks(self, request: Request, query_len: int) -> int:
        """Those that a row of a running request needs beyond what it holds and what is free; at least 1."""
        num_held = len(self._kv.block_table(request.request_id))
        num_fresh = self._kv.num_blocks_for(request.num_computed_tokens + query_len) - num_held
        return max(1, num_fresh - self._kv.pool.num_available)

    def join(self, request: Request) -> None:
        self.num_final_blocks += self.final_blocks(request)

    def leave(self, request: Request) -> None:
        self.num_final_blocks -= self.final_blocks(request)

    def is_enough(
        self,
        request: Request,
        hit: PrefixHit,
        query_len: int,
        running: Mapping[str, Request],
        num_promised_blocks: int,
        without: Collection[Request] = (),
        *,
        forks: Sequence[tuple[Request, int]] = (),
        swaps: bool = False,
    ) -> bool:
        """May the request join those who run, with a first chunk of `query_len`, once those of `without` had left?

        `num_promised_blocks`: free ones that running prefills will need for the tokens they have. Of beams, all that run of a
        search are among `without`, or none. `forks`: who follows it, and how many blocks each will share with it. `swaps`: who
        is preempted comes back from the tier.
        """
        num_available, staying = self._kv.pool.num_available, running.values()
        num_promised, num_final = num_promised_blocks, self.num_final_blocks
        if without:
            leaving = {other.request_id for other in without}
            num_available += self._kv.num_freed_blocks(leaving, kept=hit.block_ids)
            num_promised -= sum(map(self.missing_blocks, without))
            num_final -= sum(map(self.final_blocks, without))
            staying = {key: other for key, other in running.items() if key not in leaving}.values()
        num_shared = len(hit.block_ids) - hit.num_free_blocks
        num_chunk = self._kv.num_blocks_for(hit.num_tokens + query_len) - num_shared
        if not staying:
            return num_chunk <= num_available
        num_total, num_blocks_for = self._kv.num_total_blocks, self._kv.num_blocks_for
        num_fork_blocks = sum(num_blocks_for(fork.num_tokens) - num_same for fork, num_same in forks)
        num_final_fork_blocks = sum(self.final_blocks(fork) - num_same for fork, num_same in forks)
        view = AdmissionView(
            request=request,
            running=staying,
            num_chunk_blocks=num_chunk,
            num_prompt_blocks=num_blocks_for(request.num_tokens) - num_shared + num_fork_blocks,
            num_final_blocks=self.final_blocks(request) - num_shared + num_final_fork_blocks,
            num_running=len(staying) + len(forks),
            num_growth_blocks=max(0, num_final - (num_total - num_available) - num_promised),
            num_total_blocks=num_total,
            block_size=self._kv.block_size,
            swaps=swaps,
        )
        num_free = num_available - num_promised
        if self._required_blocks(view) <= num_free:
            return True
        if num_free < view.num_prompt_blocks:
            return False
        joining = [request, *(fork for fork, _ in forks)]
        view.num_peak_blocks = num_blocks_for(peak_growth_tokens([*joining, *staying]))
        return self._required_blocks(view) <= num_free

    def _required_blocks(self, view: AdmissionView) -> int:
        required = max(view.num_chunk_blocks, self._reserve.required_blocks(view))
        return max(required, blocks_to_resume(view)) if view.request.num_preemptions else required


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
        tables = self._kv.tables
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
