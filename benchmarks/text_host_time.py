"""What does a text cost the host beside its kernels? CPU time of everything in Python between a request and its answer.

    python benchmarks/text_host_time.py [--texts 20000] [--tokens 24] [--per-step 8] [--rounds 5] [--profile]

An executor that computes nothing answers each text with the same numbers. `core`: scheduler and core, without observers.
`told`: with metrics, signals and journal, as in a server. `engine`: also the engine's thread, its output and the bridge to an
event loop, which reads the answers; the process's CPU time, both threads together. Calls of 64 texts: one after another in
`engine`, else when fewer than two steps' worth wait. Medians of the rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import gc
import statistics
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from printed import origin, table

from penstock.admission.door import Admission, AdmissionLimits
from penstock.clock import WallClock
from penstock.engine.bridge import Bridge
from penstock.engine.core import EngineCore
from penstock.engine.output import OutputStage
from penstock.engine.ports import Detokenizer, ObserverGroup
from penstock.engine.thread import Engine
from penstock.obs.explain.journal import Journal
from penstock.obs.metrics import Metrics
from penstock.obs.signals import Signals
from penstock.sched.policies.base import Budget, BudgetView, StepLimits
from penstock.sched.policies.presets import make_policies
from penstock.testing import make_core, text_capacity
from penstock.types.adapter import NoAdapters
from penstock.types.events import Add
from penstock.types.plan import Capacity, StepPlan, Ticket
from penstock.types.request import Request
from penstock.types.result import StepResult, StepTiming
from penstock.types.sampling import SamplingParams

STATES = bytes(384 * 4)
SAMPLING = SamplingParams(temperature=0.0, max_tokens=1)
CALL_TEXTS = 64


class Nothing(NoAdapters):
    """An executor that answers at once, always the same."""

    depth = 1
    block_bytes = 0

    def __init__(self, capacity: Capacity) -> None:
        self.capacity = capacity
        self._steps: deque[StepPlan] = deque()

    def submit(self, plan: StepPlan) -> Ticket:
        self._steps.append(plan)
        return Ticket(plan.step_id)

    def collect(self, ticket: Ticket) -> StepResult:
        plan = self._steps.popleft()
        return StepResult(
            ticket.step_id, {}, StepTiming(0, 0), states=dict.fromkeys([row.request_id for row in plan.rows], STATES)
        )

    def copy_blocks(self, pairs: object) -> None:
        del pairs

    def close(self) -> None: ...


def main() -> None:
    arguments = _parse()
    if arguments.profile:
        with cProfile.Profile() as profile:
            _core_us(arguments, is_told=True)
        profile.print_stats("tottime")
        return
    ways = {
        "core": lambda: _core_us(arguments, is_told=False),
        "told": lambda: _core_us(arguments, is_told=True),
        "engine": lambda: _engine_us(arguments),
    }
    rounds = [{name: measure() for name, measure in ways.items()} for _ in range(arguments.rounds)]
    print(origin(f"{arguments.texts} texts of {arguments.tokens} tokens, {arguments.per_step} a step"))
    values = {name: [found[name] for found in rounds] for name in ways}
    lines = [[name, f"{statistics.median(us):.1f}", f"{min(us):.1f}", f"{max(us):.1f}"] for name, us in values.items()]
    print(table(["CPU us a text", "median", "least", "most"], lines))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=int, default=20_000)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--per-step", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--preset", default="texts")
    parser.add_argument("--profile", action="store_true", help="print where the core's time goes, instead")
    return parser.parse_args()


def _capacity(arguments: argparse.Namespace) -> Capacity:
    return text_capacity(512, max_rows=64, max_step_tokens=max(512, arguments.tokens * arguments.per_step))


@dataclass(frozen=True)
class FixedStep(Budget):
    """A fixed number of tokens per step: an executor that takes no time teaches nothing."""

    num_tokens: int

    def limits(self, view: BudgetView) -> StepLimits:
        del view
        return StepLimits(self.num_tokens)


class Listeners:
    """The parts of a server that are told of requests."""

    def __init__(self, capacity: Capacity) -> None:
        self.metrics, self.journal = Metrics("texts"), Journal(1000)
        self.journal.speaks_for_calls = True
        admission = Admission(AdmissionLimits(), capacity, reads_priority=False)
        signals = Signals(capacity.max_rows, admission.drain.rate)
        self.observer = ObserverGroup([self.metrics, admission, signals])
        self.token_observer = ObserverGroup([self.metrics, admission])


def _make_core(arguments: argparse.Namespace, listeners: Listeners | None) -> EngineCore:
    policies = make_policies(arguments.preset, budget=FixedStep(arguments.tokens * arguments.per_step))
    observer, journal = (None, None) if listeners is None else (listeners.observer, listeners.journal)
    return make_core(_capacity(arguments), policies, observer=observer, journal=journal, enable_prefix_caching=False)


def _texts(arguments: argparse.Namespace) -> Iterator[list[Request]]:
    """Calls of `CALL_TEXTS` texts each."""
    token_ids = tuple(range(1, arguments.tokens + 1))
    for call in range(arguments.texts // CALL_TEXTS):
        yield [Request(f"call-{call}.{idx}", token_ids, SAMPLING, call, parent_id=f"call-{call}") for idx in range(CALL_TEXTS)]


def _core_us(arguments: argparse.Namespace, *, is_told: bool) -> float:
    core = _make_core(arguments, Listeners(_capacity(arguments)) if is_told else None)
    executor, calls, num_ended, now_ns = Nothing(_capacity(arguments)), _texts(arguments), 0, 0
    gc.collect()
    started_ns = time.thread_time_ns()
    while num_ended < arguments.texts // CALL_TEXTS * CALL_TEXTS:
        now_ns += 1_000_000
        few = core.num_waiting < 2 * arguments.per_step
        core.apply([Add(request) for request in next(calls, ())] if few else (), now_ns)
        plan = core.begin(now_ns)
        assert plan is not None
        num_ended += len(core.finish(plan, executor.collect(executor.submit(plan)), now_ns + 500_000))
    return (time.thread_time_ns() - started_ns) / 1e3 / num_ended


def _engine_us(arguments: argparse.Namespace) -> float:
    capacity = _capacity(arguments)
    listeners, bridge = Listeners(capacity), Bridge()
    engine = Engine(
        _make_core(arguments, listeners),
        Nothing(capacity),
        OutputStage(_no_text, observer=listeners.token_observer),
        clock=WallClock(),
        sink=bridge.deliver,
        observer=listeners.observer,
        turn_observer=listeners.metrics,
    )
    bridge.attach(engine)
    engine.start()
    gc.collect()
    started_ns = time.process_time_ns()
    num_ended = asyncio.run(_read_all(bridge, arguments))
    used_ns = time.process_time_ns() - started_ns
    engine.close(10.0)
    return used_ns / 1e3 / num_ended


async def _read_all(bridge: Bridge, arguments: argparse.Namespace) -> int:
    num_ended = 0
    for call in _texts(arguments):
        with bridge.open(call) as stream:
            while chunks := await stream.next_chunks():
                num_ended += len(chunks)
    return num_ended


def _no_text(_shown: tuple[int, ...] | None) -> Detokenizer:
    raise AssertionError("a text that is read has no text of its own")


if __name__ == "__main__":
    main()
