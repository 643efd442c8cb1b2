"""The books of who came and who was admitted: right whatever the order, and small."""

from __future__ import annotations

import tracemalloc
from bisect import bisect_left, insort

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.obs.explain.lives import MAX_TURNS, REASONS, LateKeys, LateMarks, Turns, WaitMark

KEYS = st.tuples(st.integers(-3, 3), st.integers(0, 5))


@given(st.lists(st.tuples(st.booleans(), KEYS), max_size=60))
def test_keys_are_those_of_a_sorted_list(deeds: list[tuple[bool, tuple[int, int]]]) -> None:
    keys, expected = LateKeys(), []
    for is_new, key in deeds:
        if not is_new:
            keys.discard(key)
            expected = [other for other in expected if other != key]
        elif key not in expected:
            assert keys.add(key) == bisect_left(expected, key)
            insort(expected, key)
        probes = [*expected, *((instant, number) for instant in range(-4, 5) for number in (0, 3, 6))]
        assert [keys.num_before(probe) for probe in probes] == [bisect_left(expected, probe) for probe in probes]


def test_forgotten_keys_still_count() -> None:
    keys = LateKeys()
    for number in range(3 * MAX_TURNS):
        assert keys.add((number // 2, number)) == number
    assert keys.num_before((3 * MAX_TURNS // 2, 0)) == 3 * MAX_TURNS
    late = (3 * MAX_TURNS // 2 - 1, 3 * MAX_TURNS - 2)
    assert keys.num_before(late) == 3 * MAX_TURNS - 2
    keys.discard(late)
    assert keys.num_before((3 * MAX_TURNS // 2, 0)) == 3 * MAX_TURNS - 1


def mark(number: int) -> WaitMark:
    """One that no other equals, of large numbers, as they are after hours."""
    at_ns = 10**16 + number * 10**6
    return WaitMark(at_ns, tuple(at_ns + idx for idx in range(len(REASONS))))


@pytest.mark.parametrize("num_marks", [1, 2, MAX_TURNS, MAX_TURNS + 1, 2 * MAX_TURNS + 7])
def test_late_marks_are_the_last_and_the_oldest_stands_for_what_was_before(num_marks: int) -> None:
    marks = LateMarks()
    for number in range(num_marks):
        marks.append(mark(number))
    for count in {1, min(2, num_marks), min(num_marks, MAX_TURNS)}:
        assert marks.from_last(count) == mark(num_marks - count)
    assert marks.from_last(num_marks + 5) == mark(max(0, num_marks - MAX_TURNS))


def test_an_admission_takes_a_hundred_bytes_and_thousands_more_take_none() -> None:
    """Each as by itself in its step: requests that come together share what is told of the step, and would hide it."""
    turns = Turns()
    tracemalloc.start()
    try:
        sizes = [0]
        for start in range(0, 3 * MAX_TURNS, MAX_TURNS):
            for number in range(start, start + MAX_TURNS):
                turns.admit(turns.come(10**16 + number), mark(number))
            sizes.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    assert sizes[1] < 100 * MAX_TURNS
    assert max(sizes[2:]) < 1.1 * sizes[1]
