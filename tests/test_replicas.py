"""The number of servers that a load needs: up once it has lasted, down once it has not come back."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from penstock.replicas import DOWN_S, UP_S, Replicas, num_needed


@given(st.integers(0, 8), st.lists(st.integers(0, 8), min_size=1, max_size=600))
def test_never_more_than_was_asked_and_never_less_than_was_asked_all_along(first: int, asked: list[int]) -> None:
    replicas = Replicas(first)
    for second, num in enumerate(asked):
        replicas.add(second, num)
        before = [first] * DOWN_S + asked[: second + 1]
        assert min(before[-UP_S:]) <= replicas.desired <= max(before[-DOWN_S:])


@given(st.lists(st.tuples(st.integers(0, 8), st.integers(1, 400)), min_size=1, max_size=12))
def test_what_rose_stays_for_long(stretches: list[tuple[int, int]]) -> None:
    replicas, desired = Replicas(1), []
    for second, num in enumerate(num for num, seconds in stretches for _ in range(seconds)):
        replicas.add(second, num)
        desired.append(replicas.desired)
    changes = [(at, now > was) for at, (was, now) in enumerate(pairwise(desired)) if now != was]
    for (rose_at, is_up), (fell_at, is_next_up) in pairwise(changes):
        assert not is_up or is_next_up or fell_at - rose_at >= DOWN_S


def test_a_target_and_a_tolerance() -> None:
    assert [num_needed(utilisation, 0.0) for utilisation in (0.0, 0.01, 0.8, 0.87, 0.89, 1.6)] == [0, 0, 1, 1, 2, 2]
    assert num_needed(0.8, 30.0) == 2, "a queue of half a minute needs another one"
