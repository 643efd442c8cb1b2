"""How long does a device wait for the host between two steps? The real engine over an executor whose steps take a fixed time.

    python benchmarks/pipeline.py [--step-ms 5] [--steps 200] [--cases plain host priority]

The executor needs no CPU while a step runs, as with a GPU: it notes when it was given a step and when the one before had ended,
and `collect` sleeps until the step has. All else is as in a server, but for HTTP: scheduler, loop, detokenizing (of words that
are numbers), stop strings. Decoding rows, `--rows` of them, and a reply ends and another begins every few steps. With a depth
of 1 the device waits while the host plans and commits; with a depth of 2 only if that takes longer than a step.

Cases: `plain`; `host`, a tier in the machine's memory below a pool that is full, so that almost every step saves blocks of
`--block-kib` each, and every second prompt is one that only the tier has; `priority`, with a queue beyond the rows, and a short
request of a higher class every ten steps, which pauses another.

The last line is one JSON object, by rows, case and depth: `gap_us`, the median time between two steps on the device, and its
ninth decile; `host_us`, the median CPU time of the engine thread per step; `steps_per_s` over all; `ahead`, the share of the
steps that came while one was in flight. For the tier: the share of the steps before which blocks were read, and how many were
read and written; for classes, how often somebody was paused.
"""

from __future__ import annotations

import argparse
import json
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

import numpy as np

from penstock import machine
from penstock.clock import WallClock
from penstock.engine.output import OutputStage
from penstock.engine.ports import BlockMover, OutputChunk
from penstock.engine.thread import Engine
from penstock.engine.transfers import Transfers
from penstock.kv.tiers import Tier
from penstock.sched.policies.presets import make_policies
from penstock.storage.host_memory import HostMemory
from penstock.testing import make_core, make_request
from penstock.types.plan import Capacity, StepPlan, Ticket
from penstock.types.request import Request
from penstock.types.result import StepResult, StepTiming

BLOCK_SIZE = 16
PROMPT_TOKENS = 64
MAX_TOKENS = 160
WARM_UP_STEPS = 20
TIMEOUT_S = 120.0
CASES = ("plain", "host", "priority")
QUEUE_LEN = 16
"""Requests that wait, where there are classes."""
HIGH_EVERY_STEPS, HIGH_TOKENS = 10, 16
"""So often one of a higher class comes, and its reply."""
RETURN_AFTER = 16
"""So many others have ended when a prompt comes again: the pool, which is a little larger than what runs, has it no more."""


class Timer:
    """An executor that says `7` when the time of a step is over."""

    def __init__(self, capacity: Capacity, depth: int, step_ns: int, block_bytes: int = 1) -> None:
        self.capacity = capacity
        self.depth = depth
        self.block_bytes = block_bytes
        self.num_ahead = self.num_saving = self.num_read = self.num_written = 0
        """Steps that came while one was in flight; steps before which blocks were read; blocks."""
        self.gaps_ns: list[int] = []
        """Between the end of a step and the beginning of the next."""
        self.cpu_ns: list[int] = []
        """CPU time of the engine thread, at each `collect`."""
        self._step_ns = step_ns
        self._ends_ns: deque[int] = deque()
        self._last_end_ns = 0
        self._has_read = False
        """Since the last step."""
        self._content = np.ones(block_bytes, np.uint8)
        self._said: deque[Mapping[str, tuple[int, ...]]] = deque()

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        del pairs

    def read_blocks(self, block_ids: Sequence[int], out: Sequence[memoryview]) -> None:
        """The host's part, as if the device had copied at once."""
        self.num_read += len(block_ids)
        self._has_read = True
        for target in out:
            np.frombuffer(target, np.uint8)[:] = self._content

    def write_blocks(self, block_ids: Sequence[int], contents: Sequence[memoryview]) -> None:
        self.num_written += len(block_ids)
        for content in contents:
            self._content[:] = np.frombuffer(content, np.uint8)

    def submit(self, plan: StepPlan) -> Ticket:
        now_ns = time.monotonic_ns()
        self.num_ahead += len(self._ends_ns) > 0
        self.num_saving += self._has_read
        self._has_read = False
        start_ns = max(now_ns, self._last_end_ns)
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
    """Token 7 is `7 `."""

    def push(self, token_ids: Sequence[int]) -> str:
        return "".join(f"{token_id} " for token_id in token_ids)

    def flush(self) -> str:
        return ""


