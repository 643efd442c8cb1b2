"""The running requests: their rows in a step, their blocks, how far they can grow, and which rows the executor must release."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence

from penstock.kv.manager import KVManager
from penstock.sched import progress
from penstock.sched.choosing.groups import Groups
from penstock.sched.policies.base import AdmissionView, Policies, VictimView, loads_back
from penstock.sched.queue import Queues
from penstock.sched.step_builder import Candidate, StepBuilder
from penstock.types.adapter import BASE
from penstock.types.plan import Capacity
from penstock.types.request import Request, RequestStatus
from penstock.types.stats import Preemption, PreemptReason

RESUME_GROWTH_TOKENS = 32
"""Room for each running request to grow when one resumes after its first preemption; half of it with a tier."""
MEASURED_FRACTION = 1 / 4
"""A step without decodes measures prefill speed if it uses at least this fraction of the possible tokens, or is faster."""
MAX_FORCED_TOKENS = 15
"""Most forced tokens of a request in one step, since all rows of the step wait for them."""


class Running:
    def __init__(
        self, kv: KVManager, policies: Policies, queues: Queues, groups: Groups, capacity: Capacity, *, max_rows: int
    ) -> None:
        self.max_rows = max_rows
        self.requests: dict[str, Request] = {}
        """In order of admission."""
        self.num_background = 0
        self._protects_one = policies.background_share > 0 and max_rows > 1
        self._protected: Request | None = None
        """A background request that waiting requests can't preempt. It uses the background's share of the time."""
        self._others_go_first = False
        """The protected request left. Requests that wait for a row, memory or an adapter join before the next is protected."""
        self.prefill_ns_per_token = 0.0
        """From steps without decodes; 0.0 before the first."""
        self._kv = kv
        self._order = policies.order
        self._victim = policies.victim
        self._reserve = policies.reserve
        self._queues = queues
        self._groups = groups
        self._capacity = capacity
        self._releases: list[str] = []
        self._to_resend: set[str] = set()
        """Running requests to send in full with their next rows."""
        self._num_final_blocks = 0
        """Blocks that the running requests would hold at their limits if they shared nothing."""

    def __len__(self) -> int:
        return len(self.requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self.requests.values())

    # who runs

    def join(self, request: Request, *, is_fork: bool = False) -> None:
        """Add a request to the running ones. `is_fork`: the executor does not know it yet."""
        self.requests[request.request_id] = request
        self.num_background += request.background
        if request.background and self._protects_one and self._protected is None and not self._others_go_first:
            self._protected = request
        self._num_final_blocks += self._final_blocks(request)
        if is_fork:
            self._to_resend.add(request.request_id)

    def leave(self, request: Request) -> None:
        del self.requests[request.request_id]
        self.num_background -= request.background
        if request is self._protected:
            self._protected, self._others_go_first = None, True
        if not request.background:
            self._order.left(request)
        self._num_final_blocks -= self._final_blocks(request)
        if request.request_id in self._to_resend:
            self._to_resend.remove(request.request_id)
        else:
            self._releases.append(request.request_id)

    def of_class(self, *, background: bool) -> Sequence[Request]:
        """Return the running background requests, or all others, in order of admission."""
        if not self.num_background:  # as nearly always
            return () if background else tuple(self)
        return [request for request in self if request.background is background]

    @property
    def num_background_blocks(self) -> int:
        """Return how many blocks running background requests allocated, so that each block counts once."""
        return sum(self._kv.num_allocated_blocks(request.request_id) for request in self.of_class(background=True))

    @property
    def yielding(self) -> Sequence[Request]:
        """Return the running requests that all others may preempt: background requests, except the protected one."""
        found, kept = self.of_class(background=True), self._protected_members
        return [request for request in found if request not in kept] if kept else found

    @property
    def _protected_members(self) -> Sequence[Request]:
        return () if self._protected is None else self._groups.members(self._protected)

    def protect_next(self) -> None:
        """Protect the oldest background request. Call this when no other request waits for the place of the last one."""
        if self._others_go_first:
            self._others_go_first = False
            self._protected = next(iter(self.of_class(background=True)), None)

    def preemptable_for(self, grower: Request) -> Sequence[Request]:
        """Return the requests that may be preempted to free blocks for `grower`, which runs: the first group that is not empty.

        1. All background requests except the protected one, if the grower is not one itself.
        2. The grower's class except its most senior request. The protected request counts as the most senior.
        3. The protected request, if the grower is not a background request.
        4. The grower itself, or all requests of its beam search.
        """
        if not grower.background and (yielding := self.yielding):
            return yielding
        running, spared = self.of_class(background=grower.background), self._protected_members
        if not spared or not grower.background:
            reads_priority = self._order.reads_priority
            senior = min(running, key=lambda request: (request.priority if reads_priority else 0, request.arrival_ns))
            spared = self._groups.members(senior)
        found = [request for request in running if request not in spared]
        return found or (running if grower.background else self._protected_members or running)

    def choose_victim(self, candidates: Collection[Request], request: Request, query_len: int) -> Request:
        """Return which candidate to preempt, so that `request` can compute its next `query_len` tokens."""
        kv = self._kv
        num_fresh = kv.num_blocks_for(request.num_computed_tokens + query_len) - len(kv.block_table(request.request_id))
        view = VictimView(
            candidates=tuple(candidates),
            num_needed_blocks=max(1, num_fresh - kv.pool.num_available),
            num_freed_blocks=lambda request: kv.num_own_blocks(request.request_id),
            num_lost_tokens=self._num_lost_tokens,
            prefill_ns_per_token=self.prefill_ns_per_token,
            load_ns_per_token=kv.load_ns_per_token,
            block_size=kv.block_size,
        )
        return self._victim.choose(view)

    def _num_lost_tokens(self, request: Request) -> int:
        kv = self._kv
        num_shared = kv.num_held_blocks(request.request_id) - kv.num_own_blocks(request.request_id)
        return max(0, request.num_computed_tokens - num_shared * kv.block_size)

    @property
    def _loads_back(self) -> bool:
        return loads_back(self.prefill_ns_per_token, self._kv.load_ns_per_token)

    def preempt(self, step: StepBuilder, victim: Request, reason: PreemptReason) -> None:
        """Take a request's batch row and blocks, and let it wait again. Undoes what this step planned for it."""
        assert not step.is_ahead, "a row in flight must not be preempted"
        is_swap = self._loads_back and not victim.background  # the tier does not take its blocks
        step.counts.num_preemptions += 1
        step.counts.num_swaps += is_swap
        for request in self._groups.members(victim):
            step.preemptions.append(Preemption(request.request_id, reason, request.num_computed_tokens, is_swap))
            if request.status is RequestStatus.RUNNING:
                step.take_back(request)
                progress.plan(request, 0)
                self.leave(request)
                self._kv.publish_last(request)
                self._kv.suspend(request.request_id)
                progress.preempt(request)
        self._queues.of(victim).push_preempted(self._groups.preempted(victim))

    # what the executor knows

    def resend(self, request: Request) -> None:
        """Send a running request in full with its next row, since the executor's copy of it is outdated."""
        if request.request_id not in self._to_resend:
            self._to_resend.add(request.request_id)
            self._releases.append(request.request_id)

    def must_resend(self, request: Request) -> bool:
        return request.request_id in self._to_resend

    def release(self, request_id: str) -> None:
        self._releases.append(request_id)

    def take_releases(self, admitted: Iterable[str]) -> tuple[str, ...]:
        """Return, once each, ids of requests whose rows the executor frees before the plan that admits `admitted`."""
        releases, self._releases = tuple(self._releases), []
        self._to_resend.difference_update(admitted)
        return releases

    # memory

    def missing_blocks(self, request: Request) -> int:
        """Return how many blocks a running request still needs for its tokens. A sliding window limits what it holds at
        once."""
        num_blocks_for = self._kv.num_blocks_for
        num_planned = request.num_computed_tokens + request.num_inflight_tokens
        num_left = num_blocks_for(request.num_tokens) - num_blocks_for(num_planned)
        if not num_left or not self._capacity.window:
            return num_left
        num_more = self.most_blocks(request, request.num_tokens) - self._kv.num_held_blocks(request.request_id)
        # A step planned ahead sees blocks that the request releases when the step in flight is committed.
        return min(num_left, max(num_more, num_blocks_for(self._capacity.max_step_tokens)))

    def num_missing_blocks(self, *, background: bool) -> int:
        """Return how many blocks the running requests of a class still need for their tokens."""
        running = self.of_class(background=background)
        behind = [one for one in running if one.num_tokens > one.num_computed_tokens + one.num_inflight_tokens]
        return sum(map(self.missing_blocks, behind))

    def most_blocks(self, request: Request, num_positions: int) -> int:
        """Return the most blocks that a request holds at one time until `num_positions` are computed."""
        return most_blocks(request, num_positions, self._capacity)

    def _final_blocks(self, request: Request) -> int:
        return 1 if self._capacity.is_one_pass else self.most_blocks(request, request.max_total_tokens - 1)

    def final_blocks_alone(self, request: Request) -> int:
        """Return the most blocks that a request with all its beams ever holds."""
        return most_blocks_alone(request, request.max_total_tokens - 1, self._capacity)

    def has_room_for(self, candidate: Candidate, num_promised_blocks: int, without: Collection[Request] = ()) -> bool:
        """Return whether there are blocks to admit the candidate if the requests in `without` were preempted.

        Requests that the candidate may preempt get no reserve for growth.
        """
        request, hit = candidate.request, candidate.hit
        num_available, num_promised, num_final = self._kv.pool.num_available, num_promised_blocks, self._num_final_blocks
        adapters, number = self._kv.adapters, request.adapter_number
        num_adapter_blocks = adapters.num_pinned_blocks
        staying: Collection[Request] = self.requests.values()
        leaving = {other.request_id for other in without}
        if leaving:
            num_available += self._kv.num_freed_blocks(leaving, kept=(*hit.block_ids, *hit.state))
            num_freed = self._kv.num_freed_adapter_blocks(leaving, kept=number)
            num_available += num_freed
            num_adapter_blocks -= num_freed
            num_promised -= sum(self.missing_blocks(other) for other in without if not other.background)
        yielding = [] if request.background else [other for other in self.yielding if other.request_id not in leaving]
        if leaving or yielding:
            leaving |= {other.request_id for other in yielding}
            staying = [other for other in self if other.request_id not in leaving]
            num_final -= sum(map(self._final_blocks, [*without, *yielding]))
        for group in self._groups.running:
            if group.carriers[0].request_id not in leaving:  # the rest of its beams are forked later
                num_final += (group.width - group.num_running) * self._final_blocks(group.carriers[0])
        if number != BASE:
            num_missing = adapters.num_missing(number, candidate.packed)
            num_available -= num_missing
            num_adapter_blocks += num_missing
        num_shared = len(hit.block_ids) - hit.num_free_blocks
        num_state = self._capacity.num_state_blocks
        num_chunk = self._kv.num_blocks_for(hit.num_tokens + candidate.query_len) - num_shared + num_state
        if not staying:
            return num_chunk <= num_available
        num_total, num_blocks_for = self._kv.num_total_blocks, self._kv.num_blocks_for
        num_held = num_total - num_available - num_adapter_blocks
        num_held -= sum([self._kv.num_allocated_blocks(other.request_id) for other in yielding])
        num_prompt = num_blocks_for(request.num_tokens) + num_state
        num_limit = num_blocks_for(request.max_total_tokens - 1) + num_state
        num_fork_blocks = num_final_fork_blocks = 0
        forks: Sequence[tuple[Request, int]] = ()
        if request.sampling.beams is not None:
            forks = self._groups.forks(request)
            num_fork_blocks = sum(num_blocks_for(fork.num_tokens) - num_same for fork, num_same in forks)
            num_final_fork_blocks = self.final_blocks_alone(request) - self._final_blocks(request)
        view = AdmissionView(
            request=request,
            running=staying,
            num_chunk_blocks=num_chunk,
            num_prompt_blocks=min(num_prompt - num_shared, self.most_blocks(request, request.num_tokens)) + num_fork_blocks,
            num_final_blocks=min(num_limit - num_shared, self._final_blocks(request)) + num_final_fork_blocks,
            num_running=len(staying) + len(forks),
            num_growth_blocks=max(0, num_final - num_held - num_promised),
            num_total_blocks=num_total,
            block_size=self._kv.block_size,
            swaps=self._loads_back,
        )
        num_free = num_available - num_promised
        if hit.state and self._kv.pool.ref_count(hit.state[0]) == 0:  # it is held while the request's first step reads it
            num_free -= num_state
        if self._required_blocks(view) <= num_free:
            return True
        if num_free < view.num_prompt_blocks:
            return False
        joining = [request, *(fork for fork, _ in forks)]
        view.num_peak_blocks = num_blocks_for(peak_growth_tokens([*joining, *staying], self._capacity.window))
        return self._required_blocks(view) <= num_free

    def _required_blocks(self, view: AdmissionView) -> int:
        required = max(view.num_chunk_blocks, self._reserve.required_blocks(view))
        return max(required, blocks_to_resume(view)) if view.request.num_preemptions else required

    # pace

    def learn_pace(self, num_prefill_tokens: int, duration_ns: int) -> None:
        known, ns_per_token = self.prefill_ns_per_token, duration_ns / num_prefill_tokens
        is_measured = num_prefill_tokens >= MEASURED_FRACTION * self._capacity.max_step_tokens
        if is_measured or ns_per_token < known or not known:
            self.prefill_ns_per_token = ns_per_token

    def check(self) -> None:
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
            table, block_size = tables[request_id], self._kv.block_size
            num_slots = len(table.block_ids) * block_size
            assert request.num_computed_tokens + request.num_inflight_tokens <= num_slots, f"{request_id!r} lacks blocks"
            num_unread = table.num_unread(request.num_computed_tokens, block_size)
            assert table.num_released <= num_unread, f"{request_id!r} has released a block that is still read"
        final, noted = sum(map(self._final_blocks, self)), self._num_final_blocks
        assert final == noted, f"the running can grow to {final} blocks, {noted} are noted"
        holders = {request_id for request_id, table in tables.items() if table.block_ids}
        assert holders <= self.requests.keys(), f"{holders - self.requests.keys()} hold blocks and do not run"
        assert self._to_resend <= self.requests.keys(), "a request that does not run must be sent again"


