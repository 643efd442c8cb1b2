"""Replicas on one clock: the router decides, a split computes prompts on one side and answers on the other, runs repeat."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.admission.door import AdmissionLimits
from penstock.kv.changes import names_of
from penstock.lab.cost_model import CostModel, Residuals
from penstock.lab.front import Front
from penstock.lab.links import Link
from penstock.lab.records import End
from penstock.lab.simulation import Simulation
from penstock.lab.virtual_server import VirtualServer
from penstock.lab.workload import Job, Workload
from penstock.sched.policies.presets import make_policies
from penstock.sched.routing.routers import Arrival, LeastWork, PrefixAware, RoundRobin, Router, find_router
from penstock.types.errors import ConfigError, PenstockError
from penstock.types.plan import Capacity, StepPlan, StepShape
from penstock.types.stats import EngineLoad
from support.cluster import Apart

CAPACITY = Capacity(num_blocks=129, block_size=16, max_rows=4, max_step_tokens=64, max_model_len=512)
SETTINGS = Simulation(capacity=CAPACITY, make_policies=make_policies, max_tokens=None)
MS = 1_000_000
LINK = Link(bytes_per_token=1000, bytes_per_s=1e9, latency_ns=2 * MS)


def of(*jobs: Job, prefix_block_tokens: int = 0) -> Workload:
    return Workload(name="jobs of a test", jobs=jobs, prefix_block_tokens=prefix_block_tokens)


def cluster(*, settings: Simulation = SETTINGS, **changes: Any) -> Simulation:
    return replace(settings, **changes)


def many(count: int, every_ns: int = 20 * MS) -> Workload:
    return of(
        *(Job(arrival_ns=k * every_ns, num_prompt_tokens=40 + k % 50, num_output_tokens=5 + k % 20) for k in range(count))
    )


def cost(*rows: tuple[int, int]) -> int:
    return CostModel().duration_ns(StepShape(rows, 1))


def test_one_replica_is_one_server() -> None:
    alone = Simulation(capacity=CAPACITY, make_policies=make_policies, max_tokens=None)
    assert cluster().run(many(60)).records == alone.run(many(60)).records


def test_two_replicas_serve_what_one_can_not() -> None:
    one, two = (cluster(num_replicas=count).run(many(100)) for count in (1, 2))
    assert two.duration_ns < 0.7 * one.duration_ns
    assert list(two.timelines) == ["replica 0", "replica 1"]
    assert {record.end for record in two.records} == {End.OK}
    assert [record.index for record in two.records] == list(range(100))


@pytest.mark.parametrize("num_prefill_replicas", [0, 2])
@pytest.mark.parametrize("make_router", [RoundRobin, LeastWork, PrefixAware])
def test_runs_repeat(make_router: Callable[[], Router], num_prefill_replicas: int) -> None:
    plans: list[list[StepPlan]] = [[], []]
    settings = replace(SETTINGS, cost=CostModel(residuals=(Residuals(1e9, (0.5, 1.0, 2.0)),)))
    some = cluster(
        settings=settings, num_replicas=3, num_prefill_replicas=num_prefill_replicas, link=LINK, make_router=make_router
    )
    outcomes = [some.run(many(50), on_plan=each.append) for each in plans]
    assert plans[0] == plans[1]
    assert outcomes[0].records == outcomes[1].records


def test_each_replica_has_its_own_door() -> None:
    settings = replace(SETTINGS, limits=AdmissionLimits(max_queue=1))
    records = cluster(settings=settings, num_replicas=2).run(many(30, every_ns=MS)).records
    ends = Counter(record.end for record in records)
    assert ends == {End.OK: 2 * (4 + 1), End.REFUSED: 20}


def test_affinity_finds_more_in_the_caches() -> None:
    jobs = [
        Job(arrival_ns=k * 200 * MS, num_prompt_tokens=140, num_output_tokens=2, prefix=(k * 7 % 5, 100 + k * 7 % 5))
        for k in range(60)
    ]
    found = {}
    for make_router in (RoundRobin, LeastWork, PrefixAware):
        records = cluster(num_replicas=4, make_router=make_router).run(of(*jobs, prefix_block_tokens=64)).records
        found[make_router] = sum(record.num_cached_tokens for record in records)
    assert found[PrefixAware] == 128 * (60 - 5)
    assert max(found[RoundRobin], found[LeastWork]) < 0.8 * found[PrefixAware]


@pytest.mark.parametrize(("make_router", "are_together"), [(PrefixAware, True), (LeastWork, False), (RoundRobin, False)])
def test_turns_of_a_conversation_stay_together(make_router: Callable[[], Router], are_together: bool) -> None:
    """The second turns come in another order than the first."""
    jobs = [Job(arrival_ns=k * MS, num_prompt_tokens=50, num_output_tokens=8) for k in range(3)]
    jobs += [Job(arrival_ns=(900 - 400 * k) * MS, num_prompt_tokens=90, num_output_tokens=8, after=k) for k in range(3)]
    records = cluster(num_replicas=3, make_router=make_router).run(of(*jobs)).records
    assert ([record.num_cached_tokens for record in records] == [0, 0, 0, 57, 57, 57]) == are_together


@pytest.fixture
def fronts(monkeypatch: pytest.MonkeyPatch) -> list[Front]:
    """The fronts that are made from now on."""
    made: list[Front] = []

    def make_front(*args: Any, **words: Any) -> Front:
        made.append(Front(*args, **words))
        return made[-1]

    monkeypatch.setattr("penstock.lab.simulation.Front", make_front)
    return made


@pytest.mark.parametrize("num_prefill_replicas", [0, 3])
@pytest.mark.parametrize("make_router", [LeastWork, PrefixAware])
def test_a_router_keeps_nothing_of_requests_that_ended(
    make_router: Callable[[], Router], num_prefill_replicas: int, fronts: list[Front]
) -> None:
    """Some are served, others refused, cancelled or late. The router knows of the caches what they hold."""
    jobs = [
        Job(
            arrival_ns=k * 4 * MS,
            num_prompt_tokens=40 + k % 90,
            num_output_tokens=1 + k % 20,
            prefix=(k % 7,),
            cancelled_ns=k * 4 * MS + k % 90 * MS if k % 5 == 0 else None,
            deadline_ns=k * 4 * MS + 60 * MS if k % 6 == 1 else None,
        )
        for k in range(300)
    ]
    settings = replace(SETTINGS, limits=AdmissionLimits(max_queue=3), capacity=replace(CAPACITY, num_blocks=40))
    some = cluster(
        settings=settings, num_replicas=3, num_prefill_replicas=num_prefill_replicas, link=LINK, make_router=make_router
    )
    ends = Counter(record.end for record in some.run(of(*jobs, prefix_block_tokens=32)).records)
    assert min(ends[end] for end in (End.OK, End.CANCELLED, End.REFUSED, End.FAILED)) > 5
    (front,) = fronts
    holdings = front.dispatcher._holdings
    for ledger in (front.dispatcher._all, front.dispatcher._people):
        assert (ledger.work, ledger._entries) == ([0, 0, 0], {})
    assert not holdings._expected
    assert not holdings._coming
    for number, (server, log) in enumerate(zip(front.servers, front._logs, strict=True)):
        front.dispatcher.hear(number, log.take())
        index = server.core.scheduler.kv.prefix.index
        held = {name for name, replicas in holdings._held.items() if replicas >> number & 1}
        assert held == set(names_of(block_hash for block_hash, _ in index.items()))
        assert held


def test_a_popular_prefix_comes_to_all_replicas() -> None:
    """Requests of one long prefix at a rate that one replica can't serve: none is refused, and no replica has most of them."""
    jobs = [Job(arrival_ns=k * 60 * MS, num_prompt_tokens=300, num_output_tokens=40, prefix=(1,)) for k in range(100)]
    settings = replace(SETTINGS, limits=AdmissionLimits(max_queue=4))
    outcomes = {
        count: cluster(settings=settings, num_replicas=count, make_router=PrefixAware).run(of(*jobs, prefix_block_tokens=256))
        for count in (1, 3)
    }
    refused = {count: sum(record.end is End.REFUSED for record in outcome.records) for count, outcome in outcomes.items()}
    assert refused[1] > 10
    assert refused[3] == 0
    running = [timeline.means(outcomes[3].duration_ns)[0] for timeline in outcomes[3].timelines.values()]
    assert max(running) < sum(running) / 2


