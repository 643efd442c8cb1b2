"""Models with a recurrent state of their own: where it is saved, which prompts go on from there, and what that spares."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random

import pytest

from penstock.engine.core import EngineCore
from penstock.kv.manager import KVManager
from penstock.kv.prefix_cache import MARK_TOKENS, MAX_MARKS
from penstock.kv.states import MIN_SAVED_BLOCKS
from penstock.sched.policies.presets import make_policies
from penstock.testing import Driver, HashExecutor, expected_tokens, make_core, make_request, run_to_completion
from penstock.testing.hash_executor import HashModel
from penstock.types.events import Abort, Add, Command
from penstock.types.plan import Capacity
from penstock.types.request import FinishReason
from penstock.types.sampling import BeamParams
from penstock.types.stats import PrefixEnd

BLOCK = 16
STATE_BLOCKS = 20
INTERVAL = BLOCK * STATE_BLOCKS
MIN_GAP = BLOCK * MIN_SAVED_BLOCKS
CAPACITY = Capacity(2000, BLOCK, max_rows=8, max_step_tokens=256, max_model_len=30_000, num_state_blocks=STATE_BLOCKS)


class Server:
    """Sends one prompt after another, and says how many tokens of each were computed, its answer's included."""

    CHECK_TURNS = 10
    """Every so many turns the core is checked, which takes longer than a step: the pool has thousands of blocks."""

    def __init__(self, capacity: Capacity = CAPACITY) -> None:
        self.capacity = capacity
        self.core: EngineCore = make_core(capacity)
        self.executor = HashExecutor(capacity)
        self._num_sent = 0

    def send(self, *prompts: Sequence[int], num_answer: int = 8, commands: dict[int, list[Command]] | None = None) -> int:
        before = self.executor.num_computed_tokens
        requests = []
        for prompt in prompts:
            requests.append(make_request(f"r{self._num_sent}", prompt, max_tokens=num_answer))
            self._num_sent += 1
        outcomes = run_to_completion(self.core, self.executor, *map(Add, requests), later=commands, after_turn=self._check)
        self.core.check()
        for request in requests:
            outcome = outcomes[request.request_id]
            expected = expected_tokens(
                request.prompt_token_ids, request.sampling, model=HashModel(), max_model_len=self.capacity.max_model_len
            ).token_ids
            is_cut = outcome.finish_reason is FinishReason.ABORT
            assert tuple(outcome.token_ids) == (expected[: len(outcome.token_ids)] if is_cut else expected)
        return self.executor.num_computed_tokens - before

    def _check(self, driver: Driver) -> None:
        plan = driver.plans[-1]
        if plan.admits or plan.saves or plan.step_id % self.CHECK_TURNS == 0:
            driver.core.check()

    def answer(self, prompt: Sequence[int], num_answer: int = 8) -> list[int]:
        """The model's answer to a prompt, computed elsewhere."""
        sampling = make_request("x", prompt, max_tokens=num_answer).sampling
        found = expected_tokens(prompt, sampling, model=HashModel(), max_model_len=self.capacity.max_model_len)
        return list(found.token_ids)

    @property
    def kv(self) -> KVManager:
        return self.core.scheduler.kv


def words(count: int, seed: int = 0) -> list[int]:
    return [(idx * idx + 7 * seed + idx * seed) % 991 for idx in range(count)]


def test_a_prompt_goes_on_from_its_own_end() -> None:
    server = Server()
    prompt = words(200)
    assert server.send(prompt, num_answer=1) == 200
    assert server.send(prompt, num_answer=1) == MARK_TOKENS


def test_a_conversation_goes_on_from_its_last_answer() -> None:
    server = Server()
    prompt = words(200)
    server.send(prompt, num_answer=100)
    history = prompt + server.answer(prompt, 100)
    # The last token of an answer is never computed.
    assert server.send(history + words(30, seed=1), num_answer=1) == 31


def test_a_turn_without_the_reasoning_of_the_last_answer_goes_on_from_the_last_prompt() -> None:
    server = Server()
    prompt = words(200)
    server.send(prompt, num_answer=100)
    history = prompt + server.answer(prompt, 100)[80:]
    assert server.send(history + words(30, seed=1), num_answer=1) == MARK_TOKENS + 20 + 30


@pytest.mark.parametrize("length", [INTERVAL, 2 * INTERVAL + 5])
def test_a_long_prompt_leaves_states_on_its_way(length: int) -> None:
    server = Server()
    prompt = words(5 * INTERVAL)
    server.send(prompt, num_answer=1)
    departing = prompt[:length] + words(40, seed=2)
    assert server.send(departing, num_answer=1) == length % INTERVAL + 40


def test_the_second_prompt_that_departs_from_a_beginning_saves_its_state_for_the_third() -> None:
    server = Server()
    system = words(100)
    assert server.send(system + words(150, seed=1), num_answer=1) == 250
    assert server.send(system + words(70, seed=2), num_answer=1) == 170, "there was no state at the beginning's end"
    assert server.send(system + words(60, seed=3), num_answer=1) == 60


