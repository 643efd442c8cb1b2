"""A crowd before the door, in virtual time: arrivals, refusals and returns against the real door and the real core.

The executor is a cost model: a step takes a fixed time, and some more per row and per token. Used by `test_overload`; as a
program it prints the table of docs/admission.md, the same on every machine:

    .venv/bin/python tests/virtual_overload/town.py
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from penstock.admission.ask import Ask
from penstock.admission.door import Admission, AdmissionLimits
from penstock.engine.core import EngineCore
from penstock.sched.policies.base import Policies
from penstock.testing import make_core
from penstock.types.errors import Rejected
from penstock.types.events import Add
from penstock.types.plan import Capacity, StepPlan
from penstock.types.request import FinishReason, Request
from penstock.types.result import StepResult, StepTiming
from penstock.types.sampling import SamplingParams
from penstock.types.stats import EngineLoad, RequestStats, StepStats

SECOND = 1_000_000_000
STEP_NS, ROW_NS, TOKEN_NS = 3_000_000, 200_000, 200_000
CAPACITY = Capacity(num_blocks=4001, block_size=16, max_rows=32, max_step_tokens=256, max_model_len=2048)


@dataclass(frozen=True, slots=True)
class Job:
    num_prompt_tokens: int
    num_new_tokens: int


@dataclass(slots=True)
class Client:
    """One caller: it comes, and as often as it is told to come back."""

    idx: int
    job: Job
    first_ns: int
    refused_ns: list[int] = field(default_factory=list)
    retry_after_s: list[int] = field(default_factory=list)
    admitted_ns: int | None = None
    first_token_ns: int | None = None
    ended_ns: int | None = None
    returns: bool = True

    @property
    def ttft_s(self) -> float:
        assert self.first_token_ns is not None
        assert self.admitted_ns is not None
        return (self.first_token_ns - self.admitted_ns) / SECOND


class Town:
    """The door, the core and the clients, on one virtual clock."""

    def __init__(self, limits: AdmissionLimits, capacity: Capacity = CAPACITY, policies: Policies | None = None) -> None:
        self.now_ns = 0
        self.capacity = capacity
        self.admission = Admission(limits, capacity)
        self.core: EngineCore = make_core(capacity, policies, observer=self)
        self.clients: dict[str, Client] = {}
        self.inbox: list[Add] = []
        self.num_ended = 0

    def run(self, clients: Sequence[Client], until_s: float = math.inf) -> None:
        """Serve all of them, and those that come back, until nothing is left to do or the time is over."""
        arrivals = [(client.first_ns, client.idx, client) for client in clients]
        heapq.heapify(arrivals)
        while self.now_ns < until_s * SECOND:
            self._apply()
            plan = self.core.begin(self.now_ns)
            if plan is None and not arrivals:
                return
            end_ns = self.now_ns + self._cost_ns(plan) if plan is not None else max(self.now_ns, arrivals[0][0])
            while arrivals and arrivals[0][0] <= end_ns:
                at_ns, _, client = heapq.heappop(arrivals)
                self.now_ns = max(self.now_ns, at_ns)
                again_ns = self._knock(client)
                if again_ns is not None:
                    heapq.heappush(arrivals, (again_ns, client.idx, client))
            if plan is not None:
                self.now_ns = end_ns
                self._finish(plan)

    def _knock(self, client: Client) -> int | None:
        """When it comes back; None if it was let in, or does not."""
        job = client.job
        ask = Ask(num_token_ids=job.num_prompt_tokens, max_new_tokens=512, claim=client.idx.to_bytes(4, "big"))
        try:
            entering = self.admission.decide(ask, self._load(), self.now_ns)
        except Rejected as refusal:
            retry_after_s = math.ceil(refusal.retry_after_s or math.nan)  # as the header has it
            client.refused_ns.append(self.now_ns)
            client.retry_after_s.append(retry_after_s)
            return self.now_ns + retry_after_s * SECOND if client.returns else None
        request = Request(
            str(client.idx),
            tuple([2 + client.idx % 200] * job.num_prompt_tokens),
            SamplingParams(max_tokens=job.num_new_tokens, temperature=0.0),
            self.now_ns,
            cache_salt=str(client.idx).encode(),
        )
        client.admitted_ns = self.now_ns
        self.clients[request.request_id] = client
        self.admission.add_requests(entering, [request], self.now_ns)
        self.inbox.append(Add(request))
        self.admission.end_entering(entering)
        return None

    def _load(self) -> EngineLoad:
        kv = self.core.scheduler.kv
        num_running, num_cached = self.core.num_running, kv.pool.num_cached
        return EngineLoad(
            num_running=num_running,
            num_waiting=self.core.num_waiting + len(self.inbox),
            num_rows_free=self.capacity.max_rows - num_running,
            num_blocks_total=kv.num_total_blocks,
            num_blocks_free=kv.pool.num_available - num_cached,
            num_blocks_cached=num_cached,
        )

    def _apply(self) -> None:
        events = self.core.apply(self.inbox, self.now_ns)
        assert not events
        self.inbox.clear()

    def _cost_ns(self, plan: StepPlan) -> int:
        return STEP_NS + ROW_NS * len(plan.rows) + TOKEN_NS * plan.num_tokens

    def _finish(self, plan: StepPlan) -> None:
        running = self.core.scheduler.running
        tokens = {row.request_id: (1,) for row in plan.rows if row.samples and row.request_id in running}  # others are padding
        result = StepResult(plan.step_id, tokens, StepTiming(plan.now_ns, self.now_ns))
        firsts = [running[name] for name in tokens if running[name].first_token_ns is None]
        self.core.finish(plan, result, self.now_ns)
        for request in firsts:
            self.clients[request.request_id].first_token_ns = self.now_ns
        self.admission.on_tokens(firsts, ())

    def on_step(self, stats: StepStats) -> None:
        self.admission.on_step(stats)

    def on_finish(self, stats: RequestStats) -> None:
        self.admission.on_finish(stats)
        assert stats.finish_reason is FinishReason.LENGTH
        self.clients[stats.request_id].ended_ns = stats.ended_ns
        self.num_ended += 1


def jobs(rng: random.Random) -> Iterator[Job]:
    """Lengths like those of conversations: log-normal, cut."""
    while True:
        num_prompt = min(1024, max(4, int(rng.lognormvariate(4.3, 1.0))))
        yield Job(num_prompt, min(400, max(4, int(rng.lognormvariate(4.2, 0.8)))))


def arrivals(rng: random.Random, rate: float, seconds: float, cv: float) -> Iterator[float]:
    """Seconds of arrivals with gamma-distributed gaps of this coefficient of variation; 1 is Poisson."""
    shape = 1 / cv**2
    at_s = rng.gammavariate(shape, 1 / (rate * shape))
    while at_s < seconds:
        yield at_s
        at_s += rng.gammavariate(shape, 1 / (rate * shape))


def make_clients(seed: int, rate: float, seconds: float, cv: float, *, start_s: float = 0.0) -> list[Client]:
    rng = random.Random(seed)
    source = jobs(rng)
    times = list(arrivals(rng, rate, seconds, cv))
    return [Client(idx, next(source), int((start_s + at_s) * SECOND)) for idx, at_s in enumerate(times)]


def measure_capacity(policies: Policies | None = None, *, seed: int = 0, num_requests: int = 300) -> float:
    """Requests per second with every row busy and as many waiting: all at once, the first and last tenth left out."""
    rng = random.Random(seed)
    source = jobs(rng)
    town = Town(AdmissionLimits(max_queue=10 * num_requests, kv_headroom=0), policies=policies)
    clients = [Client(idx, next(source), 0) for idx in range(num_requests)]
    town.run(clients)
    ends = sorted(client.ended_ns for client in clients if client.ended_ns is not None)
    first, last = num_requests // 10, num_requests - num_requests // 5
    return (last - first) * SECOND / (ends[last] - ends[first])


@dataclass(frozen=True, slots=True)
class Verdict:
    goodput: float
    """Requests per second whose first token came within the target, of those that came in while there was overload."""
    ttft_p99_s: float
    return_share: float
    """Share of the clients that came back as told that were let in at once."""
    num_refused: int
    num_clients: int


def judge(clients: Sequence[Client], slo_s: float, seconds: float, skip_s: float = 5.0) -> Verdict:
    served = [client for client in clients if client.admitted_ns is not None]
    within = [
        client
        for client in served
        if client.ended_ns is not None and skip_s * SECOND <= client.ended_ns < seconds * SECOND and client.ttft_s <= slo_s
    ]
    ttfts = sorted(client.ttft_s for client in served if client.first_token_ns is not None)
    num_returns = sum(min(len(client.refused_ns), 1) for client in clients if client.returns)
    num_broken = sum(len(client.refused_ns) > 1 for client in clients if client.returns)
    return Verdict(
        goodput=len(within) / (seconds - skip_s),
        ttft_p99_s=ttfts[max(0, math.ceil(0.99 * len(ttfts)) - 1)],
        return_share=1 - num_broken / num_returns if num_returns else 1.0,
        num_refused=sum(bool(client.refused_ns) for client in clients),
        num_clients=len(clients),
    )


def main() -> None:
    """Means of five seeds, at twice the capacity, all clients coming back as told."""
    capacity, slo_s, seconds, seeds = measure_capacity(), 2.0, 40.0, range(1, 6)
    doors = {
        "`--slo-ttft 2s`": AdmissionLimits(slo_ttft_ns=int(slo_s * SECOND)),
        "`--max-queue 20`": AdmissionLimits(max_queue=20),
        "no bound": AdmissionLimits(max_queue=10**6, kv_headroom=0),
    }
    print(f"capacity {capacity:.1f} requests/s")
    print("| arrivals | door | goodput / capacity | p99 TTFT of those let in, worst | let in on return | sent away |")
    print("|---|---|---|---|---|---|")
    for name, cv in (("Poisson", 1.0), ("gamma, CV 4", 4.0)):
        for door, limits in doors.items():
            verdicts = []
            for seed in seeds:
                clients = make_clients(seed, 2 * capacity, seconds, cv)
                Town(limits).run(clients)
                verdicts.append(judge(clients, slo_s, seconds))
            goodput = sum(verdict.goodput for verdict in verdicts) / len(verdicts) / capacity
            worst_s = max(verdict.ttft_p99_s for verdict in verdicts)
            returned = sum(verdict.return_share for verdict in verdicts) / len(verdicts)
            refused = sum(v.num_refused for v in verdicts) / sum(v.num_clients for v in verdicts)
            shown = f"{returned:.1%}" if refused else "-"
            print(f"| {name} | {door} | {goodput:.2f} | {worst_s:.2f} s | {shown} | {refused:.0%} |")


if __name__ == "__main__":
    main()