def test_a_split_computes_the_prompt_here_and_the_answer_there() -> None:
    job = Job(arrival_ns=0, num_prompt_tokens=60, num_output_tokens=4)
    plans: list[StepPlan] = []
    outcome = cluster(num_prefill_replicas=1, link=LINK).run(of(job), on_plan=plans.append)
    (record,) = outcome.records
    shapes = [[(row.query_len, row.context_len) for row in plan.rows] for plan in plans]
    assert shapes == [[(60, 0)], [(1, 60)], [(1, 61)], [(1, 62)]]
    assert record.first_ns == cost((60, 0))
    transfer_ns = 60 * 1000 + 2 * MS
    assert list(record.gaps_ns) == [transfer_ns + cost((1, 60)), cost((1, 61)), cost((1, 62))]
    assert (record.end, record.num_output_tokens, record.num_prompt_tokens) == (End.OK, 4, 60)
    assert outcome.ended[0].num_generated_tokens == 4
    assert list(outcome.timelines) == ["prefill 0", "decode 0"]


def test_limits_for_the_first_token_end_with_it_in_a_split() -> None:
    job = Job(arrival_ns=0, num_prompt_tokens=300, num_output_tokens=20)
    slow = Link(bytes_per_token=1000, bytes_per_s=1e6)
    (record,) = cluster(num_prefill_replicas=1, link=slow, queue_timeout_ns=100 * MS).run(of(job)).records
    assert (record.end, record.num_output_tokens) == (End.OK, 20)
    limit_ns = (record.first_ns or 0) + MS
    (record,) = cluster(num_prefill_replicas=1, link=slow, first_token_timeout_ns=limit_ns).run(of(job)).records
    assert (record.end, record.num_output_tokens) == (End.OK, 20)


