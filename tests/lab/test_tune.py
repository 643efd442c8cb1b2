"""The search finds settings that are better, is not taken in by noise, and says when the default is to be kept."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from random import Random

import pytest

from penstock.config.components import config_from
from penstock.config.sources import all_settings, parse_settings
from penstock.deploy.policies import choose_policies
from penstock.lab.arrivals import poisson
from penstock.lab.figures import parse_slos
from penstock.lab.intervals import Estimate
from penstock.lab.records import End, Record
from penstock.lab.transforms import cut
from penstock.lab.tune import (
    DEFAULT,
    NEEDS,
    SPACE,
    Comparison,
    Objective,
    Settings,
    Trials,
    Tuned,
    Value,
    judge,
    score,
    search,
    tune,
    verify,
    with_needs,
    words,
)
from penstock.lab.tune_report import gain_words, search_lines, verdict_lines
from penstock.lab.workload import Job, Workload
from penstock.types.errors import ConfigError, PenstockError

MS = 1_000_000
ROWS = ("max_num_seqs", 128)
SJF = ("policy", "sjf")


def workload(count: int = 120) -> Workload:
    instants = poisson(Random(1), count, 10.0)
    return Workload(name="w", jobs=[Job(arrival_ns=at, num_prompt_tokens=8, num_output_tokens=8) for at in instants])


class Fake:
    """A server whose TTFT depends on its settings: 100 ms times the effects of settings, and noise.

    The noise is the slice's, or if it is `own`, each candidate has its own.
    """

    def __init__(self, effects: dict[tuple, float], *, noise_ms: float = 20.0, own: bool = False) -> None:
        self.effects, self.noise_ms, self.own = effects, noise_ms, own
        self.served: list[tuple[Settings, str]] = []

    def __call__(self, settings: Settings, jobs: Workload) -> Sequence[Record]:
        if "kv_watermark" in dict(settings):
            raise ConfigError("This contradicts the reserve.")
        self.served.append((settings, jobs.name))
        factor = math.prod(self.effects.get(item, 1.0) for item in settings)
        rng = Random(f"{jobs.name} {settings if self.own else ''}")
        return [
            _record(index, job.arrival_ns, 100 * factor + rng.uniform(0, self.noise_ms)) for index, job in enumerate(jobs.jobs)
        ]


def _record(index: int, at_ns: int, ttft_ms: float) -> Record:
    first_ns = at_ns + round(ttft_ms * MS)
    return Record(
        index=index, intended_ns=at_ns, sent_ns=at_ns, first_ns=first_ns, ended_ns=first_ns + 9 * MS, num_output_tokens=8
    )


def test_settings_that_help_one_by_one_are_tried_together() -> None:
    effects = {ROWS: 0.8, SJF: 0.9, ("budget", "decode-first"): 1.3}
    tuned = tune(Fake(effects), workload(), Objective.TTFT_P99, ())
    assert tuned.best is not None
    assert tuned.best.settings == (ROWS, SJF), "and nothing that has no effect"
    assert tuned.best.gain.low is not None
    assert tuned.best.gain.low > 0.2
    assert tuned.verified is None
    assert tuned.num_refused == len(SPACE["kv_watermark"]), "what the server refuses drops out"
    assert [one.num_slices for one in tuned.rounds] == [1, 2, 4, 8]
    assert "max_num_seqs = 128, policy = sjf: +2" in verdict_lines(tuned)


def test_noise_alone_is_no_gain() -> None:
    """Each candidate has noise of its own: the best on the search's slices is so by chance, and the others show it."""
    better = [tune(Fake({}, noise_ms=100.0 + seed, own=True), workload(), Objective.TTFT_P99, ()).best for seed in range(8)]
    assert sum(one is not None for one in better) <= 1


def test_the_three_thirds_have_no_slice_in_common() -> None:
    simulator, engine = Fake({ROWS: 0.8}), Fake({ROWS: 0.8})
    tuned = verify(tune(simulator, workload(), Objective.TTFT_P99, (), num_slices=18), engine)
    names = [one.name for one in cut(workload(), 18)]
    assert {name for settings, name in simulator.served[: tuned.num_runs]} == set(names[0::3])
    assert {name for settings, name in simulator.served[tuned.num_runs :]} == set(names[1::3])
    assert {name for settings, name in engine.served} == set(names[2::3])


