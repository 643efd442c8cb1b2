"""What does the front of a cluster add to a first token, and what do routers find in real caches? Without Ray.

    python benchmarks/cluster.py overhead                                     # stubs without a model
    python benchmarks/cluster.py routers --workload sharegpt --replicas 2     # replicas of smollm2:135m, a thread each
    python benchmarks/cluster.py routers --workload mooncake --simulated      # beside the simulation of the same requests
    python benchmarks/cluster.py stubs --replicas 64 --requests 1500          # steps of a large model, and the simulation

`overhead` compares a single server, a front with one replica and a front with four, in turn. Each is a process that computes
hashes instead of a model. The client sends `--rate` requests per second, 100 words each, for 4 tokens. CPU time is that of the
process that speaks HTTP, which in the single server includes the engine. Figures are medians over the rounds.

`routers` sends the requests of a workload of `routing.py`, capped, through each router to new processes with empty caches, at
`--load` of the rate at which `least-work` answers all at once, without guesses. `one server` has the threads and the memory
of all replicas. With `--simulated`, the cost model is fitted to made-up requests through a front to as many replicas; an error
is simulated / real - 1.

`stubs` sends them to replicas that compute hashes and take as long per step as 8 billion 4-bit weights on 16 cores would
(`split.py`). The simulation has the same step times, and gives the rate for `--load`.

`power-of-two` and `ray`, the rule of Ray Serve's router for prefixes, are in `other_routers.py`. The last line is one JSON
object.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from cluster_processes import MAX_QUEUE, Stub, Values, send_all, started
from other_routers import OTHERS, router_of
from printed import origin, table
from routing import BLOCK_SIZE, MAX_STEP_TOKENS, ROUTERS, WORKLOADS, at_rate, figures_of, print_comparison, read, serve
from simulated_and_real import Told, profile, send_turns
from split import MACHINES
from usage import cpu_s
from workloads import DEFAULT_TRACES, read_tokenizer

from penstock.config.components import DEFAULT_MODEL, config_from
from penstock.config.units import parse_size
from penstock.deploy.factory import locate
from penstock.deploy.forecast import kv_bytes_per_token, simulation_of
from penstock.lab.arrivals import num_arrivals
from penstock.lab.links import Link
from penstock.lab.prompts import WORDS, write_prompts
from penstock.lab.records import Sent
from penstock.lab.simulation import Simulation
from penstock.lab.target import Target
from penstock.lab.transforms import cap_lengths
from penstock.lab.workload import Job, Workload
from penstock.sched.policies.presets import make_policies
from penstock.types.plan import Capacity

STUBS = {"single server": 0, "front, 1 replica": 1, "front, 4 replicas": 4}
ROWS, MAX_PROMPT_TOKENS, MAX_OUTPUT_TOKENS = 32, 4096, 256
LINK_BYTES_PER_S, LINK_NS = 8e9, 2_000_000
"""Copies of KV on one machine, as `kv_transfer.py` measures them."""
COMPARED = {"output tokens/s": "output_tokens_per_s", "TTFT, mean": "ttft_mean_s", "whole answer": "e2e_mean_s"}
STUB_LINK = Link(bytes_per_token=8, bytes_per_s=LINK_BYTES_PER_S, latency_ns=LINK_NS)
"""A stub's block has 8 bytes of KV for each token."""
Figures = dict[str, float]


def requests(count: int, rate: float, seed: int) -> Workload:
    words = partial(random.Random(seed).choices, WORDS, k=100)
    job = partial(Job, num_prompt_tokens=100, num_output_tokens=4)
    return Workload(name="", jobs=[job(arrival_ns=round(k * 1e9 / rate), prompt=" ".join(words())) for k in range(count)])


