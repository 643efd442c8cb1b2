"""What do the waiting orders change? Fair shares, classes, deadlines, short jobs first, each against first come, first served.

    python benchmarks/policies.py                     # all four, about three minutes
    python benchmarks/policies.py --parts fair edf

The real scheduler and core over a modelled executor, under a virtual clock: the numbers are exact, repeat to the last digit
and do not depend on the machine. Steps take as long as `penstock.lab.cost_model.CostModel()` says. Loads are relative to
the capacity: the rate at which the same requests are served when all are there at once. Lengths are those of real traces
(--traces): prompts and outputs of `azure_conv_2023.csv` divided by 4, at most 1,500 and 500; for `sjf` the true outputs of
`length_predictions_3class.csv` and what a small model predicted for them. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import csv
import json
import random
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path

from workloads import AZURE_DIVISOR, AZURE_FILE, DEFAULT_TRACES

from penstock.lab.arrivals import poisson
from penstock.lab.simulation import Outcome, Simulation
from penstock.lab.traces import read_workload
from penstock.lab.transforms import cap_lengths, divide_lengths
from penstock.lab.workload import Job, Workload
from penstock.sched.policies.presets import make_policies
from penstock.types.plan import Capacity, StepPlan
from penstock.types.request import FinishReason

CAPACITY = Capacity(num_blocks=1 + 4096, block_size=16, max_rows=32, max_step_tokens=512, max_model_len=4096)
PREDICTIONS_FILE = "length_predictions_3class.csv"
MAX_PROMPT_TOKENS, MAX_OUTPUT_TOKENS = 1500, 500
NUM_LIGHT_TENANTS = 8
CREDIT_TOKENS = 2048
"""Credit of a tenant that comes back: the default of `FairShares`."""
FAIR_SPAN_S = 1200.0
LIGHT_RATE, HEAVY_LOAD, LOW_CLASS_LOAD = 0.15, 1.2, 0.8
EDF_LOADS, SJF_LOADS = (0.6, 0.8, 0.9, 1.0, 1.2, 1.5), (0.9, 1.0, 1.2)
NUM_JOBS = 3000
PATIENCE_S = (5.0, 30.0)


def read_azure(traces: Path) -> Sequence[Job]:
    """All of them, due at once: their lengths are what is drawn from."""
    trace = divide_lengths(read_workload(traces / AZURE_FILE), AZURE_DIVISOR)
    trace = cap_lengths(trace, max_prompt_tokens=MAX_PROMPT_TOKENS, max_output_tokens=MAX_OUTPUT_TOKENS)
    return [replace(job, arrival_ns=0) for job in trace.jobs]


def read_predictions(traces: Path, skip: int, count: int) -> list[tuple[int, int]]:
    """(true output, predicted class) of `count` rows."""
    with (traces / PREDICTIONS_FILE).open(encoding="utf-8", newline="") as file:
        rows = islice(csv.DictReader(file), skip, skip + count)
        return [(max(1, int(row["output_token_length"])), int(row["predicted_length"])) for row in rows]


def simulation(order: str, budget: str | None = None) -> Simulation:
    """The default preset's policies but for the order, and the budget if one is named."""
    return Simulation(
        capacity=CAPACITY, make_policies=lambda: make_policies(order=order, budget=budget), enable_prefix_caching=False
    )


def of(jobs: Sequence[Job]) -> Workload:
    """Those that come first stand first; of equals as they are."""
    return Workload(name="policies", jobs=jobs)


def capacity_of(jobs: Sequence[Job]) -> float:
    """Requests per second when all are there at once."""
    outcome = simulation("fcfs").run(of([replace(job, arrival_ns=0, deadline_ns=None) for job in jobs]))
    return len(jobs) / (outcome.duration_ns / 1e9)


def quantile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


# fair


@dataclass
class GapMeter:
    """The range of what the heavy tenant and a light one were given, over each time in which both waited (weighted tokens)."""

    jobs: Sequence[Job]
    given: Counter[str] = field(default_factory=Counter)
    waiting: Counter[str] = field(default_factory=Counter)
    ranges: dict[str, tuple[int, int]] = field(default_factory=dict)
    largest: int = 0
    next_idx: int = 0
    by_arrival: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.by_arrival = sorted(range(len(self.jobs)), key=lambda idx: self.jobs[idx].arrival_ns)

    def on_plan(self, plan: StepPlan) -> None:
        while self.next_idx < len(self.by_arrival) and self.jobs[self.by_arrival[self.next_idx]].arrival_ns <= plan.now_ns:
            self.waiting[self.jobs[self.by_arrival[self.next_idx]].tenant] += 1
            self.next_idx += 1
        for admit in plan.admits:
            tenant = self.jobs[int(admit.request_id)].tenant
            self.waiting[tenant] -= 1
            self.given[tenant] += admit.num_prompt_tokens
        for row in plan.rows:
            self.given[self.jobs[int(row.request_id)].tenant] += 2 * row.samples
        for tenant in [name for name in self.given if name != "heavy"]:
            if self.waiting["heavy"] and self.waiting[tenant]:
                gap = self.given["heavy"] - self.given[tenant]
                low, high = self.ranges.get(tenant, (gap, gap))
                self.ranges[tenant] = low, high = min(low, gap), max(high, gap)
                self.largest = max(self.largest, high - low)
            else:
                self.ranges.pop(tenant, None)


