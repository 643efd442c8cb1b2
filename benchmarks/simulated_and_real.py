"""How far is the simulation from the engine? The same requests through `penstock serve` and through `penstock simulate`.

    benchmarks/simulated_and_real.py --workload azure_conv_2023.csv --divide-lengths 4 --loads 0.5 0.8 1.1 --repeat 3

A server answers made-up requests, then the workload at some load, then made-up ones again, and so on. The cost model is fitted
to its recording of the made-up requests alone, client and HTTP included. Machines drift: the made-up requests on both sides of
a run say how fast this one was just then, and the simulation of the run is scaled by that. Besides it knows the server's KV
blocks and rows, and what HTTP and text add to a made-up request in the mean; nothing of the workload's own runs.

A load is a share of the capacity: the rate of the first 100 requests when all are there at once. An error is (simulated - real)
/ real of one run. Told are the median of the runs and, for noise, the least and the largest real run around their median. KV
occupancy is the share of blocks that requests hold, mean over time. With several `--presets` it says whether both put them in
the same order. The last line is one JSON object.
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
from statistics import fmean, median

from workloads import read_tokenizer

from penstock.config.components import config_from
from penstock.deploy.forecast import simulation_of
from penstock.lab.client import send
from penstock.lab.cost_model import CostModel, Residuals, cold_share
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
from penstock.models.cache import default_cache_dir
from penstock.models.catalog import DEFAULT_MODEL, resolve

PORT, ROWS = 8931, 32
MADE_UP = WorkloadChoice(input_tokens="300~1.5", max_input_tokens=3000, output_tokens="60~1")
CLOSED = {1: 3, 4: 6, 16: 16, 32: 32}
"""Users of made-up requests that wait for their answers -> how many they send."""
OPEN = {2.0: 8, 4.0: 12}
"""Made-up requests per second that wait for nobody -> how many there are."""
RANKED = ("ttft mean", "ttft p99", "tpot mean", "tpot p99", "e2e mean")
Figures = dict[str, float]


@dataclass(frozen=True, slots=True)
class Run:
    """One workload, sent once."""

    load: float
    """0: made-up requests."""
    workload: Workload
    pace: Pace
    records: Sequence[Record]
    begin_s: float
    """Seconds since the epoch, as `end_s`."""
    end_s: float


@contextmanager
def serving(words: Sequence[str], port: int = PORT) -> Iterator[Target]:
    """A server that is ready."""
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "penstock", "serve", DEFAULT_MODEL, "--port", str(port), "--log-level", "warning"]
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


def figures_of(records: Sequence[Record], occupancy: float, front_ns: float = 0) -> Figures:
    """`front_ns` is added to TTFT and end to end."""
    figures = make_figures(Samples.of(list(records)))
    found = {"output tokens/s": figures.rates.output_tokens_per_s.value, "KV occupancy": occupancy}
    for name in ("ttft", "tpot", "e2e"):
        distribution, added = figures.latencies[name], front_ns / 1e6 if name != "tpot" else 0
        found[f"{name} mean"] = distribution.mean.value + added
        found |= {f"{name} {quantile}": distribution.quantiles[quantile].value + added for quantile in ("p50", "p90", "p99")}
    return found


def measure(
    preset: str,
    workloads: Mapping[float, Workload],
    tokenizer: Tokenizer,
    repeat: int,
    path: Path,
    words: Sequence[str] = (),
    port: int = PORT,
) -> list[Run]:
    """Made-up requests before, between and after the workloads, each `repeat` times. The server's recording is at `path`.

    `words`: further options of the server.
    """
    made_up = [
        (replace(MADE_UP, requests=num, arrivals="closed", seed=num), Pace(concurrency=at)) for at, num in CLOSED.items()
    ]
    made_up += [(replace(MADE_UP, requests=num, rate=rate, seed=num), Pace()) for rate, num in OPEN.items()]
    between = [(0.0, make_workload(choice), pace) for choice, pace in made_up]
    turns = [turn for load, workload in [*workloads.items()] * repeat for turn in ((load, workload, Pace()), *between)]
    runs: list[Run] = []
    with serving(["--preset", preset, "--record", str(path), "--record-size", "2GiB", *words], port) as target:
        for load, workload, pace in (*between, *turns):
            sent, begin_s = write_prompts(workload, tokenizer, seed=len(runs)), time.time()
            runs.append(Run(load, sent, pace, send(sent, target, pace=pace).records, begin_s, time.time()))
    return runs


class Told:
    """The costs that a recording tells by its made-up requests, and how full the cache was in each run."""

    def __init__(self, path: Path, runs: Sequence[Run]) -> None:
        recording = open_recording(path)
        began_s = datetime.fromisoformat(recording.header.began).timestamp()

        def run_at(at_ns: int) -> int | None:
            at_s = began_s + at_ns / 1e9
            return next((idx for idx, run in enumerate(runs) if run.begin_s <= at_s <= run.end_s), None)

        made_up = {idx for idx, run in enumerate(runs) if run.load == 0}
        run_of: list[int] = []
        """Each step's, in the order of the steps that are taken."""

        def is_taken(step: StepDone) -> bool:
            idx = run_at(step.planned_ns)
            if idx is None or idx not in made_up:
                return False
            run_of.append(idx)
            return True

        steps = steps_of(recording, is_taken=is_taken, max_steps=1 << 30)
        self.cost = fit(steps, are_in_order=True).cost
        """The costs of all made-up requests together."""
        self._real_ns, self._modelled_ns = (dict.fromkeys(made_up, 0.0) for _ in range(2))
        for idx, step in zip(run_of, steps, strict=True):
            self._real_ns[idx] += step.execute_ns
            self._modelled_ns[idx] += self.cost.duration_ns(step.shape) + self.cost.cold_ns * cold_share(
                step.coldness, sum(query_len for query_len, _ in step.shape.rows)
            )
        self.num_blocks = recording.header.capacity.num_blocks - 1
        steps_in: list[list[StepDone]] = [[] for _ in runs]
        for done in recording.steps():
            if (run_no := run_at(done.ended_ns)) is not None:
                steps_in[run_no].append(done)
        self.occupancies = [_mean_held(some, self.num_blocks) / self.num_blocks for some in steps_in]
        """The share of blocks that requests held in each run, mean over time."""
        alone = {idx for idx in made_up if runs[idx].pace.concurrency is None}
        of_engine = [
            request.departure.first_token_ns - request.arrival.arrival_ns
            for request in recording.requests()
            if run_at(request.arrival.arrival_ns) in alone
            if request.departure is not None and request.departure.first_token_ns is not None
        ]
        of_client = [one.first_ns - one.intended_ns for idx in alone for one in runs[idx].records if one.first_ns is not None]
        self.front_ns = fmean(of_client) - fmean(of_engine)
        """The mean time that HTTP, text and the client add to the TTFT of a request that does not come with others."""

    def cost_at(self, idx: int) -> CostModel:
        """The costs at the speed that the machine had around a run."""
        num_made_up = len(CLOSED) + len(OPEN)
        near = [*range(idx - num_made_up, idx), *range(idx + 1, idx + 1 + num_made_up)]
        slowness = self._ratio(near) / self._ratio(list(self._real_ns))
        slower = [Residuals(each.up_to_ns, tuple(slowness * ratio for ratio in each.ratios)) for each in self.cost.residuals]
        return replace(self.cost, residuals=tuple(slower))

    def _ratio(self, runs: Sequence[int]) -> float:
        return sum(self._real_ns[idx] for idx in runs) / sum(self._modelled_ns[idx] for idx in runs)