def test_requests_that_come_together_wait_for_the_state_of_what_they_share() -> None:
    server = Server()
    system = words(150)
    computed = server.send(*[system + words(40, seed=seed) for seed in range(1, 7)], num_answer=1)
    assert computed == 150 + 6 * 40


def test_requests_that_come_together_on_cached_keys_wait_for_the_state() -> None:
    """An earlier prompt left the keys of what they share, and no state at its end."""
    server = Server()
    system = words(300)
    server.send(system + words(100, seed=9), num_answer=1)
    computed = server.send(*[system + words(40, seed=seed) for seed in range(1, 7)], num_answer=1)
    assert computed == 300 + 6 * 40


def test_nobody_waits_for_a_state_that_is_not_worth_saving() -> None:
    server = Server()
    header = words(20)
    requests = [make_request(f"r{idx}", header + words(100, seed=1 + idx), max_tokens=1) for idx in range(6)]
    news = []
    run_to_completion(
        server.core,
        server.executor,
        *map(Add, requests),
        after_turn=lambda driver: news.append(driver.core.scheduler.news.set_aside),
    )
    assert not any(news)


def test_a_prompt_does_not_save_a_state_for_each_of_those_that_wait_for_it() -> None:
    server = Server()
    long = words(2000)
    server.send(long, *[long[: 64 * idx] + words(40, seed=idx) for idx in range(1, 30)], num_answer=1)
    assert len(server.kv.states) <= 2000 // INTERVAL + MAX_MARKS + 1 + 2 * 29, "two of each that waited"


def test_short_requests_leave_no_states() -> None:
    server = Server()
    server.send(*[words(5, seed=seed) for seed in range(20)], num_answer=2)
    assert len(server.kv.states) == 0


def test_short_turns_keep_a_state_in_a_full_pool() -> None:
    """Each answer comes back without its reasoning, so the next turn departs where its prompt ended."""
    server = Server(replace(CAPACITY, num_blocks=1 + 200 + 4 * STATE_BLOCKS))
    server.send(words(3200, seed=7), num_answer=1)
    history = words(1000)
    server.send(history, num_answer=30)
    for turn in range(1, 7):
        history += words(30, seed=turn)
        assert server.send(history, num_answer=30) <= 30 + 29 + MARK_TOKENS + MIN_GAP