def test_an_answer_of_one_token_does_not_move() -> None:
    outcome = cluster(num_prefill_replicas=1, link=LINK).run(of(Job(arrival_ns=0, num_prompt_tokens=60, num_output_tokens=1)))
    assert outcome.num_steps == 1
    assert outcome.records[0].end is End.OK


def test_transfers_wait_for_each_other() -> None:
    slow = Link(bytes_per_token=1000, bytes_per_s=1e6)
    jobs = [Job(arrival_ns=0, num_prompt_tokens=30, num_output_tokens=2) for _ in range(2)]
    first, second = cluster(num_prefill_replicas=1, link=slow).run(of(*jobs)).records
    assert first.gaps_ns[0] == 30 * MS + cost((1, 30))
    assert second.gaps_ns[0] == 60 * MS + cost((1, 30))


def test_all_of_a_split_end_whatever_their_clients_do() -> None:
    jobs = [
        Job(
            arrival_ns=k * 3 * MS,
            num_prompt_tokens=30 + k % 60,
            num_output_tokens=1 + k % 30,
            cancelled_ns=k * 3 * MS + k % 70 * MS if k % 3 == 0 else None,
        )
        for k in range(200)
    ]
    link = Link(bytes_per_token=1000, bytes_per_s=1e7, latency_ns=20 * MS)
    outcome = cluster(num_prefill_replicas=2, num_replicas=2, link=link).run(of(*jobs))
    assert [record.index for record in outcome.records] == list(range(200))
    ends = Counter(record.end for record in outcome.records)
    assert set(ends) == {End.OK, End.CANCELLED}
    assert min(ends.values()) > 40
    served = [(record, jobs[record.index]) for record in outcome.records if record.end is End.OK]
    assert all(record.num_output_tokens == job.num_output_tokens for record, job in served)