class Crowd:
    """As many requests as there are rows, and a queue if there are classes; when one ends, another comes."""

    def __init__(
        self, num_rows: int, depth: int, step_ns: int, num_steps: int, *, case: str = "plain", block_bytes: int = 1
    ) -> None:
        num_blocks = 1 + (num_rows + 8) * -(-(PROMPT_TOKENS + MAX_TOKENS) // BLOCK_SIZE)
        capacity = Capacity(num_blocks, BLOCK_SIZE, num_rows, 2048, PROMPT_TOKENS + MAX_TOKENS)
        self.executor = Timer(capacity, depth, step_ns, block_bytes)
        self._case = case
        tier = Tier(4 * num_blocks) if case == "host" else None
        self._core = make_core(capacity, make_policies(order="priority" if case == "priority" else "fcfs"), tier=tier)

        def make_transfers(blocks: BlockMover, wake: Callable[[], None]) -> Transfers | None:
            if tier is None:
                return None
            store = HostMemory(tier.slots.num_slots, content_bytes=block_bytes)
            return Transfers(self._core.scheduler.kv, blocks, store, clock=WallClock(), wake=wake)

        self.engine = Engine(
            self._core,
            self.executor,
            OutputStage(lambda _: Numbers()),
            clock=WallClock(),
            sink=self._hear,
            make_transfers=make_transfers,
        )
        self._num_rows = num_rows
        self._num_steps = num_steps
        self._num_come = 0
        self._prompts: dict[str, Sequence[int]] = {}
        self._ended: deque[str] = deque()
        self._requests: list[Request] = []
        self._high: set[str] = set()
        self._next_high_step = WARM_UP_STEPS
        self._is_over = threading.Event()

    def _next(self, max_tokens: int, priority: int = 1) -> Request:
        self._num_come += 1
        name = f"r{self._num_come}"
        prompt: Sequence[int] = [self._num_come, *range(1, PROMPT_TOKENS)]
        if self._case == "host" and self._num_come % 2 and len(self._ended) >= RETURN_AFTER:
            prompt = self._prompts[self._ended.popleft()]
        self._prompts[name] = prompt
        arrival_ns = time.monotonic_ns()
        request = make_request(name, prompt, max_tokens=max_tokens, arrival_ns=arrival_ns, stop=("8 ",), priority=priority)
        self._requests.append(request)
        return request

    def _hear(self, chunks: list[OutputChunk]) -> None:
        if len(self.executor.gaps_ns) > self._num_steps + WARM_UP_STEPS:
            self._is_over.set()
        elif not self._is_over.is_set():
            for chunk in chunks:
                if chunk.finish_reason is not None and chunk.request_id not in self._high:
                    self._ended.append(chunk.request_id)
                    self.engine.submit(self._next(MAX_TOKENS))
            if self._case == "priority" and len(self.executor.gaps_ns) >= self._next_high_step:
                self._next_high_step += HIGH_EVERY_STEPS
                high = self._next(HIGH_TOKENS, priority=0)
                self._high.add(high.request_id)
                self.engine.submit(high)

    def run(self) -> dict[str, float]:
        # The first replies end one after another.
        for idx in range(self._num_rows):
            self.engine.submit(self._next(WARM_UP_STEPS + 1 + idx * (MAX_TOKENS - WARM_UP_STEPS - 1) // self._num_rows))
        for _ in range(QUEUE_LEN if self._case == "priority" else 0):
            self.engine.submit(self._next(MAX_TOKENS))
        self.engine.start()
        started_s = time.monotonic()
        assert self._is_over.wait(TIMEOUT_S), "the engine has stopped"
        device = self.executor
        seconds, num_steps, num_ahead = time.monotonic() - started_s, len(device.gaps_ns), device.num_ahead
        self.engine.close(0)
        gaps_ns = device.gaps_ns[WARM_UP_STEPS : self._num_steps + WARM_UP_STEPS]
        cpu_ns = device.cpu_ns[WARM_UP_STEPS : self._num_steps + WARM_UP_STEPS]
        host_ns = [later - earlier for earlier, later in pairwise(cpu_ns)]
        report = {
            "gap_us": round(statistics.median(gaps_ns) / 1e3, 1),
            "gap_p90_us": round(statistics.quantiles(gaps_ns, n=10)[-1] / 1e3, 1),
            "host_us": round(statistics.median(host_ns) / 1e3, 1),
            "steps_per_s": round(num_steps / seconds, 1),
            "ahead": round(num_ahead / num_steps, 3),
        }
        if self._case == "host":
            report["saving"] = round(device.num_saving / len(device.gaps_ns), 3)
            report |= {"blocks_read": device.num_read, "blocks_written": device.num_written}
        if self._case == "priority":
            report["pauses"] = sum(request.num_preemptions for request in self._requests)
        return report


def main() -> None:
    parser = argparse.ArgumentParser(description="Gap between steps on a device, by depth.")
    parser.add_argument("--step-ms", type=float, default=5.0)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rows", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--depths", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--cases", choices=CASES, nargs="+", default=["plain"])
    parser.add_argument("--block-kib", type=int, default=64, help="of a block of the pool, above a tier")
    arguments = parser.parse_args()
    report: dict[str, object] = {
        "benchmark": "pipeline",
        "cpu": machine.cpu_name(),
        "step_ms": arguments.step_ms,
        "steps": arguments.steps,
    }
    for num_rows in arguments.rows:
        for case in arguments.cases:
            for depth in arguments.depths:
                crowd = Crowd(
                    num_rows,
                    depth,
                    int(arguments.step_ms * 1e6),
                    arguments.steps,
                    case=case,
                    block_bytes=arguments.block_kib << 10,
                )
                name = f"rows_{num_rows}_depth_{depth}" if case == "plain" else f"rows_{num_rows}_{case}_depth_{depth}"
                report[name] = crowd.run()
    print(json.dumps(report))


if __name__ == "__main__":
    main()
