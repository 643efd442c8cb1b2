"""Turns and steps of requests: right in any order, and bounded."""

from __future__ import annotations

import gc
import tracemalloc

from hypothesis import given
from hypothesis import strategies as st

from penstock.obs.explain.lives import MAX_STEPS, MAX_TURNS, StepLog, StepNote, Ticket, Turns
from penstock.obs.waits import REASONS, WaitMark
from support.work_time import others_are_no_garbage


def mark(number: int) -> WaitMark:
    return WaitMark(number, (0,) * len(REASONS))


@given(st.lists(st.tuples(st.sampled_from(["come", "admit", "leave"]), st.integers(0, 9)), max_size=80))
def test_turns_are_those_of_the_whole_history(deeds: list[tuple[str, int]]) -> None:
    turns, waiting, admissions = Turns(), list[Ticket](), list[tuple[Ticket, int]]()
    for now, (deed, number) in enumerate(deeds):
        if deed == "come":
            waiting.append(turns.come(number))
        elif waiting:
            ticket = waiting.pop(number % len(waiting))
            if deed == "leave":
                turns.leave(ticket)
            else:
                turns.admit(ticket, mark(now))
                admissions.append((ticket, now))
        for ticket in waiting:
            later = [at for other, at in admissions[ticket.num_admitted :] if other.key > ticket.key]
            turn = turns.turn_of(ticket)
            assert turn.num_passed_by == len(later)
            # Passed by n: in order of arrival, the n-th admission from the end would have been this request's.
            assert turn.due == (mark(admissions[-len(later)][1]) if later else None)


def test_a_request_passed_by_more_than_are_remembered_has_the_oldest_mark() -> None:
    turns = Turns()
    first = turns.come(0)
    for number in range(1, 3 * MAX_TURNS):
        turns.admit(turns.come(number), mark(number))
    turn = turns.turn_of(first)
    assert MAX_TURNS // 2 <= turn.num_passed_by <= MAX_TURNS
    assert turn.due == mark(3 * MAX_TURNS - turn.num_passed_by)


def test_what_nobody_waits_for_is_forgotten_and_still_counts() -> None:
    turns = Turns()
    for number in range(10):
        turns.admit(turns.come(number), mark(number))
    ticket = turns.come(10)
    assert (ticket.num_came_before, turns.turn_of(ticket).num_passed_by) == (10, 0)
    turns.admit(turns.come(11), mark(11))
    assert turns.turn_of(ticket).num_passed_by == 1


def test_requests_that_come_and_go_leave_nothing_behind() -> None:
    turns = Turns()
    for number in range(3 * MAX_TURNS):
        turns.leave(turns.come(number))
    ticket = turns.come(5)
    assert (ticket.num_before, ticket.num_came_before) == (0, 0)


def test_admissions_take_a_bounded_part_of_memory_and_none_once_nobody_waits() -> None:
    """Each as by itself in its step: requests that come together share what is noted of the step, and would hide it."""

    def admit(first: int, count: int) -> None:
        for number in range(first, first + count):
            at_ns = 10**16 + number * 10**6
            turns.admit(turns.come(at_ns), WaitMark(at_ns, tuple(at_ns + idx for idx in range(len(REASONS)))))

    def size() -> int:
        gc.collect()  # which also frees what Python keeps for the next tuples
        return tracemalloc.get_traced_memory()[0]

    turns, sizes = Turns(), []
    tracemalloc.start()
    try:
        with others_are_no_garbage():
            waiting = turns.come(0)
            for start in range(0, 3 * MAX_TURNS, MAX_TURNS):
                admit(start, MAX_TURNS)
                sizes.append(size())
            turns.leave(waiting)
            admit(3 * MAX_TURNS, MAX_TURNS)
            left = size()
    finally:
        tracemalloc.stop()
    assert sizes[0] < 700 * MAX_TURNS
    assert max(sizes[1:]) < 1.1 * sizes[0]
    assert left < sizes[0] // 20


def test_a_span_has_the_totals_of_its_steps_and_forgotten_ones_do_not_count() -> None:
    log = StepLog()
    for number in range(MAX_STEPS):
        num_prefills = number % 2
        log.append(StepNote(5, number, num_prefills=num_prefills, waited_ns=1), ended_ns=10 * (number + 1))
    assert log.is_full
    span = log.span(2, 6)
    assert (span.num_steps, span.num_rows, span.max_rows, span.prompts_ns, span.waited_ns) == (4, 14, 5, 20, 4)
    assert span.longest is not None
    assert span.longest.gap_ns == 10
    log.forget_before(4)
    assert (log.first, log.next) == (4, MAX_STEPS)
    assert log.span(2, 6).num_rows == 9
    assert log.span(0, 4).num_steps == 0
