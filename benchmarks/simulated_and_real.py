"""How far is the simulation from the engine? The same requests through `penstock serve` and through `penstock simulate`.

    python benchmarks/simulated_and_real.py --workloads azure_conv_2023.csv/4 --loads 0.5 0.8 1.1 --repeat 3
    python benchmarks/simulated_and_real.py --workloads sharegpt_1000.jsonl long-short short-long bursts sessions

`penstock profile` measures steps up to the server's limits. Then a server answers made-up requests, the workload at some
load, made-up ones again, and so on. The profile's cost model is refitted to the recorded steps of all made-up requests, so
client and HTTP count. The simulation also knows the server's KV blocks and rows, and how long client and HTTP take for a
made-up request; nothing of the workloads' own runs, except at own speed. Speculation is off in both. A simulation is the
mean of five, which differ by their noise.

A workload is a file, with its lengths divided by a number after a slash, or one of `CORNERS`. A load is a share of the
capacity: the rate of the first 60 requests when all are there at once. An error is (simulated - real) / real of one run.
The tables have the median of the runs and, for noise, the least and largest real run around their median. "Time of steps" is
the real time of a run's steps over the cost model's mean time for them, noise included: where it is not 1, the machine was
faster or slower than during the made-up requests, or the model misjudges these steps. "At own speed" multiplies the costs by
it: what is left is not due to the mean time of steps. KV occupancy is the time-averaged share of blocks that requests hold.
With several `--presets` it prints how both rank them. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any

from sessions import serving
from workloads import read_tokenizer

from penstock.config.components import config_from
from penstock.deploy.forecast import simulation_of
from penstock.lab.arrivals import num_arrivals
from penstock.lab.client import send
from penstock.lab.cost_files import load_cost
from penstock.lab.cost_model import CostModel, cold_share
from penstock.lab.figures import Samples, make_figures
from penstock.lab.fitting import fit
from penstock.lab.pacing import Pace
from penstock.lab.prompts import Tokenizer, write_prompts
from penstock.lab.recording import Recording, StepDone, open_recording
from penstock.lab.records import Record
from penstock.lab.simulation import Outcome
from penstock.lab.steps import MeasuredStep, steps_of, texts_of
from penstock.lab.target import Target
from penstock.lab.workload import Workload
from penstock.lab.workload_choice import WorkloadChoice, make_workload
from penstock.models.cache import default_cache_dir
from penstock.models.catalog import DEFAULT_MODEL, resolve

ROWS = 32
MADE_UP_NAME = "made up"
MADE_UP = WorkloadChoice(input_tokens="300~1.5", max_input_tokens=3000, output_tokens="60~1")
CLOSED = {1: 9, 4: 6, 16: 16, 32: 32}
"""Users of made-up requests that wait for their answers -> how many they send."""
OPEN = {2.0: 8, 4.0: 12}
"""Made-up requests per second that wait for nobody -> how many there are."""
SIZES = ("--kv-cache-memory", "256MiB", "--max-num-seqs", str(ROWS))
GUESSES = ("--speculation", "off")
SEEDS = range(5)
CORNERS = {
    "long-short": WorkloadChoice(
        workload="documents", input_tokens="1800~0.6", output_tokens="10~1", max_input_tokens=6000, requests=100
    ),
    "short-long": WorkloadChoice(
        workload="writing", input_tokens="40~1", output_tokens="250~0.7", max_output_tokens=1000, requests=120
    ),
    "bursts": WorkloadChoice(workload="chat", input_tokens="200~1", output_tokens="60~1", cv=13.0, requests=200),
    "sessions": WorkloadChoice(
        workload="chat",
        input_tokens="80~1",
        output_tokens="80~0.5",
        prefix_tokens=1500,
        prefix_groups=2,
        sessions=16,
        think_time_s=1.0,
        requests=160,
    ),
}
"""Made-up workloads in which one thing is extreme."""
STEP_TIME = "time of steps"
RANKED = ("ttft mean", "ttft p99", "tpot mean", "tpot p99", "e2e mean")
Figures = dict[str, float]


@dataclass(frozen=True, slots=True)
class Run:
    """One workload, sent once."""

    name: str
    """Its workload and load, or `MADE_UP_NAME`."""
    workload: Workload
    pace: Pace
    records: Sequence[Record]
    begin_s: float
    """Seconds since the epoch, as `end_s`."""
    end_s: float


@contextmanager
def server(words: Sequence[str]) -> Iterator[Target]:
    """A server that is ready."""
    with serving(DEFAULT_MODEL, "--log-level", "warning", *SIZES, *words) as session:
        yield Target(url=session.url, model=session.model)


def figures_of(records: Sequence[Record], occupancy: float) -> Figures:
    figures = make_figures(Samples.of(list(records)))
    found = {"output tokens/s": figures.rates.output_tokens_per_s.value, "KV occupancy": occupancy}
    for name in ("ttft", "tpot", "e2e"):
        distribution = figures.latency_ms[name]
        found[f"{name} mean"] = distribution.mean.value
        found |= {f"{name} {quantile}": distribution.quantiles[quantile].value for quantile in ("p50", "p90", "p99")}
    return found


def send_turns(
    target: Target, workloads: Mapping[str, Workload], tokenizer: Tokenizer, *, repeat: int, users: int = 1
) -> list[Run]:
    """Made-up requests before, between and after the workloads, each `repeat` times.

    `users`: multiplies the made-up requests, for a target of several replicas.
    """
    made_up = [
        (replace(MADE_UP, requests=users * num, arrivals="closed", seed=num), Pace(concurrency=users * at))
        for at, num in CLOSED.items()
    ]
    made_up += [(replace(MADE_UP, requests=users * num, rate=users * rate, seed=num), Pace()) for rate, num in OPEN.items()]
    between = [(MADE_UP_NAME, make_workload(choice), pace) for choice, pace in made_up]
    turns = [turn for name, workload in [*workloads.items()] * repeat for turn in ((name, workload, Pace()), *between)]
    runs: list[Run] = []
    for name, workload, pace in (*between, *turns):
        sent, begin_s = write_prompts(workload, tokenizer, seed=len(runs)), time.time()
        runs.append(Run(name, sent, pace, send(sent, target, pace=pace).records, begin_s, time.time()))
    return runs


class Told:
    """The costs that a recording tells by its made-up requests, and how full the cache was in each run."""

    def __init__(self, path: Path, runs: Sequence[Run], base: CostModel, beside: Sequence[Path] = ()) -> None:
        """`base`: fitted to steps up to the server's limits. `beside`: of other replicas, for the time of HTTP."""
        recording = open_recording(path)

        def run_at(at_ns: int, of: Recording = recording) -> int | None:
            at_s = datetime.fromisoformat(of.header.began).timestamp() + at_ns / 1e9
            return next((idx for idx, run in enumerate(runs) if run.begin_s <= at_s <= run.end_s), None)

        def is_made_up(at_ns: int) -> bool:
            idx = run_at(at_ns)
            return idx is not None and runs[idx].name == MADE_UP_NAME

        steps = steps_of(recording, is_taken=lambda step: is_made_up(step.planned_ns), max_steps=1 << 30)
        texts = texts_of(recording, is_taken=lambda arrival: is_made_up(arrival.arrival_ns))
        self.cost = fit(steps, are_in_order=True, base=base, texts=texts).cost
        self.num_blocks = recording.header.capacity.num_blocks - 1
        steps_in: list[list[StepDone]] = [[] for _ in runs]
        real_ns, told_ns = [0] * len(runs), [0.0] * len(runs)
        every_step = steps_of(recording, is_taken=lambda _: True, max_steps=1 << 30)
        for step, done in zip(every_step, recording.steps(), strict=True):
            if (run_no := run_at(done.ended_ns)) is not None:
                steps_in[run_no].append(done)
                real_ns[run_no] += step.execute_ns
                told_ns[run_no] += mean_ns(self.cost, step)
        self.step_ratios = [real / told for real, told in zip(real_ns, told_ns, strict=True)]
        """The real time of each run's steps over the cost model's mean time for the same steps, noise included."""
        self.occupancies = [_mean_held(some, self.num_blocks) / self.num_blocks for some in steps_in]
        """The share of blocks that requests held in each run, mean over time."""
        alone = {idx for idx, run in enumerate(runs) if run.name == MADE_UP_NAME and run.pace.concurrency is None}
        of_engine = [
            request.departure.first_token_ns - request.arrival.arrival_ns
            for one in (recording, *map(open_recording, beside))
            for request in one.requests()
            if run_at(request.arrival.arrival_ns, one) in alone and request.departure is not None
            if request.departure.first_token_ns is not None
        ]
        of_client = [one.first_ns - one.intended_ns for idx in alone for one in runs[idx].records if one.first_ns is not None]
        self._http_ns = fmean(of_client) - fmean(of_engine)
        print(
            f"outside of the engine: {self._http_ns / 1e6:.1f} ms for client and HTTP, {self.cost.text_ns / 1e6:.1f} ms "
            f"and {self.cost.text_token_ns / 1e3:.1f} us a token for the text"
        )

    def as_client(self, record: Record) -> Record:
        """Return a simulated record with the time that client and HTTP add to the first token.

        This time delays neither other requests nor the conversation's next turn.
        """
        if record.first_ns is None:
            return record
        added_ns = round(self._http_ns)
        return replace(record, first_ns=record.first_ns + added_ns, ended_ns=record.ended_ns + added_ns)


