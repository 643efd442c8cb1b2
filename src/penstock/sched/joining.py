"""Admits waiting requests. Preempts background requests for them, and others if the order policy says so.

A request is set aside, so that later ones pass it, while a running prefill (its leader) computes a block that both share, or
while its adapter is being loaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto

from penstock.kv.manager import KVManager
from penstock.kv.prefix_cache import NO_HIT, Awaited, PrefixHit
from penstock.sched import progress
from penstock.sched.adapters import Adapters
from penstock.sched.choosing.groups import Groups
from penstock.sched.padding import Padding
from penstock.sched.policies.base import UNLIMITED, GateDecision, GateView, Policies, StepLimits
from penstock.sched.queue import AwaitedAdapter, Follower, WaitingQueue
from penstock.sched.running import Running
from penstock.sched.step_builder import Candidate, StepBuilder
from penstock.types.errors import PolicyError
from penstock.types.request import Request, RequestStatus
from penstock.types.stats import Admission, PreemptReason, WaitReason

CLOSED = GateDecision(max_admissions=0)
LOAD_STEPS = 4
"""A load of a prefix leaves blocks free for each running request to grow by this many tokens."""


class Outcome(Enum):
    """Result of one attempt to admit a waiting request."""

    ADMITTED = auto()
    SET_ASIDE = auto()
    PREEMPTED = auto()
    """A running request was preempted. Try again before its victim joins: the prefix hit may have changed."""
    BLOCKED = auto()
    """The request must wait, and later ones must not overtake it."""


class Joining:
    def __init__(
        self,
        kv: KVManager,
        policies: Policies,
        waiting: WaitingQueue,
        running: Running,
        groups: Groups,
        padding: Padding,
        adapters: Adapters,
        *,
        max_step_tokens: int,
        is_background: bool = False,
    ) -> None:
        """`waiting`: the queue of background requests if `is_background`, else that of all others."""
        self.wakeup_ns: int | None = None
        self.records_stops = True
        self._kv = kv
        self._gate = policies.gate
        self._order = waiting.order
        self._has_ranks = waiting.order.has_ranks
        self.is_background = is_background
        self.waiting = waiting
        self._running = running
        self._groups = groups
        self._padding = padding
        self._adapters = adapters
        self._max_step_tokens = max_step_tokens

    def must_preempt(self, now_ns: int) -> bool:
        """Return whether the first waiting request needs a preemption, which a step planned ahead can't make. O(running)."""
        if not len(self.waiting) or not (self._order.is_preemptive or self._running.num_background):
            return False
        step = StepBuilder(now_ns, StepLimits(UNLIMITED), CLOSED, is_ahead=True)
        request = self._next_waiting(self.waiting.peek(now_ns), step)
        return request is not None and self._needs_preemption(request, step)

    def _needs_preemption(self, request: Request, step: StepBuilder) -> bool:
        running = self._running
        if not self._lower(request, step):
            return False
        tier = self._kv.tier
        if tier is not None and tier.is_awaited_by(request.request_id, step.now_ns):  # running requests continue meanwhile
            return False
        step.num_promised_blocks = running.num_missing_blocks(background=False)
        self._keep_places(step)
        packed, ref = None, request.adapter
        if ref is not None:
            packed, is_awaited = self._adapters.look_up(request, ref)
            if is_awaited:
                return False
        hit = self._kv.lookup_prefix(request)
        query_len = min(request.num_tokens - hit.num_tokens, self._max_step_tokens)
        candidate = Candidate(request, hit, query_len, packed)
        return self._lacks(candidate, step) is not WaitReason.NOTHING and bool(self._candidate_victims(candidate, step))

    def ask_gate(self, now_ns: int) -> GateDecision:
        """Ask the gate policy how many requests may join. If it starts a batch, only requests of that batch join."""
        if not self.waiting.num_fresh:
            self.wakeup_ns = None
            return CLOSED
        buckets = self.waiting.views()
        num_running = self._running.num_background
        if not self.is_background:
            num_running = len(self._running) - num_running
        view = GateView(now_ns, num_running, self.waiting.num_joining, self._running.max_rows, buckets)
        decision = self._gate.decide(view)
        self.wakeup_ns = decision.wakeup_ns
        if not decision.is_batch or decision.max_admissions < 1:
            return decision
        if self._gate.is_continuous:
            what = "called a batch in decide, but must not, since it says is_continuous = True"
            raise PolicyError("gate", self._gate, what)
        assert view.num_running + view.num_joining == 0, "a batch begins while another runs"
        batch = self.waiting.start_batch(decision.bucket, decision.max_admissions, now_ns)
        self._padding.start(batch, decision.pad_to_tokens)
        return CLOSED

    def rank(self, prefills: list[Request], now_ns: int, late: Sequence[Request] = ()) -> list[Request]:
        """Return running prefills in the order in which they get tokens. Requests in `late` come after others of equal rank."""
        if not self._has_ranks:
            return [request for request in prefills if request not in late] + list(late) if late else prefills
        if len(prefills) < 2:
            return prefills
        # No sort, since the order is partial: an aged request may tie with two requests that do not tie with each other.
        outranks, left, ranked = self._order.outranks, list(prefills), list[Request]()
        num_before = {one.request_id: sum(outranks(other, one, now_ns) for other in left) for one in left}
        while left:
            firsts = [request for request in left if not num_before[request.request_id]]
            if not firsts:
                circle = "each of these prompts is outranked by another one or by itself, but one must be first"
                raise PolicyError("order", self._order, f"returned True from outranks in a circle: {circle}")
            first = next((request for request in firsts if request not in late), firsts[0])
            left.remove(first)
            ranked.append(first)
            for other in left:
                num_before[other.request_id] -= outranks(first, other, now_ns)
        return ranked

    def keep_tokens(self, step: StepBuilder, request: Request) -> None:
        """Reserve a share of the step's tokens for long prefills, if `request` passes one that it does not outrank."""
        step.num_kept_tokens = 0
        if step.late and request not in step.late:
            assert step.limits.long_prefill_share is not None, "else none is late"
            if not all(self._order.outranks(request, long, step.now_ns) for long in step.late):
                step.num_kept_tokens = step.limits.long_prefill_share

    def admit(self, step: StepBuilder, before: Request | None = None) -> None:
        """Admit requests that the gate has let in before, and as many new ones as it allows now.

        `before`: a running prefill. Only requests that get tokens before this prefill are admitted.
        """
        if step.lacks_memory or step.counts.waits_for is not WaitReason.NOTHING:
            return  # a request waits for a resource, and later ones must not overtake it
        if self.is_background and step.preemptions:
            return
        if before is not None and not self._has_ranks and before not in step.late:
            return
        has_lower = self._order.is_preemptive or (self._running.num_background > 0 and not self.is_background)
        may_preempt = has_lower and not self._padding.is_active
        again: Request | None = None
        while step.has_tokens and (may_preempt or not self._is_full(step)):
            fresh = self._fresh(step)
            request = again or self._next_waiting(fresh, step)
            if request is None or (before is not None and not self._goes_before(request, before, step)):
                return
            outcome = self._try(request, step, may_preempt=may_preempt)
            if outcome is Outcome.BLOCKED:
                return
            again = request if outcome is Outcome.PREEMPTED else None
            if again is None:
                step.num_let_in += request is fresh

    def _try(self, request: Request, step: StepBuilder, *, may_preempt: bool) -> Outcome:
        """Admit the request, set it aside, or preempt one running request for it."""
        self.keep_tokens(step, request)
        if step.tokens_left == 0:
            return Outcome.BLOCKED
        packed, ref = None, request.adapter
        if ref is not None:
            packed, is_awaited = self._adapters.look_up(request, ref)
            if is_awaited:
                return self._step_aside(request, self._adapters.wait(ref, step.now_ns), step)
        hit = self._kv.lookup_prefix(request)
        awaited = self._kv.prefix.find_coming(request, hit)
        if awaited is not None and not self._goes_past(request, awaited.leader, step):
            return self._step_aside(request, awaited, step)
        is_long = step.is_long(request.num_tokens - hit.num_tokens)
        if is_long and request.status is RequestStatus.WAITING and not self._may_start_long(request, step):
            self.waiting.hold_back(request, step.now_ns)
            step.set_aside.append((request.request_id, WaitReason.TOKENS))
            return Outcome.SET_ASIDE
        has_tokens = not self._padding.is_active or self._padding.pad_prompt(request, step)
        query_len = step.chunk_of(request, hit.num_tokens) if has_tokens else 0
        if query_len == 0:
            step.counts.waits_for = WaitReason.TOKENS
            return Outcome.BLOCKED
        candidate = Candidate(request, hit, query_len, packed)
        lack = self._lacks(candidate, step)
        if lack is not WaitReason.NOTHING:
            step.counts.waits_for = lack
            if not may_preempt or not self._preempt_one(candidate, step):
                return Outcome.BLOCKED
            step.counts.waits_for = WaitReason.NOTHING
            return Outcome.PREEMPTED
        if self._waits_for_load(request, hit, step):
            return Outcome.BLOCKED
        self._admit(candidate, step)
        if is_long:
            step.long_prefills.append(request)
        return Outcome.ADMITTED

    def admit_texts(self, step: StepBuilder) -> None:
        """Admit input texts (embedded or scored whole in one step) while the step has tokens."""
        counts, pool = step.counts, self._kv.pool
        while step.has_tokens and not self._is_full(step):
            fresh = self._fresh(step)
            request = self._next_waiting(fresh, step)
            if request is None:
                return
            if not pool.num_available:
                counts.waits_for = WaitReason.MEMORY
                return
            has_tokens = not self._padding.is_active or self._padding.pad_prompt(request, step)
            if not has_tokens or not step.chunk(request.num_tokens):
                counts.waits_for = WaitReason.TOKENS
                return
            self._admit(Candidate(request, NO_HIT, request.num_tokens), step)
            step.num_let_in += request is fresh

    def waits_for(self, step: StepBuilder) -> WaitReason:
        """Return why the first request that still waits could not join."""
        if not len(self.waiting):
            return WaitReason.NOTHING
        waits_for = step.counts.waits_for
        if waits_for in (WaitReason.LOADING, WaitReason.ADAPTER, WaitReason.ROWS, WaitReason.MEMORY):
            return waits_for
        if waits_for is WaitReason.NOTHING and step.preemptions and not step.admissions:
            return WaitReason.MEMORY
        if len(self.waiting.aside) == len(self.waiting):  # ask before `_is_full`, which counts the rows kept for these
            num_adapters = sum(1 for _ in self.waiting.adapters_aside)
            return WaitReason.ADAPTER if num_adapters == len(self.waiting) else WaitReason.PREFIX
        if self._is_full(step):
            return WaitReason.ROWS
        is_short_of_tokens = step.tokens_left == 0 or waits_for is WaitReason.TOKENS or self.waiting.num_held_back
        return WaitReason.TOKENS if is_short_of_tokens else WaitReason.GATE

    def resume(self, step: StepBuilder) -> None:
        """Queue requests set aside again once their prefix or adapter is ready. Keep rows and blocks for the others."""
        self.waiting.resume(self._keep_places(step))

    def _keep_places(self, step: StepBuilder) -> list[Follower]:
        """Keep rows and blocks for requests set aside. Return those whose prefix or adapter is ready."""
        ready: list[Follower] = []
        if not self.waiting.aside:
            return ready
        are_late = self._adapters.are_late(step.now_ns)
        for follower in self.waiting.aside:
            if not self._is_awaiting(follower):
                ready.append(follower)
            elif not are_late or isinstance(follower.awaited, Awaited):
                self._keep_place(follower, step)
        return ready

    def _is_awaiting(self, follower: Follower) -> bool:
        awaited = follower.awaited
        if isinstance(awaited, AwaitedAdapter):
            return self._adapters.look_up(follower.request, awaited.ref)[1]
        return self._kv.prefix.is_coming(awaited)

    def _step_aside(self, request: Request, awaited: Awaited | AwaitedAdapter, step: StepBuilder) -> Outcome:
        """Set a request aside until `awaited` is ready. It is blocked if no row can be kept for it, even by preemption."""
        if self._is_full(step):
            lower = self._groups.running_members(self._lower(request, step))
            if self._num_taken_rows(step) - self._groups.num_rows(lower) >= self._running.max_rows:
                return Outcome.BLOCKED
        num_blocks = self._kv.num_blocks_for(request.num_tokens) + self._kv.num_state_blocks
        reason = WaitReason.ADAPTER
        if isinstance(awaited, Awaited):
            num_blocks -= self._kv.prefix.num_common_blocks(request, awaited.leader)
            reason = WaitReason.PREFIX
        follower = Follower(request, awaited, min(num_blocks, self._running.most_blocks(request, request.num_tokens)))
        self.waiting.step_aside(follower)
        if isinstance(awaited, Awaited) or not self._adapters.are_late(step.now_ns):
            self._keep_place(follower, step)
        step.set_aside.append((request.request_id, reason))
        return Outcome.SET_ASIDE

    def _keep_place(self, follower: Follower, step: StepBuilder) -> None:
        step.num_promised_rows += follower.request.num_rows
        step.num_promised_blocks += follower.num_blocks

    def _is_full(self, step: StepBuilder) -> bool:
        return self._num_taken_rows(step) >= self._running.max_rows

    def _num_taken_rows(self, step: StepBuilder) -> int:
        num_kept = self._groups.num_kept_rows if self._groups.running else 0
        return len(self._running) + num_kept + step.num_promised_rows

    def _fresh(self, step: StepBuilder) -> Request | None:
        return self.waiting.peek(step.now_ns, step.gate.bucket) if step.gate.max_admissions > step.num_let_in else None

    def _next_waiting(self, fresh: Request | None, step: StepBuilder) -> Request | None:
        if not self.waiting.num_joining:
            return fresh
        held = self.waiting.peek_held(step.now_ns)
        if held is not None and not self._may_start_long(held, step):
            held = None
        joining = self.waiting.peek_preempted()
        if held is not None and (joining is None or self._order.outranks(held, joining, step.now_ns)):
            joining = self._preempted_before(held, step.now_ns) or held
        joining = joining or self.waiting.peek_ready()
        if fresh is not None and (joining is None or self._order.outranks(fresh, joining, step.now_ns)):
            return self._preempted_before(fresh, step.now_ns) or fresh
        return joining

    def _preempted_before(self, request: Request, now_ns: int) -> Request | None:
        return next((other for other in self.waiting.preempted if not self._order.outranks(request, other, now_ns)), None)

    def _goes_before(self, request: Request, prefill: Request, step: StepBuilder) -> bool:
        if self._order.outranks(request, prefill, step.now_ns):
            return True
        return prefill in step.late and not self._order.outranks(prefill, request, step.now_ns)

    def _goes_past(self, request: Request, leader: Request, step: StepBuilder) -> bool:
        """Return whether a request computes its prompt itself rather than wait for `leader` to compute the same."""
        return (leader.background and not self.is_background) or self._order.outranks(request, leader, step.now_ns)

    def _may_start_long(self, request: Request, step: StepBuilder) -> bool:
        longs, limit = step.long_prefills, step.limits.max_long_prefills
        if len(longs) < limit:
            return True
        return self._has_ranks and sum(not self._order.outranks(request, long, step.now_ns) for long in longs) < limit

    def _lacks(self, candidate: Candidate, step: StepBuilder) -> WaitReason:
        """Return what the candidate lacks to join. NOTHING: there is room for it."""
        if self._lacks_adapter_place(candidate.request):
            return WaitReason.ADAPTER
        if self._num_taken_rows(step) + candidate.request.num_rows > self._running.max_rows:
            return WaitReason.ROWS
        has_memory = self._running.has_room_for(candidate, step.num_promised_blocks)
        return WaitReason.NOTHING if has_memory else WaitReason.MEMORY

    def _lacks_adapter_place(self, request: Request) -> bool:
        return request.adapter is not None and self._adapters.is_full(request.adapter)

    def _waits_for_load(self, request: Request, hit: PrefixHit, step: StepBuilder) -> bool:
        swapping = self._kv.swapping
        if swapping is None or request.lacks_prompt_logprobs:
            return False
        num_spare = self._kv.pool.num_available - step.num_promised_blocks - self._num_growing - hit.num_free_blocks
        cost_ns = self._running.prefill_ns_per_token
        waits = swapping.fetch(request, hit, max_blocks=max(0, num_spare), compute_ns_per_token=cost_ns, now_ns=step.now_ns)
        if waits:
            step.counts.waits_for = WaitReason.LOADING
        return waits

    @property
    def _num_growing(self) -> int:
        return -(-len(self._running) * LOAD_STEPS // self._kv.block_size)

    def _candidate_victims(self, candidate: Candidate, step: StepBuilder) -> Sequence[Request]:
        """Return the running requests to choose a victim from, or none if preempting all of them would not be enough."""
        running = self._running
        lower = self._lower(candidate.request, step)
        if not lower:
            return ()
        leaving = self._groups.running_members(lower)
        num_rows = self._num_taken_rows(step) - self._groups.num_rows(leaving) + candidate.request.num_rows
        is_enough = num_rows <= running.max_rows and running.has_room_for(candidate, step.num_promised_blocks, without=leaving)
        if not is_enough:
            return ()
        if self._lacks_adapter_place(candidate.request):
            return self._users_of_an_adapter(lower)
        return [other for other in lower if other.background] or lower

    def _users_of_an_adapter(self, lower: Sequence[Request]) -> Sequence[Request]:
        """Return all running requests of one adapter, if `lower` has all of them. Empty if no adapter can be freed that way."""
        users: dict[int, list[Request]] = {}
        for other in self._running:
            if other.adapter is not None:
                users.setdefault(other.adapter.number, []).append(other)
        ids = {other.request_id for other in lower}
        found = [using for using in users.values() if all(other.request_id in ids for other in using)]
        return min(found, key=lambda using: (not all(other.background for other in using), len(using)), default=())

    def _lower(self, request: Request, step: StepBuilder) -> Sequence[Request]:
        """Return the running requests that `request` may preempt, as background requests or by the order."""
        if self.is_background:
            return ()
        lower = list(self._running.yielding)
        if self._order.is_preemptive:
            pauses, running = self._order.pauses, self._running.of_class(background=False)
            lower += [other for other in running if pauses(request, other, step.now_ns)]
        return [other for other in lower if other.request_id not in step.admits]  # the executor does not know these yet

    def _preempt_one(self, candidate: Candidate, step: StepBuilder) -> bool:
        """Preempt one running request for the candidate. Return False if none may be preempted now."""
        lower = self._candidate_victims(candidate, step)
        # While its prefix is loaded the candidate needs no blocks, so nothing is preempted for it.
        if not lower or self._waits_for_load(candidate.request, candidate.hit, step):
            return False
        if step.is_ahead:
            step.needs_preemption = True
            return False
        running = self._running
        victim = running.choose_victim(lower, candidate.request, candidate.query_len)
        if not victim.background:  # else no block was promised
            step.num_promised_blocks -= sum(map(running.missing_blocks, self._groups.running_members([victim])))
        running.preempt(step, victim, PreemptReason.ORDER)
        return True

    def _admit(self, candidate: Candidate, step: StepBuilder) -> None:
        request, hit, query_len = candidate.request, candidate.hit, candidate.query_len
        self.waiting.remove(request)
        self._running.join(request)
        members = (request,) if request.sampling.beams is None else self._groups.start(request)
        is_new = progress.admit(request, hit.num_tokens, step.now_ns, members)
        stop = self._kv.prefix.why_stopped(request, hit) if is_new and self.records_stops else None
        for member in members:
            step.admissions.append(Admission(member.request_id, request.num_tokens, hit.num_tokens, stop))
        block_ids = self._kv.allocate(request, hit, hit.num_tokens + query_len, candidate.packed)
        step.admit(request, block_ids, self._kv.tables[request.request_id])
        step.add_row(request, query_len, is_prefill=True)
        progress.plan(request, query_len)
        self._order.admitted(request)
        if query_len < request.num_behind:
            step.num_promised_blocks += self._running.missing_blocks(request)
        step.counts.num_prefix_query_tokens += request.num_tokens
        step.counts.num_prefix_hit_tokens += hit.num_tokens
