"""A router's table of the blocks that replicas hold, beside a plain search of each replica."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from penstock.sched.routing.holdings import STRIDE, Holdings

NAMES = list(range(100, 140))


def plain_depths(held: Sequence[set[int]], names: Sequence[int]) -> list[int]:
    return [next((depth for depth, name in enumerate(names) if name not in of_one), len(names)) for of_one in held]


@pytest.mark.parametrize("seed", range(20))
def test_depths_are_those_of_a_plain_search(seed: int) -> None:
    """Replicas hold beginnings of prompts that share beginnings with each other."""
    rng = random.Random(seed)
    num_replicas = rng.randint(1, 9)
    stem = [rng.getrandbits(64) for _ in range(rng.randint(0, 40))]
    prompts = [stem[: rng.randint(0, len(stem))] + [rng.getrandbits(64) for _ in range(rng.randint(0, 40))] for _ in range(12)]
    holdings, held = Holdings(1), [set[int]() for _ in range(num_replicas)]
    for number, of_one in enumerate(held):
        for prompt in rng.sample(prompts, 4):
            names = prompt[: rng.randint(0, len(prompt))]
            holdings.hear(number, names, [])
            of_one.update(names)
    for prompt in prompts:
        assert holdings.depths(prompt, num_replicas) == plain_depths(held, prompt)


def test_blocks_that_a_replica_lost_are_not_held() -> None:
    holdings = Holdings(1)
    for number in (0, 1):
        holdings.hear(number, NAMES, [])
    holdings.hear(0, [], NAMES[10:])
    assert holdings.depths(NAMES, 2) == [10, 40]
    holdings.hear(1, [], NAMES)
    assert holdings.depths(NAMES, 2) == [10, 0]
    holdings.hear(1, [], NAMES)  # told again, it changes nothing
    assert holdings.depths(NAMES, 2) == [10, 0]


def test_a_prompt_that_was_sent_is_expected_until_it_is_computed() -> None:
    holdings = Holdings(1)
    holdings.hear(1, NAMES[:5], [])
    holdings.expect("one", 1, NAMES[:20], 5)
    assert holdings.depths(NAMES, 2) == [0, 20]
    holdings.hear(1, NAMES[5:20], [])
    holdings.settle("one")
    assert holdings.depths(NAMES, 2) == [0, 20]
    holdings.hear(1, [], NAMES[20:5:-1])
    assert holdings.depths(NAMES, 2) == [0, 6]


@pytest.mark.parametrize("depth", [0, 5, 8])
def test_a_prompt_in_flight_is_held_to_its_last_block_and_by_fours_before(depth: int) -> None:
    holdings = Holdings(1)
    holdings.hear(0, NAMES[:depth], [])
    holdings.expect("one", 0, NAMES[:22], depth)
    assert holdings.depths(NAMES[:22], 1) == [22]
    assert holdings.depths(NAMES, 1) == [22]
    for shared in range(23):
        other = [*NAMES[:shared], *range(500, 510)]
        (found,) = holdings.depths(other, 1)
        assert max(min(depth, shared), shared // STRIDE * STRIDE) <= found <= shared
    holdings.settle("one")
    assert holdings.depths(NAMES, 1) == [depth]


def test_a_prompt_that_ends_without_a_token_is_not_expected_any_more() -> None:
    holdings = Holdings(1)
    holdings.expect("one", 0, NAMES, 0)
    holdings.settle("one")
    assert holdings.depths(NAMES, 1) == [0]
    holdings.settle("one")
    holdings.settle("never sent")


def test_of_two_that_compute_a_block_the_last_is_expected() -> None:
    holdings = Holdings(1)
    holdings.expect("one", 0, NAMES, 0)
    holdings.expect("two", 1, NAMES, 0)
    assert holdings.depths(NAMES, 2) == [0, 40]
    holdings.settle("one")
    assert holdings.depths(NAMES, 2) == [0, 40]
    holdings.settle("two")
    assert holdings.depths(NAMES, 2) == [0, 0]


@pytest.mark.parametrize(("num_holders", "at_most"), [(0, 2), (1, 15), (5, 60)])
def test_a_long_prompt_takes_few_lookups(num_holders: int, at_most: int) -> None:
    """A thousand blocks and a hundred replicas. Each holder has a longer beginning than the last."""
    names, looked_up = list(range(1_000)), list[int]()

    class Noting(dict[int, int]):
        def get(self, name: int, default: int = 0) -> int:
            looked_up.append(name)
            return super().get(name, default)

    holdings = Holdings(1)
    for number in range(num_holders):
        holdings.hear(10 * number, names[: 150 * (number + 1)], [])
    holdings._held = Noting(holdings._held)
    depths = holdings.depths(names, 100)
    assert sorted(depths)[100 - num_holders :] == [150 * (number + 1) for number in range(num_holders)]
    assert len(looked_up) <= at_most
