"""Does it pay to compute prompts on some replicas and answers on others? Simulated goodput at rising rates.

    python benchmarks/split.py                                     # all machines and workloads
    python benchmarks/split.py --machines gpu --workloads azure

The real scheduler, KV manager and router over a modelled executor, under a virtual clock: figures are exact and do not depend
on the machine. Four equal replicas, in one of several ways:

- `chunked`: each computes prompts in chunks beside its answers, under the target between tokens.
- `as needed`: prompts and answers are computed apart while fewer tokens fit beside the answers than a chunk has at least.
- `split P+D`: P compute prompts and first tokens, D continue.

A request is good if its first token comes in time, and its others on average, too. The table has the share of good requests at
shares of the rate at which `chunked` serves all requests at once. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
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

NUM_REPLICAS, BLOCK_SIZE = 4, 16
LOADS = (0.3, 0.5, 0.7, 0.8, 0.9, 1.0)
MS = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    about: str
    cost: CostModel
    divisor: int
    """Lengths of requests are divided by it."""
    num_blocks: int
    max_rows: int
    max_step_tokens: int
    kv_bytes_per_token: int
    link_bytes_per_s: float
    ttft_ms: int
    tpot_ms: int


MACHINES = {
    "small": Machine(
        about="SmolLM2-135M on one thread (measured), 10 GB/s between replicas",
        cost=CostModel(),
        divisor=4,
        num_blocks=4_096,
        max_rows=64,
        max_step_tokens=512,
        kv_bytes_per_token=12_072,
        link_bytes_per_s=10e9,
        ttft_ms=2_000,
        tpot_ms=50,
    ),
    # 4.6 GB of weights at 80 GB/s; 16 GFLOP a token at 1.6 TFLOP/s; KV of 66 kB a token.
    "cpu": Machine(
        about="8 billion 4-bit weights on 16 cores (roofline), 1.2 GB/s between replicas",
        cost=CostModel(
            step_ns=58e6,
            decode_row_ns=0.0,
            prefill_token_ns=0.0,
            token_brackets=((5, 0.0), (1 << 30, 10e6)),
            decode_read_ns=820.0,
            prefill_read_ns=330.0,
        ),
        divisor=4,
        num_blocks=4_096,
        max_rows=64,
        max_step_tokens=512,
        kv_bytes_per_token=65_536,
        link_bytes_per_s=1.2e9,
        ttft_ms=10_000,
        tpot_ms=200,
    ),
    # 16 GB of weights at 2.6 TB/s; 16 GFLOP a token at 500 TFLOP/s; KV of 131 kB a token.
    "gpu": Machine(
        about="8 billion 16-bit weights on a GPU of 2.6 TB/s and 500 TFLOP/s (roofline), 25 GB/s between replicas",
        cost=CostModel(
            step_ns=6.5e6,
            decode_row_ns=0.0,
            prefill_token_ns=0.0,
            token_brackets=((200, 0.0), (1 << 30, 32_000.0)),
            decode_read_ns=50.0,
            prefill_read_ns=1.0,
        ),
        divisor=1,
        num_blocks=24_576,
        max_rows=256,
        max_step_tokens=2_048,
        kv_bytes_per_token=131_072,
        link_bytes_per_s=25e9,
        ttft_ms=400,
        tpot_ms=20,
    ),
}


def azure(traces: Path, count: int, divisor: int) -> Workload:
    return divide_lengths(every(first(read_workload(trace_file(traces, "azure_conv_2023.csv")), 8 * count), 8), divisor)


def long_prompts(traces: Path, count: int, divisor: int) -> Workload:
    del traces
    lengths = synthetic("long", count, prompt=Lengths.parse("8000"), output=Lengths.parse("200"), seed=1)
    return divide_lengths(lengths, divisor)


WORKLOADS = {"azure": azure, "long": long_prompts}


def simulations(machine: Machine) -> dict[str, Simulation]:
    capacity = Capacity(1 + machine.num_blocks, BLOCK_SIZE, machine.max_rows, machine.max_step_tokens, max_model_len=16_384)
    settings = {"budget": {"slo_itl_ns": machine.tpot_ms * MS}}
    base = Simulation(
        capacity=capacity,
        make_policies=partial(make_policies, settings=settings),
        cost=machine.cost,
        make_router=LeastWork,
        link=Link(bytes_per_token=machine.kv_bytes_per_token, bytes_per_s=machine.link_bytes_per_s, latency_ns=MS),
    )
    found = {"chunked": replace(base, num_replicas=NUM_REPLICAS)}
    found["as needed"] = replace(base, num_replicas=NUM_REPLICAS, slo_itl_ns=machine.tpot_ms * MS)
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
    parser.add_argument("--requests", type=int, default=600)
    parser.add_argument("--traces", type=Path, default=DEFAULT_TRACES)
    args = parser.parse_args()
    figures: dict[str, object] = {}
    for machine_name in args.machines:
        machine = MACHINES[machine_name]
        slos = (Slo("ttft", machine.ttft_ms * MS), Slo("tpot", machine.tpot_ms * MS))
        for name in args.workloads:
            workload = WORKLOADS[name](args.traces, args.requests, machine.divisor)
            ways = simulations(machine)
            rate = ways["chunked"].capacity_per_s(workload)
            found: dict[str, list[float]] = {}
            for way, simulation in ways.items():
                found[way] = [share_of_good(simulation, at_rate(workload, load * rate), slos) for load in args.loads]
                print(way, found[way], file=sys.stderr)
            goals = " and ".join(map(str, slos))
            print(origin(f"{machine.about}; {name}, {args.requests} requests, {rate:.3g} a second at a load of 1; {goals}"))
            rows = [(way, *map(percent, shares)) for way, shares in found.items()]
            print(table(("", *(f"{load:g}" for load in args.loads)), rows), end="\n\n", flush=True)
            figures[f"{machine_name} {name}"] = found
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
