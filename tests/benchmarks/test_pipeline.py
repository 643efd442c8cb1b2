"""The device of `pipeline.py` counts what it is to count: the time between two steps, and no time of a step itself."""

import pipeline
import pytest
from pipeline import Timer

from penstock.types.plan import Capacity, RowPlan, StepPlan, Ticket

CAPACITY = Capacity(num_blocks=9, block_size=16, max_rows=2, max_step_tokens=32, max_model_len=64)
STEP_NS = 5_000


class Clock:
    """Stands for `time`."""

    def __init__(self) -> None:
        self.now_ns = 1_000_000

    def monotonic_ns(self) -> int:
        return self.now_ns

    def thread_time_ns(self) -> int:
        return 0

    def sleep(self, seconds: float) -> None:
        self.now_ns += round(seconds * 1e9)


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(pipeline, "time", clock)
    return clock


def plan(step_id: int) -> StepPlan:
    return StepPlan(step_id, 0, (), (RowPlan("a", 0, 2, (), False), RowPlan("b", 9, 1, (), True)), ())


def test_a_device_waits_for_a_step_that_comes_after_the_end_of_the_one_before(clock):
    device = Timer(CAPACITY, 1, STEP_NS)
    result = device.collect(device.submit(plan(0)))
    assert clock.now_ns == result.timing.end_ns == result.timing.start_ns + STEP_NS
    assert result.token_ids == {"b": (7,)}, "only the row that samples"
    clock.now_ns += 300
    device.submit(plan(1))
    assert device.gaps_ns[1:] == [300]


def test_it_does_not_wait_for_one_that_was_there_before(clock):
    device = Timer(CAPACITY, 2, STEP_NS)
    tickets = [device.submit(plan(0)), device.submit(plan(1))]
    started_ns = clock.now_ns
    for ticket in tickets:
        device.collect(ticket)
    assert device.gaps_ns[1:] == [0]
    assert clock.now_ns == started_ns + 2 * STEP_NS, "one after the other"


def test_a_host_that_is_late_with_its_collecting_finds_the_step_ended(clock):
    device = Timer(CAPACITY, 2, STEP_NS)
    ticket = device.submit(plan(0))
    clock.now_ns += 3 * STEP_NS
    late_ns = clock.now_ns
    assert device.collect(ticket).timing.end_ns == late_ns - 2 * STEP_NS
    assert clock.now_ns == late_ns


def test_rows_stay_full_while_requests_come_and_go(monkeypatch):
    num_rows: list[int] = []
    submit = Timer.submit

    def note(device: Timer, plan: StepPlan) -> Ticket:
        num_rows.append(len(plan.rows))
        return submit(device, plan)

    monkeypatch.setattr(Timer, "submit", note)
    crowd = pipeline.Crowd(4, 1, 2_000_000, 400)
    crowd.run()
    assert crowd.num_come > 8, "others came after the first"
    assert num_rows.count(4) > 0.9 * len(num_rows)


def test_with_two_steps_in_flight_the_device_waits_less():
    one, two = (pipeline.Crowd(4, depth, 5_000_000, 30).run() for depth in (1, 2))
    assert 0 <= two["gap_us"] < one["gap_us"]
    assert one["host_us"] > 0
    assert one["ahead"] == 0 < 0.9 < two["ahead"]


def test_each_number_of_rows_has_a_line_for_each_depth(capsys):
    pipeline.main(["--rows", "2", "4", "--steps", "30", "--step-ms", "0.2"])
    lines = [line.split(" | ") for line in capsys.readouterr().out.splitlines()[4:]]
    assert [(line[0], line[1]) for line in lines] == [("| 2", "1"), ("| 2", "2"), ("| 4", "1"), ("| 4", "2")]