def mean_ns(cost: CostModel, step: MeasuredStep) -> float:
    """Return the modelled time of a step, with the mean of its noise."""
    num_tokens = sum([query_len for query_len, _ in step.shape.rows])
    ns = cost.duration_ns(step.shape) + cost.cold_ns * cold_share(step.coldness, num_tokens)
    last = cost.residuals[-1]
    return ns * fmean(next(one for one in cost.residuals if ns <= one.up_to_ns or one is last).ratios)


def _mean_held(steps: Sequence[StepDone], num_blocks: int) -> float:
    """Blocks that requests hold, mean over time: while steps are computed, and between them."""
    total = 0.0
    for before, step in pairwise(steps):
        assert step.num_blocks_held is not None
        between = num_blocks - before.num_blocks_free - before.num_blocks_cached
        total += between * max(0, step.planned_ns - before.ended_ns)
        total += step.num_blocks_held * (step.ended_ns - max(step.planned_ns, before.ended_ns))
    return total / (steps[-1].ended_ns - steps[0].ended_ns)


def compare(preset: str, runs: Sequence[Run], told: Told) -> Mapping[str, dict[str, list[Figures]]]:
    """Name of a workload and load -> kind -> figures of each run: real, simulated, and simulated at that run's own speed."""
    settings = config_from({"preset": preset, "max_num_seqs": ROWS, "speculation": "off"})
    found: dict[str, dict[str, list[Figures]]] = {}
    for run, ratio, occupancy in zip(runs, told.step_ratios, told.occupancies, strict=True):
        if run.name == MADE_UP_NAME:
            continue
        of_run = {"real": figures_of(run.records, occupancy) | {STEP_TIME: ratio}}
        for kind, factor in (("simulated", 1.0), ("own speed", ratio)):
            server = simulation_of(settings, told.cost.scaled(factor), num_blocks=told.num_blocks)
            outcomes = [replace(server, max_tokens=None, seed=seed).run(run.workload) for seed in SEEDS]
            means = [figures_of([told.as_client(record) for record in one.records], _occupancy(one)) for one in outcomes]
            of_run[kind] = {name: fmean(one[name] for one in means) for name in means[0]} | {STEP_TIME: factor}
            if outcomes[0].num_outside and kind == "simulated":
                print(f"{run.name}: {outcomes[0].num_outside} of {outcomes[0].num_steps} steps lie outside of the fitted range")
        for kind, figures in of_run.items():
            found.setdefault(run.name, {}).setdefault(kind, []).append(figures)
    return found