@dataclass(frozen=True)
class Crowd:
    """Eight light tenants and a heavy one."""

    light: list[Job]
    heavy: list[Job]
    capacity: float
    """Requests per second."""


def make_crowd(traces: Path, heavy_load: float) -> Crowd:
    trace = read_azure(traces)

    def jobs_of(tenant: str, rate: float, seed: int) -> list[Job]:
        rng = random.Random(seed)
        drawn = (rng.choice(trace) for _ in range(int(rate * FAIR_SPAN_S)))
        times = poisson(rng, int(rate * FAIR_SPAN_S), rate)
        return [replace(job, arrival_ns=at_ns, tenant=tenant) for at_ns, job in zip(times, drawn, strict=True)]

    light = [job for k in range(NUM_LIGHT_TENANTS) for job in jobs_of(f"light{k}", LIGHT_RATE, k)]
    capacity = capacity_of(light)
    return Crowd(light, jobs_of("heavy", heavy_load * capacity, 99), capacity)


def ttft(outcome: Outcome, count: int) -> dict[str, float]:
    """Times to first token of the first `count` requests, in seconds."""
    ended = outcome.ended[:count]
    ttft_s = [(stats.first_token_ns - stats.arrival_ns) / 1e9 for stats in ended if stats.first_token_ns is not None]
    return {"ttft_p50_s": round(quantile(ttft_s, 0.5), 3), "ttft_p99_s": round(quantile(ttft_s, 0.99), 3)}


def run_fair(traces: Path) -> dict[str, object]:
    crowd = make_crowd(traces, HEAVY_LOAD)
    light, jobs = crowd.light, crowd.light + crowd.heavy
    report: dict[str, object] = {
        "capacity_per_s": round(crowd.capacity, 2),
        "light_load": round(NUM_LIGHT_TENANTS * LIGHT_RATE / crowd.capacity, 3),
        "heavy_load": HEAVY_LOAD,
        "light_requests": len(light),
        "heavy_requests": len(crowd.heavy),
        "gap_bound": 2 * (max(MAX_PROMPT_TOKENS, 2 * (CAPACITY.num_blocks - 1) * CAPACITY.block_size) + CREDIT_TOKENS),
    }
    for budget in ("decode-first", "itl"):
        rows: dict[str, dict[str, float]] = {}
        for name, order, served in (("alone", "fcfs", light), ("fcfs", "fcfs", jobs), ("fair", "fair", jobs)):
            meter = GapMeter(served)
            outcome = simulation(order, budget).run(of(served), on_plan=meter.on_plan)
            rows[name] = {**ttft(outcome, len(light)), "largest_gap": meter.largest}
            print("fair", budget, name, rows[name], flush=True)
        report[budget] = rows
    return report


# priority


def run_priority(traces: Path) -> dict[str, object]:
    """The same requests; the light tenants' are of a higher class."""
    crowd = make_crowd(traces, LOW_CLASS_LOAD)
    high = crowd.light
    jobs = high + [replace(job, priority=1) for job in crowd.heavy]
    report: dict[str, object] = {"high_requests": len(high), "low_requests": len(crowd.heavy), "low_load": LOW_CLASS_LOAD}
    for budget in ("decode-first", "itl"):
        rows: dict[str, dict[str, float]] = {}
        for name, order, served in (("alone", "fcfs", high), ("fcfs", "fcfs", jobs), ("priority", "priority", jobs)):
            outcome = simulation(order, budget).run(of(served))
            num_paused = sum(stats.num_preemptions for stats in outcome.ended)
            rows[name] = {**ttft(outcome, len(high)), "preemptions": num_paused, "duration_s": round(outcome.duration_ns / 1e9)}
            print("priority", budget, name, rows[name], flush=True)
        report[budget] = rows
    return report


# edf


