"""The search finds the rate of servers whose capacity is known, names what binds, and the bill follows from both."""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from penstock.config.units import parse_share
from penstock.lab.arrivals import constant, mean_rate, poisson
from penstock.lab.cost_model import CostModel, Residuals
from penstock.lab.figures import parse_slos
from penstock.lab.hardware import Hardware
from penstock.lab.intervals import Estimate
from penstock.lab.plan import (
    MOST_GROUP,
    MOST_REQUESTS,
    STEP,
    Binding,
    Candidate,
    Gain,
    Requirements,
    Resource,
    Search,
    Trial,
    at_rate,
    fewest_replicas,
    find_binding,
    find_fleet,
    find_saturated_rate,
    highest_rate,
    long_enough,
    make_bill,
    make_trial,
    p99_ttft_ns,
    plan,
    saturated_rate,
    search,
)
from penstock.lab.plan_report import as_json, beside, comparison, plots, report
from penstock.lab.simulation import Outcome, Simulation
from penstock.lab.sizing import ModelSize, Speeds, batch_point, fullest_batch, lengths_of, roofline
from penstock.lab.workload import Job, Workload
from penstock.models.program import KvShape
from penstock.sched.policies.presets import make_policies
from penstock.types.errors import ConfigError
from penstock.types.kv_dtype import KvDtype
from penstock.types.plan import Capacity

CAPACITY = Capacity(num_blocks=2001, block_size=16, max_rows=16, max_step_tokens=512, max_model_len=4096)
"""Few rows, because the run that times a saturated server fills them 16 times."""
PLAIN = CostModel(step_ns=10_000_000, decode_row_ns=1_000_000, prefill_token_ns=100_000, decode_read_ns=0, prefill_read_ns=0)
"""10 ms, 1 ms for each row, 0.1 ms for each token of a prompt."""
SIZE = ModelSize(
    name="tiny",
    num_parameters=1_000_000,
    num_weight_bytes=1_000_000,
    num_read_bytes=1_000_000,
    num_token_products=1_000_000,
    num_logit_products=1_000,
    num_attention_products=1_000,
    kv_shapes=(KvShape(2, 64),) * 2,
    kv_dtype=KvDtype.INT8,
    kv_bytes_per_token=536,
    kv_read_bytes=536,
    is_quantised=True,
)
RATES = Speeds(ops_per_s=2e9, read_bytes_per_s=1e9, fixed_ns=100_000)


def candidate(cost: CostModel = PLAIN, *, is_fitted: bool = True, **changes: int) -> Candidate:
    simulation = Simulation(
        capacity=replace(CAPACITY, **changes),
        make_policies=lambda: make_policies("sarathi"),
        cost=cost,
        max_tokens=None,
        enable_prefix_caching=False,
    )
    return Candidate(simulation=simulation, size=SIZE, rates=RATES, is_fitted=is_fitted)


def asked(slos: Sequence[str] = (), **changes: Any) -> Requirements:
    return Requirements(slos=parse_slos(slos), **changes)


def workload(count: int, prompt: int = 32, output: int = 20, *, instants: list[int] | None = None) -> Workload:
    instants = instants or constant(count, 1.0)
    jobs = [Job(arrival_ns=at_ns, num_prompt_tokens=prompt, num_output_tokens=output) for at_ns in instants]
    return Workload(name="made up", jobs=jobs)


def trial(rate: float, stress: float) -> Trial:
    return Trial(
        rate,
        100,
        100 if stress <= 1 else 0,
        0.99,
        stress,
        {"ttft=1s": stress},
        10,
        1,
        0.1,
        1,
        0,
        10,
        Estimate(float(stress <= 1)),
    )


@pytest.mark.parametrize(("goal", "num_requests", "num_good"), [("99.9%", 1000, 999), ("95%", 1000, 950), ("7%", 100, 7)])
def test_a_goal_may_be_met_exactly(goal: str, num_requests: int, num_good: int) -> None:
    made = trial(1.0, 1.0)._replace(num_requests=num_requests, num_good=num_good, goal=parse_share(goal))
    assert made.holds
    assert not made._replace(num_good=num_good - 1).holds


@functools.cache
def one_row() -> tuple[Candidate, Workload, Requirements, Search]:
    """A server of one row, even arrivals, and the search for their highest rate. A run of 3 s is a dozen requests long."""
    server, jobs, slos = candidate(max_rows=1), workload(105), asked(["ttft=500ms"], least_run_s=3.0)
    return server, jobs, slos, search(server, jobs, slos)


# The search


