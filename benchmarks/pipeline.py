"""How long does a device wait for the host between two steps? The real engine over an executor whose steps take a fixed time.

    python benchmarks/pipeline.py [--step-ms 5] [--steps 200]

The executor needs no CPU while a step runs, as with a GPU: it records when a step came and when the one before ended,
and `collect` sleeps until the step's end. All else is as in a server, but for HTTP: scheduler, loop, detokenizing (tokens print
as numbers), stop strings. 64 or 256 rows decode, and a reply ends and another begins every few steps. With one step in flight
the device waits while the host plans and commits; with two only if that takes longer than a step.

`gap` is the time between two steps on the device, median and p90; `host` the median CPU time of the engine thread
per step; `ahead` the share of the steps submitted while one was in flight.
"""

from __future__ import annotations

import argparse
import statistics
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import pairwise

from printed import origin, percent, table

from penstock.clock import WallClock
from penstock.engine.output import OutputStage
from penstock.engine.ports import OutputChunk
from penstock.engine.thread import Engine
from penstock.testing import make_core, make_request
from penstock.types.adapter import NoAdapters
from penstock.types.plan import Capacity, StepPlan, Ticket
from penstock.types.request import Request
from penstock.types.result import StepResult, StepTiming

BLOCK_SIZE = 16
PROMPT_TOKENS = 64
MAX_TOKENS = 160
WARM_UP_STEPS = 20
TIMEOUT_S = 120.0


class Timer(NoAdapters):
    """An executor that says `7` when the time of a step is over."""

    def __init__(self, capacity: Capacity, depth: int, step_ns: int) -> None:
        self.capacity = capacity
        self.depth = depth
        self.num_ahead = 0
        """Steps that came while one was in flight."""
        self.gaps_ns: list[int] = []
        """Between the end of a step and the beginning of the next."""
        self.cpu_ns: list[int] = []
        """CPU time of the engine thread, at each `collect`."""
        self._step_ns = step_ns
        self._ends_ns: deque[int] = deque()
        self._last_end_ns = 0
        self._said: deque[Mapping[str, tuple[int, ...]]] = deque()

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None: ...

    def submit(self, plan: StepPlan) -> Ticket:
        self.num_ahead += len(self._ends_ns) > 0
        start_ns = max(time.monotonic_ns(), self._last_end_ns)
        self.gaps_ns.append(start_ns - self._last_end_ns)
        self._last_end_ns = start_ns + self._step_ns
        self._ends_ns.append(self._last_end_ns)
        self._said.append({row.request_id: (7,) for row in plan.rows if row.samples})
        return Ticket(plan.step_id)

    def collect(self, ticket: Ticket) -> StepResult:
        self.cpu_ns.append(time.thread_time_ns())
        end_ns = self._ends_ns.popleft()
        time.sleep(max(0, end_ns - time.monotonic_ns()) / 1e9)
        return StepResult(ticket.step_id, self._said.popleft(), StepTiming(end_ns - self._step_ns, end_ns))

    def close(self) -> None: ...


class Numbers:
    """A detokenizer: token 7 is `7 `."""

    def push(self, token_ids: Sequence[int]) -> str:
        return "".join(f"{token_id} " for token_id in token_ids)

    def flush(self) -> str:
        return ""


class Crowd:
    """As many requests as there are rows; when one ends, another comes."""

    def __init__(self, num_rows: int, depth: int, step_ns: int, num_steps: int) -> None:
        num_blocks = 1 + (num_rows + 8) * -(-(PROMPT_TOKENS + MAX_TOKENS) // BLOCK_SIZE)
        capacity = Capacity(num_blocks, BLOCK_SIZE, num_rows, 2048, PROMPT_TOKENS + MAX_TOKENS)
        self.executor = Timer(capacity, depth, step_ns)
        output = OutputStage(lambda _: Numbers())
        self.engine = Engine(make_core(capacity), self.executor, output, clock=WallClock(), sink=self._hear)
        self.num_come = 0
        self._num_rows, self._num_steps = num_rows, num_steps
        self._is_over = threading.Event()

    def _next(self, max_tokens: int) -> Request:
        self.num_come += 1
        prompt = [self.num_come, *range(1, PROMPT_TOKENS)]
        return make_request(f"r{self.num_come}", prompt, max_tokens=max_tokens, arrival_ns=time.monotonic_ns(), stop=("8 ",))

    def _hear(self, chunks: list[OutputChunk]) -> None:
        if len(self.executor.gaps_ns) > self._num_steps + WARM_UP_STEPS:
            self._is_over.set()
        elif not self._is_over.is_set():
            for _ in (chunk for chunk in chunks if chunk.finish_reason is not None):
                self.engine.submit(self._next(MAX_TOKENS))

    def run(self) -> dict[str, float]:
        # The first replies end one after another.
        for idx in range(self._num_rows):
            self.engine.submit(self._next(WARM_UP_STEPS + 1 + idx * (MAX_TOKENS - WARM_UP_STEPS - 1) // self._num_rows))
        self.engine.start()
        started_s = time.monotonic()
        assert self._is_over.wait(TIMEOUT_S), "the engine has stopped"
        seconds, num_steps, num_ahead = time.monotonic() - started_s, len(self.executor.gaps_ns), self.executor.num_ahead
        self.engine.close(0)
        measured = slice(WARM_UP_STEPS, self._num_steps + WARM_UP_STEPS)
        gaps_ns, cpu_ns = self.executor.gaps_ns[measured], self.executor.cpu_ns[measured]
        return {
            "gap_us": statistics.median(gaps_ns) / 1e3,
            "gap_p90_us": statistics.quantiles(gaps_ns, n=10)[-1] / 1e3,
            "host_us": statistics.median(later - earlier for earlier, later in pairwise(cpu_ns)) / 1e3,
            "steps_per_s": num_steps / seconds,
            "ahead": num_ahead / num_steps,
        }


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--step-ms", type=float, default=5.0)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rows", type=int, nargs="+", default=[64, 256])
    args = parser.parse_args(words)
    lines = []
    for num_rows, depth in ((num_rows, depth) for num_rows in args.rows for depth in (1, 2)):
        found = Crowd(num_rows, depth, int(args.step_ms * 1e6), args.steps).run()
        lines.append([num_rows, depth, percent(found.pop("ahead")), *(f"{figure:.0f}" for figure in found.values())])
    print(origin())
    print(table(["rows", "steps in flight", "ahead", "gap, us", "its p90", "host, us a step", "steps/s"], lines))


if __name__ == "__main__":
    main()
