"""Thousands of requests, some cancelled, some hopeless, some whose client leaves: each ends once, and nothing is left behind.

The whole engine (inbox, core, output stage, door) over the hash executor, under a virtual clock: no thread, no sleeping.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from penstock.admission.ask import Ask
from penstock.admission.door import Admission, AdmissionLimits
from penstock.clock import VirtualClock
from penstock.engine.output import OutputStage
from penstock.engine.ports import ObserverGroup, OutputChunk
from penstock.engine.thread import Engine
from penstock.obs.metrics import Metrics
from penstock.testing import HashExecutor, make_core, make_request
from penstock.types.errors import Rejected, RejectReason
from penstock.types.plan import Capacity, Ticket
from penstock.types.request import FinishReason
from penstock.types.result import StepResult

NUM_REQUESTS = [2_000, pytest.param(10_000, marks=pytest.mark.slow)]
CAPACITY = Capacity(num_blocks=120, block_size=8, max_rows=24, max_step_tokens=96, max_model_len=160)
STEP_NS = 1_000_000
CANCELLED, HOPELESS, LEAVING = 0.05, 0.02, 0.01


class SlowExecutor(HashExecutor):
    """A step takes its time on the virtual clock."""

    def __init__(self, clock: VirtualClock, depth: int) -> None:
        super().__init__(CAPACITY, depth=depth)
        self._clock = clock

    def collect(self, ticket: Ticket) -> StepResult:
        self._clock.advance(STEP_NS)
        return super().collect(ticket)


class NoText:
    def push(self, token_ids: Sequence[int]) -> str:
        return "x" * len(token_ids)

    def flush(self) -> str:
        return ""


@dataclass
class Fate:
    """The events of a request beside being served."""

    cancel_after_ns: int | None = None
    leave_after_tokens: int | None = None
    deadline_ns: int | None = None


class Town:
    """An engine without thread, its clients, and what they were told."""

    def __init__(self, seed: int, depth: int, max_queue: int) -> None:
        self.rng = random.Random(seed)
        self.clock = VirtualClock()
        self.metrics = Metrics("m")
        self.admission = Admission(AdmissionLimits(max_queue=max_queue, kv_headroom=0), CAPACITY)
        observer = ObserverGroup([self.metrics, self.admission])
        self.core = make_core(CAPACITY, observer=observer)
        self.executor = SlowExecutor(self.clock, depth)
        self.engine = Engine(
            self.core,
            self.executor,
            OutputStage(lambda _shown: NoText(), observer=ObserverGroup([self.metrics, self.admission])),
            clock=self.clock,
            sink=self.deliver,
            observer=observer,
        )
        self.fates: dict[str, Fate] = {}
        self.ends: dict[str, OutputChunk] = {}
        self.cancels: list[tuple[int, str]] = []
        self.refused: Counter[RejectReason] = Counter()

    def deliver(self, chunks: list[OutputChunk]) -> None:
        for chunk in chunks:
            name, fate = chunk.request_id, self.fates[chunk.request_id]
            assert name not in self.ends, f"{name} was heard of after its end"
            if chunk.finish_reason is not None:
                self.ends[name] = chunk
            elif fate.leave_after_tokens is not None and chunk.num_generated_tokens >= fate.leave_after_tokens:
                self.engine.abort(name, "the client closed the connection")

    def arrive(self, name: str) -> None:
        """One call at the door."""
        rng, now_ns = self.rng, self.clock.now_ns()
        fate = self.fates[name] = Fate()
        kind = rng.random()
        if kind < CANCELLED:
            fate.cancel_after_ns = rng.randrange(200 * STEP_NS)
        elif kind < CANCELLED + HOPELESS:
            fate.deadline_ns = now_ns + rng.randrange(1, 3) * STEP_NS
        elif kind < CANCELLED + HOPELESS + LEAVING:
            fate.leave_after_tokens = rng.randint(1, 10)
        num_prompt, num_new = rng.randint(1, 30), rng.randint(4, 30)
        ask = Ask(num_token_ids=num_prompt, max_new_tokens=num_new, min_new_tokens=num_new, deadline_ns=fate.deadline_ns)
        try:
            entering = self.admission.decide(ask, self.engine.load(), now_ns)
        except Rejected as refusal:
            self.refused[refusal.reason] += 1
            del self.fates[name]
            return
        prompt = [rng.randrange(1, 200) for _ in range(num_prompt)]
        request = make_request(name, prompt, arrival_ns=now_ns, max_tokens=num_new, deadline_ns=fate.deadline_ns)
        self.admission.add_requests(entering, [request], now_ns)
        self.engine.submit(request)
        self.admission.end_entering(entering)
        if fate.cancel_after_ns is not None:
            self.cancels.append((now_ns + fate.cancel_after_ns, name))

    def run(self, num_requests: int) -> None:
        num_come = 0
        while num_come < num_requests or self.core.has_work or self.engine.load().num_waiting:
            for _ in range(min(self.rng.choice((0, 0, 0, 1, 1, 8)), num_requests - num_come)):
                self.arrive(f"r{num_come}")
                num_come += 1
            due = [name for at_ns, name in self.cancels if at_ns <= self.clock.now_ns()]
            self.cancels = [cancel for cancel in self.cancels if cancel[0] > self.clock.now_ns()]
            for name in due:
                self.engine.abort(name)
            if not self.engine.turn():
                self.clock.advance(STEP_NS)
            if self.executor.num_steps % 50 == 0:
                self.core.check()


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("num_requests", NUM_REQUESTS)
def test_every_one_of_thousands_ends_exactly_once_and_leaves_nothing_behind(num_requests: int, depth: int) -> None:
    town = Town(seed=7, depth=depth, max_queue=num_requests)
    town.run(num_requests)

    assert town.ends.keys() == town.fates.keys()
    assert len(town.ends) + sum(town.refused.values()) == num_requests
    reasons = Counter(chunk.finish_reason for chunk in town.ends.values())
    assert reasons[FinishReason.LENGTH] > 0.6 * num_requests
    assert reasons[FinishReason.ABORT] > 0.03 * num_requests
    assert reasons[FinishReason.ERROR] == reasons[FinishReason.REJECTED] == 0
    # Of the hopeless, nobody got a whole answer, and those whom the door could tell were told there.
    hopeless = [name for name, fate in town.fates.items() if fate.deadline_ns is not None]
    assert all(town.ends[name].reject_reason == RejectReason.DEADLINE for name in hopeless)
    assert town.refused[RejectReason.DEADLINE] > 0.01 * num_requests

    town.core.check()
    kv = town.core.scheduler.kv
    assert kv.pool.num_available == kv.num_total_blocks
    assert not kv.tables
    assert (town.engine.load().num_running, town.engine.load().num_waiting) == (0, 0)
    assert len(town.admission._backlog) == 0
    assert town.admission._backlog.num_prefill_tokens == town.admission._backlog.num_blocks == 0
    assert town.admission._num_entering == 0
