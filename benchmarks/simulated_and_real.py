"""How far is the simulation from the engine? The same requests through `penstock serve` and through `penstock simulate`.

    benchmarks/simulated_and_real.py --workload azure_conv_2023.csv --divide-lengths 4 --loads 0.5 0.8 1.1 --repeat 3

A server answers made-up requests of 1 to 32 users, then the workload at some load, then made-up ones again, and so on, in the
same minutes. The cost model is fitted to its recording of the made-up requests alone, client and HTTP included; the simulation
knows besides the server's KV blocks and rows, and nothing of the workload's own runs. A load is a share of the capacity: the
rate of the first 100 requests when all are there at once. Errors are (simulated - median) / median of the real runs, beside
the distance of the least and the largest real run from that median. KV occupancy is the share of blocks that requests hold,
mean over time. With several `--presets` it says whether both put them in the same order. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from statistics import median

from workloads import read_tokenizer

from penstock.config.components import config_from
from penstock.deploy.virtual import server_settings
from penstock.lab.client import send
from penstock.lab.cluster import Cluster
from penstock.lab.cost_model import CostModel
from penstock.lab.figures import Samples, make_figures
from penstock.lab.fitting import fit
from penstock.lab.pacing import Pace
from penstock.lab.prompts import Tokenizer, write_prompts
from penstock.lab.recording import StepDone, open_recording
from penstock.lab.records import Record
from penstock.lab.steps import steps_of
from penstock.lab.target import Target
from penstock.lab.workload import Workload
from penstock.lab.workload_choice import WorkloadChoice, make_workload
from penstock.models.catalog import DEFAULT_MODEL, default_cache_dir, resolve

PORT, ROWS = 8931, 32
USERS = {1: 3, 2: 4, 4: 6, 8: 10, 16: 16, 32: 32}
"""Users of the made-up requests -> how many they send."""
MADE_UP = WorkloadChoice(input_tokens="300~1.5", max_input_tokens=3000, output_tokens="60~1", arrivals="closed")
RANKED = ("ttft mean", "ttft p99", "tpot mean", "tpot p99", "e2e mean")
Figures = dict[str, float]


@dataclass(frozen=True, slots=True)
class Measured:
    """A server's runs."""

    cost: CostModel
    num_blocks: int
    runs: Mapping[float, list[tuple[Workload, Figures]]]
    """By load."""


@dataclass(frozen=True, slots=True)
class Span:
    """Seconds since the epoch."""

    begin_s: float
    end_s: float


@contextmanager
def serving(words: Sequence[str]) -> Iterator[Target]:
    """A server that is ready."""
    url = f"http://127.0.0.1:{PORT}"
    command = [sys.executable, "-m", "penstock", "serve", DEFAULT_MODEL, "--port", str(PORT), "--log-level", "warning"]
    command += ["--kv-cache-memory", "256MiB", "--max-num-seqs", str(ROWS), *words]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        while server.poll() is None:
            with suppress(OSError), urllib.request.urlopen(f"{url}/ready", timeout=10):
                break
            time.sleep(0.1)
        yield Target(url=url, model=DEFAULT_MODEL)
    finally:
        server.terminate()
        server.wait()


def figures_of(records: Sequence[Record], occupancy: float) -> Figures:
    figures = make_figures(Samples.of(list(records)))
    found = {"output tokens/s": figures.rates.output_tokens_per_s.value, "KV occupancy": occupancy}
    for name in ("ttft", "tpot", "e2e"):
        distribution = figures.latencies[name]
        found[f"{name} mean"] = distribution.mean.value
        found |= {f"{name} {quantile}": distribution.quantiles[quantile].value for quantile in ("p50", "p90", "p99")}
    return found


def occupancy_in(steps: Sequence[StepDone], num_blocks: int) -> float:
    """Blocks that are held after a step are held until the next has ended."""
    spans = [(after.ended_ns - step.ended_ns, step) for step, after in pairwise(steps)]
    held = sum(span_ns * (num_blocks - step.num_blocks_free - step.num_blocks_cached) for span_ns, step in spans)
    return held / num_blocks / sum(span_ns for span_ns, _ in spans)


