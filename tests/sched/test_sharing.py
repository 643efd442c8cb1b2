"""Requests that come together and begin alike: a prompt is computed and stored once, whatever happens to who computes it."""

from __future__ import annotations

from itertools import product

import pytest

from penstock.sched.policies.budgets import DecodeFirst
from penstock.sched.policies.presets import TABLES, make_policies
from penstock.testing import Driver, HashExecutor, expected_tokens, make_core, make_request, run_to_completion
from penstock.testing.hash_executor import HashModel
from penstock.types.events import Abort, Add
from penstock.types.plan import Capacity
from penstock.types.request import Request
from penstock.types.sampling import BeamParams
from penstock.types.stats import WaitReason

CAPACITY = Capacity(num_blocks=200, block_size=16, max_rows=16, max_step_tokens=128, max_model_len=1100)


class Peak:
    """The most blocks that were held after a turn."""

    def __init__(self) -> None:
        self.num_blocks = 0

    def __call__(self, driver: Driver) -> None:
        driver.core.check()
        kv = driver.core.scheduler.kv
        self.num_blocks = max(self.num_blocks, kv.num_total_blocks - kv.pool.num_available)


def choices(num: int, num_prompt_tokens: int, max_tokens: int = 8) -> list[Request]:
    """The choices of one call."""
    prompt = [idx * idx % 997 for idx in range(num_prompt_tokens)]
    return [make_request(f"r{idx}", prompt, max_tokens=max_tokens, temperature=1.0, seed=idx) for idx in range(num)]


def check_answers(requests: list[Request], outcomes: dict, capacity: Capacity = CAPACITY) -> None:
    for request in requests:
        expected = expected_tokens(
            request.prompt_token_ids, request.sampling, model=HashModel(), max_model_len=capacity.max_model_len
        )
        assert tuple(outcomes[request.request_id].token_ids) == expected.token_ids