def test_the_real_engine_has_the_last_word() -> None:
    """Settings that are better in the simulator alone are not the outcome."""
    simulator = Fake({ROWS: 0.8, SJF: 0.9})
    simulated = tune(simulator, workload(), Objective.TTFT_P99, ())
    assert simulated.simulated[0].is_surely_better
    tuned = verify(simulated, Fake({ROWS: 1.1}))
    assert tuned.verified is not None
    assert [one.settings for one in tuned.verified] == [one.settings for one in tuned.simulated]
    assert tuned.best is None or ROWS not in tuned.best.settings
    none = verify(simulated, Fake({}))
    assert none.best is None
    assert "keep the default" in verdict_lines(none)


def test_an_engine_is_not_asked_about_settings_that_are_no_better() -> None:
    engine = Fake({})
    tuned = verify(tune(Fake({}), workload(), Objective.TTFT_P99, ()), engine)
    assert (tuned.best, list(tuned.verified or ()), engine.served) == (None, [], [])


def test_turns_alternate_so_that_a_slow_afternoon_favours_nobody() -> None:
    fake, slices = Fake({}), cut(workload(), 6)
    judge(fake, Objective.TTFT_P99, (), [(ROWS,), (SJF,)], slices)
    order = [settings for settings, _ in fake.served]
    assert order[:6] == [DEFAULT, (ROWS,), (SJF,), (SJF,), (ROWS,), DEFAULT]
    assert [name for _, name in fake.served[:6]] == [slices[0].name] * 3 + [slices[1].name] * 3


def test_a_comparison_is_paired() -> None:
    """Slices differ much more than settings do; their differences are what counts."""

    def uneven(settings: Settings, jobs: Workload) -> Sequence[Record]:
        nth = int(jobs.name.rsplit("slice ")[1].split()[0])
        return [_record(0, 0, 100 * nth - nth % 2 - bool(settings))]

    [found] = judge(uneven, Objective.TTFT_P99, (), [(ROWS,)], cut(workload(), 12))
    assert found.is_surely_better
    assert found.gain.value == pytest.approx(1 / 649.5)
    assert (found.default, found.tuned) == pytest.approx((0.6495, 0.6485))


def test_more_finalists_have_wider_intervals() -> None:
    fake, slices = Fake({ROWS: 0.9}, own=True), cut(workload(), 8)
    [alone] = judge(fake, Objective.TTFT_MEAN, (), [(ROWS,)], slices)
    among = judge(fake, Objective.TTFT_MEAN, (), [(ROWS,), (SJF,), (("reserve", "chunk"),)], slices)[0]
    assert alone.gain.low is not None
    assert among.gain.low is not None
    assert among.gain.value == alone.gain.value
    assert among.gain.low < alone.gain.low


def test_objectives_are_what_they_say() -> None:
    records = Fake({}, noise_ms=0.0)(DEFAULT, workload(40))
    span_s = (max(record.ended_ns for record in records) - min(record.intended_ns for record in records)) / 1e9
    assert score(records, Objective.GOODPUT, parse_slos(["ttft=101ms"])) == pytest.approx(40 / span_s)
    assert score(records, Objective.GOODPUT, parse_slos(["ttft=99ms"])) == 0
    assert score(records, Objective.GOODPUT, parse_slos(["ttft=101ms", "e2e=105ms"])) == 0
    assert score(records, Objective.THROUGHPUT, ()) == pytest.approx(320 / span_s)
    late = [_record(nth, 0, ttft_ms) for nth, ttft_ms in enumerate([1000.0] + [100.0] * 9)]
    assert score(late, Objective.TTFT_P99, ()) == pytest.approx(1.0)
    assert score(late, Objective.TTFT_MEAN, ()) == pytest.approx(0.19)
    assert score(late, Objective.E2E_MEAN, ()) == pytest.approx(0.199)


