"""What do classes and deadlines change? The orders `priority` and `edf` against first come, first served, simulated.

    python benchmarks/policies.py                     # both, a minute
    python benchmarks/policies.py --parts edf

The real scheduler on a virtual clock, over the default cost model: the numbers repeat to the last digit and do not depend on
the machine. Prompts and outputs are those of `azure_conv_2023.csv` (--traces) divided by 4, at most 1,500 and 500. Loads are
relative to the rate at which the same requests are served when all are there at once.

`priority`: requests of a higher class at 1.2 a second, alone, and beside a lower class at 80 % of the capacity. `edf`: the
share of answers completed within their deadline of 5 or 30 s. `penstock simulate` covers tenants' shares
(docs/orders.md), `predicted_lengths.py` predicted lengths. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from workloads import AZURE_DIVISOR, AZURE_FILE, DEFAULT_TRACES

from penstock.lab.arrivals import poisson
from penstock.lab.figures import Samples, make_figures
from penstock.lab.simulation import Outcome, Simulation
from penstock.lab.traces import read_workload
from penstock.lab.transforms import cap_lengths, divide_lengths
from penstock.lab.workload import Job, Workload
from penstock.sched.policies.presets import make_policies
from penstock.types.plan import Capacity
from penstock.types.request import FinishReason

CAPACITY = Capacity(num_blocks=1 + 4096, block_size=16, max_rows=32, max_step_tokens=512, max_model_len=4096)
SPAN_S = 1200.0
HIGH_RATE, LOW_LOAD = 1.2, 0.8
EDF_LOADS = (0.6, 0.8, 0.9, 1.0, 1.2, 1.5)
NUM_JOBS = 3000
PATIENCE_S = (5.0, 30.0)


def read_azure(traces: Path) -> Sequence[Job]:
    """Return all requests, due at once; lengths are drawn from them."""
    trace = divide_lengths(read_workload(traces / AZURE_FILE), AZURE_DIVISOR)
    trace = cap_lengths(trace, max_prompt_tokens=1500, max_output_tokens=500)
    return [replace(job, arrival_ns=0) for job in trace.jobs]


def simulation(order: str, budget: str | None = None) -> Simulation:
    """The default preset's policies but for the order, and the budget if one is named."""
    return Simulation(
        capacity=CAPACITY, make_policies=lambda: make_policies(order=order, budget=budget), enable_prefix_caching=False
    )


def of(jobs: Sequence[Job]) -> Workload:
    return Workload(name="policies", jobs=jobs)


def capacity_of(jobs: Sequence[Job]) -> float:
    """Requests per second when all are there at once."""
    return simulation("fcfs").capacity_per_s(of(jobs))


def run_priority(traces: Path) -> dict[str, object]:
    trace = read_azure(traces)

    def drawn(rate: float, seed: int, priority: int) -> list[Job]:
        rng, count = random.Random(seed), int(rate * SPAN_S)
        times = poisson(rng, count, rate)
        return [replace(rng.choice(trace), arrival_ns=at_ns, priority=priority) for at_ns in times]

    high = drawn(HIGH_RATE, 0, 0)
    low = drawn(LOW_LOAD * capacity_of(high), 99, 1)
    report: dict[str, object] = {"high_requests": len(high), "low_requests": len(low), "low_load": LOW_LOAD}
    for budget in ("decode-first", "itl"):
        rows: dict[str, dict[str, float]] = {}
        for name, order, served in (
            ("alone", "fcfs", high),
            ("fcfs", "fcfs", [*high, *low]),
            ("priority", "priority", [*high, *low]),
        ):
            outcome = simulation(order, budget).run(of(served))
            ttft = make_figures(Samples.of(outcome.records[: len(high)])).latency_ms["ttft"].quantiles
            rows[name] = {f"ttft_{share}_s": round(ttft[share].value / 1e3, 3) for share in ("p50", "p99")}
            rows[name]["paused"] = sum(stats.num_preemptions > 0 for stats in outcome.ended)
            print("priority", budget, name, rows[name], flush=True)
        report[budget] = rows
    return report


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
        shares = {order: round(attainment(simulation(order).run(of(jobs))), 4) for order in ("fcfs", "edf")}
        rows.append({"load": load, **shares})
        print("edf", rows[-1], flush=True)
    return {"capacity_per_s": round(capacity, 2), "requests": NUM_JOBS, "patience_s": PATIENCE_S, "attainment": rows}


def attainment(outcome: Outcome) -> float:
    """Share of requests that ended by themselves, and so before their deadline."""
    return statistics.fmean(stats.finish_reason is not FinishReason.ABORT for stats in outcome.ended)


PARTS: dict[str, Callable[[Path], dict[str, object]]] = {"priority": run_priority, "edf": run_edf}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, default=DEFAULT_TRACES)
    parser.add_argument("--parts", nargs="+", choices=tuple(PARTS), default=list(PARTS))
    args = parser.parse_args()
    print(json.dumps({"benchmark": "policies"} | {part: PARTS[part](args.traces) for part in args.parts}))


if __name__ == "__main__":
    main()