def _mean_held(steps: Sequence[StepDone], num_blocks: int) -> float:
    """Blocks that requests hold, mean over time: while steps are computed, and between them."""
    total = 0.0
    for before, step in pairwise(steps):
        assert step.num_blocks_held is not None
        between = num_blocks - before.num_blocks_free - before.num_blocks_cached
        total += between * max(0, step.planned_ns - before.ended_ns)
        total += step.num_blocks_held * (step.ended_ns - max(step.planned_ns, before.ended_ns))
    return total / (steps[-1].ended_ns - steps[0].ended_ns)


def compare(preset: str, runs: Sequence[Run], told: Told) -> Mapping[float, tuple[list[Figures], list[Figures]]]:
    """Load -> figures of the real runs, and of their simulations."""
    settings = config_from({"preset": preset, "max_num_seqs": ROWS})
    found: dict[float, tuple[list[Figures], list[Figures]]] = {}
    for idx, run in enumerate(runs):
        if run.load == 0:
            continue
        server = simulation_of(settings, told.cost_at(idx), num_blocks=told.num_blocks)
        outcome = replace(server, max_tokens=None, seed=idx).run(run.workload)
        if outcome.num_outside:
            print(f"{outcome.num_outside} of {outcome.num_steps} steps lie outside of the fitted range")
        (timeline,) = outcome.timelines.values()
        real, simulated = found.setdefault(run.load, ([], []))
        real.append(figures_of(run.records, told.occupancies[idx]))
        simulated.append(figures_of(outcome.records, timeline.means(outcome.duration_ns)[2], told.front_ns))
    return found


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
    middles: dict[str, dict[str, dict[str, Figures]]] = {f"load {load:g}": {} for load in args.loads}
    for preset in args.presets:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "steps.rec"
            runs = measure(preset, workloads, tokenizer, args.repeat, path)
            compared = compare(preset, runs, Told(path, runs))
        for load, (real, simulated) in compared.items():
            print(f"\n{preset}, load {load:g}\n\n| | real | simulated | error | real runs |\n|---|---|---|---|---|")
            kinds = {"real": real, "simulated": simulated}
            middle = {kind: {name: median(one[name] for one in some) for name in real[0]} for kind, some in kinds.items()}
            middles[f"load {load:g}"][preset] = middle
            for name, value in middle["real"].items():
                error = median(told[name] / seen[name] - 1 for seen, told in zip(real, simulated, strict=True))
                spread = (
                    f"{min(one[name] for one in real) / value - 1:+.0%} to {max(one[name] for one in real) / value - 1:+.0%}"
                )
                print(f"| {name} | {value:.4g} | {middle['simulated'][name]:.4g} | {error:+.1%} | {spread} |", flush=True)
    for words, by_preset in middles.items():
        for name in RANKED if len(by_preset) > 1 else ():
            orders = [sorted(by_preset, key=lambda one: by_preset[one][kind][name]) for kind in ("real", "simulated")]
            print(f"{words}, by {name}: real {' < '.join(orders[0])}; simulated {' < '.join(orders[1])}")
    print(json.dumps({"benchmark": "simulated_and_real", "workload": args.workload, "capacity": capacity, **middles}))


if __name__ == "__main__":
    main()