def test_a_request_without_an_answer_is_the_worst_and_one_whose_client_left_does_not_count() -> None:
    records = [_record(nth, 0, 100.0) for nth in range(9)]
    refused = Record(index=9, intended_ns=0, sent_ns=0, end=End.REFUSED, http_status=429)
    for objective in (Objective.TTFT_P99, Objective.TTFT_MEAN, Objective.E2E_MEAN):
        assert score([*records, refused], objective, ()) == math.inf
        left = Record(index=9, intended_ns=0, sent_ns=0, ended_ns=MS, end=End.CANCELLED)
        assert score([*records, left], objective, ()) < 0.2
    for objective in Objective:
        with pytest.raises(ConfigError, match=r"every client left.*Lower --cancel-share"):
            score([left], objective, parse_slos(["ttft=1s"]))


class Broken(Fake):
    """A server that answers nobody with some settings."""

    def __call__(self, settings: Settings, jobs: Workload) -> Sequence[Record]:
        if settings not in self.effects:
            return super().__call__(settings, jobs)
        return [Record(index=0, intended_ns=0, sent_ns=0, ended_ns=MS, end=End.FAILED)]


def test_what_holds_an_slo_is_better_than_a_default_that_holds_none() -> None:
    fake, slos = Fake({ROWS: 0.5}), parse_slos(["ttft=90ms"])
    tuned = tune(fake, workload(), Objective.GOODPUT, slos)
    assert tuned.best is not None
    assert (tuned.best.settings, tuned.best.default) == ((ROWS,), 0)
    assert tuned.best.difference.value == pytest.approx(tuned.best.tuned)
    told = gain_words(tuned.best, Objective.GOODPUT)
    assert re.fullmatch(r"\+\d+\.\d+ \[\+\d+\.\d+, \+\d+\.\d+\] requests/s", told)
    assert f"max_num_seqs = 128: {told} over the default." in verdict_lines(tuned)
    assert verify(tuned, fake).best is not None


def test_a_candidate_that_leaves_a_request_unanswered_is_not_better() -> None:
    [found] = judge(Broken({(ROWS,): 1}), Objective.TTFT_P99, (), [(ROWS,)], cut(workload(), 6))
    assert not found.is_surely_better
    assert gain_words(found, Objective.TTFT_P99) == "unknown"


class Unlucky(Fake):
    """A real engine with which one request of one slice fails, with some settings; with others it can't be loaded."""

    def __init__(self, effects: dict[tuple, float], settings: Settings, *, refuses: Settings = (SJF,)) -> None:
        super().__init__(effects)
        self.settings, self.refuses = settings, refuses

    def __call__(self, settings: Settings, jobs: Workload) -> Sequence[Record]:
        records = list(super().__call__(settings, jobs))
        if settings == self.refuses:
            raise PenstockError("There is no memory.")
        if settings == self.settings and "slice 6 " in jobs.name:
            records[2].end, records[2].first_ns = End.FAILED, None
        return records


def test_a_slice_in_which_the_default_fails_is_left_out_and_told() -> None:
    simulated = tune(Fake({ROWS: 0.5}), workload(), Objective.E2E_MEAN, ())
    tuned = verify(simulated, Unlucky({ROWS: 0.5}, DEFAULT))
    assert tuned.best is not None
    assert tuned.best.num_dropped == 1
    assert tuned.best.gain.value == pytest.approx(0.42, abs=0.03)
    assert "1 slice left out: the default gave a request no answer." in verdict_lines(tuned)
    assert "left out" not in search_lines(tuned)
    few = judge(Unlucky({ROWS: 0.5}, DEFAULT), Objective.E2E_MEAN, (), [(ROWS,)], cut(workload(), 6))
    assert few[0].difference.low is None, "five slices are left, too few for an interval"
    [none] = judge(Broken({DEFAULT: 1}), Objective.E2E_MEAN, (), [(ROWS,)], cut(workload(), 6))
    assert (none.num_dropped, gain_words(none, Objective.E2E_MEAN)) == (6, "unknown")