@pytest.mark.parametrize("capacity", [0.6, 3.0, 9.9])
def test_bisection_finds_a_known_capacity(capacity: float) -> None:
    found = highest_rate(lambda rate: trial(rate, rate / capacity), 10.0)
    assert found.rate == pytest.approx(capacity, rel=0.02)
    assert found.rate <= capacity < found.failed.rate  # type: ignore[union-attr]
    assert len(found.trials) <= 12


def test_a_server_that_is_saturated_first_and_one_that_holds_nothing() -> None:
    saturated = highest_rate(lambda rate: trial(rate, 0.5), 10.0)
    assert (saturated.rate, saturated.failed, len(saturated.trials)) == (10.0, None, 1)
    hopeless = highest_rate(lambda rate: trial(rate, 7.0), 10.0)
    assert (hopeless.rate, hopeless.best) == (0.0, None)


def test_one_row_serves_as_many_as_its_time_allows() -> None:
    """With even arrivals a server of one row keeps up with 1 / service requests a second, and not with 1 % more."""
    # 32 tokens of a prompt take 10 + 3.2 ms, 19 more tokens 11 ms each.
    service_s = 0.0132 + 19 * 0.011
    *_, found = one_row()
    assert found.saturated_rate == pytest.approx(1 / service_s, rel=0.01)
    assert found.rate == pytest.approx(1 / service_s, rel=0.03)


def test_a_limit_of_tpot_bounds_the_batch() -> None:
    """By Little's law N requests run at a rate of N / (time per token x tokens), and a step of N rows takes 10 + N ms."""
    # Prompts of 1 token are steps like all others: 10 steps for 10 tokens.
    found = search(candidate(), workload(250, prompt=1, output=10), asked(["tpot=22.5ms"]))
    rows = 12
    assert found.rate == pytest.approx(rows / (0.022 * 10), rel=0.03)
    assert found.best is not None
    assert found.best.mean_running == pytest.approx(rows, rel=0.06)
    assert found.best.worst_slo == "tpot=22.5ms"


def test_a_stricter_slo_and_bursts_never_raise_the_rate() -> None:
    steady, bursty = workload(60), workload(60, instants=poisson(Random(1), 60, 1.0))
    rates = [
        search(candidate(max_rows=4), jobs, asked([slo])).rate
        for jobs, slo in ((steady, "ttft=2s"), (steady, "ttft=100ms"), (bursty, "ttft=100ms"))
    ]
    assert rates == sorted(rates, reverse=True)
    assert rates[1] > 1.05 * rates[2]


def test_faster_machines_hold_higher_rates() -> None:
    slos = asked(["ttft=300ms", "tpot=25ms"])
    jobs = workload(50, instants=poisson(Random(1), 50, 1.0))
    slow, fast = (search(candidate(replace(PLAIN, step_ns=step_ns)), jobs, slos).rate for step_ns in (15_000_000, 10_000_000))
    assert fast > slow


def test_the_same_seed_gives_the_same_answer() -> None:
    at_once = workload(80, instants=[0] * 80)
    one, two = (search(candidate(), at_once, asked(["ttft=1s"], goal=0.9, seed=4)) for _ in range(2))
    assert one == two
    assert search(candidate(), at_once, asked(["ttft=1s"], goal=0.9, seed=5)) != one


# Rates of a workload


def test_a_workload_at_another_rate_keeps_its_shape() -> None:
    jobs = workload(50, instants=poisson(Random(2), 50, 3.0))
    faster = at_rate(jobs, 6.0, seed=0)
    assert mean_rate(faster) == pytest.approx(6.0, rel=1e-6)
    own = mean_rate(jobs) or 0.0
    for old, new in zip(jobs.jobs, faster.jobs, strict=True):
        assert new.arrival_ns == pytest.approx(old.arrival_ns * own / 6.0, abs=1)


def test_users_think_as_long_at_any_rate() -> None:
    jobs = [
        Job(arrival_ns=0, num_prompt_tokens=8, num_output_tokens=8),
        Job(arrival_ns=5_000_000_000, num_prompt_tokens=32, num_output_tokens=8, after=0),
        Job(arrival_ns=2_000_000_000, num_prompt_tokens=8, num_output_tokens=8),
    ]
    faster = at_rate(Workload(name="talks", jobs=jobs), 5.0, seed=0)
    assert [job.arrival_ns for job in faster.jobs] == [0, 5_000_000_000, 200_000_000]


def test_clients_are_as_patient_at_any_rate() -> None:
    jobs = [replace(job, deadline_ns=job.arrival_ns + 10, cancelled_ns=job.arrival_ns + 20) for job in workload(5).jobs]
    for job in at_rate(Workload(name="hasty", jobs=jobs), 10.0, seed=0).jobs:
        assert (job.deadline_ns, job.cancelled_ns) == (job.arrival_ns + 10, job.arrival_ns + 20)