def measure(preset: str, workloads: Mapping[float, Workload], tokenizer: Tokenizer, repeat: int) -> Measured:
    """Made-up requests before, between and after the workloads, each `repeat` times, on a server of this preset."""
    made_up: list[Span] = []
    runs: list[tuple[float, Workload, Sequence[Record], Span]] = []

    def send_made_up() -> None:
        begin_s = time.time()
        for users, num in USERS.items():
            workload = make_workload(replace(MADE_UP, requests=num, seed=users))
            send(write_prompts(workload, tokenizer, seed=100 * len(made_up) + users), target, pace=Pace(concurrency=users))
        made_up.append(Span(begin_s, time.time()))

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "steps.rec"
        with serving(["--preset", preset, "--record", str(path)]) as target:
            send_made_up()
            for load, workload in [*workloads.items()] * repeat:
                begin_s = time.time()
                sent = write_prompts(workload, tokenizer, seed=10_000 + len(runs))
                runs.append((load, sent, send(sent, target).records, Span(begin_s, time.time())))
                send_made_up()
        recording = open_recording(path)
        began_s = datetime.fromisoformat(recording.header.began).timestamp()

        def is_in(step: StepDone, span: Span) -> bool:
            return span.begin_s <= began_s + step.planned_ns / 1e9 <= span.end_s

        steps = list(recording.steps())
        num_blocks = recording.header.capacity.num_blocks - 1
        cost = fit(
            steps_of(recording, is_taken=lambda step: any(is_in(step, span) for span in made_up)), are_in_order=True
        ).cost
    by_load: dict[float, list[tuple[Workload, Figures]]] = {load: [] for load in workloads}
    for load, sent, records, span in runs:
        occupancy = occupancy_in([step for step in steps if is_in(step, span)], num_blocks)
        by_load[load].append((sent, figures_of(records, occupancy)))
    return Measured(cost, num_blocks, by_load)


def simulate(preset: str, measured: Measured, workload: Workload) -> Figures:
    settings = config_from({"preset": preset, "max_num_seqs": ROWS})
    outcome = Cluster(settings=server_settings(settings, measured.cost, num_blocks=measured.num_blocks)).run(workload)
    if outcome.num_outside:
        print(f"{outcome.num_outside} of {outcome.num_steps} steps lie outside of the fitted range")
    (timeline,) = outcome.timelines.values()
    return figures_of(outcome.records, timeline.means(outcome.duration_ns)[2])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", default="chat", help="as of `penstock bench`")
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--divide-lengths", type=int, default=1)
    parser.add_argument("--tenants", default="")
    parser.add_argument("--loads", type=float, nargs="+", default=[0.5, 0.8, 1.1])
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--presets", nargs="+", default=["penstock"])
    args = parser.parse_args()
    choice = WorkloadChoice(workload=args.workload, divide_lengths=args.divide_lengths, tenants=args.tenants)
    tokenizer = read_tokenizer(resolve(DEFAULT_MODEL, default_cache_dir()).path)
    with serving([]) as target:
        at_once = make_workload(replace(choice, requests=100, arrivals="closed"))
        capacity = 100e9 / send(write_prompts(at_once, tokenizer), target).duration_ns
    print(f"{args.workload}: capacity {capacity:.2f} requests/s", flush=True)
    workloads = {load: make_workload(replace(choice, requests=args.requests, rate=load * capacity)) for load in args.loads}
    found: dict[str, dict[str, dict[str, Figures]]] = {}
    for preset in args.presets:
        measured = measure(preset, workloads, tokenizer, args.repeat)
        for load, runs in measured.runs.items():
            told = simulate(preset, measured, runs[0][0])
            real = {name: sorted(figures[name] for _, figures in runs) for name in told}
            middle = {name: median(values) for name, values in real.items()}
            found.setdefault(f"load {load:g}", {})[preset] = {"simulated": told, "real": middle}
            print(f"\n{preset}, load {load:g}\n\n| | real | simulated | error | spread of the real |\n|---|---|---|---|---|")
            for name, value in middle.items():
                spread = f"{real[name][0] / value - 1:+.0%} to {real[name][-1] / value - 1:+.0%}"
                print(f"| {name} | {value:.3f} | {told[name]:.3f} | {told[name] / value - 1:+.1%} | {spread} |", flush=True)
    for words, by_preset in found.items():
        for name in RANKED if len(by_preset) > 1 else ():
            real_order, told_order = (
                sorted(by_preset, key=lambda one: by_preset[one][kind][name]) for kind in ("real", "simulated")
            )
            print(f"{words}, by {name}: real {' < '.join(real_order)}; simulated {' < '.join(told_order)}")
    print(json.dumps({"benchmark": "simulated_and_real", "workload": args.workload, "capacity": capacity, **found}))


if __name__ == "__main__":
    main()
