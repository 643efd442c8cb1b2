"""What does each gate do, step by step? Six requests through static, dynamic and continuous batching, drawn from their plans.

    python benchmarks/batch_picture.py

Plans are those of the real scheduler, computed by the hash executor under a virtual clock, where every step takes a
millisecond; a column is a step. docs/batching.md shows the output (a test compares the two). In a cell: 12 positions of the
prompt, 12+4 with 4 positions of padding before it; o a token of the reply; x a position that is computed for nobody, in the
row of a request that has ended; . the request waits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from penstock.sched.policies.base import Gate
from penstock.sched.policies.gates import Continuous, Dynamic, Static
from penstock.sched.policies.presets import make_policies
from penstock.testing import Driver, HashExecutor, make_core, make_request
from penstock.types.events import Add
from penstock.types.plan import Capacity, PaddingId, StepPlan
from penstock.types.request import Request

MS = 1_000_000
BATCH_SIZE = 3


@dataclass(frozen=True, slots=True)
class Guest:
    """A request of the picture."""

    name: str
    arrival_ms: int
    num_prompt_tokens: int
    max_tokens: int


GUESTS = (
    Guest("a", 0, 12, 6),
    Guest("b", 0, 4, 3),
    Guest("c", 1, 10, 4),
    Guest("d", 1, 5, 8),
    Guest("e", 3, 14, 2),
    Guest("f", 6, 3, 4),
)
GATES: Mapping[str, Gate] = {
    "static: 3 requests, or those that are there after 5 ms": Static(BATCH_SIZE, 5 * MS),
    "dynamic: 3 requests of up to 8 or up to 16 prompt tokens, or a window of 2 ms": Dynamic(BATCH_SIZE, (), 2 * MS, (8, 16)),
    "continuous: 3 rows": Continuous(),
}


def record(gate: Gate) -> list[StepPlan]:
    """Every plan until all have ended."""
    max_rows = BATCH_SIZE if isinstance(gate, Continuous) else 2 * BATCH_SIZE
    capacity = Capacity(num_blocks=100, block_size=4, max_rows=max_rows, max_step_tokens=64, max_model_len=64)
    policies = make_policies(gate=gate, budget="decode-first")
    driver = Driver(make_core(capacity, policies, enable_prefix_caching=False), HashExecutor(capacity))
    later = list(GUESTS)
    while later or driver.core.has_work:
        now_ns = driver.clock.now_ns()
        come = [guest for guest in later if guest.arrival_ms * MS <= now_ns]
        later = later[len(come) :]
        if driver.turn(*(Add(_request(guest)) for guest in come)) is None:
            wakeup_ns = driver.core.next_wakeup_ns(now_ns)
            times = [guest.arrival_ms * MS for guest in later[:1]] + ([] if wakeup_ns is None else [wakeup_ns])
            driver.clock.advance_to(min(times, default=now_ns))
    return driver.plans


def draw(plans: Sequence[StepPlan]) -> list[str]:
    """A line per request and a column per millisecond."""
    columns = {plan.now_ns // MS: _cells(plan) for plan in plans}
    width = max(len(cell) for cells in columns.values() for cell in cells.values()) + 1
    times = range(max(columns) + 1)
    lines = ["ms" + " " * 14 + "".join(str(time).rjust(width) for time in times)]
    for guest in GUESTS:
        own = [time for time, cells in columns.items() if guest.name in cells]
        cells = [columns.get(time, {}).get(guest.name, _idle(guest, time, own)).rjust(width) for time in times]
        lines.append(f"{guest.name} {guest.num_prompt_tokens:3} + {guest.max_tokens:<8}" + "".join(cells).rstrip())
    return lines


def summary(plans: Sequence[StepPlan]) -> str:
    padding = sum(row.query_len for plan in plans for row in plan.rows if isinstance(row.request_id, PaddingId))
    total = sum(plan.num_tokens for plan in plans)
    return f"{len(plans)} steps, {total} positions, {padding} of them padding ({padding / total:.0%})"


def _request(guest: Guest) -> Request:
    prompt = [ord(guest.name)] * guest.num_prompt_tokens
    return make_request(guest.name, prompt, arrival_ns=guest.arrival_ms * MS, max_tokens=guest.max_tokens)


def _cells(plan: StepPlan) -> dict[str, str]:
    """The letters in each request's row."""
    cells = {row.request_id: "o" if row.query_len == 1 else str(row.query_len) for row in plan.rows}
    for row in plan.rows:
        if isinstance(row.request_id, PaddingId):
            owner = row.request_id.split(" of ")[1]
            cells[owner] = "x" if row.samples else f"{cells[owner]}+{row.query_len}"
    return cells


def _idle(guest: Guest, time: int, own: Sequence[int]) -> str:
    return "." if guest.arrival_ms <= time < own[0] else ""


def main() -> None:
    for title, gate in GATES.items():
        plans = record(gate)
        print(title, *draw(plans), summary(plans), "", sep="\n")


if __name__ == "__main__":
    main()
