"""How many replica-hours does an autoscaled group use, and how many first tokens are late?

    python benchmarks/scaling.py                        # all workloads: three minutes
    python benchmarks/scaling.py --workloads spike

The real scheduler, KV manager, router and scaler over a modelled executor, under a virtual clock: figures are exact and do not
depend on the machine. A step takes four times as long as that of the default cost model. Requests have the lengths of Azure's
trace, divided by 4. Rates are multiples of one replica's capacity:

- `ramp`: from 0.5 to 4 within ten minutes, back within five, then 0.2 for seven minutes.
- `spike`: 0.6 for two minutes, 2.5 for three, 0.6 for eight.
- `azure`: the trace's own arrivals, half as fast: bursts of a mean of 1.6.

A first token is late after 5 s. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from printed import origin, table
from routing import BLOCK_SIZE, MAX_ROWS, MAX_STEP_TOKENS, WORKLOADS, read, times_as_fast
from workloads import DEFAULT_TRACES

from penstock.lab import arrivals
from penstock.lab.scaling import Scaling
from penstock.lab.simulation import Simulation
from penstock.lab.transforms import first, speed
from penstock.lab.workload import NS_PER_S, Workload
from penstock.sched.policies.presets import make_policies
from penstock.sched.routing.routers import LeastWork
from penstock.types.plan import Capacity

SLO_S, MOST = 5, 6
RAMP = tuple(0.5 + 3.5 * step / 19 for step in range(20))
STAGES = {
    "ramp": (*((load, 30.0) for load in RAMP), *((load, 15.0) for load in reversed(RAMP)), (0.2, 420.0)),
    "spike": ((0.6, 120.0), (2.5, 180.0), (0.6, 480.0)),
}
CAPACITY_REQUESTS, AZURE_REQUESTS = 400, 6_000
ONE = Simulation(
    capacity=Capacity(1 + WORKLOADS["azure"], BLOCK_SIZE, MAX_ROWS, MAX_STEP_TOKENS, max_model_len=16_384),
    make_policies=make_policies,
    make_router=LeastWork,
    cost=times_as_fast(0.25),
)


def staged(workload: Workload, rate: float, stages: Sequence[tuple[float, float]]) -> Workload:
    """Poisson arrivals in stages of (multiple of `rate`, seconds)."""
    rates = [(rate * load, seconds) for load, seconds in stages]
    count = int(sum(rate * seconds for rate, seconds in rates))
    chosen = first(workload, count)
    return arrivals.arrive(chosen, arrivals.stages(random.Random(0), len(chosen.jobs), rates), "stages")


def serve(simulation: Simulation, workload: Workload) -> dict[str, float]:
    outcome = simulation.run(workload)
    ttft_s = sorted((record.first_ns - record.intended_ns) / 1e9 for record in outcome.records if record.first_ns is not None)
    replica_ns, numbers = simulation.num_replicas * outcome.duration_ns, [simulation.num_replicas]
    if outcome.scaled is not None:
        replica_ns, numbers = outcome.scaled.replica_ns, [num for _, num, _ in outcome.scaled.wanted]
    return {
        "served": len(ttft_s),
        "replica_hours": replica_ns / NS_PER_S / 3600,
        "replicas_mean": replica_ns / outcome.duration_ns,
        "replicas_max": max(numbers),
        "changes": len(numbers) - 1,
        "ttft_p50_s": ttft_s[len(ttft_s) // 2],
        "ttft_p99_s": ttft_s[int(0.99 * (len(ttft_s) - 1))],
        "late": sum(seconds > SLO_S for seconds in ttft_s) / len(ttft_s),
    }


def compare(workload: Workload, fixed: Sequence[int], starts_s: Sequence[int]) -> dict[str, dict[str, float]]:
    figures = {str(num): serve(replace(ONE, num_replicas=num), workload) for num in fixed}
    for start_s in starts_s:
        scaling = Scaling(least=1, most=MOST, start_ns=start_s * NS_PER_S)
        figures[f"1 to {MOST}, started in {start_s} s"] = serve(replace(ONE, scaling=scaling), workload)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", nargs="+", choices=[*STAGES, "azure"], default=[*STAGES, "azure"])
    parser.add_argument("--fixed", nargs="+", type=int, default=[3, 4, 6])
    parser.add_argument("--start", nargs="+", type=int, default=[10, 60], help="seconds that a replica takes to start")
    parser.add_argument("--traces", type=Path, default=DEFAULT_TRACES)
    args = parser.parse_args()
    azure = read("azure", args.traces, AZURE_REQUESTS)
    rate = ONE.capacity_per_s(first(azure, CAPACITY_REQUESTS))
    figures: dict[str, object] = {}
    for name in args.workloads:
        workload = staged(azure, rate, STAGES[name]) if name in STAGES else speed(azure, 0.5)
        compared = compare(workload, args.fixed, args.start)
        print(origin(f"{name}, {len(workload.jobs)} requests; one replica serves {rate:.2f} a second"))
        rows = [
            (
                replicas,
                f"{one['replica_hours']:.2f}",
                f"{one['replicas_mean']:.1f}",
                f"{one['replicas_max']:.0f}",
                f"{one['changes']:.0f}",
                f"{one['ttft_p50_s']:.2f}",
                f"{one['ttft_p99_s']:.1f}",
                f"{100 * one['late']:.1f} %",
            )
            for replicas, one in compared.items()
        ]
        head = ("replicas", "replica-hours", "mean", "most", "changes", "TTFT, median, s", "p99, s", "late")
        print(table(head, rows), end="\n\n", flush=True)
        figures[name] = compared
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
