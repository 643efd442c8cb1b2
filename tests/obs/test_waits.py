"""Waits: a request's wait is the sum of what the queue lacked meanwhile."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.obs.waits import MAX_CHANGES, REASONS, Waits
from penstock.types.stats import StepCounts, StepStats, WaitReason

GATE, ROWS, NOTHING = WaitReason.GATE, WaitReason.ROWS, WaitReason.NOTHING


def step(planned_ns: int, ended_ns: int, reason: WaitReason, before: WaitReason) -> StepStats:
    counts = StepCounts(waits_for=reason, waited_for=before)
    return StepStats(0, planned_ns, ended_ns, 0, 0, 0, 0, 0, counts, planned_ns=planned_ns)


def split(waits: Waits, from_ns: int, to_ns: int) -> dict[WaitReason, int]:
    return {reason: part_ns for reason, part_ns in waits.split(from_ns, to_ns).items() if part_ns}


def test_a_wait_is_divided_where_the_reason_changes() -> None:
    waits = Waits()
    waits.on_step(step(10, 20, ROWS, NOTHING))
    waits.on_step(step(20, 30, ROWS, ROWS))
    waits.on_step(step(30, 40, NOTHING, ROWS))
    assert split(waits, 5, 35) == {NOTHING: 10, ROWS: 20}
    assert split(waits, 12, 28) == {ROWS: 16}
    assert split(waits, 33, 90) == {NOTHING: 57}
    assert split(waits, 90, 33) == {}


def test_the_time_without_a_step_belongs_to_what_kept_it_from_being_planned() -> None:
    waits = Waits()
    waits.on_step(step(10, 20, NOTHING, NOTHING))
    waits.on_step(step(50, 60, NOTHING, GATE))
    assert split(waits, 25, 50) == {GATE: 25}
    assert split(waits, 15, 60) == {NOTHING: 15, GATE: 30}


def test_only_so_many_changes_are_kept() -> None:
    waits = Waits()
    for idx in range(3 * MAX_CHANGES):
        waits.on_step(step(10 * idx, 10 * idx + 10, (ROWS, GATE)[idx % 2], (GATE, ROWS)[idx % 2]))
    assert len(waits._reasons) == len(waits._since_ns) == len(waits._totals_ns) <= MAX_CHANGES
    now_ns = 30 * MAX_CHANGES
    assert split(waits, now_ns - 40, now_ns) == {ROWS: 20, GATE: 20}


REASON = st.sampled_from(REASONS)
STEPS = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50), REASON, REASON), max_size=30)


@given(STEPS, st.integers(-10, 2000), st.integers(0, 2000))
def test_the_parts_add_up(steps: list[tuple[int, int, WaitReason, WaitReason]], from_ns: int, length_ns: int) -> None:
    waits, now_ns = Waits(), 0
    for idle_ns, step_ns, reason, before in steps:
        waits.on_step(step(now_ns + idle_ns, now_ns + idle_ns + step_ns, reason, before))
        now_ns += idle_ns + step_ns
    parts = waits.split(from_ns, from_ns + length_ns)
    assert sum(parts.values()) == length_ns
    assert min(parts.values(), default=0) >= 0
