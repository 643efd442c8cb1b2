"""What does it cost to hold the latency between tokens, and what does it give? Budgets compared, under a virtual clock.

The real scheduler runs against a step cost like that of a model of 135M parameters on two cores: 2 ms, 0.4 ms for each decode,
0.2 ms for each token of a prompt and 0.1 us for each token before it. Nothing is computed, so that the numbers are exact and do
not depend on the machine.

    python benchmarks/budgets.py

`chat`: log-normal prompts (median 66 tokens, at most 512) and replies (median 110, at most 200). `long`: the same, but one
prompt in 17 has 4,000 tokens. `prompts`: prompts of 500 to 3,000 tokens, replies of 5 to 60. Closed loops (32 clients, 16 for
`prompts`) and Poisson arrivals near what the machine can do. `change` is the step change of load: 8 streams, then 32, then 8,
beside prompts of 4,000 tokens without end, with `--slo-itl 30ms`. Latencies are milliseconds; the last line is one JSON object.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from penstock.engine.core import EngineCore
from penstock.sched.policies.base import Budget
from penstock.sched.policies.budgets import DecodeFirst, HoldLatency
from penstock.sched.policies.presets import make_policies
from penstock.testing import make_core, make_request
from penstock.types.events import Abort, Add
from penstock.types.plan import Capacity, StepPlan
from penstock.types.result import StepResult, StepTiming

MS = 1_000_000
CAPACITY = Capacity(num_blocks=8001, block_size=16, max_rows=64, max_step_tokens=512, max_model_len=8192)
LONG_TOKENS = 512
"""A longer prompt is long."""
NO_TIME = StepTiming(0, 0)

Lengths = Sequence[tuple[int, int]]
"""(prompt, reply) in tokens."""


def cost_ns(plan: StepPlan) -> int:
    total = 2.0 * MS
    for row in plan.rows:
        if row.query_len == 1:
            total += 0.4 * MS
        else:
            total += row.query_len * (0.2 * MS + 100 * (row.context_len + row.query_len / 2))
    return int(total)


def budgets() -> dict[str, Budget]:
    """New ones, as they learn."""
    long = {"long_prefill_token_threshold": LONG_TOKENS}
    return {
        "decode-first": DecodeFirst(),
        "itl": HoldLatency(),
        "itl, short ones pass": HoldLatency(**long),
        "itl, 30 ms, short ones pass": HoldLatency(slo_itl_ns=30 * MS, **long),
        "itl, twice, short ones pass": HoldLatency(fluent_itl_ns=0, **long),
    }


@dataclass(slots=True)
class Times:
    """Times of all requests, in nanoseconds."""

    arrivals: dict[str, int] = field(default_factory=dict)
    last_tokens: dict[str, int] = field(default_factory=dict)
    gaps: list[int] = field(default_factory=list)
    firsts: dict[str, int] = field(default_factory=dict)
    """Time to the first token."""
    totals: list[int] = field(default_factory=list)


class Replay:
    """One workload through one scheduler. A closed loop of `clients`, or Poisson arrivals at `rate` per second."""

    def __init__(self, budget: Budget, lengths: Lengths, clients: int = 0, rate: float = 0.0) -> None:
        self._core = make_core(CAPACITY, make_policies(budget=budget), enable_prefix_caching=False)
        self._lengths = lengths
        self._clients = clients
        rng = random.Random(0)
        self._due_ns = [0] * len(lengths)
        for idx in range(1, len(lengths)) if rate else ():
            self._due_ns[idx] = self._due_ns[idx - 1] + int(rng.expovariate(rate) * 1e9)
        self._num_added = 0
        self._now_ns = 0
        self.times = Times()

    def run(self) -> dict[str, float]:
        for _ in range(self._clients):
            self._add()
        while self._num_added < len(self._lengths) or self._core.has_work:
            if not self._clients:
                self._add_due()
            self._step()
        return self._figures()

    def _add_due(self) -> None:
        if not self._core.has_work:
            self._now_ns = max(self._now_ns, self._due_ns[self._num_added])
        while self._num_added < len(self._lengths) and self._due_ns[self._num_added] <= self._now_ns:
            self._add(self._due_ns[self._num_added])

    def _add(self, arrival_ns: int | None = None) -> None:
        if self._num_added == len(self._lengths):
            return
        prompt, reply = self._lengths[self._num_added]
        request_id = f"r{self._num_added}"
        self._num_added += 1
        arrival_ns = self.times.arrivals[request_id] = self._now_ns if arrival_ns is None else arrival_ns
        self._core.apply([Add(make_request(request_id, prompt, max_tokens=reply, arrival_ns=arrival_ns))], self._now_ns)

    def _step(self) -> None:
        plan = self._core.begin(self._now_ns)
        assert plan is not None
        self._now_ns += cost_ns(plan)
        for event in self._core.finish(plan, sampled(plan), self._now_ns):
            self._note(event.request_id)
            if event.finish_reason is not None:
                self.times.totals.append(self._now_ns - self.times.arrivals[event.request_id])
                if self._clients:
                    self._add()

    def _note(self, request_id: str) -> None:
        before = self.times.last_tokens.get(request_id)
        if before is None:
            self.times.firsts[request_id] = self._now_ns - self.times.arrivals[request_id]
        else:
            self.times.gaps.append(self._now_ns - before)
        self.times.last_tokens[request_id] = self._now_ns

    def _figures(self) -> dict[str, float]:
        times = self.times
        prompts = {f"r{idx}": prompt for idx, (prompt, _) in enumerate(self._lengths)}
        short = [ns for request_id, ns in times.firsts.items() if prompts[request_id] <= LONG_TOKENS]
        return {
            "output_tokens_per_s": round(sum(reply for _, reply in self._lengths) / self._now_ns * 1e9),
            "itl_p50": _quantile(times.gaps, 0.5),
            "itl_p99": _quantile(times.gaps, 0.99),
            "ttft_p50": _quantile(times.firsts.values(), 0.5),
            "ttft_p99": _quantile(times.firsts.values(), 0.99),
            "short_ttft_p50": _quantile(short, 0.5),
            "short_ttft_p99": _quantile(short, 0.99),
            "e2e_p50": _quantile(times.totals, 0.5),
            "e2e_p99": _quantile(times.totals, 0.99),
        }


def sampled(plan: StepPlan) -> StepResult:
    return StepResult(plan.step_id, {row.request_id: (7,) for row in plan.rows if row.samples}, NO_TIME)


def _quantile(values: Iterable[int], share: float) -> float:
    ordered = sorted(values)
    return round(ordered[min(len(ordered) - 1, int(share * len(ordered)))] / MS, 1) if ordered else 0.0


def chat(rng: random.Random) -> tuple[int, int]:
    prompt, reply = int(rng.lognormvariate(4.2, 1.2)), int(rng.lognormvariate(4.7, 0.9))
    return min(512, max(4, prompt)), min(200, max(2, reply))


def workloads() -> dict[str, tuple[Lengths, int, float]]:
    """Lengths, clients, rate."""
    rng = random.Random(3)
    chats = [chat(rng) for _ in range(400)]
    mixed = [(4000, 20) if rng.random() < 1 / 17 else chat(rng) for _ in range(400)]
    prompts = [(rng.randrange(500, 3000), rng.randrange(5, 60)) for _ in range(100)]
    return {
        "chat, 32 clients": (chats, 32, 0.0),
        "chat, 10/s": (chats, 0, 10.0),
        "long, 32 clients": (mixed, 32, 0.0),
        "long, 5/s": (mixed, 0, 5.0),
        "prompts, 16 clients": (prompts, 16, 0.0),
        "prompts, 1.5/s": (prompts, 0, 1.5),
    }


JOIN_STEP, LEAVE_STEP, NUM_STEPS = 120, 240, 360


def change(slo_ms: int = 30) -> list[dict[str, float]]:
    """Every fourth step around the two changes: decodes, prefill tokens, duration."""
    budget = HoldLatency(slo_itl_ns=slo_ms * MS, long_prefill_token_threshold=LONG_TOKENS)
    core = make_core(CAPACITY, make_policies(budget=budget), enable_prefix_caching=False)
    core.apply([Add(make_request(f"prompt-{idx}", 4000, max_tokens=1, arrival_ns=idx + 1)) for idx in range(60)], 0)
    _join(core, range(8), 0)
    now_ns, rows = 0, []
    for number in range(NUM_STEPS):
        if number == JOIN_STEP:
            _join(core, range(8, 32), now_ns)
        if number == LEAVE_STEP:
            core.apply([Abort(f"stream-{idx}") for idx in range(8, 32)], now_ns)
        plan = core.begin(now_ns)
        assert plan is not None
        now_ns += cost_ns(plan)
        core.finish(plan, sampled(plan), now_ns)
        num_decodes = sum(row.query_len == 1 for row in plan.rows)
        rows.append(
            {"step": number, "decodes": num_decodes, "prefill": plan.num_tokens - num_decodes, "ms": cost_ns(plan) / MS}
        )
    shown = [*range(8), *range(JOIN_STEP - 2, JOIN_STEP + 10), *range(LEAVE_STEP - 2, LEAVE_STEP + 6)]
    return [{key: round(value, 1) for key, value in rows[number].items()} for number in shown]


def _join(core: EngineCore, numbers: range, now_ns: int) -> None:
    core.apply([Add(make_request(f"stream-{idx}", 2, max_tokens=4000, arrival_ns=0)) for idx in numbers], now_ns)


def main() -> None:
    report: dict[str, object] = {"benchmark": "budgets"}
    for title, (lengths, clients, rate) in workloads().items():
        figures = {name: Replay(budget, lengths, clients, rate).run() for name, budget in budgets().items()}
        report[title] = figures
        print(title)
        for name, row in figures.items():
            print(f"  {name:28}", ", ".join(f"{key} {value:g}" for key, value in row.items()))
    report["change"] = change()
    print("change")
    for row in report["change"]:  # type: ignore[attr-defined]
        print(" ", row)
    print(json.dumps(report))


if __name__ == "__main__":
    main()