def test_a_saturated_server_is_timed_with_patient_clients() -> None:
    jobs = workload(70)
    hasty = replace(jobs, jobs=[replace(job, deadline_ns=1, cancelled_ns=2) for job in jobs.jobs])
    assert find_saturated_rate(candidate(), hasty) == find_saturated_rate(candidate(), jobs)


def test_a_short_workload_is_repeated_as_often_as_it_needs() -> None:
    jobs = workload(100)  # 2,000 tokens
    full = batch_point(8, PLAIN, lengths_of(jobs.jobs), CAPACITY)
    assert len(long_enough(jobs, replace(full, rate=1.0), 30.0).jobs) == 100
    longer = long_enough(jobs, replace(full, rate=5.0), 30.0)
    assert len(longer.jobs) == 200
    assert mean_rate(longer) == pytest.approx(1.0, rel=0.02)
    assert len(long_enough(jobs, replace(full, rate=1e6), 30.0).jobs) == MOST_REQUESTS
    assert len(long_enough(jobs, replace(full, rate=1e6, num_rows=1), 30.0).jobs) == 200, "5,000 steps"


def test_arrivals_are_made_up_where_there_are_none() -> None:
    at_once = workload(400, instants=[0] * 400)
    slow, fast = at_rate(at_once, 2.0, seed=1), at_rate(at_once, 4.0, seed=1)
    assert mean_rate(slow) == pytest.approx(2.0, rel=0.15)
    for one, two in zip(slow.jobs, fast.jobs, strict=True):
        assert one.arrival_ns == pytest.approx(2 * two.arrival_ns, abs=2)


def test_a_saturated_server_is_timed_without_its_begin_and_its_tail() -> None:
    server, jobs = candidate(max_rows=8), workload(250)
    outcome = server.simulation.saturate(jobs)
    rate = saturated_rate(outcome, jobs)
    assert rate >= 250 / outcome.duration_ns * 1e9
    assert rate == pytest.approx(8 / (20 * 0.018 + 8 * 0.0032), rel=0.05), "8 rows of 20 steps, each with 8 prompts beside it"


@pytest.mark.parametrize("count", [17, 25, 60])
def test_a_short_workload_does_not_make_a_saturated_server_look_faster(count: int) -> None:
    """16 rows of 20 steps, each with 16 prompts of 200 tokens beside it, at 0.1 ms a token."""
    true_rate = 16 / (20 * 0.026 + 16 * 0.02)
    assert find_saturated_rate(candidate(), workload(count, prompt=200)) == pytest.approx(true_rate, rel=0.05)


def test_a_saturated_run_that_would_be_too_long_counts_no_more_than_a_full_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.lab.plan._MOST_SATURATED_TOKENS", 20_000)
    jobs, server = workload(70, prompt=32, output=200), candidate()
    full = fullest_batch(PLAIN, lengths_of(jobs.jobs), server.simulation.capacity)
    assert find_saturated_rate(server, jobs) <= full.rate


# Trials


def test_a_trial_says_how_far_the_slos_are_held() -> None:
    jobs = workload(100)
    outcome = candidate().simulation.run(jobs)
    kept, missed = (make_trial(outcome, 1.0, asked([slo])) for slo in ("ttft=26.4ms", "ttft=6.6ms"))
    assert (kept.num_good, kept.holds, kept.stress) == (100, True, pytest.approx(0.5))
    assert (missed.num_good, missed.holds, missed.stress) == (0, False, pytest.approx(2.0))
    assert kept.attainment.value == 1.0
    both = make_trial(outcome, 1.0, asked(["ttft=26.4ms", "tpot=1ms"]))
    assert both.worst_slo == "tpot=1ms"
    assert both.by_slo["tpot=1ms"] == pytest.approx(11.0, rel=0.01)


def test_requests_that_are_refused_hold_nothing() -> None:
    outcome = candidate(num_blocks=3, max_model_len=32).simulation.run(workload(10, prompt=100))
    refused = make_trial(outcome, 1.0, asked(["ttft=10s"]))
    assert (refused.num_good, refused.stress) == (0, math.inf)


# What binds


def binding_of(server: Candidate, jobs: Workload, *slos: str) -> Binding:
    parsed = asked(slos)
    found = search(server, jobs, parsed)
    binding = find_binding(server, jobs, parsed, found)
    assert binding.reason.endswith(".")
    return binding


HOST = replace(PLAIN, step_ns=0, host_step_ns=10_000_000)
"""No machine makes those 10 ms shorter."""