def test_a_candidate_that_fails_is_refused_and_the_others_are_judged() -> None:
    engine, few, slices = Unlucky({ROWS: 0.5}, DEFAULT), [(SJF,), (ROWS,)], cut(workload(), 8)
    refused, kept = judge(engine, Objective.TTFT_P99, (), few, slices)
    assert (refused.refusal, refused.is_surely_better) == ("There is no memory.", False)
    assert [settings for settings, _ in engine.served].count((SJF,)) == 1, "it has no second turn"
    assert kept.is_surely_better
    simulated = tune(Fake({ROWS: 0.5}), workload(), Objective.TTFT_P99, (), num_finalists=1)
    tuned = verify(simulated, Unlucky({}, DEFAULT, refuses=(ROWS,)))
    assert tuned.best is None
    assert "max_num_seqs = 128 was refused: There is no memory." in verdict_lines(tuned)
    with pytest.raises(PenstockError, match="no memory"):
        judge(Unlucky({}, DEFAULT, refuses=DEFAULT), Objective.TTFT_P99, (), few, slices)


def test_a_request_that_fails_after_its_first_token_is_infinitely_late() -> None:
    records = [_record(nth, 0, 100.0) for nth in range(9)]
    records[4].end = End.FAILED
    for objective in (Objective.TTFT_P99, Objective.TTFT_MEAN, Objective.E2E_MEAN):
        assert score(records, objective, ()) == math.inf


def test_a_request_that_the_default_never_answers_is_told_with_a_remedy() -> None:
    with pytest.raises(ConfigError, match=r"slice 1 of 18.*--max-input-tokens"):
        tune(Broken({DEFAULT: 1}), workload(), Objective.E2E_MEAN, (), num_slices=18)


def test_the_default_stays_to_the_end_and_no_slice_is_run_twice() -> None:
    fake = Fake({(key, value): 0.5 + len(str(value)) / 100 for key, values in SPACE.items() for value in values})
    rounds = search(Trials(fake, Objective.TTFT_P99, ()), cut(workload(), 8))
    assert all(DEFAULT in dict(one.ranking) for one in rounds)
    assert len(fake.served) == len(set(fake.served))


def test_the_lower_bound_decides_between_those_that_are_better() -> None:
    def found(settings: Settings, low: float) -> Comparison:
        return Comparison(settings=settings, default=1.0, tuned=2.0, difference=Estimate(0.5, low, 0.9))

    some = [found((ROWS,), 0.1), found((SJF,), 0.2), found(DEFAULT, -0.1)]
    tuned = Tuned(
        objective=Objective.GOODPUT,
        slos=(),
        workload="w",
        unseen=[],
        rounds=[],
        num_runs=0,
        num_refused=0,
        simulated=some,
        verified=None,
    )
    assert tuned.best == some[1]


def test_slices_keep_conversations_and_gaps() -> None:
    jobs = []
    for nth in range(24):
        jobs.append(Job(arrival_ns=nth * 10 * MS, num_prompt_tokens=8, num_output_tokens=8, deadline_ns=nth * 10 * MS + 5))
        jobs.append(Job(arrival_ns=3 * MS, num_prompt_tokens=24, num_output_tokens=8, after=2 * nth))
    slices = cut(Workload(name="talks", jobs=jobs), 12)
    assert [len(one.jobs) for one in slices] == [4] * 12
    for one in slices:
        assert [job.after for job in one.jobs] == [None, 0, None, 2]
        assert [job.arrival_ns for job in one.jobs] == [0, 3 * MS, 10 * MS, 3 * MS]
        assert one.jobs[2].deadline_ns == 10 * MS + 5
    assert len({one.name for one in slices}) == 12
    with pytest.raises(ConfigError, match="too few for 12 slices"):
        cut(Workload(name="few", jobs=jobs[:20]), 12)


def test_what_can_not_be_tuned_is_an_error() -> None:
    with pytest.raises(ConfigError, match="18 or more"):
        tune(Fake({}), workload(), Objective.THROUGHPUT, (), num_slices=17)


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, values in SPACE.items() for value in values])
def test_each_value_is_one_that_the_server_knows(key: str, value: Value) -> None:
    settings = with_needs({key: value})
    assert words(settings).count(" = ") == 1 + (key in NEEDS)
    choose_policies(config_from(parse_settings(dict(settings), all_settings())))
