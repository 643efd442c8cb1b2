"""Does it pay to compute prompts on some replicas and answers on others? Simulated goodput at rising rates.

    python benchmarks/split.py                                     # both machines and workloads: ten minutes
    python benchmarks/split.py --machines small --workloads azure

The real scheduler, KV manager and router over a modelled executor, under a virtual clock: figures are exact and do not depend
on the machine. Four equal replicas, in one of several ways:

- `chunked`: each computes prompts in chunks beside its answers, under the target between tokens.
- `as needed`: as a cluster does it with `--slo-itl` (`sched/routing/split.py`).
- `split P+D`: P compute prompts and first tokens, D continue.

Workloads are `azure`, every eighth request of a production trace, and `long`, prompts of 8,000 tokens with answers of 200; all
lengths are divided by 4. A request is good if its first token comes in time, and its others on average, too. Tables have the
share of good requests at shares of the rate at which `chunked` serves all at once. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from printed import origin, percent, table
from workloads import DEFAULT_TRACES, trace_file

from penstock.lab import arrivals
from penstock.lab.cost_model import CostModel
from penstock.lab.figures import Samples, Slo
from penstock.lab.links import Link
from penstock.lab.simulation import Simulation
from penstock.lab.synthetic import Lengths, synthetic
from penstock.lab.traces import read_workload
from penstock.lab.transforms import divide_lengths, every, first
from penstock.lab.workload import Workload
from penstock.sched.policies.presets import make_policies
from penstock.sched.routing.routers import LeastWork
from penstock.types.plan import Capacity

NUM_REPLICAS, BLOCK_SIZE, DIVISOR = 4, 16, 4
LOADS = (0.3, 0.5, 0.7, 0.9)
MS = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    about: str
    cost: CostModel
    kv_bytes_per_token: int
    link_bytes_per_s: float
    ttft_s: dict[str, int]
    """Limit of each workload."""
    tpots_ms: tuple[int, ...]
    """Targets between tokens."""


MACHINES = {
    "small": Machine(
        about="SmolLM2-135M on one thread (measured), 1.25 GB/s between replicas",
        cost=CostModel(),
        kv_bytes_per_token=12_072,
        link_bytes_per_s=1.25e9,
        ttft_s={"azure": 2, "long": 8},
        tpots_ms=(8, 12, 20),
    ),
    # 4.6 GB of weights at 80 GB/s, 16 GFLOP a token at 1.6 TFLOP/s, KV of 66 kB a token at 80 GB/s.
    "large": Machine(
        about="8 billion 4-bit weights on 16 cores (roofline), 1.25 GB/s between replicas",
        cost=CostModel(
            step_ns=58e6,
            decode_row_ns=0.0,
            prefill_token_ns=0.0,
            token_brackets=((5, 0.0), (1 << 30, 10e6)),
            decode_read_ns=820.0,
            prefill_read_ns=330.0,
        ),
        kv_bytes_per_token=65_536,
        link_bytes_per_s=1.25e9,
        ttft_s={"azure": 10, "long": 120},
        tpots_ms=(70, 100, 200),
    ),
}


def azure(traces: Path, count: int) -> Workload:
    return divide_lengths(every(first(read_workload(trace_file(traces, "azure_conv_2023.csv")), 8 * count), 8), DIVISOR)


def long_prompts(traces: Path, count: int) -> Workload:
    del traces
    lengths = synthetic("long", count, prompt=Lengths.parse("8000"), output=Lengths.parse("200"), seed=1)
    return divide_lengths(lengths, DIVISOR)


WORKLOADS = {"azure": azure, "long": long_prompts}
CAPACITY = Capacity(4_097, BLOCK_SIZE, max_rows=64, max_step_tokens=512, max_model_len=16_384)


def simulations(machine: Machine, tpot_ms: int) -> dict[str, Simulation]:
    settings = {"budget": {"slo_itl_ns": tpot_ms * MS}}
    base = Simulation(
        capacity=CAPACITY,
        make_policies=partial(make_policies, settings=settings),
        cost=machine.cost,
        make_router=LeastWork,
        link=Link(bytes_per_token=machine.kv_bytes_per_token, bytes_per_s=machine.link_bytes_per_s, latency_ns=MS),
    )
    found = {
        "chunked": replace(base, num_replicas=NUM_REPLICAS),
        "as needed": replace(base, num_replicas=NUM_REPLICAS, slo_itl_ns=tpot_ms * MS),
    }
    for num in range(1, NUM_REPLICAS):
        found[f"split {num}+{NUM_REPLICAS - num}"] = replace(base, num_prefill_replicas=num, num_replicas=NUM_REPLICAS - num)
    return found


def at_rate(workload: Workload, rate: float) -> Workload:
    count = arrivals.num_arrivals(workload)
    return arrivals.arrive(workload, arrivals.poisson(random.Random(1), count, rate), "Poisson")


def share_of_good(simulation: Simulation, workload: Workload, slos: Sequence[Slo]) -> float:
    samples = Samples.of(simulation.run(workload).records)
    return float(samples.holds_all(slos).mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machines", nargs="+", choices=list(MACHINES), default=list(MACHINES))
    parser.add_argument("--workloads", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS))
    parser.add_argument("--loads", nargs="+", type=float, default=LOADS)
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--traces", type=Path, default=DEFAULT_TRACES)
    args = parser.parse_args()
    figures: dict[str, object] = {}
    for machine, name in itertools.product(args.machines, args.workloads):
        model, workload = MACHINES[machine], WORKLOADS[name](args.traces, args.requests)
        for tpot_ms in model.tpots_ms:
            slos = (Slo("ttft", model.ttft_s[name] * 1000 * MS), Slo("tpot", tpot_ms * MS))
            ways = simulations(model, tpot_ms)
            rate = ways["chunked"].capacity_per_s(workload)
            found = {
                way: [share_of_good(simulation, at_rate(workload, load * rate), slos) for load in args.loads]
                for way, simulation in ways.items()
            }
            goals = " and ".join(map(str, slos))
            print(origin(f"{model.about}; {name}, {args.requests} requests, {rate:.3g} a second at a load of 1; {goals}"))
            rows = [(way, *map(percent, shares)) for way, shares in found.items()]
            print(table(("", *(f"{load:g}" for load in args.loads)), rows), end="\n\n", flush=True)
            figures[f"{machine} {name} {tpot_ms} ms"] = found
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
