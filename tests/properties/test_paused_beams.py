"""Classes, beam searches, sharing and a tier that is slow, all at once: every answer is that of the request alone."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import fields

import pytest

from penstock.clock import VirtualClock
from penstock.sched.choosing.beam_search import BeamSearch
from penstock.sched.policies.presets import TABLES, make_policies
from penstock.sched.policies.reserves import Watermark
from penstock.testing import expected_tokens, make_request, run_to_completion
from penstock.testing.driver import STEP_NS
from penstock.testing.hash_executor import ROOT, mix
from penstock.types.events import Abort, Add, Command
from penstock.types.plan import Capacity
from penstock.types.request import FinishReason, Request
from penstock.types.sampling import BeamParams, EarlyStopping, SamplingParams
from penstock.types.stats import TierStats
from support.memory_store import Faults
from support.strategies import EOS_TOKEN_ID, MODEL, Engine, LowerTier

MAX_LEN = 100
EAGER = Watermark(share=0.0, growth_tokens=0)


def check_answers(engine: Engine, script: dict[int, list[Command]], groups: Sequence[Sequence[Request]]) -> TierStats | None:
    """Run to the end, and compare every answer but of groups that are aborted or can not fit. Return what the tier did.

    `groups` are searches, or single requests.
    """
    core, executor = engine.make()
    clock = VirtualClock()
    transfers, worker = engine.make_transfers(core, executor, clock)
    outcomes = run_to_completion(
        core,
        executor,
        later=script,
        clock=clock,
        transfers=transfers,
        worker=worker,
        after_turn=lambda driver: driver.core.check(),
        max_turns=20_000,
    )
    aborted = {command.request_id for commands in script.values() for command in commands if isinstance(command, Abort)}
    for group in groups:
        told = [outcomes[request.request_id] for request in group]
        reasons = {outcome.finish_reason for outcome in told}
        if reasons == {FinishReason.REJECTED}:
            assert may_be_too_large(group, engine.capacity)
        elif reasons == {FinishReason.ABORT}:
            assert not aborted.isdisjoint(request.request_id for request in group)
        else:
            assert reasons <= {FinishReason.STOP, FinishReason.LENGTH}
            assert [tuple(outcome.token_ids) for outcome in told] == expected_answers(group[0])
    assert core.scheduler.kv.pool.num_available == core.scheduler.kv.num_total_blocks
    assert not core.scheduler.kv.tables
    return None if transfers is None else transfers.stats


def may_be_too_large(group: Sequence[Request], capacity: Capacity) -> bool:
    """Return whether a search needs more rows than there are, or more blocks if its beams share none."""
    num_tokens = group[0].num_prompt_tokens + group[0].sampling.max_tokens
    return len(group) > capacity.max_rows or len(group) * -(-num_tokens // capacity.block_size) >= capacity.num_blocks


def expected_answers(request: Request) -> list[tuple[int, ...]]:
    sampling = request.sampling
    if sampling.beams is None:
        return [expected_tokens(request.prompt_token_ids, sampling, model=MODEL, max_model_len=MAX_LEN).token_ids]
    max_tokens = min(sampling.max_tokens or MAX_LEN, MAX_LEN - request.num_prompt_tokens)
    search = BeamSearch(sampling.beams, frozenset(sampling.stop_token_ids), max_tokens)
    assert sampling.logprobs is not None
    while not search.is_done:
        tops = []
        for beam in search.beams:
            value = ROOT
            for token_id in (*request.prompt_token_ids, *beam.token_ids):
                value = mix(value, token_id)
            tops.append(MODEL.logprobs(MODEL.sample(value, sampling, len(beam.token_ids)), sampling.logprobs))
        search.advance(tops)
    return [beam.token_ids for beam in search.finished]


def make_search(name: str, prompt: Sequence[int], width: int, **options: object) -> list[Request]:
    stops = options.pop("stop_token_ids", ())
    assert isinstance(stops, tuple)
    params = options.pop("params", None) or BeamParams(width=width)
    assert isinstance(params, BeamParams)
    sampling = SamplingParams(
        temperature=0.0,
        max_tokens=options.pop("max_tokens", 30),  # type: ignore[arg-type]
        beams=params,
        stop_token_ids=stops,
        logprobs=width + len(stops),
    )
    group = [make_request(f"{name}{idx}", prompt, sampling=sampling, **options) for idx in range(width)]
    for request in group:
        request.parent_id = name
    return group


def num_pauses(seed: int) -> int:
    """Run a search beside a request of a higher class that waits for a load. Return how often its members are preempted."""
    draw = random.Random(seed)
    capacity = Capacity(draw.randint(26, 40), 4, draw.choice([3, 4, 5]), 64, MAX_LEN)
    lower = LowerTier(num_slots=500, num_staged_blocks=200, promptness=draw.choice([0.1, 0.3]), seed=seed)
    engine = Engine(capacity, make_policies(order="priority", reserve=EAGER), True, lower)
    prefix = [draw.randint(1, 39) for _ in range(60)]
    turn = 40 + draw.randint(2, 14)
    warm = make_request("warm", prefix, max_tokens=2)
    flood = make_request("flood", [draw.randint(1, 39) for _ in range(90)], arrival_ns=10 * STEP_NS, max_tokens=2)
    search = make_search(
        "b", [7] * draw.choice([5, 6, 7, 9, 10, 30]), min(3, capacity.max_rows), arrival_ns=40 * STEP_NS, priority=5
    )
    again = make_request("again", [*prefix, *range(1, 21)], arrival_ns=turn * STEP_NS, priority=-5, max_tokens=4)
    script: dict[int, list[Command]] = {0: [Add(warm)], 10: [Add(flood)], 40: [*map(Add, search)], turn: [Add(again)]}
    stats = check_answers(engine, script, [[warm], [flood], search, [again]])
    assert stats is not None
    assert stats.num_loaded_blocks > 0
    return sum(request.num_preemptions for request in search)


@pytest.mark.parametrize("first", range(0, 20, 5))
def test_a_search_is_paused_for_one_that_waits_for_a_load(first: int) -> None:
    """It has just planned copies of the blocks that its beams share, and nobody runs while the load is under way."""
    assert sum(map(num_pauses, range(first, first + 5))) > 0, "no search of these seeds is paused"


def draw_engine(draw: random.Random, seed: int) -> Engine:
    block_size = draw.choice([1, 2, 4, 4, 8])
    num_needed = -(-(MAX_LEN - 1) // block_size)
    rows = draw.randint(2, 8)
    capacity = Capacity(1 + num_needed + draw.randint(0, num_needed // 2), block_size, rows, draw.randint(rows, 64), MAX_LEN)
    policies = make_policies(
        order=draw.choice(["priority", "priority", *TABLES["order"]]),
        budget=draw.choice(list(TABLES["budget"])),
        reserve=draw.choice([EAGER, *TABLES["reserve"]]),
        victim=draw.choice(list(TABLES["victim"])),
        eviction=draw.choice(list(TABLES["eviction"])),
    )
    faults = Faults(**{name.name: draw.choice([0.0, 0.0, 0.05, 0.3]) for name in fields(Faults)})
    lower = LowerTier(
        num_slots=draw.choice([3, 30, 500]),
        num_staged_blocks=draw.choice([4, 200]),
        max_load_blocks=draw.choice([1, 3, 64]),
        promptness=draw.choice([0.0, 0.1, 0.5]),
        faults=faults,
        seed=seed,
    )
    return Engine(capacity, policies, draw.random() < 0.8, lower if draw.random() < 0.7 else None, draw.choice([1, 2]), seed)


def draw_group(draw: random.Random, name: str, prefixes: Sequence[Sequence[int]], turn: int) -> list[Request]:
    """A search or a single request."""
    prompt = [*draw.choice(prefixes)[: draw.choice([0, 20, 50, 80])], *(draw.choice([1, 2]) for _ in range(draw.randint(1, 8)))]
    options = {
        "arrival_ns": turn * STEP_NS,
        "priority": draw.randint(-2, 2),
        "tenant": draw.choice(["", "a", "b"]),
        "max_tokens": draw.randint(1, 30),
        "stop_token_ids": draw.choice([(), (EOS_TOKEN_ID,)]),
    }
    if draw.random() < 0.5:
        return [make_request(name, prompt, **options)]
    width = draw.randint(1, 4)
    params = BeamParams(
        width=width, length_penalty=draw.choice([0.0, 1.0, -1.0]), early_stopping=draw.choice(list(EarlyStopping))
    )
    return make_search(name, prompt, width, params=params, **options)


@pytest.mark.parametrize("seed", range(50))
def test_searches_classes_prefixes_and_loads_together(seed: int) -> None:
    draw = random.Random(seed)
    engine = draw_engine(draw, seed)
    prefixes = [[1] * MAX_LEN, [1, 2] * MAX_LEN, [draw.randint(1, 39) for _ in range(MAX_LEN)]]
    span = draw.choice([5, 40, 150])
    script: dict[int, list[Command]] = {}
    groups: list[list[Request]] = []
    for idx in range(draw.randint(2, 12)):
        turn = draw.randrange(span)
        group = draw_group(draw, f"g{idx}-", prefixes, turn)
        groups.append(group)
        script.setdefault(turn, []).extend(map(Add, group))
        if draw.random() < 0.1:
            script.setdefault(turn + draw.randint(0, 30), []).append(Abort(group[-1].request_id))
    check_answers(engine, script, groups)