def test_rows_bind_where_more_of_them_would_help() -> None:
    assert binding_of(candidate(HOST, max_rows=2), workload(40), "ttft=1s").resources == [Resource.ROWS]


def test_memory_binds_where_requests_wait_for_blocks() -> None:
    server, jobs = candidate(HOST, num_blocks=41), workload(50, prompt=150, output=60)
    assert binding_of(server, jobs, "ttft=1s").resources == [Resource.MEMORY]


def test_compute_binds_where_prompts_take_the_time() -> None:
    cost = replace(PLAIN, step_ns=1_000_000, decode_row_ns=0)
    assert binding_of(candidate(cost), workload(100, prompt=500, output=2), "ttft=1s").resources == [Resource.COMPUTE]


def test_bandwidth_binds_where_steps_read_weights() -> None:
    cost = replace(PLAIN, decode_row_ns=10_000, decode_read_ns=20_000.0)
    assert binding_of(candidate(cost), workload(50, prompt=16, output=40), "tpot=20ms").resources == [Resource.BANDWIDTH]


def test_bursts_bind_where_even_arrivals_would_wait_less() -> None:
    instants = [at_ns for at_ns in range(0, 8 * 10_000_000_000, 10_000_000_000) for _ in range(10)]
    server = candidate()
    assert binding_of(server, workload(80, prompt=300, output=5, instants=instants), "ttft=100ms").resources == [Resource.QUEUE]


def test_where_no_rate_holds_it_says_what_would() -> None:
    """A token takes 11 ms: twice the bandwidth makes that 6."""
    server, jobs = candidate(), workload(30)
    slos = asked(["tpot=8ms"])
    found = search(server, jobs, slos)
    binding = find_binding(server, jobs, slos, found)
    assert (found.best, binding.before, binding.resources) == (None, 0.0, [Resource.BANDWIDTH])
    assert binding.reason == "No rate meets the SLOs; one would with twice the memory bandwidth."


def test_a_run_that_is_too_short_to_overload_the_server_says_so() -> None:
    server, jobs = candidate(), workload(10)
    slos = asked(["ttft=1m"])
    found = search(server, jobs, slos)
    binding = find_binding(server, jobs, slos, found)
    assert (binding.resources, binding.words) == ([], "unknown")
    assert "too few" in binding.reason


def gains(**known: tuple[float, float]) -> dict[Resource, Gain]:
    return {resource: Gain(*known.get(resource.value, (1.0, 1.0))) for resource in Resource}


def test_two_that_help_alike_are_both_named() -> None:
    """One step of 12 % and ranges that overlap are within what chance does; two steps are not."""
    clear = Binding(before=1.0, gains=gains(compute=(STEP**4, STEP**4), bandwidth=(STEP**2, STEP**2)))
    assert (clear.words, clear.is_clear) == ("compute", True)
    assert "not clear" not in clear.reason
    for bandwidth in ((STEP**3, STEP**3), (STEP, STEP**4)):
        unclear = Binding(before=1.0, gains=gains(compute=(STEP**4, STEP**4), bandwidth=bandwidth))
        assert (unclear.words, unclear.is_clear) == ("bandwidth or compute", False)
        assert unclear.reason.startswith("Which one is not clear")


def test_a_gain_that_may_be_chance_is_told_as_one() -> None:
    binding = Binding(before=1.0, gains=gains(rows=(1.0, 1.25)))
    assert (binding.words, binding.is_clear) == ("perhaps rows", False)
    assert "with twice the rows of a step: 1 to 1.2 times as high" in binding.reason


def test_a_rate_that_holds_by_chance_is_no_gain() -> None:
    """Rows are never full here, so that twice as many plan the same steps and hold the same rates, those by chance included."""
    noise = (Residuals(math.inf, (0.8, 0.9, 1.0, 1.0, 1.1, 1.2, 1.3, 6.0)),)
    server = candidate(replace(PLAIN, residuals=noise), max_rows=12)
    server = replace(server, simulation=replace(server.simulation, seed=5))
    jobs = workload(50, prompt=300, output=3, instants=poisson(Random(2), 50, 1.0))
    binding = binding_of(server, jobs, "ttft=500ms")
    assert binding.before > 1, "a higher rate than the highest one holds, by chance"
    assert binding.gains[Resource.ROWS] == (1.0, 1.0)
    assert binding.gains[Resource.MEMORY] == (1.0, 1.0)


