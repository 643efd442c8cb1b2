"""A shift is found, none is not; and what the runs could not show is said."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from penstock.lab.compare import Compared, Difference, compare_results
from penstock.lab.figures import parse_slos
from penstock.lab.intervals import Estimate
from penstock.lab.records import End
from penstock.lab.results import AskedTarget, Load, Result, Run
from penstock.types.errors import ConfigError
from support.bench_records import random_records, record, result_of, run_of


def compared(before: Result, after: Result, **options: object) -> Compared:
    (found,) = compare_results(before, [after], **options)  # type: ignore[arg-type]
    return found


@functools.cache
def made(seed: int, count: int = 400, **changes: float) -> Result:
    return result_of(run_of(random_records(seed, count, **changes), seed=seed))


def by_name(found: Compared) -> dict[str, Difference]:
    (only,) = found.comparisons
    return {difference.figure: difference for difference in only.differences}


@pytest.mark.parametrize("num_pairs", [50, pytest.param(200, marks=pytest.mark.slow)])
def test_two_runs_of_the_same_thing_rarely_differ(num_pairs: int) -> None:
    """Any figure of some 15 that is called a difference is a false one. The chance of that is kept below 5 %."""
    false = 0
    for seed in range(num_pairs):
        found = compared(made(2 * seed, 250), made(2 * seed + 1, 250))
        false += any(difference.is_more_than_noise for difference in by_name(found).values())
    assert false / num_pairs < 0.08


def test_nor_do_two_short_runs() -> None:
    """60 requests over three seconds: neighbouring blocks of time are parts of the same requests."""
    found = [compared(made(5000 + 2 * seed, 60), made(5001 + 2 * seed, 60)) for seed in range(40)]
    assert np.mean([any(one.is_more_than_noise for one in by_name(each).values()) for each in found]) < 0.12


def test_nor_do_two_runs_of_a_queue() -> None:
    """M/M/1 at a load of 0.7: some 30 requests in a row share their fate."""

    def queue(seed: int) -> Result:
        rng = np.random.default_rng(seed)
        gaps_ms, work_ms = rng.exponential(143, 1500), rng.exponential(100, 1500)
        walk = np.cumsum(work_ms - gaps_ms)
        waits_ms, due_ms = walk - np.minimum.accumulate(walk), np.cumsum(gaps_ms)
        some = zip(due_ms[500:].tolist(), waits_ms[500:].tolist(), strict=True)
        records = [record(i, due_ms=due, ttft_ms=50 + wait, gaps_ms=(1, 1)) for i, (due, wait) in enumerate(some)]
        return result_of(run_of(records, seed=seed))

    found = [compared(queue(2 * seed), queue(2 * seed + 1)) for seed in range(40)]
    assert np.mean([any(one.is_more_than_noise for one in by_name(each).values()) for each in found]) < 0.12


def test_a_shift_of_a_tenth_is_found() -> None:
    """400 independent requests with a spread of 40 % show 10 % of TTFT at a power that is told beforehand."""
    found = [by_name(compared(made(2 * seed, 1500), made(2 * seed + 1, 1500, slower=1.1))) for seed in range(10)]
    for figure in ("ttft mean", "ttft p50", "itl p50", "tpot mean"):
        shown = [one[figure] for one in found]
        assert sum(one.is_more_than_noise and one.worsening > 0 for one in shown) >= 9, figure
        assert sum(one.change.low <= 0.1 <= one.change.high for one in shown) >= 8, figure  # type: ignore[union-attr,operator]


def test_the_same_jobs_show_more() -> None:
    """With the same seed both sides have the same jobs: what these have in common cancels."""
    before, after = made(1), result_of(run_of(random_records(1, 400, slower=1.02), seed=1))
    paired = by_name(compared(before, after))["ttft p50"]
    other = result_of(replace(after.runs[0], seed=2))
    apart = by_name(compared(before, other))["ttft p50"]
    assert paired.is_more_than_noise
    assert not apart.is_more_than_noise
    assert paired.smallest < apart.smallest / 3


def test_a_result_does_not_differ_from_itself() -> None:
    found = compared(made(4), made(4))
    for difference in by_name(found).values():
        assert not difference.is_more_than_noise
        assert difference.before == difference.after
        assert difference.words.startswith(("no difference", "too few"))
    assert not found.worse(0.0)


def test_too_few_requests_are_said() -> None:
    found = by_name(compared(made(0, 40), made(1, 40, slower=3)))
    assert found["ttft p99"].change is None
    assert found["ttft p99"].words == "too few requests to say"
    assert found["ttft mean"].is_more_than_noise, "a threefold time shows with 40"


def test_one_request_on_each_side_is_no_error() -> None:
    one = result_of(run_of([record()]))
    assert all(difference.change is None for difference in by_name(compared(one, one)).values())


def test_repeats_see_what_differs_between_runs() -> None:
    """Each run has a level of its own, by 10 % or so: within a run nothing tells that."""

    def runs(seeds: Sequence[int], levels: Sequence[float]) -> Result:
        some = zip(seeds, levels, strict=True)
        return result_of(*(run_of(random_records(seed, 600, slower=level), seed=seed) for seed, level in some))

    before, after = runs([1, 2, 3, 4], [1.0, 1.15, 0.9, 1.05]), runs([5, 6, 7, 8], [1.1, 1.2, 0.95, 1.0])
    together = by_name(compared(before, after))["itl p50"]
    assert not together.is_more_than_noise
    first = result_of(before.runs[2]), result_of(after.runs[1])
    alone = compared(*first)
    assert by_name(alone)["itl p50"].is_more_than_noise
    assert any("With fewer than 3 runs" in note for note in alone.notes)
    far = runs([5, 6, 7, 8], [2.1, 2.2, 1.95, 2.0])
    assert by_name(compared(before, far))["itl p50"].is_more_than_noise


def test_repeats_of_several_seeds_are_compared_in_pairs() -> None:
    """Workloads of other seeds are faster or slower themselves; that cancels between runs of one seed."""

    def runs(seeds: Sequence[int], slower: float) -> Result:
        levels = {1: 1.0, 2: 1.4, 3: 0.8, 4: 1.2}
        return result_of(*(run_of(random_records(seed, slower=slower * levels[seed]), seed=seed) for seed in seeds))

    before = runs([1, 2, 3, 4], 1.0)
    shown = by_name(compared(before, runs([1, 2, 3, 4], 1.1)))
    for figure in ("ttft mean", "tpot p50", "itl p50"):
        assert shown[figure].is_more_than_noise, figure
        assert shown[figure].worsening == pytest.approx(0.1, abs=0.01)
    assert by_name(compared(before, runs([4, 3, 2, 1], 1.1))) == shown, "in whatever order"
    others = result_of(*(replace(run, seed=10 * (run.seed or 0)) for run in runs([1, 2, 3, 4], 1.1).runs))
    assert not by_name(compared(before, others))["ttft mean"].is_more_than_noise, "no pairs"
    assert not any(one.is_more_than_noise for one in by_name(compared(before, before)).values())


def test_few_pairs_show_only_large_differences() -> None:
    """With 2 degrees of freedom, a difference among 20 figures is significant from some 20 standard errors on."""

    def runs(levels: Sequence[float]) -> Result:
        seeds = range(1, len(levels) + 1)
        return result_of(
            *(run_of(random_records(seed, slower=level), seed=seed) for seed, level in zip(seeds, levels, strict=True))
        )

    shown = by_name(compared(runs([1, 1, 1]), runs([1, 1.01, 0.99])))["ttft mean"]
    assert not shown.is_more_than_noise
    assert shown.smallest > 15 * 0.01 / 3**0.5


def test_repeats_of_one_seed_are_not_pairs() -> None:
    """With one seed, the n-th run of a side has nothing in common with the n-th of the other."""

    def runs(seed: int, levels: Sequence[float]) -> Result:
        return result_of(*(run_of(random_records(seed, slower=level)) for level in levels))

    found = by_name(compared(runs(1, [1.0, 1.4, 0.8]), runs(1, [1.1, 1.54, 0.88])))
    assert not any(one.is_more_than_noise for one in found.values())


def test_other_workloads_are_refused_unless_asked_for() -> None:
    before, after = made(0), result_of(replace(made(1).runs[0], workload="another"))
    with pytest.raises(ConfigError, match="'made up' and 'another'") as caught:
        compared(before, after)
    assert "--any-workload" in caught.value.remedy
    assert any("workloads differ" in note for note in compared(before, after, any_workload=True).notes)


def test_loads_are_compared_with_their_like() -> None:
    def sweep(*rates: float) -> Result:
        return result_of(*(run_of(random_records(int(rate), 50), load=Load("rate", rate)) for rate in rates))

    found = compared(sweep(1, 2, 3), sweep(2, 3, 4))
    assert [one.load for one in found.comparisons] == ["rate 2", "rate 3"]
    assert any("rate 1, rate 4" in note for note in found.notes)
    with pytest.raises(ConfigError, match="no load in common: rate 1 and rate 4"):
        compared(sweep(1), sweep(4))


def test_variants_are_compared_with_their_like() -> None:
    def varied(*names: str) -> Result:
        return result_of(*(run_of(random_records(len(name), 50), name=name) for name in names))

    found = compared(varied("fcfs", "sjf"), varied("sjf", "fair", "sjf"))
    assert [(one.load, one.num_runs) for one in found.comparisons] == [("sjf at rate 20", (1, 2))]
    assert any("fair at rate 20, fcfs at rate 20" in note for note in found.notes)
    with pytest.raises(ConfigError, match="no variant and load in common: fcfs at rate 20, sjf at rate 20 and rate 20"):
        compared(varied("fcfs", "sjf"), made(1))
    assert [one.load for one in compared(varied("rate=20"), made(1)).comparisons] == ["rate 20"]
    assert [one.load for one in compared(varied("sjf"), varied("fcfs", "sjf")).comparisons] == ["sjf at rate 20"]


def test_what_else_differs_is_noted() -> None:
    bad = [*random_records(0, 50), record(50, due_ms=9, end=End.FAILED)]
    other = result_of(run_of(bad, target=AskedTarget(model="large"), how="simulated", warnings=("Interrupted.",)))
    other = replace(other, machine=replace(other.machine, num_cpus=4))
    notes = " ".join(compared(made(0), other).notes)
    assert "The machines differ" in notes
    assert "The models differ" in notes
    assert "One side is http, the other simulated" in notes
    assert "1 requests were refused or failed" in notes
    assert "Figures of the second result are doubtful" in notes
    assert "first result" not in notes


def test_goodput_is_compared_where_both_have_slos() -> None:
    slos = parse_slos(["ttft=150ms"])
    before, after = (result_of(run_of(random_records(seed, 300), slos=slos)) for seed in (0, 1))
    assert "goodput_per_s" in by_name(compared(before, after))
    assert "goodput_per_s" not in by_name(compared(before, made(1)))


def test_goodput_of_other_slos_is_not_compared_and_a_note_says_so() -> None:
    before, after = (result_of(run_of(random_records(0, 300), slos=parse_slos([slo]))) for slo in ("ttft=150ms", "ttft=900ms"))
    found = compared(before, after)
    assert "goodput_per_s" not in by_name(found)
    assert "The SLOs differ, so goodput and the share within them are not compared." in found.notes


def test_a_rate_that_falls_and_a_latency_that_rises_are_worse() -> None:
    rate = Difference(
        figure="requests_per_s",
        is_higher_better=True,
        before=10,
        after=9,
        change=Estimate(-0.1, -0.12, -0.08),
        is_more_than_noise=True,
    )
    latency = replace(rate, figure="ttft p50", is_higher_better=False)
    assert rate.worsening > 0
    assert latency.worsening <= 0
    assert rate.words == "lower by 10 % [8, 12]"
    assert latency.words == "faster by 10 % [8, 12]"
    slower = replace(latency, change=Estimate(0.2, -0.01, 0.4), is_more_than_noise=False, chance=0.2, smallest=0.3)
    assert replace(latency, change=Estimate(3.63, 2.5, 5.2)).words == "slower by 363 % [250, 520]"
    assert slower.words == "no difference that these runs could show; they would show 30 %"
    assert replace(slower, chance=0.01).words == "perhaps slower by 20 % [-1, 40]; not sure among so many figures"


def test_a_change_for_the_worse_is_found_for_ci() -> None:
    found = compared(made(1), result_of(run_of(random_records(1, 400, slower=1.2), seed=1)))
    names = {difference.figure for _, difference in found.worse(0.05)}
    assert "ttft p50" in names
    assert not found.worse(0.5)
    better = compared(result_of(run_of(random_records(1, 400, slower=1.2), seed=1)), made(1))
    assert not better.worse(0.0)


def test_goodput_that_falls_to_nothing_is_worse() -> None:
    slos = parse_slos(["ttft=1s"])
    before, after, few = (
        result_of(run_of(random_records(1, count, slower=slower), slos=slos))
        for count, slower in ((400, 1.0), (400, 99.0), (9, 1.0))
    )
    found = compared(before, after)
    goodput = by_name(found)["goodput_per_s"]
    assert (goodput.after, goodput.words) == (0, "lower by 100 % [100, 100]")
    assert goodput in [difference for _, difference in found.worse(0.99)]
    none_of_few = result_of(run_of(random_records(1, 9, slower=99.0), slos=slos))
    for pair in ((few, after), (after, before), (before, none_of_few)):
        found = compared(*pair)
        assert by_name(found)["goodput_per_s"].words == "not compared, since one side is 0"
        assert "goodput_per_s" not in [difference.figure for _, difference in found.worse(0.0)]


def test_goodput_of_short_repeats_that_falls_to_nothing_is_worse() -> None:
    slos = parse_slos(["ttft=1s"])

    def runs(*slower: float) -> Result:
        return result_of(*(run_of(random_records(seed, 12, slower=one), slos=slos) for seed, one in enumerate(slower)))

    before = runs(1.0, 1.0, 1.0)
    assert by_name(compared(before, runs(99.0, 99.0, 99.0)))["goodput_per_s"].is_more_than_noise
    mixed = by_name(compared(before, runs(99.0, 99.0, 1.0)))["goodput_per_s"]
    assert mixed.words == "too few requests to say"


def test_a_few_good_requests_less_may_be_noise() -> None:
    slos = parse_slos(["ttft=1s"])
    some = [record(i, due_ms=50 * i, ttft_ms=5 if i % 100 == 50 else 2000) for i in range(400)]
    none = [record(i, due_ms=50 * i, ttft_ms=2000) for i in range(400)]

    def goodput(count: int) -> Difference:
        sides = [result_of(*(run_of(records[:count], slos=slos) for _ in range(3))) for records in (some, none)]
        return by_name(compared(*sides))["goodput_per_s"]

    assert goodput(400).is_more_than_noise, "12 requests"
    assert goodput(100).words == "no difference that these runs could show", "3 requests"


def some_refused(seed: int, num_ok: int, *, count: int = 400, slower: float = 1.0) -> Run:
    """A run in which every `count` / `num_ok`-th request is answered, and the others are refused at once."""
    some = random_records(seed, count, slower=slower)
    ok = {count * i // num_ok for i in range(num_ok)}
    kept = [one if i in ok else record(i, due_ms=one.intended_ns / 1e6, end=End.REFUSED) for i, one in enumerate(some)]
    return run_of(kept, seed=seed, slos=parse_slos(["e2e=20s"]))


@pytest.mark.parametrize("seeds", [(1,), (1, 2, 3)])
def test_a_server_that_refuses_most_requests_is_worse_though_faster(seeds: Sequence[int]) -> None:
    before, after = (
        result_of(*(some_refused(seed, num_ok, slower=slower) for seed in seeds)) for num_ok, slower in ((400, 1.0), (40, 0.5))
    )
    found = compared(before, after)
    assert by_name(found)["e2e mean"].worsening < 0
    assert {"answered", "within_slos"} <= {difference.figure for _, difference in found.worse(0.8)}
    none = compared(before, result_of(*(some_refused(seed, 0) for seed in seeds)))
    assert {"answered", "within_slos"} <= {difference.figure for _, difference in none.worse(0.99)}
    assert not {"answered", "within_slos"} & {difference.figure for _, difference in compared(after, before).worse(0.0)}


@pytest.mark.parametrize("seeds", [(1,), (1, 2, 3)])
def test_one_refusal_in_each_run_may_be_noise(seeds: Sequence[int]) -> None:
    before, after = (result_of(*(some_refused(seed, num_ok) for seed in seeds)) for num_ok in (400, 399))
    found = by_name(compared(before, after))
    assert found["answered"].after < found["answered"].before
    assert not found["answered"].is_more_than_noise


def test_a_few_answers_are_not_enough_to_pass_by_their_share_alone() -> None:
    few = result_of(some_refused(1, 3))
    found = compared(few, few)
    assert by_name(found)["answered"].change is not None
    assert found.is_unknown(0.05)


def test_failures_in_a_row_are_not_passed_over_though_they_may_have_one_cause() -> None:
    records = random_records(1, 400)
    crashed = [one if i < 40 else record(i, due_ms=one.intended_ns / 1e6, end=End.FAILED) for i, one in enumerate(records)]
    found = compared(result_of(run_of(records)), result_of(run_of(crashed)))
    assert by_name(found)["answered"].change is None
    assert found.is_unknown(0.05)
    assert not found.is_unknown(0.95)
    assert not compared(result_of(run_of(crashed)), result_of(run_of(records))).is_unknown(0.05)


def test_the_same_refusal_in_each_of_three_tiny_runs_is_not_certain() -> None:
    before, after = (result_of(*(some_refused(seed, num_ok, count=5) for seed in (1, 2, 3))) for num_ok in (5, 4))
    assert by_name(compared(before, after))["answered"].change is None


def test_rates_of_a_steady_part_are_not_compared_with_those_of_a_whole_run() -> None:
    both = [made(0, count).runs[0].figures for count in (400, 15)]
    assert [figures.steady is None for figures in both] == [False, True]
    assert any("rates are those of whole runs" in note for note in compared(made(0, 400), made(0, 15)).notes)
    assert not any("whole runs" in note for note in compared(made(0, 15), made(0, 15)).notes)
    found = by_name(compared(made(0, 400), made(0, 15)))["requests_per_s"]
    assert [found.before, found.after] == pytest.approx([figures.rates.requests_per_s.value for figures in both])


def test_two_others_are_corrected_for_together() -> None:
    both = compare_results(made(0), [made(1), made(2)])
    alone = compared(made(0), made(1))
    assert len(both) == 2
    assert by_name(both[0])["ttft p50"].smallest > by_name(alone)["ttft p50"].smallest
