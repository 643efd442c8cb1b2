"""Beam search over paged memory: the hypotheses are those of a search without blocks, steps or company."""

from __future__ import annotations

import cProfile
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from itertools import product
from pathlib import Path
from types import FrameType

import pytest

from penstock.clock import VirtualClock
from penstock.engine.core import EngineCore
from penstock.sched.choosing.beam_search import BeamSearch
from penstock.sched.policies.presets import TABLES, make_policies
from penstock.testing import Driver, HashExecutor, Outcome, expected_tokens, make_core, make_request, run_to_completion
from penstock.testing.hash_executor import HashModel, mix, root_of
from penstock.types.errors import RejectReason
from penstock.types.events import Abort, Add, Command, Drain
from penstock.types.plan import Capacity
from penstock.types.request import FinishReason, Request
from penstock.types.result import TokenLogprobs
from penstock.types.sampling import BeamParams, EarlyStopping
from penstock.types.stats import WaitReason
from support.fake_adapters import FakeAdapters, make_adapter
from support.memory_store import Faults
from support.strategies import Engine, LowerTier

EOS = 3
MODEL = HashModel(vocab_size=40, eos_token_id=EOS, eos_period=12)
CAPACITY = Capacity(num_blocks=200, block_size=4, max_rows=12, max_step_tokens=32, max_model_len=100)


def search_requests(
    width: int, prompt: Sequence[int] = (1, 2, 3, 4, 5, 6), *, name: str = "b", stops: tuple[int, ...] = (EOS,), **fields
) -> list[Request]:
    params = BeamParams(
        width=width,
        length_penalty=fields.pop("length_penalty", 1.0),
        early_stopping=fields.pop("early_stopping", EarlyStopping.HEURISTIC),
        num_logprobs=fields.pop("num_logprobs", None),
    )
    fields = {"max_tokens": 12, "beams": params, "stop_token_ids": stops, "logprobs": width + len(stops)} | fields
    requests = [make_request(f"{name}{idx}", prompt, **fields) for idx in range(width)]
    for request in requests:
        request.parent_id = name
    return requests


def expected_hypotheses(request: Request, model: HashModel = MODEL) -> list[tuple[int, ...]]:
    """The search with each beam computed from its whole prefix."""
    sampling = request.sampling
    search = BeamSearch(sampling.beams, frozenset(sampling.stop_token_ids), sampling.max_tokens)
    while not search.is_done:
        tops = []
        for beam in search.beams:
            value = root_of(request.adapter)
            for token_id in (*request.prompt_token_ids, *beam.token_ids):
                value = mix(value, token_id)
            token_id = model.sample(value, sampling, len(beam.token_ids))
            tops.append(model.logprobs(token_id, sampling.logprobs))
        search.advance(tops)
    return [beam.token_ids for beam in search.finished]


def check(driver: Driver) -> None:
    driver.core.check()


def run(core: EngineCore, executor: HashExecutor, *requests: Request, **options) -> dict[str, Outcome]:
    return run_to_completion(core, executor, *map(Add, requests), after_turn=check, **options)


def check_answers(requests: Sequence[Request], outcomes: dict[str, Outcome]) -> None:
    expected = expected_hypotheses(requests[0])
    got = [tuple(outcomes[request.request_id].token_ids) for request in requests]
    assert got == expected
    for request in requests:
        (event,) = outcomes[request.request_id].events
        is_stopped = event.token_ids[-1] in request.sampling.stop_token_ids
        assert event.finish_reason is (FinishReason.STOP if is_stopped else FinishReason.LENGTH)
        assert event.stop_reason == (EOS if is_stopped else None)