def test_kv_without_room_is_computed_again() -> None:
    """Two answers that fill the decode replica's memory, and a third that comes meanwhile."""
    tight = replace(CAPACITY, num_blocks=9)
    jobs = [Job(arrival_ns=k * 40 * MS, num_prompt_tokens=45, num_output_tokens=60) for k in range(3)]
    plans: list[StepPlan] = []
    some = cluster(settings=replace(SETTINGS, capacity=tight), num_prefill_replicas=1, link=LINK)
    outcome = some.run(of(*jobs), on_plan=plans.append)
    assert [record.num_output_tokens for record in outcome.records] == [60, 60, 60]
    assert any(row.query_len > 45 for plan in plans for row in plan.rows), "prompt and first token in one row"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"num_replicas": 0}, "at least one replica"),
        ({"num_prefill_replicas": 1}, "need a link"),
        (
            {"num_prefill_replicas": 1, "link": LINK, "settings": replace(SETTINGS, enable_prefix_caching=False)},
            "prefix cache, which is off",
        ),
    ],
)
def test_what_makes_no_cluster_is_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        cluster(**changes)


class Astray:
    def choose(self, arrival: Arrival, loads: Sequence[EngineLoad]) -> int:
        return len(loads)


def test_a_router_that_chooses_nobody_is_named() -> None:
    with pytest.raises(PenstockError, match="The router Astray chose replica 2; there are 2"):
        cluster(num_replicas=2, make_router=Astray).run(many(1))


class Broken:
    def choose(self, arrival: Arrival, loads: Sequence[EngineLoad]) -> int:
        raise KeyError(arrival.tenant)


def test_a_router_that_fails_is_named() -> None:
    with pytest.raises(PenstockError, match=r"The router Broken failed in choose: KeyError: ''\. If it is your own"):
        cluster(num_replicas=2, make_router=Broken).run(many(1))


