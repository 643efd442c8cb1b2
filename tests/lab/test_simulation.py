"""The simulation runs the real core: times are what the cost model says, outputs end where the oracle says, runs repeat."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from penstock.admission.door import AdmissionLimits
from penstock.clock import VirtualClock
from penstock.lab.cost_model import CostModel, Fitted, Residuals
from penstock.lab.pacing import Pace
from penstock.lab.plots import Panel
from penstock.lab.records import End
from penstock.lab.scaling import Scaling
from penstock.lab.simulation import Simulation, play
from penstock.lab.simulation_report import SimulatedRun, plots_of
from penstock.lab.traffic import Call, Traffic
from penstock.lab.virtual_server import MAX_SAMPLES, ServerSettings, Timeline, VirtualServer
from penstock.lab.workload import Job, Workload
from penstock.sched.policies.base import Gate, GateDecision, GateView
from penstock.sched.policies.presets import make_policies
from penstock.sched.policies.reserves import Watermark
from penstock.types.errors import PolicyError, Rejected, RejectReason
from penstock.types.plan import Capacity, PaddingId, StepPlan, StepShape
from penstock.types.request import FinishReason
from penstock.types.stats import AdapterCounts
from penstock.types.tenant_limits import TenantLimits

CAPACITY = Capacity(num_blocks=65, block_size=16, max_rows=4, max_step_tokens=64, max_model_len=512)
COST = CostModel()
MS = 1_000_000


def of(*jobs: Job) -> Workload:
    return Workload(name="jobs of a test", jobs=jobs)


def cost(*rows: tuple[int, int]) -> int:
    return COST.duration_ns(StepShape(rows, 1))


def test_one_request_takes_its_prefill_and_a_step_for_each_further_token() -> None:
    job = Job(arrival_ns=5 * MS, num_prompt_tokens=100, num_output_tokens=3)
    outcome = Simulation(capacity=CAPACITY, make_policies=make_policies).run(of(job))
    stats = outcome.ended[0]
    assert stats.first_scheduled_ns == 5 * MS
    assert stats.first_token_ns == 5 * MS + cost((64, 0)) + cost((36, 64))
    assert stats.ended_ns == outcome.duration_ns == stats.first_token_ns + cost((1, 100)) + cost((1, 101))
    assert (stats.finish_reason, stats.num_generated_tokens, outcome.num_steps) == (FinishReason.STOP, 3, 4)


def test_who_comes_during_a_step_is_planned_after_it() -> None:
    jobs = [Job(arrival_ns=at, num_prompt_tokens=32, num_output_tokens=2) for at in (0, 1)]
    first, second = Simulation(capacity=CAPACITY, make_policies=make_policies).run(of(*jobs)).ended
    assert second.first_scheduled_ns == first.first_token_ns == cost((32, 0))


class InPairs(Gate):
    """Looks every millisecond whether two requests wait."""

    def decide(self, view: GateView) -> GateDecision:
        return GateDecision(0, view.now_ns + MS) if sum(one.num_waiting for one in view.buckets) < 2 else GateDecision(2)


def test_a_gate_that_never_fills_its_last_batch_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.lab.simulation.MOST_IDLE_TURNS", 100)

    def run(num_jobs: int, scaling: Scaling | None = None) -> int:
        jobs = [Job(arrival_ns=at * 200 * MS, num_prompt_tokens=32, num_output_tokens=2) for at in range(num_jobs)]
        simulation = Simulation(capacity=CAPACITY, make_policies=lambda: make_policies(gate=InPairs()), scaling=scaling)
        return len(simulation.run(of(*jobs)).ended)

    assert run(2) == 2, "however long the second client takes"
    for scaling in (None, Scaling(least=1, most=2, start_ns=MS)):
        with pytest.raises(PolicyError, match=r"The gate '.*InPairs' was called 100 times without a step between"):
            run(3, scaling)


def test_a_request_is_queued_once_its_text_is_read() -> None:
    jobs = [Job(arrival_ns=at * MS, num_prompt_tokens=32, num_output_tokens=1) for at in (0, 1, 100)]
    jobs[1] = replace(jobs[1], cancelled_ns=2 * MS)
    texts = replace(COST, text_ns=1.0 * MS, text_token_ns=0.25 * MS)
    first, gone, third = simulation(cost=texts).run(of(*jobs)).records
    assert first.first_ns == 9 * MS + cost((32, 0))
    assert (gone.first_ns, gone.ended_ns) == (None, 2 * MS), "its client left before the engine knew it"
    assert third.first_ns == 109 * MS + cost((32, 0))


def test_texts_are_read_in_the_order_of_arrival() -> None:
    jobs = [Job(arrival_ns=0, num_prompt_tokens=num, num_output_tokens=1) for num in (64, 32, 8)]
    records = simulation(cost=replace(COST, text_token_ns=1e5)).run(of(*jobs)).records
    firsts = [record.first_ns or 0 for record in records]
    assert firsts == sorted(firsts), "a short text does not overtake"


def test_the_clients_limit_ends_an_output_as_well() -> None:
    jobs = [Job(arrival_ns=0, num_prompt_tokens=9, num_output_tokens=50)]
    stats = Simulation(capacity=CAPACITY, make_policies=make_policies, max_tokens=20).run(of(*jobs)).ended[0]
    assert (stats.finish_reason, stats.num_generated_tokens) == (FinishReason.LENGTH, 20)


def test_a_deadline_ends_a_request() -> None:
    job = Job(arrival_ns=0, num_prompt_tokens=9, num_output_tokens=300, deadline_ns=20 * MS)
    stats = Simulation(capacity=CAPACITY, make_policies=make_policies).run(of(job)).ended[0]
    assert stats.finish_reason is FinishReason.ABORT
    assert stats.ended_ns >= 20 * MS


def test_with_a_depth_of_two_the_step_of_who_came_meanwhile_is_the_one_after_the_next() -> None:
    jobs = [Job(arrival_ns=at, num_prompt_tokens=32, num_output_tokens=3) for at in (0, 1)]
    outcome = Simulation(capacity=CAPACITY, make_policies=make_policies, depth=2).run(of(*jobs))
    first, second = outcome.ended
    assert second.first_scheduled_ns == first.first_token_ns == cost((32, 0))
    assert second.first_token_ns == cost((32, 0)) + cost((1, 32)) + cost((1, 33), (32, 0))
    assert first.ended_ns == second.first_token_ns
    # After its last token, which is not known beforehand, each has a row for nothing.
    last_ns = second.first_token_ns + cost((1, 34), (1, 32)) + cost((1, 33))
    assert (second.ended_ns, outcome.duration_ns) == (last_ns, last_ns + cost((1, 34)))


@pytest.mark.parametrize(("order", "depth"), [("fcfs", 1), ("sjf", 2), ("fair", 1)])
def test_a_preempted_output_has_its_length_and_runs_repeat(order: str, depth: int) -> None:
    """Sixteen requests that need six times the memory."""
    jobs = [Job(arrival_ns=idx * MS, num_prompt_tokens=60, num_output_tokens=20 + 25 * idx) for idx in range(16)]
    jobs = [replace(job, tenant=str(idx % 3)) for idx, job in enumerate(jobs)]
    simulation = Simulation(
        capacity=replace(CAPACITY, num_blocks=33, max_rows=8),
        make_policies=lambda: make_policies(order=order, reserve=Watermark(0.0, 0)),
        depth=depth,
    )
    runs: list[list[StepPlan]] = [[], []]
    outcomes = [simulation.run(of(*jobs), on_plan=plans.append) for plans in runs]
    assert sum(stats.num_preemptions for stats in outcomes[0].ended) > 0
    assert [stats.num_generated_tokens for stats in outcomes[0].ended] == [job.num_output_tokens for job in jobs]
    assert runs[0] == runs[1]


def test_predictions_of_the_caller_are_used() -> None:
    jobs = [Job(arrival_ns=0, num_prompt_tokens=9, num_output_tokens=5) for _ in range(3)]
    simulation = Simulation(
        capacity=replace(CAPACITY, max_rows=1), make_policies=lambda: make_policies(order="sjf", predictor="none")
    )
    ended = simulation.run(of(*jobs), predictions={0: 400, 1: 40, 2: 4}).ended
    assert sorted(range(3), key=lambda idx: ended[idx].ended_ns) == [2, 1, 0]


@pytest.mark.parametrize("preset", ["static", "dynamic"])
def test_batches_are_padded(preset: str) -> None:
    jobs = [Job(arrival_ns=idx * MS, num_prompt_tokens=50 + idx, num_output_tokens=5 + idx) for idx in range(20)]
    plans: list[StepPlan] = []
    simulation = Simulation(capacity=replace(CAPACITY, max_rows=16), make_policies=lambda: make_policies(preset))
    ended = simulation.run(of(*jobs), on_plan=plans.append).ended
    assert [(stats.finish_reason, stats.num_generated_tokens) for stats in ended] == [
        (FinishReason.STOP, job.num_output_tokens) for job in jobs
    ]
    assert any(isinstance(row.request_id, PaddingId) and row.samples for plan in plans for row in plan.rows)


def simulation(**changes: Any) -> Simulation:
    return Simulation(**{"capacity": CAPACITY, "make_policies": make_policies, "max_tokens": None, **changes})


def test_a_record_has_what_its_client_would_have_seen() -> None:
    job = Job(arrival_ns=5 * MS, num_prompt_tokens=100, num_output_tokens=3, tenant="a")
    outcome = simulation().run(of(job))
    first_ns = 5 * MS + cost((64, 0)) + cost((36, 64))
    (record,) = outcome.records
    gaps_ns = [cost((1, 100)), cost((1, 101))]
    assert (record.intended_ns, record.sent_ns, record.first_ns) == (5 * MS, 5 * MS, first_ns)
    assert list(record.gaps_ns) == gaps_ns
    assert record.ended_ns == first_ns + sum(gaps_ns)
    assert (record.num_prompt_tokens, record.num_output_tokens, record.num_cached_tokens) == (100, 3, 0)
    assert (record.end, record.http_status, record.tenant, record.queue_ns) == (End.OK, 200, "a", 0)
    assert outcome.ended[0].finish_reason is FinishReason.LENGTH, "as with ignore_eos, which `penstock bench` sends"


def test_a_client_that_goes_away_is_told_no_more() -> None:
    job = Job(arrival_ns=0, num_prompt_tokens=9, num_output_tokens=300, cancelled_ns=50 * MS)
    outcome = simulation().run(of(job))
    (record,) = outcome.records
    assert record.end is End.CANCELLED
    assert 50 * MS <= record.ended_ns < 60 * MS
    assert 1 < record.num_output_tokens < 300


def test_a_client_may_go_away_after_a_part_of_the_answer() -> None:
    jobs = [Job(arrival_ns=0, num_prompt_tokens=9, num_output_tokens=30, cancelled_after_tokens=gone) for gone in (1, 7, None)]
    outcome = simulation().run(of(*jobs))
    ends = [(record.end, record.num_output_tokens) for record in outcome.records]
    assert ends == [(End.CANCELLED, 1), (End.CANCELLED, 7), (End.OK, 30)]
    assert outcome.ended[1].num_generated_tokens == 7, "the server stops, too"


def test_a_missed_deadline_and_a_prompt_that_is_too_long_are_failures() -> None:
    late = Job(arrival_ns=0, num_prompt_tokens=9, num_output_tokens=300, deadline_ns=20 * MS)
    long = Job(arrival_ns=0, num_prompt_tokens=400, num_output_tokens=200)
    first, second = simulation().run(of(late, long)).records
    assert (first.end, first.http_status, first.error) == (End.FAILED, 408, "deadline")
    assert (second.end, second.http_status, second.error) == (End.FAILED, 400, "context_length")


def test_a_full_queue_is_refused_and_comes_back_as_told() -> None:
    """The door is that of the server: the same limits let the same calls in."""
    jobs = [Job(arrival_ns=idx * MS, num_prompt_tokens=32, num_output_tokens=20) for idx in range(20)]
    limits = AdmissionLimits(max_queue=2)
    refused = [record for record in simulation(limits=limits).run(of(*jobs)).records if record.end is End.REFUSED]
    assert len(refused) == 20 - 4 - 2
    assert {(record.http_status, record.error) for record in refused} == {(429, "queue_full")}
    assert all(record.ended_ns == record.sent_ns for record in refused)

    patient = simulation(limits=limits, max_returns=20).run(of(*jobs)).records
    assert {record.end for record in patient} == {End.OK}
    waited = [record for record in patient if record.sent_ns + 10**9 <= (record.first_ns or 0)]
    assert len(waited) == len(refused), "their latencies count from when they first came"


def test_a_refused_client_waits_as_many_milliseconds_as_it_was_told() -> None:
    sent_ns: list[int] = []

    class Full:
        def submit(self, call: Call) -> None:
            sent_ns.append(call.request.arrival_ns)
            raise Rejected(RejectReason.QUEUE_FULL, "", retry_after_s=1.2341)

        def abort(self, call: Call) -> None:
            raise AssertionError(call)

    clock = VirtualClock()
    job = Job(arrival_ns=0, num_prompt_tokens=32, num_output_tokens=20)
    traffic = Traffic(of(job), clock, simulation(), max_returns=1)
    traffic.begin(Full())
    play(clock, traffic, [], [])
    assert sent_ns == [0, 1235 * MS]


def test_a_target_of_the_first_token_keeps_the_queue_short() -> None:
    jobs = [Job(arrival_ns=idx * 10 * MS, num_prompt_tokens=100, num_output_tokens=40) for idx in range(400)]
    slo_ns = 10**9
    records = simulation(limits=AdmissionLimits(slo_ttft_ns=slo_ns)).run(of(*jobs)).records
    ok = [record for record in records if record.end is End.OK]
    assert {record.error for record in records if record.end is End.REFUSED} == {"queue_delay"}
    assert sum((record.first_ns or 0) - record.sent_ns <= slo_ns for record in ok) >= 0.95 * len(ok) > 50
    without = simulation(limits=AdmissionLimits()).run(of(*jobs)).records
    assert max((record.first_ns or 0) - record.sent_ns for record in without) > 5 * slo_ns


def test_a_tenant_may_have_so_many_requests() -> None:
    jobs = [Job(arrival_ns=0, num_prompt_tokens=9, num_output_tokens=5, tenant="ab"[idx % 2]) for idx in range(8)]
    records = simulation(limits=AdmissionLimits(tenant=TenantLimits(max_concurrent=2))).run(of(*jobs)).records
    assert Counter((record.tenant, record.error) for record in records) == {
        ("a", ""): 2,
        ("b", ""): 2,
        ("a", "tenant_concurrency"): 2,
        ("b", "tenant_concurrency"): 2,
    }


def test_only_what_the_workload_says_is_shared() -> None:
    jobs = [
        Job(arrival_ns=idx * 10**9, num_prompt_tokens=70, num_output_tokens=2, prefix=prefix, tenant=tenant)
        for idx, (prefix, tenant) in enumerate([((7, 8), "a"), ((7, 9), "a"), ((7, 8), "b"), ((), "a"), ((), "a"), ((8,), "a")])
    ]
    workload = Workload(name="prefixes", jobs=jobs, prefix_block_tokens=32)
    cached = [record.num_cached_tokens for record in simulation().run(workload).records]
    assert cached == [0, 32, 64, 0, 0, 0]
    apart = [record.num_cached_tokens for record in simulation(isolates_tenants=True).run(workload).records]
    assert apart == [0, 32, 0, 0, 0, 0]
    assert not any(record.num_cached_tokens for record in simulation(enable_prefix_caching=False).run(workload).records)


def test_steps_read_a_common_prefix_once() -> None:
    jobs = [Job(arrival_ns=0, num_prompt_tokens=70, num_output_tokens=2, prefix=(7, 8)) for _ in range(3)]
    workload = Workload(name="prefixes", jobs=jobs, prefix_block_tokens=32)
    plans: list[StepPlan] = []
    cheaper = simulation(cost=replace(COST, repeated_ns=100.0)).run(workload, on_plan=plans.append)
    assert max(plan.num_repeated for plan in plans) == 2 * 64
    saved_ns = 2 * 64 * 100  # by the step with three decodes, not by that with two prompts
    assert cheaper.duration_ns == simulation().run(workload).duration_ns - saved_ns


def test_a_turn_follows_the_answer_and_finds_its_conversation_in_the_cache() -> None:
    jobs = [
        Job(arrival_ns=0, num_prompt_tokens=40, num_output_tokens=10),
        Job(arrival_ns=3 * MS, num_prompt_tokens=70, num_output_tokens=10, after=0),
    ]
    first, second = simulation().run(of(*jobs)).records
    assert second.intended_ns == second.sent_ns == first.ended_ns + 3 * MS
    assert second.num_cached_tokens == 49, "prompt and answer, but for the last token, which was never computed"


def test_a_prompt_with_blocks_of_an_answer_finds_the_answer_in_the_cache() -> None:
    jobs = [
        Job(arrival_ns=0, num_prompt_tokens=40, num_output_tokens=30, prefix=(1, 2, 3), answer=(4, 5, 6)),
        Job(arrival_ns=10**9, num_prompt_tokens=90, num_output_tokens=2, prefix=(1, 2, 4, 5, 7, 8), alike=((7, 6, 5),)),
        Job(arrival_ns=2 * 10**9, num_prompt_tokens=48, num_output_tokens=2, prefix=(1, 2, 9), alike=((9, 3, 4),)),
        Job(arrival_ns=3 * 10**9, num_prompt_tokens=48, num_output_tokens=2, prefix=(1, 2, 10)),
    ]
    workload = Workload(name="recorded", jobs=jobs, prefix_block_tokens=16)
    cached = [record.num_cached_tokens for record in simulation().run(workload).records]
    assert cached == [0, 64 + 5, 32 + 4, 32]


def test_a_turn_that_shares_a_prefix_finds_its_whole_conversation_in_the_cache() -> None:
    jobs = [
        Job(arrival_ns=0, num_prompt_tokens=40, num_output_tokens=10, prefix=(7,)),
        Job(arrival_ns=0, num_prompt_tokens=70, num_output_tokens=10, prefix=(7,), after=0),
    ]
    _, second = simulation().run(Workload(name="prefixes", jobs=jobs, prefix_block_tokens=32)).records
    assert second.num_cached_tokens == 49


def test_after_a_cancelled_turn_the_conversation_goes_on_with_what_was_said() -> None:
    jobs = [
        Job(arrival_ns=0, num_prompt_tokens=40, num_output_tokens=100, cancelled_after_tokens=10),
        Job(arrival_ns=3 * MS, num_prompt_tokens=70, num_output_tokens=10, after=0),
    ]
    first, second = simulation().run(of(*jobs)).records
    assert (first.end, second.end) == (End.CANCELLED, End.OK)
    assert second.intended_ns == first.ended_ns + 3 * MS
    assert second.num_cached_tokens >= 48


def test_after_a_client_that_went_away_before_its_return_the_conversation_goes_on() -> None:
    jobs = [Job(arrival_ns=idx * MS, num_prompt_tokens=32, num_output_tokens=20) for idx in range(19)]
    gone = Job(arrival_ns=19 * MS, num_prompt_tokens=32, num_output_tokens=20, cancelled_ns=50 * MS)
    turn = Job(arrival_ns=10**10, num_prompt_tokens=60, num_output_tokens=2, after=19)
    records = simulation(limits=AdmissionLimits(max_queue=2), max_returns=20).run(of(*jobs, gone, turn)).records
    ends = {record.index: record.end for record in records}
    assert (ends[19], ends[20]) == (End.CANCELLED, End.OK)


def test_after_a_refused_turn_the_conversation_is_over() -> None:
    jobs = [
        Job(arrival_ns=0, num_prompt_tokens=600, num_output_tokens=10),
        Job(arrival_ns=0, num_prompt_tokens=70, num_output_tokens=10, after=0),
    ]
    records = simulation().run(of(*jobs)).records
    assert [(record.index, record.end) for record in records] == [(0, End.FAILED), (1, End.FAILED)]


def test_a_closed_loop_has_so_many_users() -> None:
    jobs = [Job(arrival_ns=0, num_prompt_tokens=9, num_output_tokens=4) for _ in range(6)]
    outcome = simulation().run(of(*jobs), pace=Pace(concurrency=2))
    assert max(outcome.timelines["replica 0"].num_running) == 2
    sent = [record.sent_ns for record in outcome.records]
    ends = [record.ended_ns for record in outcome.records]
    assert sent == [0, 0, *ends[:4]]


@pytest.mark.parametrize("depth", [1, 2])
def test_the_host_takes_its_time_between_steps_or_beside_them(depth: int) -> None:
    """With two steps in flight, what is shorter than a step costs nothing."""
    host_ns = 1_000_000
    busy = replace(COST, host_step_ns=host_ns)
    job = Job(arrival_ns=0, num_prompt_tokens=32, num_output_tokens=4)
    plain, slowed = (simulation(cost=model, depth=depth).run(of(job)).records[0] for model in (COST, busy))
    added = [after - before for before, after in zip(plain.gaps_ns, slowed.gaps_ns, strict=True)]
    assert added == ([host_ns] * 3 if depth == 1 else [0, 0, 0])


def test_the_capacity_counts_conversations_and_no_think_times() -> None:
    first = Job(arrival_ns=5 * MS, num_prompt_tokens=32, num_output_tokens=2, deadline_ns=6 * MS)
    turn = replace(first, arrival_ns=10_000 * MS, num_prompt_tokens=66)
    talks = of(first, replace(turn, after=0), first, replace(turn, after=2))
    one = simulation(capacity=replace(CAPACITY, max_rows=1), enable_prefix_caching=False)
    duration_ns = 2 * (cost((32, 0)) + cost((1, 32)) + cost((64, 0)) + cost((2, 64)) + cost((1, 66)))
    assert one.capacity_per_s(talks) == pytest.approx(2e9 / duration_ns)


def test_noise_is_seeded() -> None:
    noisy = replace(COST, residuals=(Residuals(1e9, (0.8, 1.0, 1.5)),))
    jobs = [Job(arrival_ns=0, num_prompt_tokens=9, num_output_tokens=50)]
    ends = [simulation(cost=noisy, seed=seed).run(of(*jobs)).duration_ns for seed in (1, 1, 2)]
    assert ends[0] == ends[1] != ends[2]


def test_no_replica_has_the_noise_of_another_seeds_replica() -> None:
    noisy = replace(COST, residuals=(Residuals(1e9, (0.8, 1.0, 1.5)),))
    jobs = [Job(arrival_ns=0, num_prompt_tokens=9, num_output_tokens=50)] * 2
    runs = [simulation(cost=noisy, num_replicas=2, seed=seed).run(of(*jobs)).records for seed in (0, 1)]
    assert len({record.ended_ns for records in runs for record in records}) == 4


def test_steps_outside_of_the_fitted_range_are_counted() -> None:
    fitted = replace(COST, fitted=Fitted(max_rows=2, max_decodes=2, max_prefill_tokens=64, max_context_len=512))
    jobs = [Job(arrival_ns=0, num_prompt_tokens=9, num_output_tokens=9) for _ in range(4)]
    outcome = simulation(cost=fitted).run(of(*jobs))
    assert outcome.num_outside == outcome.num_steps == outcome.outside["rows > 2"]
    assert outcome.outside["decodes > 2"] == outcome.num_steps - 1
    assert simulation(cost=fitted).run(of(jobs[0])).num_outside == 0


def test_the_timeline_is_exact_in_the_mean_and_bounded() -> None:
    job = Job(arrival_ns=10 * MS, num_prompt_tokens=32, num_output_tokens=2)
    outcome = simulation().run(of(job))
    busy_ns = cost((32, 0)) + cost((1, 32))
    running, waiting, held = outcome.timelines["replica 0"].means(outcome.duration_ns)
    assert running == pytest.approx(busy_ns / outcome.duration_ns)
    assert waiting == 0
    assert held == pytest.approx((2 * cost((32, 0)) + 3 * cost((1, 32))) / 64 / outcome.duration_ns)

    outcome = simulation().run(of(job, replace(job, arrival_ns=12 * MS)))
    _, waiting, _ = outcome.timelines["replica 0"].means(outcome.duration_ns)
    assert waiting == pytest.approx((cost((32, 0)) - 2 * MS) / outcome.duration_ns), "it waits for the end of a step"

    timeline = Timeline(10)
    for idx in range(100_000):
        timeline.note(idx * 10 * MS, idx % 3, 0, 0)
    assert MAX_SAMPLES / 2 <= len(timeline.at_ns) <= MAX_SAMPLES
    assert timeline.means(1_000_000 * MS)[0] == pytest.approx(1.0, rel=1e-4)


def test_the_load_at_the_door_tells_the_adapters() -> None:
    server = VirtualServer(
        ServerSettings(capacity=CAPACITY, make_policies=make_policies), VirtualClock(), report=lambda _events, _now_ns: None
    )
    adapters = AdapterCounts(num_resident=2, num_running=1, num_blocks=6, num_placements=3, num_evictions=1)
    server.core.snapshot = server.core.snapshot._replace(adapters=adapters)
    assert server.load().adapters == adapters


def test_plots_show_servers_of_every_run_and_say_how_many_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[tuple[str, list[Panel]]] = []
    monkeypatch.setattr("penstock.lab.plots.draw", lambda title, panels: drawn.append((title, panels)))
    simulation = Simulation(capacity=CAPACITY, make_policies=make_policies)
    workload = of(Job(arrival_ns=0, num_prompt_tokens=9, num_output_tokens=2))
    for counts in ((6, 12), (2,)):
        outcomes = {f"replicas={num}": replace(simulation, num_replicas=num).run(workload) for num in counts}
        runs = [SimulatedRun(name=name, workload=workload, outcome=one, wall_s=0) for name, one in outcomes.items()]
        assert len(list(plots_of(runs))) == 1
    (title, panels), (other, _) = drawn
    assert title == "Requests and KV blocks over time: 8 of 18 servers"
    assert other == "Requests and KV blocks over time"
    names = [series.name for series in panels[0].series]
    assert names == [f"replicas={num}, replica {nth}" for nth in range(4) for num in (6, 12)]
