"""How far is the simulation from the engine? The same workload through `penstock serve` and through `penstock simulate`.

    benchmarks/simulated_and_real.py --workload azure_conv_2023.csv --divide-lengths 4 --loads 0.5 0.8 1.1

First the real server answers the first `--capacity-requests`, a few of them with one user and with four, then all at once,
and records its steps. The rate of all at once is the capacity, of which loads are shares. The cost model is fitted to that
recording, with the part of client and HTTP in it; or it is `--cost`. Then, at each load, a server that records nothing gets
the requests at the instants that are simulated. The simulation knows its KV blocks and rows, and nothing of that run. Errors
are (simulated - real) / real; KV occupancy is the share of blocks held, mean over time. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from statistics import fmean

from workloads import read_tokenizer

from penstock.config.components import config_from
from penstock.deploy.virtual import server_settings
from penstock.lab.client import send
from penstock.lab.cluster import Cluster
from penstock.lab.cost_files import load_cost
from penstock.lab.figures import Samples, make_figures
from penstock.lab.fitting import fit
from penstock.lab.pacing import Pace
from penstock.lab.prompts import write_prompts
from penstock.lab.recording import open_recording
from penstock.lab.records import Record
from penstock.lab.steps import steps_of
from penstock.lab.target import Target
from penstock.lab.workload_choice import WorkloadChoice, make_workload
from penstock.models.catalog import DEFAULT_MODEL, default_cache_dir, resolve

SAMPLE_S = 0.1
PORT, ROWS = 8931, 32


@contextmanager
def serving(words: list[str]) -> Iterator[str]:
    """The URL of a server that is ready."""
    url = f"http://127.0.0.1:{PORT}"
    command = [sys.executable, "-m", "penstock", "serve", DEFAULT_MODEL, "--port", str(PORT), "--log-level", "warning", *words]
    server = subprocess.Popen(command)
    try:
        while server.poll() is None:
            with suppress(OSError):
                ask(f"{url}/ready")
                break
            time.sleep(0.1)
        yield url
    finally:
        server.terminate()
        server.wait()


def ask(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=10) as answer:
        return bytes(answer.read())


@contextmanager
def occupancy(url: str) -> Iterator[list[float]]:
    """The share of KV blocks that requests hold, sampled until the block ends."""
    shares: list[float] = []
    stop = threading.Event()

    def sample() -> None:
        while not stop.wait(SAMPLE_S):
            load = json.loads(ask(f"{url}/load"))
            shares.append(1 - load["kv_blocks_free"] / load["kv_blocks"])

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield shares
    finally:
        stop.set()
        thread.join()


def figures_of(records: list[Record], occupancy: float) -> dict[str, float]:
    figures = make_figures(Samples.of(records))
    found = {"output tokens/s": figures.rates.output_tokens_per_s.value, "KV occupancy": occupancy}
    for name in ("ttft", "tpot", "e2e"):
        distribution = figures.latencies[name]
        found[f"{name} mean"] = distribution.mean.value
        found |= {f"{name} {quantile}": distribution.quantiles[quantile].value for quantile in ("p50", "p90", "p99")}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cost", type=Path, help="a fitted cost model, instead of one fitted to the server at its capacity")
    parser.add_argument("--workload", default="chat", help="as of `penstock bench`")
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--divide-lengths", type=int, default=1)
    parser.add_argument("--tenants", default="")
    parser.add_argument("--loads", type=float, nargs="+", default=[0.5, 0.8, 1.1])
    parser.add_argument("--preset", default="penstock")
    parser.add_argument("--capacity-requests", type=int, default=100)
    args = parser.parse_args()
    choice = WorkloadChoice(workload=args.workload, divide_lengths=args.divide_lengths, tenants=args.tenants)
    tokenizer = read_tokenizer(resolve(DEFAULT_MODEL, default_cache_dir()).path)
    words = ["--kv-cache-memory", "256MiB", "--preset", args.preset, "--max-num-seqs", str(ROWS)]
    first = write_prompts(make_workload(replace(choice, requests=args.capacity_requests, arrivals="closed")), tokenizer)
    with tempfile.TemporaryDirectory() as folder:
        recording = Path(folder) / "capacity.rec"
        with serving([*words, "--record", str(recording)]) as url:
            target = Target(url=url, model=DEFAULT_MODEL)
            for users in (1, 4):  # so that small steps are recorded, too
                send(replace(first, jobs=first.jobs[: len(first.jobs) // 5]), target, pace=Pace(concurrency=users))
            capacity = len(first.jobs) / (send(first, target).duration_ns / 1e9)
        cost = load_cost(args.cost).cost if args.cost else fit(steps_of(open_recording(recording)), are_in_order=True).cost
    report: dict[str, object] = {"benchmark": "simulated_and_real", "workload": args.workload, "preset": args.preset}
    with serving(words) as url:
        num_blocks = json.loads(ask(f"{url}/load"))["kv_blocks"]
        settings = config_from({"preset": args.preset, "max_num_seqs": ROWS})
        server = server_settings(settings, cost, num_blocks=num_blocks)
        print(f"capacity {capacity:.2f} requests/s, {num_blocks} KV blocks", flush=True)
        for load in args.loads:
            asked = replace(choice, requests=args.requests, rate=load * capacity)
            workload = write_prompts(make_workload(asked), tokenizer, seed=int(load * 1000))
            with occupancy(url) as shares:
                records = send(workload, target).records
            real = figures_of(records, fmean(shares))
            outcome = Cluster(settings=server).run(workload)
            (timeline,) = outcome.timelines.values()
            told = figures_of(list(outcome.records), timeline.means(outcome.duration_ns)[2])
            errors = {name: round(told[name] / value - 1, 4) if value else None for name, value in real.items()}
            report[f"load {load:g}"] = {"real": real, "simulated": told, "errors": errors, "outside": outcome.num_outside}
            print(f"load {load:g}: {outcome.num_outside} of {outcome.num_steps} steps outside of the fitted range")
            for name, value in real.items():
                print(f"  {name:16s} real {value:10.3f}   simulated {told[name]:10.3f}   error {errors[name]:+.1%}", flush=True)
    print(json.dumps(report))


if __name__ == "__main__":
    main()