@pytest.mark.parametrize("width", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("length_penalty", [0.0, 1.0, 2.0, -1.0])
@pytest.mark.parametrize("early_stopping", EarlyStopping)
def test_the_hypotheses_are_those_of_the_search(width: int, length_penalty: float, early_stopping: EarlyStopping) -> None:
    requests = search_requests(width, length_penalty=length_penalty, early_stopping=early_stopping)
    core = make_core(CAPACITY)
    outcomes = run(core, HashExecutor(CAPACITY, model=MODEL), *requests)
    check_answers(requests, outcomes)
    assert core.scheduler.kv.pool.num_available == core.scheduler.kv.num_total_blocks
    assert not core.scheduler.kv.tables


def test_a_search_has_its_adapter_for_all_its_beams() -> None:
    """Also after its first request has ended its part, and when another search of the same adapter is done."""
    requests = search_requests(4, adapter=make_adapter(1)), search_requests(4, (1, 2, 3), name="c", adapter=make_adapter(1))
    core = make_core(CAPACITY, adapters=FakeAdapters())
    outcomes = run(core, HashExecutor(CAPACITY, model=MODEL), *requests[0], *requests[1])
    check_answers(requests[0], outcomes)
    check_answers(requests[1], outcomes)
    assert core.scheduler.kv.adapters.num_placements == 1
    assert core.scheduler.kv.pool.num_available == core.scheduler.kv.num_total_blocks


@pytest.mark.parametrize("enable_prefix_caching", [True, False])
def test_the_prompt_is_computed_and_stored_once(enable_prefix_caching: bool) -> None:
    """With a width of 8, each step computes 8 tokens; blocks are shared until they are written to."""
    capacity = Capacity(num_blocks=300, block_size=16, max_rows=12, max_step_tokens=512, max_model_len=1100)
    prompt = [idx * idx % 37 for idx in range(1000)]
    requests = search_requests(8, prompt, max_tokens=9, stops=())
    core, executor = make_core(capacity, enable_prefix_caching=enable_prefix_caching), HashExecutor(capacity, model=MODEL)
    peak = 0

    def note(driver: Driver) -> None:
        nonlocal peak
        driver.core.check()
        kv = driver.core.scheduler.kv
        peak = max(peak, kv.num_total_blocks - kv.pool.num_available)

    outcomes = run_to_completion(core, executor, *map(Add, requests), after_turn=note)
    check_answers(requests, outcomes)
    assert executor.num_computed_tokens == 1000 + 8 * 8
    assert peak <= 62 + 8 * 2


def order_budget_and_victim() -> Iterator[tuple[str, str, str]]:
    """Any two of the three meet, but not all three."""
    victims = list(TABLES["victim"])
    for (row, order), (column, budget) in product(enumerate(TABLES["order"]), enumerate(TABLES["budget"])):
        yield order, budget, victims[(row + column) % len(victims)]


@pytest.mark.parametrize(("order", "budget", "victim"), list(order_budget_and_victim()))
def test_beams_are_preempted_and_come_back(order: str, budget: str, victim: str) -> None:
    for num_blocks, enable_prefix_caching in ((26, True), (26, False), (33, True), (40, False), (60, True)):
        capacity = Capacity(num_blocks=num_blocks, block_size=2, max_rows=8, max_step_tokens=12, max_model_len=40)
        core = make_core(
            capacity,
            make_policies(order=order, budget=budget, victim=victim, reserve="chunk"),
            enable_prefix_caching=enable_prefix_caching,
        )
        others = [make_request(f"o{idx}", [7 + idx] * (3 + idx), max_tokens=25, arrival_ns=idx) for idx in range(3)]
        first = search_requests(3, name="b", max_tokens=10, arrival_ns=3)
        second = search_requests(2, [1, 2, 3, 4, 9], name="c", max_tokens=10, arrival_ns=4)
        for idx, request in enumerate((*others, *first, *second)):
            request.priority, request.tenant = idx % 2 if request in others else 1, "ab"[idx % 2] if request in others else "a"
        executor = HashExecutor(capacity, model=MODEL)
        outcomes = run(core, executor, *others[:1], *first, *others[1:], *second, max_turns=3000)
        check_answers(first, outcomes)
        check_answers(second, outcomes)
        for request in others:
            expected = expected_tokens(request.prompt_token_ids, request.sampling, model=MODEL, max_model_len=40)
            assert tuple(outcomes[request.request_id].token_ids) == expected.token_ids
        assert core.scheduler.kv.pool.num_available == core.scheduler.kv.num_total_blocks


def test_the_beams_of_the_test_above_are_preempted() -> None:
    capacity = Capacity(num_blocks=26, block_size=2, max_rows=8, max_step_tokens=12, max_model_len=40)
    core = make_core(capacity, make_policies(reserve="chunk", victim="latest"))
    requests = search_requests(3, max_tokens=10, arrival_ns=3)
    others = [make_request(f"o{idx}", [7 + idx] * (3 + idx), max_tokens=25, arrival_ns=idx) for idx in range(3)]
    run(core, HashExecutor(capacity, model=MODEL), *others[:1], *requests, *others[1:])
    assert sum(request.num_preemptions for request in requests) > 0


@pytest.mark.parametrize("turn", range(1, 12))
@pytest.mark.parametrize("which", range(3))
def test_who_cancels_one_cancels_all(turn: int, which: int) -> None:
    core, executor = make_core(CAPACITY), HashExecutor(CAPACITY, model=MODEL)
    requests = search_requests(3, max_tokens=30, stops=())
    other = make_request("o", [9, 9], max_tokens=20)
    outcomes = run(core, executor, other, *requests, later={turn: [Abort(f"b{which}")]})
    assert {outcomes[request.request_id].finish_reason for request in requests} == {FinishReason.ABORT}
    assert len(outcomes["o"].token_ids) == 20
    assert core.scheduler.kv.pool.num_available == core.scheduler.kv.num_total_blocks


@pytest.mark.parametrize(
    ("limit", "reason"),
    [("deadline_ns", RejectReason.DEADLINE), ("first_token_deadline_ns", RejectReason.FIRST_TOKEN_TIMEOUT)],
)
def test_a_time_limit_ends_all(limit: str, reason: RejectReason) -> None:
    requests = search_requests(3, max_tokens=30, stops=(), **{limit: 5_000_000})
    outcomes = run(make_core(CAPACITY), HashExecutor(CAPACITY, model=MODEL), *requests)
    assert {outcome.finish_reason for outcome in outcomes.values()} == {FinishReason.ABORT}
    assert all(outcome.last.reject_reason == reason for outcome in outcomes.values())


def test_the_first_token_of_a_search_is_the_first_that_is_sent() -> None:
    requests = search_requests(3, stops=())
    outcomes = run(make_core(CAPACITY), HashExecutor(CAPACITY, model=MODEL), *requests)
    for request in requests:
        (event,) = outcomes[request.request_id].events
        assert request.first_token_ns == event.at_ns == 12_000_000


def test_a_search_that_never_gets_all_its_requests_is_refused_as_a_whole() -> None:
    core, executor = make_core(CAPACITY), HashExecutor(CAPACITY)
    requests = search_requests(3)
    commands: list[Command] = [Add(requests[0]), Add(requests[1]), Drain(), Add(requests[2])]
    outcomes = run_to_completion(core, executor, *commands, after_turn=check)
    assert {outcome.finish_reason for outcome in outcomes.values()} == {FinishReason.REJECTED}
    assert not core.has_work


@pytest.mark.parametrize("num_come", [1, 2])
def test_those_that_come_after_one_of_their_search_has_ended_are_refused(num_come: int) -> None:
    core = make_core(CAPACITY)
    first, again = search_requests(3), search_requests(3)
    driver = Driver(core, HashExecutor(CAPACITY, model=MODEL))
    driver.turn(*map(Add, first[:num_come]), Abort("b0"))
    driver.turn(*map(Add, first[num_come:]))
    check(driver)
    assert not core.has_work
    assert [driver.outcomes[request.request_id].finish_reason for request in first] == [
        *[FinishReason.ABORT] * num_come,
        *[FinishReason.REJECTED] * (3 - num_come),
    ]
    check_answers(again, run(core, driver.executor, *again))


def test_what_can_not_be_a_score_is_refused() -> None:
    for length_penalty in (1e6, -1e6, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="length_penalty"):
            BeamParams(width=2, length_penalty=length_penalty)
    with pytest.raises(ValueError, match="width"):
        BeamParams(width=0)


@pytest.mark.parametrize("gate", ["static", "dynamic"])
def test_batches_take_no_beam_search(gate: str) -> None:
    core = make_core(CAPACITY, make_policies(gate=gate))
    outcomes = run(core, HashExecutor(CAPACITY), *search_requests(2))
    assert {outcome.finish_reason for outcome in outcomes.values()} == {FinishReason.REJECTED}


@pytest.mark.parametrize(("changed", "reason"), [({"max_rows": 3}, "invalid"), ({"num_blocks": 10}, "never_fits")])
def test_what_can_never_run_is_refused(changed: dict[str, int], reason: str) -> None:
    core = make_core(CAPACITY, **changed)
    outcomes = run(core, HashExecutor(core.scheduler.capacity), *search_requests(4, range(1, 20)))
    assert {outcome.last.reject_reason for outcome in outcomes.values()} == {reason}
    assert core.num_waiting == 0


def test_logprobs_of_the_hypotheses_are_told_if_they_were_asked_for() -> None:
    requests = search_requests(2, num_logprobs=1)
    outcomes = run(make_core(CAPACITY), HashExecutor(CAPACITY, model=MODEL), *requests)
    for outcome in outcomes.values():
        assert [entry.token_id for entry in outcome.last.logprobs] == outcome.token_ids
        assert all(len(entry.top) == 1 for entry in outcome.last.logprobs)
    assert outcomes["b0"].last.logprobs[0].rank >= 1


def test_rows_are_kept_for_forks() -> None:
    core, executor = make_core(CAPACITY, max_rows=4), HashExecutor(CAPACITY, model=MODEL)
    requests = search_requests(3, range(1, 39), max_tokens=5)
    others = [make_request(f"o{idx}", [9 + idx], max_tokens=20) for idx in range(4)]
    outcomes = run(core, executor, *requests, *others)
    check_answers(requests, outcomes)


def test_a_wide_search_waits_for_its_rows() -> None:
    core, executor = make_core(CAPACITY, max_rows=4), HashExecutor(CAPACITY, model=MODEL)
    requests = search_requests(4, max_tokens=5)
    others = [make_request(f"o{idx}", [9 + idx], max_tokens=5) for idx in range(2)]
    check_answers(requests, run(core, executor, *others, *requests))


def test_a_step_says_that_a_wide_search_waits_for_rows() -> None:
    driver = Driver(make_core(CAPACITY, max_rows=4), HashExecutor(CAPACITY, model=MODEL))
    driver.turn(Add(make_request("other", [9], max_tokens=5)))
    driver.turn(*map(Add, search_requests(4, max_tokens=5)))
    assert driver.core.scheduler.news.waits_for is WaitReason.ROWS


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("seed", range(20))
def test_beams_swap_as_others_do(seed: int, caching: bool) -> None:
    """Forks, copies of shared blocks, preemptions of whole groups, and a tier that fails now and then."""
    draw = random.Random(seed)
    faults = Faults(**{name.name: draw.choice([0.0, 0.0, 0.1]) for name in fields(Faults)})
    lower = LowerTier(num_slots=300, num_staged_blocks=100, promptness=draw.choice([0.3, 1.0]), faults=faults, seed=seed)
    capacity = Capacity(draw.choice([26, 33, 40]), block_size=2, max_rows=8, max_step_tokens=12, max_model_len=40)
    engine = Engine(capacity, make_policies(reserve="chunk", victim=draw.choice(["latest", "cheapest"])), caching, lower)
    core, executor = engine.make()
    clock = VirtualClock()
    transfers, worker = engine.make_transfers(core, executor, clock)
    others = [make_request(f"o{idx}", [7 + idx] * (3 + idx), max_tokens=25, arrival_ns=idx) for idx in range(4)]
    searches = [search_requests(3, name="b", max_tokens=10), search_requests(2, [1, 2, 3, 4, 9], name="c", max_tokens=14)]
    outcomes = run_to_completion(
        core,
        executor,
        *map(Add, [*others[:2], *searches[0], *others[2:], *searches[1]]),
        clock=clock,
        transfers=transfers,
        worker=worker,
        after_turn=check,
        max_turns=10_000,
    )
    for search in searches:
        check_answers(search, outcomes)
    for request in others:
        expected = expected_tokens(request.prompt_token_ids, request.sampling, model=MODEL, max_model_len=40)
        assert tuple(outcomes[request.request_id].token_ids) == expected.token_ids
    kv = core.scheduler.kv
    assert kv.pool.num_available == kv.num_total_blocks
    assert not kv.tables


class Apart(HashModel):
    """Beams part with their first token, and each goes on by itself."""

    def logprobs(self, token_id: int, num_top: int) -> TokenLogprobs:
        top = [((token_id + idx) % self.vocab_size, -5.0 - 0.001 * idx if idx else -0.01) for idx in range(num_top)]
        return TokenLogprobs(token_id, -0.01, 1, tuple(top))


@pytest.mark.parametrize("num_blocks", range(80, 120, 10))
@pytest.mark.parametrize("order", ["fcfs", "priority"])
def test_a_search_that_was_preempted_comes_back_when_there_is_room_for_all_its_beams(num_blocks: int, order: str) -> None:
    """And not for the first of them, to lose its blocks again as soon as the others follow."""
    capacity = Capacity(num_blocks, 4, 12, 64, 400)
    core, executor = make_core(capacity, make_policies(order=order)), HashExecutor(capacity, model=Apart())
    other = make_request("other", [1] * 10, max_tokens=180, temperature=0.0)
    search = search_requests(4, [3] * 8, max_tokens=num_blocks - 22, arrival_ns=1, stops=())
    outcomes = run(core, executor, other, *search)
    assert [tuple(outcomes[request.request_id].token_ids) for request in search] == expected_hypotheses(search[0], Apart())
    assert max(request.num_preemptions for request in search) <= 2
    assert executor.num_computed_tokens < 2 * sum(request.num_tokens for request in (other, *search))


@pytest.mark.parametrize("comes_first", [True, False])
def test_without_eviction_there_is_room_for_all_beams_at_their_limits(comes_first: bool) -> None:
    """Also while only the first beam runs, and computes the prompt."""
    capacity = Capacity(num_blocks=40, block_size=4, max_rows=12, max_step_tokens=32, max_model_len=100)
    core = make_core(capacity, make_policies(reserve="no-evict"))
    search = search_requests(3, [3] * 8, max_tokens=40, stops=())  # 2 blocks, and 10 for each beam
    other = make_request("other", [1] * 8, max_tokens=40)  # 12 blocks
    requests = [*search, other] if comes_first else [other, *search]
    outcomes = run(core, HashExecutor(capacity, model=Apart()), *requests)
    assert [tuple(outcomes[request.request_id].token_ids) for request in search] == expected_hypotheses(search[0], Apart())
    assert not any(request.num_preemptions for request in requests)


def test_searches_that_wait_cost_a_step_nothing() -> None:
    num_calls: list[int] = []
    for num_searches in (2, 40):
        core = make_core(CAPACITY, max_rows=4)
        driver = Driver(core, HashExecutor(CAPACITY, model=MODEL))
        driver.turn(Add(make_request("other", [9], max_tokens=60)))
        searches = [search_requests(4, [idx + 1] * 6, name=f"b{idx}-") for idx in range(num_searches)]
        driver.turn(*[Add(request) for search in searches for request in search])
        profile = cProfile.Profile()
        with profile:
            for _ in range(20):
                driver.turn()
        num_calls.append(sum(entry.callcount for entry in profile.getstats() if "penstock/sched/" in str(entry.code)))
        assert core.num_waiting == 4 * num_searches
        core.check()
    assert num_calls[1] <= num_calls[0]


def test_a_request_without_beams_enters_nothing_of_beam_search() -> None:
    """Not even where it is preempted: `groups.py` answers for it, and a search alone gets further."""
    entered: set[str] = set()

    def trace(frame: FrameType, event: str, _: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.parent.name == "choosing":
            entered.add(path.name)

    capacity = replace(CAPACITY, num_blocks=16, max_model_len=40)
    core, executor = make_core(capacity, make_policies(reserve="chunk")), HashExecutor(capacity, model=MODEL)
    plain = [make_request(f"r{idx}", [idx + 1] * 6, max_tokens=30, arrival_ns=idx) for idx in range(4)]
    before = sys.getprofile()
    sys.setprofile(trace)
    try:
        run(core, executor, *plain)
        without = set(entered)
        run(core, executor, make_request("r", 4, max_tokens=5), *search_requests(2))
    finally:
        sys.setprofile(before)
    assert max(request.num_preemptions for request in plain) > 0
    assert without == {"groups.py"}
    assert entered >= {"groups.py", "beams.py", "beam_search.py"}
