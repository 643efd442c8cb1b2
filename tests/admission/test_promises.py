"""The queue of those who are not here: times of their own, places that are kept, and what no-shows cost."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.admission.estimates import GRACE_NS, MAX_PER_CLAIM, MAX_PROMISES, MAX_SHARED_PLACES, MIN_SHARE, SPREAD, Promises

SECOND = 1_000_000_000
LONGEST_NS = 600 * SECOND


def make(
    promises: Promises, claim: bytes, now_s: float = 0.0, wait_s: float = 2.0, places_per_s: float = 4.0, tenant: str = ""
) -> float:
    """Seconds from now until this client is to come back."""
    now_ns, wait_ns, ns_per_request = int(now_s * SECOND), int(wait_s * SECOND), int(SECOND / places_per_s)
    return promises.make(claim, now_ns, wait_ns, ns_per_request, LONGEST_NS, tenant=tenant) / SECOND


def find(promises: Promises, claim: bytes, now_s: float, *, is_retry: bool = False):
    return promises.find(claim, is_retry=is_retry, now_ns=int(now_s * SECOND))


def test_everyone_is_told_a_time_of_their_own_one_place_apart():
    promises = Promises()
    waits = [make(promises, bytes([idx])) for idx in range(4)]
    assert waits[0] == 2.0
    assert [round(after - before, 3) for before, after in itertools.pairwise(waits)] == [round(SPREAD / 4, 3)] * 3


def test_a_promise_is_found_when_it_is_due_and_not_before():
    promises = Promises()
    wait_s = make(promises, b"a")
    assert find(promises, b"a", wait_s - 0.1) is None
    assert find(promises, b"b", wait_s) is None
    assert find(promises, b"a", wait_s) is not None


def test_who_says_that_it_comes_again_keeps_its_place():
    promises = Promises()
    make(promises, b"a")
    early = find(promises, b"a", 0.5, is_retry=True)
    assert early is not None
    assert early.due_ns == 2 * SECOND


def test_places_are_kept_until_their_clients_come_or_the_grace_is_over():
    promises = Promises()
    for idx in range(3):
        make(promises, bytes([idx]), wait_s=2.0, places_per_s=1000.0)
    assert promises.num_due(int(1.9 * SECOND)) == 0
    assert promises.num_due(int(2.1 * SECOND)) == 3
    kept = find(promises, b"\x00", 2.1)
    promises.settle(kept)
    assert promises.num_due(int(2.2 * SECOND)) == 2
    assert find(promises, b"\x00", 2.2) is None
    assert promises.num_due(int(2.1 * SECOND) + GRACE_NS + SECOND) == 0


def test_equal_calls_of_several_clients_have_a_place_each():
    promises = Promises()
    for _ in range(2):
        make(promises, b"same", places_per_s=1000.0)
    for _ in range(2):
        promises.settle(find(promises, b"same", 2.5))
    assert find(promises, b"same", 2.5) is None


def test_times_are_set_closer_where_few_come_back():
    promises = Promises()
    now_s = 0.0
    for idx in range(100):
        now_s += make(promises, b"%d" % idx, now_s=now_s) + 60
        promises.num_due(int(now_s * SECOND))
    first, second = (make(promises, name, now_s=now_s) for name in (b"x", b"y"))
    assert 0.9 * MIN_SHARE * SPREAD / 4 <= second - first <= 1.5 * MIN_SHARE * SPREAD / 4


def test_who_came_once_as_told_is_counted_on_in_full():
    """Its blocks are kept from now, whether or not many others never came."""
    promises, now_s = Promises(), 0.0
    for idx in range(100):
        now_s += make(promises, b"%d" % idx, now_s=now_s) + 60
        promises.num_due(int(now_s * SECOND))
    now_ns = int(now_s * SECOND)
    due_ns = now_ns + promises.make(b"x", now_ns, 2 * SECOND, SECOND, LONGEST_NS, num_needed=50)
    assert promises.num_needed_now(now_ns) == 0
    assert 1 <= promises.num_needed_now(due_ns) <= 10
    promises.renew(promises.find(b"x", is_retry=False, now_ns=due_ns), due_ns, 2 * SECOND, 50)
    assert promises.num_needed_now(due_ns) == 50
    again = promises.find(b"x", is_retry=False, now_ns=due_ns + 2 * SECOND)
    promises.settle(again)
    assert promises.num_needed_now(due_ns + 2 * SECOND) == 0


def test_beyond_the_longest_time_no_place_is_kept():
    promises = Promises()
    assert make(promises, b"a", wait_s=10_000) == 600
    assert find(promises, b"a", 600, is_retry=True) is None


def test_a_place_kept_for_long_does_not_hold_up_the_end_of_others():
    """A client that was told a long time has a longer grace than one that was told a short time and is due after it."""
    promises = Promises()
    make(promises, b"long", wait_s=500, places_per_s=1000.0)
    for idx in range(9):
        make(promises, bytes([idx]), now_s=499, wait_s=1.1, places_per_s=1000.0)
    assert promises.num_due(501 * SECOND) == 10
    assert promises.num_due(505 * SECOND) == 1


def test_who_asks_again_and_again_does_not_push_everyone_elses_time_out():
    promises = Promises()
    waits = [make(promises, b"impatient") for _ in range(500)]
    assert waits[-1] == waits[0] == 2.0
    assert make(promises, b"other") <= 2.0 + MAX_PER_CLAIM * SPREAD / 4


def test_a_tenant_with_many_different_calls_pushes_only_its_own_times_out():
    promises = Promises()
    waits = [make(promises, b"%d" % idx, places_per_s=1.0, tenant="many") for idx in range(600)]
    assert waits[:400] == pytest.approx([2.0 + idx * SPREAD for idx in range(400)])
    assert waits[-1] == 600
    others = [make(promises, b"other %d" % idx, places_per_s=1.0, tenant=f"other {idx}") for idx in range(3)]
    assert others == pytest.approx([2.0 + (MAX_SHARED_PLACES + idx) * SPREAD for idx in range(3)])


def test_a_tenant_with_many_different_calls_leaves_places_to_others():
    promises = Promises()
    for idx in range(MAX_PROMISES):
        make(promises, b"%d" % idx, places_per_s=1e5, tenant="many")
    wait_s = make(promises, b"other", places_per_s=1e5, tenant="other")
    assert find(promises, b"other", wait_s + 0.1) is not None


@given(st.lists(st.tuples(st.integers(0, 9), st.floats(0, 5), st.floats(0, 3), st.booleans()), max_size=60))
def test_no_promise_outlives_its_grace(moves):
    promises, now_s = Promises(), 0.0
    for claim, gap_s, wait_s, is_retry in moves:
        now_s += gap_s
        found = find(promises, bytes([claim]), now_s, is_retry=is_retry)
        if found is None:
            make(promises, bytes([claim]), now_s=now_s, wait_s=wait_s, tenant=str(claim % 2))
        else:
            assert is_retry or found.due_ns <= now_s * SECOND
            promises.settle(found)
    assert promises.num_due(int((now_s + 10_000) * SECOND)) == 0
    assert not promises._by_claim
    assert not promises._later
    assert not promises._lines