def test_a_paused_request_goes_on_from_its_state() -> None:
    """Its row of the step was planned already."""
    alone = replace(CAPACITY, max_rows=1)
    core, executor = make_core(alone, make_policies("penstock", order="priority")), HashExecutor(alone)
    late = Add(make_request("late", words(100, seed=1), max_tokens=2, priority=-1, arrival_ns=1))
    request = make_request("r", words(200), max_tokens=50, priority=1)
    run_to_completion(core, executor, Add(request), later={20: [late]})
    assert request.num_preemptions == 1
    assert executor.num_computed_tokens == 200 + 49 + 100 + 1


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 8))])
def test_a_request_that_passes_a_running_prompt_leaves_it_its_blocks(seed: int) -> None:
    """It goes on from a saved state, which is held beside its own during its first step."""
    rng, num_passed = Random(seed), 0
    for _ in range(60):
        num_state, num_prompt = rng.choice((3, 10, 20, 40)), rng.randrange(100, 1000)
        capacity = replace(
            CAPACITY,
            num_blocks=-(-num_prompt // BLOCK) + num_state + rng.randrange(20, 20 + 4 * num_state),
            max_step_tokens=rng.choice((128, 256, 512)),
            num_state_blocks=num_state,
            max_model_len=1100,
        )
        core = make_core(capacity, make_policies("penstock", order=rng.choice(("fcfs", "priority"))))
        executor, system = HashExecutor(capacity), words(rng.randrange(64, 150))
        for idx in range(3):
            tail = words(rng.randrange(1, 30), seed=idx + 1)
            run_to_completion(core, executor, Add(make_request(f"s{idx}", system + tail, max_tokens=1)))
        running = make_request("p", words(num_prompt, seed=9), max_tokens=3, priority=5, arrival_ns=1)
        late = make_request("q", system + words(rng.randrange(2, 60), seed=5), max_tokens=3, arrival_ns=2)
        outcomes = run_to_completion(core, executor, Add(running), later={rng.randrange(1, 6): [Add(late)]})
        for request in (running, late):
            expected = expected_tokens(request.prompt_token_ids, request.sampling, model=HashModel(), max_model_len=1100)
            assert tuple(outcomes[request.request_id].token_ids) == expected.token_ids
        assert running.first_token_ns is not None
        assert late.first_token_ns is not None
        num_passed += late.num_cached_tokens > 0 and late.first_token_ns < running.first_token_ns
    assert num_passed > 0


def test_a_short_departure_is_not_saved() -> None:
    server = Server()
    start = words(MIN_GAP - 1)
    for seed in range(1, 4):
        assert server.send(start + words(MIN_GAP, seed=seed), num_answer=1) == 2 * MIN_GAP - 1


def test_twenty_turns_edited_in_the_middle_compute_a_turn_and_an_interval_again() -> None:
    """Turns of 1,000 tokens: 20,000 in all. The tenth is edited, and the conversation goes on from there."""
    server = Server(replace(CAPACITY, num_blocks=4000))
    history: list[int] = []
    ends = []
    for turn in range(20):
        history += words(900, seed=turn)
        computed = server.send(history, num_answer=100)
        assert computed <= 900 + 100 + MARK_TOKENS, f"turn {turn} computed what others had"
        history += server.answer(history, 100)
        ends.append(len(history))
    edited = history[: ends[9] - 300] + words(50, seed=40)
    assert server.send(edited, num_answer=1) <= 1000 + INTERVAL
    history = edited
    for turn in range(3):
        history = history + words(200, seed=50 + turn)
        assert server.send(history, num_answer=1) <= 201 + MARK_TOKENS


def test_conversations_side_by_side_keep_their_last_states_in_a_full_pool() -> None:
    """Ten of them in turn, in a pool that has room for their keys, two states of each, and one more running."""
    num_turns, num_new = 6, 200
    num_keys = -(-num_turns * num_new // BLOCK) + 1
    server = Server(replace(CAPACITY, num_blocks=10 * (num_keys + 2 * STATE_BLOCKS) + 3 * STATE_BLOCKS))
    histories = [words(1, seed=idx) for idx in range(10)]
    for turn in range(num_turns):
        for idx, history in enumerate(histories):
            history += words(num_new - 100, seed=10 * turn + idx)
            assert server.send(history, num_answer=100) <= num_new + 1, f"conversation {idx} lost its state in turn {turn}"
            history += server.answer(history, 100)


def test_states_are_lost_before_requests_are_refused() -> None:
    """A pool that holds the longest request, its state and nothing else."""
    least = replace(CAPACITY, max_model_len=2000)
    server = Server(replace(least, num_blocks=1 + least.most_blocks(1999)))
    prompt = words(1900)
    for _ in range(3):
        server.send(prompt, num_answer=50)
    server.send(*[words(400, seed=seed) for seed in range(8)], num_answer=50)
    assert server.kv.pool.num_available == server.kv.num_total_blocks


def test_a_saved_state_becomes_a_requests_own_where_there_is_no_room_for_both() -> None:
    least = replace(CAPACITY, max_model_len=500)
    server = Server(replace(least, num_blocks=1 + least.most_blocks(499)))
    prompt = words(300)
    server.send(prompt, num_answer=1)
    assert server.send(prompt + words(190, seed=1), num_answer=9) == 190 + 8
    server.core.check()


def test_a_request_that_is_cancelled_during_a_step_leaves_no_wrong_state() -> None:
    for turn in range(1, 8):
        server = Server()
        prompt = words(700)
        server.send(prompt, commands={turn: [Abort("r0")]})
        server.send(prompt + words(20, seed=1))


def test_why_a_hit_ended_is_told() -> None:
    server = Server()
    system = words(100)
    server.send(system + words(90, seed=1), num_answer=1)
    for prompt, reason in ((system + words(80, seed=2), PrefixEnd.STATE), (system[:30] + words(9, seed=3), PrefixEnd.DIFFERS)):
        request = make_request("x", prompt)
        stop = server.kv.prefix.why_stopped(request, server.kv.lookup_prefix(request))
        assert (stop.reason, stop.position) == (reason, 0 if reason is PrefixEnd.STATE else 30)
        server.kv.free("x")


def test_beams_are_refused() -> None:
    core = make_core(CAPACITY)
    beams = [
        make_request(f"b{idx}", 20, max_tokens=4, beams=BeamParams(width=2, length_penalty=1.0), parent_id="b")
        for idx in range(2)
    ]
    outcomes = run_to_completion(core, HashExecutor(CAPACITY), *map(Add, beams))
    assert all("recurrent state" in outcome.last.detail for outcome in outcomes.values())


def test_a_tier_is_refused() -> None:
    with pytest.raises(ValueError, match="a tier keeps single blocks"):
        KVManager(100, BLOCK, num_state_blocks=2, tier=object())  # type: ignore[arg-type]


def test_without_a_prefix_cache_no_state_is_saved() -> None:
    core, executor = make_core(CAPACITY, enable_prefix_caching=False), HashExecutor(CAPACITY)
    run_to_completion(core, executor, *(Add(make_request(f"r{idx}", words(900), max_tokens=3)) for idx in range(2)))
    assert executor.num_computed_tokens == 2 * (900 + 2)
    assert len(core.scheduler.kv.states) == 0