def test_an_estimated_cost_is_made_anew_with_twice_the_rates() -> None:
    server = candidate(roofline(SIZE, RATES), is_fitted=False)
    assert server.doubled(Resource.COMPUTE).simulation.cost == roofline(SIZE, replace(RATES, ops_per_s=4e9))
    assert server.doubled(Resource.BANDWIDTH).simulation.cost == roofline(SIZE, replace(RATES, read_bytes_per_s=2e9))
    assert server.doubled(Resource.MEMORY).simulation.capacity.num_blocks == 4001
    assert server.doubled(Resource.QUEUE) == server


# Replicas


def bursts() -> Workload:
    """Every two seconds twelve requests within 24 ms, of which a server computes one in 40 ms."""
    return workload(
        156, prompt=300, output=5, instants=[2_000_000_000 * i + 2_000_000 * j for i in range(13) for j in range(12)]
    )


def test_replicas_share_a_burst() -> None:
    """The last of four in a burst waits 102 ms for the others, the last of six 180 ms. One server wants them 25 ms apart."""
    jobs = bursts()
    rate = mean_rate(jobs) or 0.0
    sized = plan(candidate(), BOX, jobs, asked(["ttft=200ms"], least_run_s=0))
    found, fleet = sized.search, sized.fleet
    assert found is not None
    assert rate / found.rate > 12, "stretched until one server holds them"
    assert fleet is not None
    assert fleet.num_replicas == 3
    assert fleet.held is not None
    assert fleet.failed is not None
    assert (fleet.held.rate, fleet.held.num_good, fleet.failed.num_good) == (rate, 156, 104)
    assert fleet.load == pytest.approx(rate / (3 * found.saturated_rate))
    assert "For 6.45 requests/s: 3 replicas behind a round-robin router, at a load of 9% of what they keep up with" in report(
        sized
    )