def test_a_router_of_ones_own_is_found(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("class Last:\n    def choose(self, arrival, loads):\n        return len(loads) - 1\n")
    outcome = cluster(num_replicas=3, make_router=find_router(f"{file}:Last")).run(many(5))
    assert [len(timeline.at_ns) > 0 for timeline in outcome.timelines.values()] == [False, False, True]


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("nearest", "There is no router 'nearest'. There are round-robin, least-work, prefix"),
        ("no.such.module:Class", "was not found: there is no module no where Python looks"),
        ("collections:Counter", "has no method choose"),
        ("collections:Nothing", "was not found: collections has no class Nothing"),
    ],
)
def test_a_router_that_is_none_is_refused(name: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        find_router(name)


class First:
    """Sends all to the first replica, whose load it reads."""

    def choose(self, arrival: Arrival, loads: Sequence[EngineLoad]) -> int:
        del arrival
        assert len(loads) == 40
        assert loads[0].num_running <= CAPACITY.max_rows
        return 0


def test_idle_replicas_cost_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run takes as many turns with 40 replicas as with one, if one has all requests; loads are read only as asked."""
    num_calls: Counter[str] = Counter()
    for method in ("act", "load"):
        original = getattr(VirtualServer, method)

        def counted(server: VirtualServer, method: str = method, original: Callable[..., Any] = original) -> Any:
            num_calls[method] += 1
            return original(server)

        monkeypatch.setattr(VirtualServer, method, counted)
    alone = cluster().run(many(20))
    num_turns = num_calls["act"]
    num_calls.clear()
    beside = cluster(num_replicas=40, make_router=First).run(many(20))
    assert beside.records == alone.records
    assert num_calls == {"act": num_turns, "load": 20}


def test_kv_is_copied_to_where_its_prompt_goes() -> None:
    """Requests of a prefix, then of another one, to each replica in turn. Without a link, each computes the prefix itself."""
    job = Job(arrival_ns=0, num_prompt_tokens=140, num_output_tokens=2)
    jobs = [replace(job, arrival_ns=k * 500 * MS, prefix=(k // 4, 10 + k // 4)) for k in range(8)]
    cached, ttft_ns = {}, {}
    slow = Link(bytes_per_token=1000, bytes_per_s=1e6)
    for name, link in (("none", None), ("fast", LINK), ("slow", slow)):
        records = cluster(num_replicas=2, link=link, make_router=RoundRobin).run(of(*jobs, prefix_block_tokens=64)).records
        cached[name] = [record.num_cached_tokens for record in records]
        ttft_ns[name] = [(record.first_ns or 0) - record.intended_ns for record in records]
    assert cached["none"] == 2 * [0, 0, 128, 128]
    assert cached["fast"] == 2 * [0, 128, 128, 128]
    assert ttft_ns["fast"][1] == 128 * 1000 + 2 * MS + cost((12, 128))
    assert ttft_ns["fast"][2] == ttft_ns["none"][2]
    assert cached["slow"][4:] == [0, 0, 128, 128], "by now each replica knows how fast it computes"


def test_a_client_may_leave_while_its_kv_comes() -> None:
    jobs = [Job(arrival_ns=0, num_prompt_tokens=140, num_output_tokens=2, prefix=(1, 2))]
    jobs.append(replace(jobs[0], arrival_ns=500 * MS, cancelled_ns=510 * MS))
    link = Link(bytes_per_token=1000, bytes_per_s=1e6)
    records = cluster(num_replicas=2, link=link, make_router=RoundRobin).run(of(*jobs, prefix_block_tokens=64)).records
    assert [record.end for record in records] == [End.OK, End.CANCELLED]
    assert records[1].ended_ns == 510 * MS


def test_answers_that_move_end_whatever_their_clients_do(monkeypatch: pytest.MonkeyPatch, fronts: list[Front]) -> None:
    """Two of four replicas take answers. Some clients leave while their KV is on its way."""
    monkeypatch.setattr("penstock.sched.routing.dispatcher.Split", Apart)
    jobs = [
        Job(
            arrival_ns=k * 3 * MS,
            num_prompt_tokens=30 + k % 60,
            num_output_tokens=1 + k % 30,
            cancelled_ns=k * 3 * MS + k % 150 * MS if k % 3 == 0 else None,
        )
        for k in range(200)
    ]
    link = Link(bytes_per_token=1000, bytes_per_s=1e7, latency_ns=20 * MS)
    settings = replace(SETTINGS, slo_itl_ns=1)
    runs = [cluster(settings=settings, num_replicas=4, link=link).run(of(*jobs)) for _ in range(2)]
    assert runs[0].records == runs[1].records
    ends = Counter(record.end for record in runs[0].records)
    assert set(ends) == {End.OK, End.CANCELLED}
    assert min(ends.values()) > 10
    served = [(record, jobs[record.index]) for record in runs[0].records if record.end is End.OK]
    assert all(record.num_output_tokens == job.num_output_tokens for record, job in served)
    moved = [record for record, job in served if job.num_output_tokens > 1]
    assert min(record.gaps_ns[0] for record in moved) > 20 * MS, "the second token comes after the KV"
    are_used = [timeline.max_held > 0 for timeline in runs[0].timelines.values()]
    assert are_used == [True, False, True, True], "the first is filled before the second"
    for ledger in [ledger for front in fronts for ledger in (front.dispatcher._all, front.dispatcher._people)]:
        assert (ledger.work, ledger.answers, ledger._entries) == ([0] * 4, [0] * 4, {})


def test_an_answer_that_moved_computes_no_token_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.sched.routing.dispatcher.Split", Apart)
    job, plans = Job(arrival_ns=0, num_prompt_tokens=60, num_output_tokens=4), list[StepPlan]()
    outcome = cluster(settings=replace(SETTINGS, slo_itl_ns=1), num_replicas=2, link=LINK).run(of(job), on_plan=plans.append)
    shapes = [[(row.query_len, row.context_len) for row in plan.rows] for plan in plans]
    assert shapes == [[(60, 0)], [(1, 60)], [(1, 61)], [(1, 62)]]
    (record,), (stats,) = outcome.records, outcome.ended
    assert list(record.gaps_ns) == [60 * 1000 + 2 * MS + cost((1, 60)), cost((1, 61)), cost((1, 62))]
    assert (record.end, record.num_output_tokens, record.num_prompt_tokens) == (End.OK, 4, 60)
    assert (stats.num_prompt_tokens, stats.num_generated_tokens) == (60, 4)
