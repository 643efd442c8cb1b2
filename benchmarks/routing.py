"""How much do routers find in replicas' caches, and how late are first tokens? How long does a decision take?

    python benchmarks/routing.py                               # four replicas, all workloads: five minutes
    python benchmarks/routing.py --workloads mooncake --replicas 16 --requests 4000
    python benchmarks/routing.py --decisions                   # 100 replicas that hold a million blocks

The real scheduler, KV manager and routers over a modelled executor, under a virtual clock: figures are exact and do not depend
on the machine, except with --decisions. Requests arrive at `--load` of the rate at which `least-work` serves them:

- `azure`: a production trace whose prompts share nothing, lengths divided by 4.
- `groups`: the same, after one of 40 system prompts of 512 tokens.
- `sharegpt`: conversations of up to eight turns, with 10 s between an answer and the next turn.
- `mooncake`: a trace of chained blocks, lengths divided by 8.

`one cache` is a single server that is as fast as all replicas together and has all their memory: it shows how much there is to
find. With `apart`, replicas copy no KV from each other; otherwise they do so over 10 Gbit/s each. The last line is one
JSON object.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
import tracemalloc
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from other_routers import OTHERS, router_of
from printed import origin, percent, table
from workloads import DEFAULT_TRACES, trace_file

from penstock.kv.changes import Changes
from penstock.lab import arrivals
from penstock.lab.cost_model import CostModel
from penstock.lab.links import Link
from penstock.lab.records import End, Record
from penstock.lab.simulation import Simulation
from penstock.lab.traces import read_workload
from penstock.lab.transforms import divide_lengths, first, share_prefix, speed, think
from penstock.lab.workload import Workload
from penstock.sched.policies.presets import make_policies
from penstock.sched.routing.dispatcher import Dispatcher
from penstock.sched.routing.routers import PrefixAware
from penstock.types.plan import Capacity
from penstock.types.request import Request
from penstock.types.sampling import SamplingParams
from penstock.types.stats import EngineLoad

ROUTERS = ("round-robin", "least-work", "prefix")
WORKLOADS = {"azure": 2_048, "groups": 2_048, "sharegpt": 2_048, "mooncake": 8_192}
"""Blocks of each replica."""
BLOCK_SIZE, MAX_ROWS, MAX_STEP_TOKENS = 16, 32, 512
MAX_TURNS, THINK_S = 8, 10.0
NUM_GROUPS, GROUP_TOKENS = 40, 512
KV_BYTES_PER_TOKEN, LINK_BYTES_PER_S = 12_072, 1.25e9
DECISION_REPLICAS, DECISION_PROMPTS, DECISION_BLOCKS, NUM_DECISIONS = 100, 1_000, 1_000, 2_000
"""A million blocks: those of a thousand prompts of 16,000 tokens."""


def read(name: str, traces: Path, num_requests: int) -> Workload:
    if name == "sharegpt":
        return read_workload(trace_file(traces), max_turns=MAX_TURNS, max_requests=num_requests)
    if name == "mooncake":
        return first(divide_lengths(read_workload(traces / "mooncake_synthetic.jsonl"), 8), num_requests)
    azure = first(divide_lengths(read_workload(trace_file(traces, "azure_conv_2023.csv")), 4), num_requests)
    return share_prefix(azure, GROUP_TOKENS, NUM_GROUPS, seed=1) if name == "groups" else azure


def at_rate(workload: Workload, rate: float) -> Workload:
    """The workload with `rate` requests a second, turns among them. A trace keeps its own bursts."""
    own_rate = arrivals.mean_rate(workload)
    if own_rate is not None:
        return speed(workload, rate / own_rate)
    count = arrivals.num_arrivals(workload)
    rng = random.Random(1)
    instants_ns = arrivals.poisson(rng, count, rate * count / len(workload.jobs))
    return think(arrivals.arrive(workload, instants_ns, "Poisson"), THINK_S, seed=1)


def times_as_fast(factor: float) -> CostModel:
    cost = CostModel()
    return replace(
        cost,
        step_ns=cost.step_ns / factor,
        decode_row_ns=cost.decode_row_ns / factor,
        prefill_token_ns=cost.prefill_token_ns / factor,
        decode_read_ns=cost.decode_read_ns / factor,
        prefill_read_ns=cost.prefill_read_ns / factor,
    )


def serve(simulation: Simulation, workload: Workload) -> dict[str, float]:
    outcome = simulation.run(workload)
    return figures_of(outcome.records, outcome.duration_ns)


def figures_of(records: Sequence[Record], duration_ns: int) -> dict[str, float]:
    served = [record for record in records if record.end is End.OK]
    ttft_s = sorted((record.first_ns - record.intended_ns) / 1e9 for record in served if record.first_ns is not None)
    return {
        "served": len(served),
        "found": sum(record.num_cached_tokens for record in served) / sum(record.num_prompt_tokens for record in served),
        "ttft_mean_s": statistics.fmean(ttft_s),
        "ttft_p99_s": ttft_s[int(0.99 * (len(ttft_s) - 1))],
        "e2e_mean_s": statistics.fmean((record.ended_ns - record.intended_ns) / 1e9 for record in served),
        "output_tokens_per_s": sum(record.num_output_tokens for record in served) / (duration_ns / 1e9),
    }


def compare(
    workload: Workload, routers: Sequence[str], num_replicas: int, num_blocks: int, load: float
) -> dict[str, dict[str, float]]:
    capacity = Capacity(1 + num_blocks, BLOCK_SIZE, MAX_ROWS, MAX_STEP_TOKENS, max_model_len=16_384)
    one = Simulation(capacity=capacity, make_policies=make_policies)
    apart = replace(one, num_replicas=num_replicas)
    linked = replace(apart, link=Link(bytes_per_token=KV_BYTES_PER_TOKEN, bytes_per_s=LINK_BYTES_PER_S, latency_ns=1_000_000))
    rate = replace(apart, make_router=router_of("least-work")).capacity_per_s(workload)
    due = at_rate(workload, load * rate * len(workload.jobs) / arrivals.num_arrivals(workload))
    whole = Capacity(1 + num_replicas * num_blocks, BLOCK_SIZE, num_replicas * MAX_ROWS, num_replicas * MAX_STEP_TOKENS, 16_384)
    figures = {"one cache": serve(replace(one, capacity=whole, cost=times_as_fast(num_replicas)), due)}
    for name in routers:
        figures[f"{name}, apart"] = serve(replace(apart, make_router=router_of(name)), due)
        if name != "round-robin":
            figures[name] = serve(replace(linked, make_router=router_of(name)), due)
    return figures


def print_comparison(name: str, num_requests: int, figures: Mapping[str, Mapping[str, float]]) -> None:
    print(origin(f"{name}, {num_requests} requests"))
    rows = [
        (
            router,
            percent(one["found"]),
            f"{one['ttft_mean_s']:.2f}",
            f"{one['ttft_p99_s']:.2f}",
            f"{one['e2e_mean_s']:.2f}",
            f"{one['output_tokens_per_s']:.0f}",
            f"{one['served']:.0f}",
        )
        for router, one in figures.items()
    ]
    head = ("router", "found in caches", "TTFT, mean, s", "p99, s", "whole answer, s", "output tokens/s", "served")
    print(table(head, rows), end="\n\n", flush=True)


def time_decisions() -> dict[str, float]:
    """Time decisions for prompts of 16,000 tokens. One replica holds the whole prompt, or its first half."""
    rng = random.Random(1)
    prompts = [tuple(rng.randrange(50_000) for _ in range(DECISION_BLOCKS * BLOCK_SIZE)) for _ in range(DECISION_PROMPTS // 10)]
    dispatcher = Dispatcher(PrefixAware(), 0, BLOCK_SIZE)
    for _ in range(DECISION_REPLICAS):
        dispatcher.join(gives=True)
    tracemalloc.start()
    for number in range(DECISION_PROMPTS):
        if number < len(prompts):
            names = dispatcher.names_of(Request(str(number), prompts[number], SamplingParams(max_tokens=1), arrival_ns=0))
        else:
            names = [rng.getrandbits(64) for _ in range(DECISION_BLOCKS)]
        dispatcher.hear(number % DECISION_REPLICAS, Changes(names, []))
    del names
    megabytes = tracemalloc.get_traced_memory()[0] / 1e6
    tracemalloc.stop()
    loads = [EngineLoad()] * DECISION_REPLICAS
    router_us: list[float] = []
    whole_us: list[float] = []
    for index in range(NUM_DECISIONS):
        prompt = prompts[index % len(prompts)]
        prompt = prompt[: len(prompt) // 2] + prompt[: len(prompt) // 2] if index % 2 else prompt
        request = Request(str(index), prompt, SamplingParams(max_tokens=100), arrival_ns=0)
        names = dispatcher.names_of(request)
        begun = time.perf_counter()
        dispatcher.choose(request, names, loads, index=index, now_ns=0, num_new_tokens=100)
        router_us.append(1e6 * (time.perf_counter() - begun))
        begun = time.perf_counter()
        dispatcher.names_of(request)
        whole_us.append(router_us[-1] + 1e6 * (time.perf_counter() - begun))
        dispatcher.on_tokens(request.request_id, 1)
        dispatcher.on_end(request.request_id)
    return {
        "decision_us": statistics.median(router_us),
        "decision_p99_us": sorted(router_us)[int(0.99 * len(router_us))],
        "with_hashes_us": statistics.median(whole_us),
        "megabytes": megabytes,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--decisions", action="store_true", help="time decisions instead of simulating")
    parser.add_argument("--workloads", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS))
    parser.add_argument("--routers", nargs="+", default=(*ROUTERS, *OTHERS), help="or classes of your own (docs/simulate.md)")
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--requests", type=int, default=1_500)
    parser.add_argument("--load", type=float, default=0.8)
    parser.add_argument("--traces", type=Path, default=DEFAULT_TRACES)
    args = parser.parse_args()
    figures: dict[str, object] = {}
    if args.decisions:
        decisions = time_decisions()
        print(origin(f"{DECISION_REPLICAS} replicas, {DECISION_PROMPTS * DECISION_BLOCKS:,} blocks"))
        print(table(list(decisions), [[f"{value:.1f}" for value in decisions.values()]]), end="\n\n")
        figures |= decisions
    for name in () if args.decisions else args.workloads:
        workload = read(name, args.traces, args.requests)
        compared = compare(workload, args.routers, args.replicas, WORKLOADS[name], args.load)
        print_comparison(name, len(workload.jobs), compared)
        figures[name] = compared
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