def run_edf(traces: Path) -> dict[str, object]:
    rng = random.Random(5)
    plain = rng.choices(read_azure(traces), k=NUM_JOBS)
    patience_ns = [round(rng.choice(PATIENCE_S) * 1e9) for _ in plain]
    capacity = capacity_of(plain)
    rows = []
    for load in EDF_LOADS:
        times = poisson(random.Random(6), NUM_JOBS, load * capacity)
        jobs = [
            replace(job, arrival_ns=at_ns, deadline_ns=at_ns + patience)
            for job, at_ns, patience in zip(plain, times, patience_ns, strict=True)
        ]
        row: dict[str, float] = {"load": load}
        for order in ("fcfs", "edf"):
            row[order] = round(attainment(simulation(order).run(of(jobs))), 4)
        rows.append(row)
        print("edf", row, flush=True)
    return {"capacity_per_s": round(capacity, 2), "requests": NUM_JOBS, "patience_s": PATIENCE_S, "attainment": rows}


def attainment(outcome: Outcome) -> float:
    """Share of requests that ended by themselves, and so before their deadline."""
    return statistics.fmean(stats.finish_reason is not FinishReason.ABORT for stats in outcome.ended)


# sjf


@dataclass(frozen=True)
class Contender:
    order: str
    predict: Callable[[int], int] | None = None
    """Index of a job -> predicted output; None: the online predictor."""


def run_sjf(traces: Path) -> dict[str, object]:
    prompts = random.Random(7).choices(read_azure(traces), k=NUM_JOBS)
    held_out, rows = (read_predictions(traces, skip, NUM_JOBS) for skip in (NUM_JOBS, 0))
    class_means = {label: round(statistics.fmean(n for n, own in held_out if own == label)) for label in (0, 1, 2)}
    plain = [replace(job, num_output_tokens=output) for job, (output, _) in zip(prompts, rows, strict=True)]
    contenders = {
        "fcfs": Contender("fcfs"),
        "oracle": Contender("sjf", lambda idx: rows[idx][0]),
        "file": Contender("sjf", lambda idx: class_means[rows[idx][1]]),
        "online": Contender("sjf"),
    }
    capacity = capacity_of(plain)
    table = [_sjf_row(load, plain, contenders, capacity, "") for load in SJF_LOADS]
    apps = [replace(job, tenant=f"class{label}") for job, (_, label) in zip(plain, rows, strict=True)]
    table_apps = [_sjf_row(load, apps, contenders, capacity, ", a tenant per class") for load in SJF_LOADS]
    return {
        "capacity_per_s": round(capacity, 2),
        "requests": NUM_JOBS,
        "class_means": class_means,
        "mean_latency_s": table,
        "mean_latency_s_with_a_tenant_per_class": table_apps,
    }


def _sjf_row(
    load: float, plain: Sequence[Job], contenders: dict[str, Contender], capacity: float, note: str
) -> dict[str, float]:
    times = poisson(random.Random(8), len(plain), load * capacity)
    jobs = [replace(job, arrival_ns=at_ns) for job, at_ns in zip(plain, times, strict=True)]
    row: dict[str, float] = {"load": load}
    for name, contender in contenders.items():
        predict = contender.predict
        predictions = None if predict is None else {idx: predict(idx) for idx in range(len(jobs))}
        ended = simulation(contender.order).run(of(jobs), predictions=predictions).ended
        row[name] = round(statistics.fmean(stats.ended_ns - stats.arrival_ns for stats in ended) / 1e9, 3)
        row[f"{name}_max"] = round(max(stats.ended_ns - stats.arrival_ns for stats in ended) / 1e9, 1)
    gain = row["fcfs"] - row["oracle"]
    for name in ("file", "online"):
        row[f"{name}_share_of_gain"] = round((row["fcfs"] - row[name]) / gain, 2)
    print(f"sjf{note}", row, flush=True)
    return row


PARTS: dict[str, Callable[[Path], dict[str, object]]] = {
    "fair": run_fair,
    "priority": run_priority,
    "edf": run_edf,
    "sjf": run_sjf,
}


def main() -> None:
    parser = argparse.ArgumentParser(description="What the waiting orders change, under a virtual clock.")
    parser.add_argument("--traces", type=Path, default=DEFAULT_TRACES)
    parser.add_argument("--parts", nargs="+", choices=tuple(PARTS), default=list(PARTS))
    arguments = parser.parse_args()
    report: dict[str, object] = {"benchmark": "policies"}
    for part in arguments.parts:
        report[part] = PARTS[part](arguments.traces)
    print(json.dumps(report))


if __name__ == "__main__":
    main()