def overhead_of(num_replicas: int, rate: float, seconds: float) -> Figures:
    with started(num_replicas, "prefix", Stub()) as (url, pid):
        send_all(requests(round(rate), rate, seed=1), url, "toy")
        before_s = cpu_s(pid)
        records = send_all(requests(round(rate * seconds), rate, seed=2), url, "toy").records
        used_s = cpu_s(pid) - before_s
    ttft_ms = sorted((record.first_ns - record.intended_ns) / 1e6 for record in records if record.first_ns is not None)
    found = {f"p{share}": ttft_ms[share * (len(ttft_ms) - 1) // 100] for share in (50, 90, 99)}
    late_ms = median((record.sent_ns - record.intended_ns) / 1e6 for record in records)
    return {**found, "sent_late_p50": late_ms, "cpu_us": 1e6 * used_s / len(records)}


def compare_overhead(rate: float, seconds: float, repeat: int) -> dict[str, Figures]:
    rounds = [{name: overhead_of(num, rate, seconds) for name, num in STUBS.items()} for _ in range(repeat)]
    found = {name: medians([one[name] for one in rounds]) for name in STUBS}
    alone, shares = found["single server"], ("p50", "p90", "p99")
    rows = [
        (name, *(f"{one[share]:.2f} ({one[share] - alone[share]:+.2f})" for share in shares), f"{one['cpu_us']:.0f}")
        for name, one in found.items()
    ]
    print(origin(f"{rate:g} requests/s for {seconds:g} s, rounds: {repeat}, CPUs: {os.cpu_count()}"))
    print(table(("", *(f"TTFT {share}, ms" for share in shares), "CPU, us/request"), rows), end="\n\n")
    return found


def medians(some: Sequence[Figures]) -> Figures:
    return {name: median(one[name] for one in some) for name in some[0]}


def sent_to(num_replicas: int, router: str, what: Values | Stub, workload: Workload) -> Sent:
    """Send the workload to new processes, once they have answered some short requests."""
    model = "toy" if isinstance(what, Stub) else DEFAULT_MODEL
    with started(num_replicas, router, what) as (url, _):
        send_all(requests(4 * max(1, num_replicas), 1e9, seed=3), url, model)
        return send_all(workload, url, model)


def compare_routers(args: argparse.Namespace, values: Values) -> tuple[dict[str, Figures], Workload]:
    """Return the figures of one server and of each router, and the requests that all got."""
    tokenizer = read_tokenizer(locate(config_from(values)).path)
    num, rate, made = args.replicas, args.rate, read(args.workload, args.traces, args.requests)
    workload = cap_lengths(made, max_prompt_tokens=MAX_PROMPT_TOKENS, max_output_tokens=MAX_OUTPUT_TOKENS)
    if rate is None:
        jobs = [job if job.after is not None else replace(job, arrival_ns=0) for job in workload.jobs]
        at_once = write_prompts(replace(workload, jobs=jobs), tokenizer)
        rate = args.load * len(jobs) / (sent_to(num, "least-work", values, at_once).duration_ns / 1e9)
    due = write_prompts(at_rate(workload, rate), tokenizer)
    whole = {**values, **{key: num * values[key] for key in ("threads", "kv_cache_memory", "max_num_seqs")}}
    runs: dict[str, list[Figures]] = {name: [] for name in ("one server", *args.routers)}
    for _ in range(args.repeat):
        for name, some in runs.items():
            sent = sent_to(0, "", whole, due) if name == "one server" else sent_to(num, name, values, due)
            some.append(figures_of(sent.records, sent.duration_ns))
            print(name, some[-1], file=sys.stderr, flush=True)
    found = {name: medians(some) for name, some in runs.items()}
    print_comparison(f"{args.workload}, {rate:.3g} requests/s, {num} replicas", len(due.jobs), found)
    return found, due


def compare_stubs(args: argparse.Namespace) -> dict[str, dict[str, Figures]]:
    """Return the figures of each router with stubs, and those of the simulation of the same requests."""
    from support.server.harness import make_tokenizer

    num, cost = args.replicas, MACHINES["large"].cost
    capacity = Capacity(1 + WORKLOADS[args.workload], BLOCK_SIZE, ROWS, MAX_STEP_TOKENS, max_model_len=16_384)
    made = cap_lengths(
        read(args.workload, args.traces, args.requests),
        max_prompt_tokens=MAX_PROMPT_TOKENS,
        max_output_tokens=MAX_OUTPUT_TOKENS,
    )
    one = Simulation(capacity=capacity, make_policies=make_policies, cost=cost, max_tokens=None)
    all_of_them = replace(one, num_replicas=num, link=STUB_LINK)
    turns = len(made.jobs) / num_arrivals(made)
    rate = args.rate or args.load * turns * replace(all_of_them, make_router=router_of("least-work")).capacity_per_s(made)
    due = write_prompts(at_rate(made, rate), make_tokenizer())
    real, simulated = dict[str, Figures](), dict[str, Figures]()
    for name in args.routers:
        simulated[name] = serve(replace(all_of_them, make_router=router_of(name)), due)
        sent = sent_to(num, name, Stub(capacity, cost), due)
        real[name] = figures_of(sent.records, sent.duration_ns)
        print(name, real[name], file=sys.stderr, flush=True)
    print_comparison(f"{args.workload}, {rate:.3g} requests/s, {num} stubs", len(due.jobs), real)
    print_comparison(f"{args.workload}, simulated", len(due.jobs), simulated)
    print_errors(simulated, real)
    return {"real": real, "simulated": simulated}


def print_errors(simulated: Mapping[str, Figures], real: Mapping[str, Figures]) -> None:
    errors = [
        (name, *(f"{one[key] / real[name][key] - 1:+.1%}" for key in COMPARED.values())) for name, one in simulated.items()
    ]
    print(table(("error of the simulation", *COMPARED), errors), end="\n\n")


def simulate(args: argparse.Namespace, values: Values, due: Workload, real: Mapping[str, Figures]) -> dict[str, Figures]:
    tokenizer = read_tokenizer(locate(config_from(values)).path)
    with tempfile.TemporaryDirectory() as folder:
        base = profile(Path(folder) / "profile.json", ["--threads", "1"])
        paths = [Path(folder) / f"steps-{number}.rec" for number in range(args.replicas)]
        recorded = [{**values, "record": str(path), "record_size": 2 << 30} for path in paths]
        with started(args.replicas, "least-work", values, recorded) as (url, _):
            runs = send_turns(Target(url=url, model=DEFAULT_MODEL), {}, tokenizer, repeat=1, users=args.replicas)
        told = Told(paths[0], runs, base, beside=paths[1:])
    link = Link(bytes_per_token=kv_bytes_per_token(config_from(values)), bytes_per_s=LINK_BYTES_PER_S, latency_ns=LINK_NS)
    server = replace(simulation_of(config_from(values), told.cost), num_replicas=args.replicas, link=link, max_tokens=None)
    found: dict[str, Figures] = {}
    for name in args.routers:
        outcome = replace(server, make_router=router_of(name)).run(due)
        found[name] = figures_of([told.as_client(record) for record in outcome.records], outcome.duration_ns)
    print_comparison(f"{args.workload}, simulated", len(due.jobs), found)
    print_errors(found, real)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("overhead", "routers", "stubs"))
    parser.add_argument("--rate", type=float, help="requests per second (overhead: 200; routers: as --load says)")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--repeat", type=int, help="rounds (overhead: 3, routers: 1)")
    parser.add_argument("--workload", choices=list(WORKLOADS), default="sharegpt")
    parser.add_argument("--routers", nargs="+", default=(*ROUTERS, *OTHERS))
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--load", type=float, default=0.8)
    parser.add_argument("--kv-cache-memory", type=parse_size, default="128MiB", help="of each replica (default: %(default)s)")
    parser.add_argument("--simulated", action="store_true", help="simulate the same requests, too")
    parser.add_argument("--traces", type=Path, default=DEFAULT_TRACES)
    args = parser.parse_args()
    args.repeat = args.repeat or (3 if args.what == "overhead" else 1)
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))  # the processes inherit it
    figures: dict[str, Any] = {"benchmark": f"cluster {args.what}"}
    if args.what == "overhead":
        figures |= compare_overhead(args.rate or 200.0, args.seconds, args.repeat)
    elif args.what == "stubs":
        figures |= compare_stubs(args)
    else:
        values = {"threads": 1, "kv_cache_memory": args.kv_cache_memory, "max_num_seqs": ROWS, "max_queue": MAX_QUEUE}
        values |= {"speculation": "off"}  # the simulation knows no acceptance
        figures["real"], due = compare_routers(args, values)
        if args.simulated:
            figures["simulated"] = simulate(args, values, due, figures["real"])
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