@pytest.mark.parametrize(("num", "num_prompt_tokens"), [(8, 1000), (8, 1034), (3, 40), (8, 12)])
def test_the_prompt_of_several_choices_is_computed_once_and_stored_once(num: int, num_prompt_tokens: int) -> None:
    peaks, computed = [], []
    for num_choices in (1, num):
        core, executor, peak = make_core(CAPACITY), HashExecutor(CAPACITY), Peak()
        requests = choices(num_choices, num_prompt_tokens)
        outcomes = run_to_completion(core, executor, *map(Add, requests), after_turn=peak)
        check_answers(requests, outcomes)
        peaks.append(peak.num_blocks)
        num_generated = sum(len(request.output_token_ids) - 1 for request in requests)  # the last is never computed
        computed.append(executor.num_computed_tokens - num_generated)
    assert computed == [num_prompt_tokens, num_prompt_tokens + num - 1], "one token each, for its logits"
    num_own = -(-(num_prompt_tokens + 8) // 16) - num_prompt_tokens // 16
    assert peaks[1] <= peaks[0] + (num - 1) * num_own, "they share all but what they write to"


@pytest.mark.parametrize(
    ("gate", "order", "budget"), list(product(TABLES["gate"], TABLES["order"], TABLES["budget"])), ids="-".join
)
def test_it_is_computed_once_under_every_policy(gate: str, order: str, budget: str) -> None:
    """In a batch too: what its rows compute is padded to a rectangle apart from that."""
    core = make_core(CAPACITY, make_policies(gate=gate, order=order, budget=budget))
    executor = HashExecutor(CAPACITY)
    requests = choices(4, 100)
    outcomes = run_to_completion(core, executor, *map(Add, requests))
    check_answers(requests, outcomes)
    num_generated = sum(len(request.output_token_ids) - 1 for request in requests)
    assert executor.num_computed_tokens - executor.num_padding_tokens - num_generated == 103


@pytest.mark.parametrize("turn", range(1, 9))
def test_another_goes_on_if_who_computes_is_cancelled(turn: int) -> None:
    core, executor = make_core(CAPACITY), HashExecutor(CAPACITY)
    requests = choices(4, 700)
    later = {turn: [Abort("r0")]}
    outcomes = run_to_completion(core, executor, *map(Add, requests), later=later, after_turn=Peak())
    check_answers(requests[1:], outcomes)
    assert executor.num_computed_tokens <= 700 + 128 + 4 * 10, "what the first had computed was not lost"


@pytest.mark.parametrize("num_blocks", range(12, 30, 3))
def test_another_goes_on_if_who_computes_is_preempted(num_blocks: int) -> None:
    capacity = Capacity(num_blocks=num_blocks, block_size=4, max_rows=8, max_step_tokens=8, max_model_len=44)
    core, executor = make_core(capacity, make_policies(reserve="chunk")), HashExecutor(capacity)
    others = [make_request(f"o{idx}", [50 + idx] * 5, max_tokens=20) for idx in range(3)]
    requests = choices(4, 30, 14)
    outcomes = run_to_completion(core, executor, *map(Add, [*others, *requests]), after_turn=Peak())
    check_answers([*others, *requests], outcomes, capacity)


def test_others_pass_who_waits_for_a_prefix_and_leave_it_a_row() -> None:
    capacity = Capacity(num_blocks=200, block_size=4, max_rows=4, max_step_tokens=12, max_model_len=200)
    driver = Driver(make_core(capacity, make_policies(budget="decode-first")), HashExecutor(capacity))
    equal = [make_request(f"e{idx}", 20, max_tokens=3) for idx in range(2)]
    others = [make_request(f"o{idx}", [60 + idx], max_tokens=30) for idx in range(3)]
    for request in (*equal, *others):
        driver.core.apply([Add(request)], 0)
    driver.turn()
    assert driver.plans[-1].rows[0].request_id == "e0"
    while equal[1].first_scheduled_ns is None:
        driver.turn()
        driver.core.check()
    running = driver.core.scheduler.running
    assert len(running) == 4
    assert "o1" in running, "they passed"
    assert "o2" not in running, "the row was kept"


def test_a_search_that_waits_for_a_prefix_is_left_all_its_rows() -> None:
    """Else those that pass it take them, and it waits for their ends."""
    capacity = Capacity(num_blocks=600, block_size=4, max_rows=4, max_step_tokens=32, max_model_len=500)
    driver = Driver(make_core(capacity), HashExecutor(capacity))
    driver.turn(Add(make_request("leader", [7] * 200, max_tokens=100)))
    search = [
        make_request(f"b{idx}", [7] * 200, max_tokens=5, beams=BeamParams(width=3), logprobs=4, arrival_ns=1)
        for idx in range(3)
    ]
    for request in search:
        request.parent_id = "b"
    others = [make_request(f"o{idx}", [idx + 10] * 6, max_tokens=200, arrival_ns=2) for idx in range(2)]
    driver.turn(*map(Add, [*search, *others]))
    for _ in range(10):
        driver.turn()
    assert search[0].first_scheduled_ns is not None


@pytest.mark.parametrize("max_rows", [2, 4])
def test_a_step_says_that_a_request_waits_for_a_prefix(max_rows: int) -> None:
    """Also if the row that is kept for it is the last one."""
    capacity = Capacity(num_blocks=200, block_size=4, max_rows=max_rows, max_step_tokens=16, max_model_len=200)
    driver = Driver(make_core(capacity), HashExecutor(capacity))
    driver.turn(*map(Add, choices(2, 10)))
    assert driver.core.scheduler.news.waits_for is WaitReason.PREFIX


def test_what_waits_for_a_prefix_can_be_cancelled() -> None:
    core, executor = make_core(CAPACITY), HashExecutor(CAPACITY)
    outcomes = run_to_completion(core, executor, *map(Add, choices(3, 700)), later={2: [Abort("r1")]}, after_turn=Peak())
    assert outcomes["r1"].token_ids == []
    assert len(outcomes["r2"].token_ids) == 8


def test_salts_do_not_wait_for_each_other() -> None:
    driver = Driver(make_core(CAPACITY), HashExecutor(CAPACITY))
    plan = driver.turn(*(Add(make_request(name, 40, cache_salt=name.encode())) for name in "ab"))
    assert plan is not None
    assert len(plan.rows) == 2


def test_a_prompt_that_grows_out_of_an_answer_computes_what_is_new() -> None:
    """The tail of an answer that has ended is found, token for token."""
    core, executor = make_core(CAPACITY), HashExecutor(CAPACITY)
    first = make_request("a", 21, max_tokens=9)
    run_to_completion(core, executor, Add(first))
    before = executor.num_computed_tokens
    prompt = [*first.prompt_token_ids, *first.output_token_ids, 1, 2, 3]
    second = make_request("b", prompt, max_tokens=1)
    outcomes = run_to_completion(core, executor, Add(second))
    check_answers([second], outcomes)
    assert second.num_cached_tokens == 29, "all that was computed: the last token of an answer never is"
    assert executor.num_computed_tokens - before == 4


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("num_others", [3, 15])
def test_a_prefix_is_found_as_soon_as_it_is_there_however_it_was_cut(num_others: int, depth: int) -> None:
    """Others decode, and leave the prompt one token of a step, or as many that it lacks one of them in the end."""
    capacity = Capacity(num_blocks=200, block_size=16, max_rows=32, max_step_tokens=16, max_model_len=200)
    core = make_core(capacity, make_policies(budget="decode-first"))
    executor = HashExecutor(capacity, depth=depth)
    driver = Driver(core, executor)
    driver.turn(*[Add(make_request(f"o{idx}", [60 + idx], max_tokens=30)) for idx in range(num_others)])
    equal = choices(2, 27, 30)
    driver.turn(*map(Add, equal))
    while equal[1].first_scheduled_ns is None:
        driver.turn()
        core.check()
    assert len(equal[0].output_token_ids) <= 4, "all that the other lacked had been there for long"
    assert equal[1].num_cached_tokens == equal[1].num_prompt_tokens - 1


@pytest.mark.parametrize("depth", [1, 2])
def test_nobody_waits_for_what_another_has_computed(depth: int) -> None:
    """The last piece but one of its prompt is a single token, and others stand aside for that block."""
    capacity = Capacity(num_blocks=200, block_size=16, max_rows=4, max_step_tokens=64, max_model_len=200)
    core = make_core(capacity, make_policies(budget=DecodeFirst(long_prefill_token_threshold=1)))
    driver = Driver(core, HashExecutor(capacity, depth=depth))
    equal = choices(2, 27, 30)
    driver.turn(*map(Add, equal))
    while equal[1].first_scheduled_ns is None:
        driver.turn()
        core.check()
    assert len(equal[0].output_token_ids) <= 1
    assert equal[1].num_cached_tokens == 26