def test_a_burst_that_one_server_never_holds_is_held_by_several() -> None:
    jobs = workload(72, prompt=300, output=5, instants=[2_000_000_000 * (i // 6) for i in range(72)])
    sized = plan(candidate(), BOX, jobs, asked(["ttft=100ms"], least_run_s=0))
    assert sized.search is not None
    assert sized.search.best is None
    assert sized.fleet is not None
    assert sized.fleet.num_replicas == 3, "two prompts take 80 ms"
    text = report(sized)
    assert "One server meets these SLOs at no rate, not even 1% of what it keeps up with" in text
    assert "Loosen that SLO" not in text
    assert "3 replicas behind a round-robin router" in text


def test_bursts_are_shared_in_brief_plans_and_with_slower_steps_too() -> None:
    jobs = workload(72, prompt=300, output=5, instants=[10_000_000_000 * (i // 8) for i in range(72)])
    slos, server = asked(["ttft=180ms"], least_run_s=0), replace(candidate(), step_error=1.5)
    sized, rival = (plan(server, BOX, jobs, slos, is_brief=is_brief) for is_brief in (False, True))
    assert sized.fleet is not None
    assert sized.fleet.num_replicas == 2, "each computes four prompts of a burst"
    assert rival.fleet == sized.fleet
    assert sized.outlooks[0].rate == 0
    assert sized.replicas == (2, 3)


def test_even_arrivals_need_as_many_replicas_as_the_arithmetic_says() -> None:
    server, jobs, slos, found = one_row()
    for times in (0.5, 1.0, 2.8, 4.9):
        fleet = find_fleet(server, jobs, slos, found, times * found.rate)
        assert fleet is not None
        assert fleet.num_replicas == math.ceil(times)
        assert fleet.failed is None, "fewer do not keep up"


def test_headroom_is_a_share_of_the_rate_that_the_replicas_hold() -> None:
    server, jobs, slos, found = one_row()
    fleets = [find_fleet(server, jobs, replace(slos, headroom=share), found, 2.8 * found.rate) for share in (0.0, 0.25)]
    assert [fleet and fleet.num_replicas for fleet in fleets] == [3, 4]  # 2.8 / 0.75 = 3.7
    assert fleets[1] is not None
    assert fleets[1].load == pytest.approx(2.8 / 4, rel=0.03)


def test_many_replicas_are_simulated_by_one_group_of_them() -> None:
    server, jobs, slos, found = one_row()
    fleet = find_fleet(server, jobs, slos, found, 99 * found.rate)
    assert fleet is not None
    assert fleet.num_groups > 1
    assert fleet.num_in_group <= 2 * MOST_GROUP
    assert 99 <= fleet.num_replicas <= 99 + fleet.num_groups
    assert fleet.held is not None
    assert fleet.held.rate == pytest.approx(99 * found.rate / fleet.num_groups)
    assert math.gcd(fleet.num_groups, 105) == 1, "or a group, such as one of 7, has the same requests each time"


def test_all_groups_together_have_no_more_replicas_than_the_most(monkeypatch: pytest.MonkeyPatch) -> None:
    """No number of replicas makes a prompt shorter than a millisecond."""
    monkeypatch.setattr("penstock.lab.plan.MOST_REPLICAS", 40)
    server, jobs, slos, found = one_row()
    tried: list[int] = []

    def run(simulation: Simulation, jobs: Workload) -> Outcome:
        tried.append(simulation.num_replicas)
        return real_run(simulation, jobs)

    real_run = Simulation.run
    monkeypatch.setattr(Simulation, "run", run)
    rate = 25 * found.saturated_rate
    fleet = find_fleet(server, jobs, slos, found, rate)
    assert fleet is not None
    assert fleet.num_groups > 1
    assert find_fleet(server, jobs, asked(["ttft=1ms"], least_run_s=3.0), found, rate) is None
    assert max(tried) * fleet.num_groups <= 40


def test_the_tokens_of_a_run_of_replicas_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.lab.plan.MOST_FLEET_TOKENS", 1_200)
    monkeypatch.setattr("penstock.lab.plan.MOST_TOKENS", 600)
    server, slos = candidate(), asked(["ttft=100ms"])
    jobs = workload(120, prompt=300, output=5, instants=[2_000_000_000 * (i // 6) for i in range(120)])
    found = search(server, jobs, slos)
    assert found.best is None, "a burst is too long for one server at any rate"
    fleet = find_fleet(server, jobs, slos, found, 12.0)
    assert fleet is not None
    assert fleet.held is not None
    assert fleet.held.num_requests == 240, "30 s would be 360 requests of 5 tokens"


def test_a_rate_beyond_all_replicas_is_an_error() -> None:
    server, jobs, slos, found = one_row()
    with pytest.raises(ConfigError, match="not even 256 of these servers keep up"):
        find_fleet(server, jobs, slos, found, 1e12)


@pytest.mark.parametrize("needed", [3, 4, 7, 20, 256])
def test_the_fewest_replicas_are_found_in_few_runs(needed: int) -> None:
    tried: list[int] = []

    def attempt(num_replicas: int) -> Trial:
        tried.append(num_replicas)
        return trial(float(num_replicas), needed / num_replicas)

    fewest = fewest_replicas(attempt, 3)
    assert fewest is not None
    number, held, failed = fewest
    assert (number, held.rate) == (needed, needed)
    assert (failed.rate if failed else 2) == needed - 1
    assert len(tried) <= 2 * math.log2(needed - 2) + 2
    assert fewest_replicas(attempt, 3, needed - 1) is None or needed == 3


def test_what_tokens_of_replicas_cost() -> None:
    lengths = lengths_of(workload(10, prompt=300, output=100).jobs)
    bill = make_bill(7.0, 4, lengths, price_per_hour=3.6)
    assert bill.price_per_hour == pytest.approx(14.4)
    # 14.4 USD an hour are 0.4 cents a second, in which 700 tokens are generated.
    assert bill.price_per_million_output_tokens == pytest.approx(0.004 / 700 * 1e6)
    assert bill.price_per_million_tokens == pytest.approx(0.004 / 2800 * 1e6)


def test_tokens_that_nobody_received_cost_no_less() -> None:
    jobs = [replace(job, cancelled_after_tokens=4 if idx % 2 else None) for idx, job in enumerate(workload(10, output=10).jobs)]
    sized = plan(candidate(), BOX, Workload(name="leavers", jobs=jobs), asked(["ttft=1s"], rate=0.5, least_run_s=0))
    assert sized.bill is not None
    assert sized.bill.price_per_million_output_tokens == pytest.approx(1 / 3600 / (0.5 * 7) * 1e6)


def test_the_rate_of_conversations_is_not_that_of_their_requests() -> None:
    first = Job(arrival_ns=0, num_prompt_tokens=20, num_output_tokens=10)
    jobs = [
        replace(first, arrival_ns=0 if turn else talk, after=5 * talk + turn - 1 if turn else None)
        for talk in range(2)
        for turn in range(5)
    ]
    talks = Workload(name="talks", jobs=jobs)
    sized = plan(candidate(), BOX, talks, asked(["ttft=1s"], rate=0.5, least_run_s=0))
    assert sized.bill is not None
    assert sized.bill.price_per_million_output_tokens == pytest.approx(1 / 3600 / (0.5 * 5 * 10) * 1e6)
    text = report(sized)
    assert "For 0.5 conversations/s: 1 replica" in text
    assert "of 10 requests meet the SLOs" in text
    full = fullest_batch(PLAIN, lengths_of(jobs), CAPACITY)
    assert len(long_enough(talks, replace(full, rate=5.0), 30.0).jobs) == 150, "five requests a second for 30 seconds"


# All of it


BOX = Hardware(
    name="box",
    description="a box",
    is_gpu=False,
    memory_bytes=1 << 30,
    read_bytes_per_s=1e9,
    int8_ops_per_s=1e12,
    bf16_ops_per_s=1e12,
    read_share=1.0,
    compute_share=1.0,
    step_ns=0,
    basis="assumed by a test",
    price_per_hour=1.0,
    price_source="https://example.org",
    price_date="2026-11",
)


def test_a_plan_says_everything_and_what_is_not_certain() -> None:
    jobs = workload(60, instants=poisson(Random(1), 60, 1.0))
    server = replace(candidate(), doubts=["The weights are made up."])
    sized = plan(server, BOX, jobs, asked(["ttft=1s", "tpot=400ms"], rate=30.0, least_run_s=0))
    text = report(sized)
    for words in (
        "Highest rate:",
        "What binds:",
        "Arithmetic",
        "replica",
        "USD per million output tokens",
        "2026-11",
    ):
        assert words in text, words
    assert "The weights are made up." in text
    assert "all but saturated" in text
    numbers = as_json([sized])["machines"][0]  # type: ignore[index]
    assert numbers["highest_rate"] == sized.search.rate  # type: ignore[union-attr]
    assert numbers["num_replicas"] == sized.fleet.num_replicas  # type: ignore[union-attr]
    assert numbers["load"] == pytest.approx(30 / (numbers["num_replicas"] * sized.search.saturated_rate))  # type: ignore[union-attr]
    assert text.index("What binds:") < text.index("What is not certain") < text.index("Arithmetic"), "the answer first"


def test_slower_and_faster_steps_bound_the_answer() -> None:
    """With one row and even arrivals the rate is 1 / service."""
    server, jobs = replace(candidate(max_rows=1), step_error=2.0), workload(40, output=10)
    sized = plan(server, BOX, jobs, asked(["e2e=2s"], rate=14.0, least_run_s=0))
    assert sized.search is not None
    assert sized.fleet is not None
    assert sized.rates == (pytest.approx(sized.search.rate / 2, rel=0.03), pytest.approx(2 * sized.search.rate, rel=0.03))
    assert sized.replicas == (math.ceil(14 / sized.rates[1]), math.ceil(14 / sized.rates[0]))
    text, (fewest, most) = report(sized), sized.replicas
    assert f"{sized.rates[0]:.3g} to {sized.rates[1]:.3g} with steps 2 times as slow or as fast" in text
    assert f"{fewest} to {most} replicas behind a round-robin router; {sized.fleet.num_replicas} with these step times" in text
    assert f"{fewest:.2f} to {most:.2f} USD an hour" in text
    machine = json.loads(json.dumps(as_json([sized])))["machines"][0]
    assert (machine["highest_rates"], machine["replicas"]) == ([*sized.rates], [fewest, most])


def test_the_speed_that_measures_a_plan_counts_the_one_it_had() -> None:
    """The times were divided by 4 already, so a bench with the same options gets them undivided."""
    sized = plan(candidate(), BOX, workload(40), asked(["e2e=9s"], speed=4.0, least_run_s=0))
    assert sized.search is not None
    assert f" and --speed {4 * sized.search.rate:.3g} in place of --speed 4\n" in report(sized)


def test_an_answer_that_slower_steps_do_not_change_is_one_number() -> None:
    sized = plan(replace(candidate(), step_error=1.01), BOX, workload(40), asked(["e2e=9s"], rate=0.1, least_run_s=0))
    assert sized.replicas == (1, 1)
    assert "For 0.1 requests/s: 1 replica, at a load" in report(sized)


def test_steps_that_hold_no_slo_need_more_replicas_than_can_be_said() -> None:
    sized = plan(replace(candidate(), step_error=3.0), BOX, workload(40), asked(["ttft=30ms"], rate=1.0, least_run_s=0))
    assert sized.fleet is not None
    assert sized.rates[0] == 0, "even one prompt takes 42 ms"
    assert sized.replicas == (1, None)
    assert "For 1 requests/s: 1 or more replicas" in report(sized)


def test_policies_are_compared_at_a_rate_that_all_of_them_hold() -> None:
    """The rival's batches have four rows."""
    jobs = workload(60, instants=poisson(Random(1), 60, 1.0))
    slos = asked(["ttft=500ms"], rate=20.0, least_run_s=0)
    sized, rival = plan(candidate(), BOX, jobs, slos), plan(candidate(max_rows=4), BOX, jobs, slos, is_brief=True)
    assert sized.search is not None
    assert rival.search is not None
    assert (rival.binding, rival.search.rate > 0) == (None, True)
    sized = replace(sized, rivals={"small": rival})
    lines = beside([sized]).splitlines()
    assert f"{sized.search.rate / rival.search.rate:.2f} x" in lines[2]
    assert lines[2].split()[:3] == ["box", "preset", "small"]
    assert f"{rival.search.rate:.3g}/s" in lines[1]
    assert p99_ttft_ns(rival, rival.search.rate) <= 500e6
    told = json.loads(json.dumps(as_json([sized])))["machines"][0]["beside"]["small"]
    assert (told["highest_rate"], told["common_rate"]) == (rival.search.rate, rival.search.rate)
    assert told["p99_ttft_s"] == p99_ttft_ns(rival, rival.search.rate) / 1e9
    assert sized.search.rate > 1.2 * rival.search.rate


def test_policies_that_sustain_no_rate_have_no_ttft_at_one() -> None:
    jobs = workload(60, instants=poisson(Random(1), 60, 1.0))
    sized = plan(candidate(), BOX, jobs, asked(["ttft=500ms"], rate=20.0, least_run_s=0))
    hopeless = plan(candidate(), BOX, jobs, asked(["ttft=1ms"], rate=20.0, least_run_s=0), is_brief=True)
    sized = replace(sized, rivals={"hopeless": hopeless})
    these, rival = beside([sized]).splitlines()[1:3]
    assert these.count("/s") == 1
    assert rival.split() == ["box", "preset", "hopeless", "round-robin", "0", "none"]
    assert as_json([sized])["machines"][0]["beside"]["hopeless"]["p99_ttft_s"] is None  # type: ignore[index]


def test_machines_are_compared_from_the_cheapest_on() -> None:
    jobs = workload(20, instants=poisson(Random(1), 20, 1.0))
    slos = asked(["ttft=1s", "tpot=400ms"])
    names = {"dear": 9.0, "unpriced": None, "cheap": 1.0}
    some = [
        plan(candidate(), replace(BOX, name=name, price_per_hour=price), jobs, replace(slos, rate=1.0, least_run_s=0))
        for name, price in names.items()
    ]
    hopeless = plan(candidate(), replace(BOX, name="hopeless"), jobs, asked(["ttft=1ms"], rate=1.0, least_run_s=0))
    lines = comparison([hopeless, *some]).splitlines()[1:5]
    assert [line.split()[0] for line in lines] == ["cheap", "dear", "unpriced", "hopeless"]


def test_plots_are_drawn_of_batches_and_rates() -> None:
    pytest.importorskip("matplotlib", reason="plots need penstock[lab]")
    sized = plan(candidate(), BOX, workload(30), asked(["ttft=1s", "tpot=40ms"], least_run_s=0))
    drawn = dict(plots(sized))
    assert drawn.keys() == {"batches", "rates"}
    assert all(plot.png().startswith(b"\x89PNG") for plot in drawn.values())


def test_without_slos_there_is_arithmetic_alone() -> None:
    sized = plan(candidate(), BOX, workload(20), asked())
    assert (sized.search, sized.binding, sized.bill) == (None, None, None)
    assert "Highest rate" not in report(sized)


def test_high_rates_have_no_exponents() -> None:
    fast = CostModel(step_ns=10_000, decode_row_ns=1_000, prefill_token_ns=10, decode_read_ns=0, prefill_read_ns=0)
    text = report(plan(candidate(fast), BOX, workload(20), asked(["ttft=1s"], least_run_s=0)))
    assert re.search(r"Highest rate: \d{4,} requests/s", text)
    assert re.search(r"rate of a full batch .*\n.* = \d{4,} requests/s", text)
    assert "e+" not in text


def test_no_rate_is_said_so() -> None:
    """A prompt takes 13.2 ms."""
    server, jobs = replace(candidate(), step_error=1.5), workload(20)
    hopeless, near = (plan(server, BOX, jobs, asked([slo], least_run_s=0)) for slo in ("ttft=1ms", "ttft=12ms"))
    for sized in (hopeless, near):
        assert "One server meets these SLOs at no rate" in report(sized)
        assert "Loosen that SLO" in report(sized)
    assert "times as fast" not in report(hopeless)
    assert near.rates[0] == 0
    assert f"With steps 1.5 times as fast, its highest rate would be {near.rates[1]:.3g} requests/s." in report(near)


def test_requests_that_can_not_fit_are_an_error() -> None:
    with pytest.raises(ConfigError, match="5020 tokens, and this server takes 4096"):
        plan(candidate(), BOX, workload(5, prompt=5000), asked())
