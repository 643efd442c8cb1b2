"""Combinations of the policies that have a name, some of all: the same answers, one end for each request, all memory back, and
every position accounted for.

One workload in which everything happens: prompts that share prefixes, more memory asked for than there is, requests that are
cancelled and others that come late, adapters that half of them have. The tables of the seams say which policies there are.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import cycle, islice
from typing import Any

import pytest

from penstock.clock import VirtualClock
from penstock.engine.draft_model import DraftModel
from penstock.sched.policies.presets import TABLES, make_policies
from penstock.sched.policies.reserves import Watermark
from penstock.testing import Driver, HashExecutor, expected_tokens, make_core, make_request, run_to_completion
from penstock.testing.driver import STEP_NS
from penstock.types.events import Abort, Add, Command
from penstock.types.plan import Capacity, StepPlan, Ticket
from penstock.types.request import FinishReason, Request
from penstock.types.stats import RequestStats, StepStats
from support.fake_adapters import FakeAdapters, make_adapter
from support.half_right import HalfRight
from support.strategies import EOS_TOKEN_ID, MODEL

CAPACITY = Capacity(num_blocks=30, block_size=4, max_rows=12, max_step_tokens=24, max_model_len=100, max_scored=20)
GUESSERS = ("off", "suffix", "half right", "draft")
EAGER = Watermark(share=0.0, growth_tokens=0)
"""Keeps no memory back, so that requests are preempted."""
LONG = {"long_prefill_token_threshold": 8, "max_long_partial_prefills": 1}
"""Settings with which most prompts are long, and wait for each other."""
CANCELLED = {7: 3, 9: 20}
"""Index of the request -> turn."""


def make_adapters() -> FakeAdapters:
    """Adapter k takes k pages."""
    return FakeAdapters(num_pages=lambda number: number)


class Account:
    """Adds up what an observer is told."""

    def __init__(self) -> None:
        self.num_tokens = self.num_padding_tokens = self.num_sampled_tokens = self.num_preemptions = self.num_ended = 0

    def on_step(self, stats: StepStats) -> None:
        self.num_tokens += stats.counts.num_tokens
        self.num_padding_tokens += stats.counts.num_padding_tokens
        self.num_sampled_tokens += stats.counts.num_sampled_tokens
        self.num_preemptions += stats.counts.num_preemptions

    def on_finish(self, stats: RequestStats) -> None:
        self.num_ended += 1


def make_requests() -> list[Request]:
    """Prompts of 1 to 40 tokens, answers of up to 60, of three tenants, priorities and deadlines that nobody misses."""
    requests = []
    for idx in range(12):
        prompt = [*[1, 2][: idx % 3] * 6, *range(4, 5 + 7 * idx % 29)]
        request = make_request(
            f"r{idx}",
            prompt,
            arrival_ns=(idx // 4) * 1_000_000,
            deadline_ns=10**15 + idx % 5,
            max_tokens=1 + idx * 23 % 60,
            temperature=idx % 2,
            seed=idx,
            stop_token_ids=(EOS_TOKEN_ID,) if idx % 4 == 1 else (),
            adapter=make_adapter(1 + idx // 2 % 3) if idx % 2 else None,
        )
        request.priority, request.tenant, request.predicted_new_tokens = idx % 3, "abc"[idx % 3], 1 + idx * 7 % 40
        request.parent_id, request.background = f"call {idx % 4}", idx % 4 == 2
        requests.append(request)
    return requests


def script(requests: list[Request]) -> dict[int, list[Command]]:
    """Commands by turn."""
    commands: dict[int, list[Command]] = {}
    for request in requests:
        commands.setdefault(request.arrival_ns // 1_000_000, []).append(Add(request))
    for idx, turn in CANCELLED.items():
        commands.setdefault(turn, []).append(Abort(f"r{idx}"))
    return commands


def check(driver: Driver) -> None:
    driver.core.check()


def combinations(rng: random.Random, num_rounds: int, *seams: Sequence[Any]) -> Iterator[tuple[Any, ...]]:
    """Each value of each seam at least `num_rounds` times, beside others in each round."""
    for _ in range(num_rounds):
        shuffled = [cycle(rng.sample(seam, len(seam))) for seam in seams]
        yield from islice(zip(*shuffled, strict=True), max(map(len, seams)))


@pytest.mark.parametrize("num_rounds", [1, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("order", TABLES["order"])
@pytest.mark.parametrize(("gate", "depth"), [*((gate, 1) for gate in TABLES["gate"]), ("continuous", 2)])
def test_the_answers_are_the_same_under_every_policy(gate: str, order: str, depth: int, num_rounds: int) -> None:
    # The two that are made for texts go together.
    names = [name for name in TABLES["budget"] if (name == "hold-step") == (order == "calls")]
    budgets: list[tuple[str, dict[str, int]]] = [*((name, {}) for name in names), ("itl", LONG)]
    evictions = cycle(TABLES["eviction"])  # each with some of the others: who runs does not depend on what it names
    guessers = cycle(GUESSERS)
    capacity = replace(CAPACITY, checks_guesses=depth == 1)
    rng = random.Random(f"{gate} {order} {depth}")  # the others have others
    chosen = combinations(rng, num_rounds, budgets, [*TABLES["reserve"], EAGER], [*TABLES["victim"]])
    num_drafted = 0
    for seed, ((budget, settings), reserve, victim) in enumerate(chosen):
        eviction, guesser = next(evictions), next(guessers)
        account = Account()
        policies = make_policies(
            gate=gate,
            order=order,
            budget=budget,
            reserve=reserve,
            victim=victim,
            eviction=eviction,
            guesser={"half right": HalfRight(MODEL, capacity, seed=seed), "draft": "suffix"}.get(guesser, guesser),
            settings={"budget": settings},
        )
        small = HashExecutor(replace(CAPACITY, num_blocks=20), model=MODEL)
        draft = DraftModel(small, VirtualClock(), vocab_size=MODEL.vocab_size, timeout_s=None)
        drafter = draft if guesser == "draft" else None
        core = make_core(capacity, policies, observer=account, adapters=make_adapters(), drafter=drafter)
        executor = HashExecutor(capacity, model=MODEL, depth=depth, seed=seed)
        requests = make_requests()
        outcomes = run_to_completion(core, executor, later=script(requests), after_turn=check)
        case = f"{gate}, {order}, {budget} {settings}, {reserve}, {victim}, {eviction}, {guesser}"
        for idx, request in enumerate(requests):
            outcome = outcomes[request.request_id]
            expected = expected_tokens(
                request.prompt_token_ids, request.sampling, model=MODEL, max_model_len=100, adapter=request.adapter
            )
            if outcome.finish_reason is FinishReason.ABORT:
                assert idx in CANCELLED, case
            else:
                assert (tuple(outcome.token_ids), outcome.finish_reason) == (expected.token_ids, expected.finish_reason), case
            assert tuple(outcome.token_ids) == expected.token_ids[: len(outcome.token_ids)], case
            assert [event.finish_reason for event in outcome.events if event.finish_reason is not None] == [
                outcome.finish_reason
            ], case
        assert account.num_ended == len(requests), case
        assert core.scheduler.kv.pool.num_available == core.scheduler.kv.num_total_blocks, case
        assert not core.scheduler.kv.fenced, case
        assert executor.num_computed_tokens == account.num_tokens, case
        assert executor.num_padding_tokens == account.num_padding_tokens, case
        assert account.num_sampled_tokens == sum(len(outcome.token_ids) for outcome in outcomes.values()), case
        assert (account.num_padding_tokens > 0) == (gate != "continuous"), case
        assert not draft._rows, case
        num_drafted += small.num_computed_tokens
        draft.close()
    assert (num_drafted > 0) == (gate == "continuous" and depth == 1)


@pytest.mark.parametrize("gate", TABLES["gate"])
@pytest.mark.parametrize("depth", [1, 2])
def test_the_workload_runs_out_of_memory(gate: str, depth: int) -> None:
    account = Account()
    core = make_core(CAPACITY, make_policies(gate=gate, reserve=EAGER), observer=account, adapters=make_adapters())
    run_to_completion(core, HashExecutor(CAPACITY, model=MODEL, depth=depth), later=script(make_requests()))
    assert account.num_preemptions > 0


@pytest.mark.parametrize("order", TABLES["order"])
def test_nearly_all_of_its_steps_are_planned_ahead(order: str) -> None:
    num_ahead: list[int] = []

    class Watched(HashExecutor):
        def submit(self, plan: StepPlan) -> Ticket:
            num_ahead.append(len(self._in_flight))
            return super().submit(plan)

    core = make_core(CAPACITY, make_policies(order=order), adapters=make_adapters())
    run_to_completion(core, Watched(CAPACITY, model=MODEL, depth=2), later=script(make_requests()))
    assert sum(num_ahead) > 0.95 * len(num_ahead)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("seed", range(24))
def test_classes_and_long_prompts_go_on_with_little_memory(seed: int, depth: int) -> None:
    """Requests pause each other in every way that there is: nobody is paused for nothing, and no row is planned twice."""
    draw = random.Random(seed)
    capacity = Capacity(draw.randint(17, 40), 4, draw.randint(2, 6), draw.choice([8, 20, 60]), 60)
    policies = make_policies(
        order="priority",
        budget=draw.choice(["decode-first", "itl"]),
        reserve=draw.choice(list(TABLES["reserve"])),
        victim=draw.choice(list(TABLES["victim"])),
        settings={"budget": {"long_prefill_token_threshold": 8, "max_long_partial_prefills": draw.choice([1, 2])}},
    )
    later: dict[int, list[Command]] = {}
    requests = []
    for idx in range(25):
        turn, prompt = draw.randrange(60), [draw.randint(1, 30) for _ in range(draw.randint(1, 40))]
        request = make_request(f"r{idx}", prompt, arrival_ns=turn * STEP_NS, max_tokens=draw.randint(1, 40))
        request.priority = draw.randint(-2, 2)
        requests.append(request)
        later.setdefault(turn, []).append(Add(request))

    def check_pauses(driver: Driver) -> None:
        check(driver)
        if driver.plans:
            admitted = {admit.request_id for admit in driver.plans[-1].admits}
            assert not admitted or not admitted <= set(driver.plans[-1].releases), "paused, and resumed by itself"

    core = make_core(capacity, policies, enable_prefix_caching=False)
    executor = HashExecutor(capacity, model=MODEL, depth=depth, seed=seed)
    outcomes = run_to_completion(core, executor, later=later, after_turn=check_pauses, max_turns=3000)
    assert len(outcomes) == len(requests)
    for request in requests:
        outcome = outcomes[request.request_id]
        expected = expected_tokens(request.prompt_token_ids, request.sampling, model=MODEL, max_model_len=60)
        assert (tuple(outcome.token_ids), outcome.finish_reason) == (expected.token_ids, expected.finish_reason)