def error_of(simulated: Sequence[float], real: Sequence[float]) -> str:
    return f"{median(one / other - 1 for one, other in zip(simulated, real, strict=True)):+.1%}"


def _occupancy(outcome: Outcome) -> float:
    """The share of blocks that requests held, mean over time from the first arrival."""
    (timeline,) = outcome.timelines.values()
    first_ns = min(record.intended_ns for record in outcome.records)
    return timeline.means(outcome.duration_ns)[2] * outcome.duration_ns / (outcome.duration_ns - first_ns)


def profile(path: Path, words: Sequence[str] = ()) -> CostModel:
    command = [sys.executable, "-m", "penstock", "profile", DEFAULT_MODEL, "--fit", str(path), *SIZES, *GUESSES, *words]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return load_cost(path).cost


def choice_of(name: str) -> WorkloadChoice:
    if name in CORNERS:
        return CORNERS[name]
    file, _, divisor = name.rpartition("/")
    divides = bool(file) and divisor.isdigit()
    return WorkloadChoice(workload=file if divides else name, divide_lengths=int(divisor) if divides else 1, requests=200)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", nargs="+", default=[*CORNERS], metavar="FILE[/DIVISOR]|CORNER")
    parser.add_argument("--requests", type=int, help="of each; default: 200 of a file")
    parser.add_argument("--loads", type=float, nargs="+", default=[0.8])
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--presets", nargs="+", default=["penstock"])
    args = parser.parse_args()
    tokenizer = read_tokenizer(resolve(DEFAULT_MODEL, default_cache_dir()).path)
    changes: dict[str, Any] = {} if args.requests is None else {"requests": args.requests}
    choices = {name: replace(choice_of(name), **changes) for name in args.workloads}
    closed: dict[str, Any] = {"requests": 60, "arrivals": "closed", "cv": None, "think_time_s": 0.0}
    all_at_once = {name: make_workload(replace(choice, **closed)) for name, choice in choices.items()}  # a file may be missing
    with tempfile.TemporaryDirectory() as folder:
        base = profile(Path(folder) / "profile.json")
        workloads: dict[str, Workload] = {}
        with server(GUESSES) as target:
            for name, at_once in all_at_once.items():
                capacity = len(at_once.jobs) * 1e9 / send(write_prompts(at_once, tokenizer), target).duration_ns
                print(f"{name}: capacity {capacity:.2f} requests/s", flush=True)
                per_arrival = len(at_once.jobs) / num_arrivals(at_once)
                for load in args.loads:
                    workloads[f"{name} at {load:g}"] = make_workload(replace(choices[name], rate=load * capacity / per_arrival))
        middles: dict[str, dict[str, dict[str, Figures]]] = {name: {} for name in workloads}
        for preset in args.presets:
            path = Path(folder) / f"{preset}.rec"
            with server([*GUESSES, "--preset", preset, "--record", str(path), "--record-size", "2GiB"]) as target:
                runs = send_turns(target, workloads, tokenizer, repeat=args.repeat)
            compared = compare(preset, runs, Told(path, runs, base))
            for workload, kinds in compared.items():
                print(f"\n{preset}, {workload}\n\n| | real | simulated | error | at own speed | real runs |")
                print("|---|---|---|---|---|---|")
                middle = {kind: {name: median(one[name] for one in some) for name in some[0]} for kind, some in kinds.items()}
                middles[workload][preset] = middle
                for name, value in middle["real"].items():
                    values = {kind: [one[name] for one in some] for kind, some in kinds.items()}
                    errors = " | ".join(error_of(values[kind], values["real"]) for kind in ("simulated", "own speed"))
                    spread = " to ".join(f"{bound(values['real']) / value - 1:+.0%}" for bound in (min, max))
                    print(f"| {name} | {value:.4g} | {middle['simulated'][name]:.4g} | {errors} | {spread} |", flush=True)
    for words, by_preset in middles.items():
        for name in RANKED if len(by_preset) > 1 else ():
            orders = [sorted(by_preset, key=lambda one: by_preset[one][kind][name]) for kind in ("real", "simulated")]
            print(f"{words}, by {name}: real {' < '.join(orders[0])}; simulated {' < '.join(orders[1])}")
    print(json.dumps({"benchmark": "simulated_and_real", **middles}))


if __name__ == "__main__":
    main()