def most_blocks(request: Request, num_positions: int, capacity: Capacity) -> int:
    """Return the most blocks that a request holds at one time until `num_positions` are computed. Beams free none until
    then."""
    if request.sampling.beams is not None:
        return -(-num_positions // capacity.block_size)
    return capacity.most_blocks(num_positions)


def most_blocks_alone(request: Request, num_positions: int, capacity: Capacity) -> int:
    """Return the most blocks that a request with all its beams ever holds. Beams share the prompt's full blocks."""
    num_blocks = most_blocks(request, num_positions, capacity)
    if request.sampling.beams is None:
        return num_blocks
    num_shared = request.num_prompt_tokens // capacity.block_size
    return num_shared + request.sampling.beams.width * (num_blocks - num_shared)


def blocks_to_resume(view: AdmissionView) -> int:
    """Return the free blocks that a preempted request needs to resume, whatever the reserve says.

    The room to grow doubles with each preemption, so that work is not lost over and over.
    """
    first_tokens = RESUME_GROWTH_TOKENS // 2 if view.swaps else RESUME_GROWTH_TOKENS
    growth_tokens = first_tokens << min(view.request.num_preemptions - 1, 20)
    num_growth = (view.num_running + 1) * -(-growth_tokens // view.block_size)
    own_growth = view.num_final_blocks - view.num_prompt_blocks
    return view.num_prompt_blocks + min(num_growth, view.num_growth_blocks + own_growth)


def peak_growth_tokens(requests: Collection[Request], window: int = 0) -> int:
    """Return the most tokens by which requests together grow at one time, if each gets one a step up to its limit. O(n log
    n)."""
    ends = sorted([(request.max_total_tokens - request.num_tokens, request.num_tokens) for request in requests])
    num_left, num_freed, peak = len(ends), 0, 0
    for num_steps, num_tokens in ends:
        peak = max(peak, num_left * num_steps - num_freed)
        num_left -= 1
        num_freed += min(num_tokens, window) if window else num_tokens
    return peak


class Extending:
    """Plans rows for running requests: decodes first, then prefills while the step has tokens left."""

    def __init__(self, kv: KVManager, running: Running) -> None:
        self._kv = kv
        self._running = running

    def decodes(
        self, step: StepBuilder, running: Sequence[Request], sitting_out: Collection[str] = (), *, most: int | None = None
    ) -> list[Request]:
        """Plan a row for each of these requests that decodes, in order of admission. Return the others.

        Decodes that sit out the step get no row. `most`: how many rows at most.
        """
        counts = step.counts
        num_others = counts.num_tokens - counts.num_decodes if step.rows else 0
        later = step.rows[step.num_decode_rows :]
        del step.rows[step.num_decode_rows :]
        counts.sat_out = ()
        if most is not None:
            decoding = [request for request in running if request.is_decode]
            resting = {request.request_id for request in decoding[most:]}
            running = [request for request in running if request.request_id not in resting]
            counts.rested = list(resting)
        if sitting_out:
            decoding = [request for request in running if request.is_decode]
            counts.sat_out = [request.request_id for request in decoding if request.request_id in sitting_out]
            staying = set(counts.sat_out)
            running = [request for request in running if request.request_id not in staying]
        prefills, num_rows = progress.plan_decodes(
            running, self._kv.num_slots, step.rows, lambda request: self._extend(step, request, 1)
        )
        counts.num_tokens += num_rows
        if prefills:
            prefills = self._jumps(step, prefills)
        counts.num_decodes = counts.num_tokens - num_others
        step.num_decode_rows = len(step.rows)
        step.rows += later
        return prefills

    def _jumps(self, step: StepBuilder, behind: Sequence[Request]) -> list[Request]:
        """Plan rows for decodes with forced tokens. Return the prefills.

        All forced tokens together get half of the tokens left, so that prompts advance.
        """
        jumping = [request for request in behind if request.is_jumping]
        num_spare = max(0, step.tokens_left - len(jumping)) // 2
        for request in jumping:
            num_forced = min(request.num_behind - 1, MAX_FORCED_TOKENS, num_spare)
            num_spare -= num_forced
            self._extend(step, request, 1 + num_forced)
        return [request for request in behind if not request.is_jumping]

    def note_long(self, step: StepBuilder, prefills: Sequence[Request]) -> None:
        if step.limits.long_prefill_share is None:
            step.long_prefills = [request for request in prefills if step.is_long(request.num_behind)]
            return
        # Count a long prompt's last piece as long too, or it would block others where chunks are small.
        step.late = [request for request in prefills if step.is_long(request.num_tokens - request.num_cached_tokens)]
        step.long_prefills = list(step.late)

    def prefill(self, step: StepBuilder, request: Request) -> None:
        """Plan a row for a prompt if tokens are left, unless its request resumed in this step."""
        if request.status is not RequestStatus.RUNNING or request.request_id in step.admits:
            return
        if query_len := step.chunk_of(request, request.num_computed_tokens):
            step.num_promised_blocks -= self._running.missing_blocks(request)
            self._extend(step, request, query_len, is_prefill=True)
            step.num_promised_blocks += self._running.missing_blocks(request)

    def _extend(self, step: StepBuilder, request: Request, query_len: int, *, is_prefill: bool = False) -> None:
        """Plan a row for a running request. Until there are blocks, preempt others, or else the request itself."""
        if request.status is not RequestStatus.RUNNING or not request.num_behind:
            return  # preempted in this step, or a beam that waits for others
        running, context_len = self._running, request.num_computed_tokens
        num_copies = len(self._kv.pending_copies)
        while (blocks := self._kv.extend(request.request_id, context_len, context_len + query_len)) is None:
            if request.background and step.is_ahead:
                step.needs_preemption = True
                return
            assert request.background or not step.admissions, "after an admission, a running request must not need a preemption"
            victim = running.choose_victim(running.preemptable_for(request), request, query_len)
            step.lacks_memory |= not victim.background
            running.preempt(step, victim, PreemptReason.MEMORY)
            if request.status is not RequestStatus.RUNNING:
                return
        if len(self._kv.pending_copies) != num_copies or running.must_resend(request):
            running.resend(request)
            step.admit(request, self._kv.block_table(request.request_id), self._kv.tables[request.request_id])
            blocks = ()
        step.add_row(request, query_len, blocks, is_prefill=is_prefill)
        progress.plan(request, query_len)
