"""The promises of every executor that computes adapters. Only tokens are compared, as in the suite beside this."""

from __future__ import annotations

import pytest

from penstock.types.adapter import BASE
from penstock.types.plan import RowPlan, StepPlan
from support.contracts.harness import FIRST_PAGE, Feed, Harness, admit

NUM_TOKENS = 6
NUM_SAMPLED = 4
NUM_ADAPTERS = 3


def make(harness: Harness, *numbers: int) -> Feed:
    """An executor with adapters of these numbers."""
    executor, end = harness.make_adapted(), FIRST_PAGE
    for number in numbers:
        end = harness.place(executor, number, end)
    return Feed(executor)


def answers(feed: Feed, harness: Harness, adapters: list[int], *, chunk: int = NUM_TOKENS) -> list[list[int]]:
    """Tokens after one prompt, of rows with these adapters in the same steps."""
    names = [f"{idx} in {feed.num_steps}" for idx in range(len(adapters))]
    prompt = harness.prompt(NUM_TOKENS)
    admits = [
        admit(name, prompt, range(1 + 3 * idx, 4 + 3 * idx), adapter=adapter)
        for idx, (name, adapter) in enumerate(zip(names, adapters, strict=True))
    ]
    found: dict[str, list[int]] = {name: [] for name in names}
    done = 0
    while done < NUM_TOKENS + NUM_SAMPLED - 1:
        count = min(chunk, NUM_TOKENS - done) if done < NUM_TOKENS else 1
        rows = [RowPlan(name, done, count, (), done + count >= NUM_TOKENS) for name in names]
        for name, tokens in feed.step(rows, admits).token_ids.items():
            found[name] += tokens
        admits, done = [], done + count
    feed.step(releases=names)
    return list(found.values())


def alone(harness: Harness, adapter: int) -> list[int]:
    (found,) = answers(make(harness, *([adapter] if adapter else [])), harness, [adapter])
    return found


def test_rows_of_any_adapters_answer_as_if_alone(harness: Harness) -> None:
    numbers = [2, BASE, 1, 3, 2]
    found = answers(make(harness, 1, 2, 3), harness, numbers)
    expected = {number: alone(harness, number) for number in range(NUM_ADAPTERS + 1)}
    assert found == [expected[number] for number in numbers]
    assert len(set(map(tuple, expected.values()))) > NUM_ADAPTERS, "each has an answer of its own"


def test_prompts_may_be_chunked(harness: Harness) -> None:
    feed = make(harness, 1, 3)
    assert answers(feed, harness, [3, 1], chunk=3) == answers(feed, harness, [3, 1])


def test_the_base_answers_as_without_adapters(harness: Harness) -> None:
    (expected,) = answers(Feed(harness.make()), harness, [BASE])
    assert answers(make(harness, 2), harness, [BASE, 2])[0] == expected


def test_blocks_of_a_dropped_adapter_are_anybodys(harness: Harness) -> None:
    """Another adapter's, under any number, and a row's."""
    feed = make(harness, 1)
    executor = feed.executor
    (one,) = answers(feed, harness, [1])
    for _ in range(2):
        executor.drop_adapter(1)
    harness.place(executor, 9, content=3)
    assert answers(feed, harness, [9]) == [alone(harness, 3)] != [one]
    executor.drop_adapter(9)
    prompt = harness.prompt(NUM_TOKENS)
    feed.step([RowPlan("r", 0, NUM_TOKENS, (), True)], [admit("r", prompt, range(FIRST_PAGE, FIRST_PAGE + 3))])
    base = alone(harness, BASE)
    assert feed.decode("r", NUM_TOKENS, NUM_SAMPLED - 1) == base[1:]
    harness.place(executor, 1, FIRST_PAGE + 3)
    assert answers(feed, harness, [1]) == [one]


def test_an_adapter_is_placed_beside_a_step_in_flight(harness: Harness) -> None:
    feed = make(harness, 1)
    executor, prompt = feed.executor, harness.prompt(NUM_TOKENS)
    rows = (RowPlan("r", 0, NUM_TOKENS, (), True),)
    ticket = executor.submit(StepPlan(0, 0, (admit("r", prompt, [20, 21, 22], adapter=1),), rows, ()))
    harness.place(executor, 2, FIRST_PAGE + 200)
    (token,) = executor.collect(ticket).token_ids["r"]
    feed.num_steps += 1
    assert token == alone(harness, 1)[0]
    assert answers(feed, harness, [2, 1]) == [alone(harness, 2), alone(harness, 1)]


def test_what_is_not_placed_is_refused(harness: Harness) -> None:
    feed = make(harness, 1)
    assert feed.executor.max_adapter_rank > 0
    with pytest.raises((ValueError, AssertionError), match="placed already"):
        harness.place(feed.executor, 1, FIRST_PAGE + 200)
    with pytest.raises((ValueError, AssertionError), match="not placed"):
        feed.step([RowPlan("r", 0, NUM_TOKENS, (), True)], [admit("r", harness.prompt(NUM_TOKENS), [1, 2], adapter=2)])
