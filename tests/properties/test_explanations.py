"""Under every policy, padding, preemption and tier: what is told of each request agrees with who saw every step, and the
picture of the pool with the pool itself, after every turn.
"""

from __future__ import annotations

import itertools
from collections import defaultdict

from hypothesis import given, settings

from penstock.clock import VirtualClock
from penstock.kv.pool_map import draw
from penstock.obs.explain.explanation import summary
from penstock.obs.explain.journal import Journal
from penstock.obs.explain.lives import Phase
from penstock.testing import Driver, run_to_completion
from penstock.types.events import TokenEvent
from penstock.types.plan import PaddingId
from penstock.types.request import Request, RequestStatus
from support.explained import explained
from support.strategies import Engine, Workload, engines, workloads

PHASES = {
    RequestStatus.WAITING: {Phase.WAITING},
    RequestStatus.RUNNING: {Phase.PREFILL, Phase.DECODE},
    RequestStatus.PREEMPTED: {Phase.PAUSED},
}


class Witness:
    """Sees every plan, and counts per request and step what the journal does not."""

    def __init__(self, journal: Journal) -> None:
        self.journal = journal
        self.num_rows: dict[str, list[int]] = defaultdict(list)
        """Requests in each step that a request was in."""
        self.num_seen = 0
        self.in_pieces: set[str] = set()
        """Requests whose forced tokens took several steps, which the journal takes for a token each."""

    def see(self, driver: Driver) -> None:
        for plan in driver.plans[self.num_seen :]:
            names = [row.request_id for row in plan.rows if not isinstance(row.request_id, PaddingId)]
            for name in names:
                self.num_rows[name].append(len(names))
            requests = driver.core.scheduler.running
            unsampled = [row.request_id for row in plan.rows if not row.samples and row.request_id in requests]
            self.in_pieces.update(name for name in unsampled if requests[name].forced_from)
        self.num_seen = len(driver.plans)
        self.check_requests(driver)
        check_pool(driver)

    def check_requests(self, driver: Driver) -> None:
        for request in driver.core._requests.values():
            told = explained(self.journal, request.request_id, driver.clock.now_ns)
            assert told is not None
            assert told.phase in PHASES[request.status], f"{request.status.name} is told as {told.phase}"
            if request.request_id not in self.in_pieces:
                assert told.num_generated_tokens == len(request.output_token_ids)
            assert len(told.pauses) == request.num_preemptions
            assert told.queue_ns + told.prefill_ns + told.decode_ns == told.total_ns
            assert sum(told.waited_for_ns.values()) == told.queue_ns
            for pause in told.pauses:
                assert sum(pause.waited_for_ns.values()) == pause.waited_ns
            assert summary(told)


def check_pool(driver: Driver) -> None:
    kv = driver.core.scheduler.kv
    drawn = draw(kv, driver.core.scheduler.running.values())
    num_adapter_blocks = kv.adapters.num_pinned_blocks
    assert list(drawn.states.values()) == [
        kv.pool.num_available - kv.pool.num_cached,
        kv.pool.num_cached,
        kv.num_total_blocks - kv.pool.num_available - kv.pool.num_shared - num_adapter_blocks,
        kv.pool.num_shared,
        num_adapter_blocks,
        1,
    ]
    assert sum(drawn.states.values()) == kv.pool.num_blocks
    assert 0 <= drawn.waste < 1


@settings(max_examples=settings.default.max_examples)
@given(engine=engines(has_lower_tier=True), workload=workloads())
def test_what_is_told_agrees_with_who_was_there(engine: Engine, workload: Workload) -> None:
    core, executor = engine.make()
    journal = core._journal = Journal(100)
    clock = VirtualClock(1000)  # requests arrive at an instant that is the number of their turn
    transfers, worker = engine.make_transfers(core, executor, clock)
    requests, witness = workload.requests(clock), Witness(journal)
    outcomes = run_to_completion(
        core,
        executor,
        later=workload.script(requests),
        clock=clock,
        transfers=transfers,
        worker=worker,
        after_turn=witness.see,
        max_turns=20_000,
    )
    for request in requests:
        check_ended(request, journal, witness, [event for event in outcomes[request.request_id].events if event.token_ids])


def check_ended(request: Request, journal: Journal, witness: Witness, events: list[TokenEvent]) -> None:
    told, num_rows = explained(journal, request.request_id, lambda: 0), witness.num_rows[request.request_id]
    if request.background:
        assert told is None, "it would push out those that people ask about"
        return
    assert told is not None
    assert told.phase is Phase.ENDED
    assert told.num_generated_tokens == sum(len(event.token_ids) for event in events)
    # The row of one that was ended while its step ran is void.
    num_steps = told.num_prefill_steps + told.num_resume_steps + told.num_decode_steps
    assert num_steps in (len(num_rows), len(num_rows) - 1)
    del num_rows[num_steps:]
    assert told.max_batch == max(num_rows, default=0)
    assert round(told.mean_batch * num_steps) == sum(num_rows)
    gaps = [late.at_ns - early.at_ns for early, late in itertools.pairwise(events)]
    if request.request_id not in witness.in_pieces:
        assert (told.longest_gap.gap_ns if told.longest_gap else 0) == max(gaps, default=0)
