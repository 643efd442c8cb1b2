"""Goodput above the capacity: how does admission control handle twice as many requests as the server can answer?

    python benchmarks/overload.py                           # 3 rounds
    python benchmarks/overload.py --loads 1.5 2 4 --rounds 1

In each round a server without a target answers a closed loop of `--users`. That rate is the round's capacity. Then servers
with `--slo-ttft` get Poisson arrivals at each of the `--loads` times this rate. Refused requests are not retried. Prompts and
answers all have the same length, and the prefix cache is off. Goodput is the rate of requests whose first token came in
time, from the first arrival to the last end, over the capacity. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from printed import origin, spread, table
from sessions import serving
from usage import OtherLoad
from workloads import read_tokenizer

from penstock.lab.client import send
from penstock.lab.figures import Figures, Samples, make_figures, parse_slos
from penstock.lab.pacing import Pace
from penstock.lab.prompts import Tokenizer, write_prompts
from penstock.lab.records import Sent
from penstock.lab.target import Target
from penstock.lab.workload import Workload
from penstock.lab.workload_choice import WorkloadChoice, make_workload
from penstock.models.cache import default_cache_dir
from penstock.models.catalog import DEFAULT_MODEL, resolve

WARM_UP = 8
"""Short requests before each run, so that no run pays for one-time work."""


@dataclass(frozen=True, slots=True)
class Point:
    """One run of an overloaded server."""

    load: float
    """Arrivals over the capacity."""
    capacity: float
    """Requests/s of the closed loop of the same round."""
    goodput: float
    """Over the capacity."""
    ttft_p50_s: float
    ttft_p99_s: float
    num_refused: int
    other_load: float
    """Share of the processors that others used meanwhile."""


class Rounds:
    """The servers and their load, all rounds alike but for the prompts and the arrivals."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._model = resolve(args.model, default_cache_dir()).path
        self._tokenizer = read_tokenizer(self._model)

    def run(self, nth: int) -> list[Point]:
        sent, _ = self._sent(nth, self._args.requests, options=(), users=self._args.users)
        capacity = make_figures(Samples.of(sent.records)).rates.requests_per_s.value or 0.0
        print(f"round {nth + 1}: closed loop {capacity:.2f} requests/s", file=sys.stderr, flush=True)
        return [self._point(nth, load, capacity) for load in self._args.loads]

    def _point(self, nth: int, load: float, capacity: float) -> Point:
        slo = f"{self._args.slo_ttft:g}s"
        options = ("--slo-ttft", slo)
        sent, others = self._sent(nth, self._args.requests, options=options, rate=load * capacity)
        figures = make_figures(Samples.of(sent.records), slos=parse_slos([f"ttft={slo}"]))
        point = _point_of(figures, load, capacity, others)
        print(f"  {load:g} times that: {point}", file=sys.stderr, flush=True)
        return point

    def _sent(
        self, nth: int, count: int, *, options: Sequence[str], users: int | None = None, rate: float | None = None
    ) -> tuple[Sent, float]:
        workload = _workload(self._args, self._tokenizer, count, rate=rate, seed=nth)
        with serving(self._model, "--no-prefix-caching", *options, *self._args.options.split()) as session:
            session.replay([replace(job, num_output_tokens=4, arrival_ns=0) for job in workload.jobs[:WARM_UP]], WARM_UP)
            others = OtherLoad()
            sent = send(workload, Target(url=session.url, model=session.model), pace=Pace(concurrency=users))
            return sent, others.share()


def _workload(args: argparse.Namespace, tokenizer: Tokenizer, count: int, *, rate: float | None, seed: int) -> Workload:
    choice = WorkloadChoice(
        requests=count, rate=rate, input_tokens=args.input_tokens, output_tokens=args.output_tokens, seed=seed
    )
    return write_prompts(make_workload(choice), tokenizer, seed=seed)


def _point_of(figures: Figures, load: float, capacity: float, others: float) -> Point:
    assert figures.goodput is not None
    ttft = figures.latency_ms["ttft"].quantiles
    return Point(
        load=load,
        capacity=round(capacity, 2),
        goodput=round((figures.goodput.requests_per_s.value or 0.0) / capacity, 3),
        ttft_p50_s=round((ttft["p50"].value or 0.0) / 1e3, 2),
        ttft_p99_s=round((ttft["p99"].value or 0.0) / 1e3, 2),
        num_refused=figures.num_by_end["refused"],
        other_load=round(others, 3),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL, help="MODEL of penstock serve (default: %(default)s)")
    parser.add_argument("--slo-ttft", type=float, default=2.0, help="target in seconds (default: %(default)s)")
    parser.add_argument("--users", type=int, default=32, help="of the closed loop (default: %(default)s)")
    parser.add_argument("--requests", type=int, default=300, help="of each run (default: %(default)s)")
    parser.add_argument("--loads", type=float, nargs="+", default=[2.0], help="times the capacity (default: 2)")
    parser.add_argument("--rounds", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--input-tokens", default="256")
    parser.add_argument("--output-tokens", default="128")
    parser.add_argument("--options", default="", help="more options of the servers, in one word")
    args = parser.parse_args()
    rounds = Rounds(args)
    points = [point for nth in range(args.rounds) for point in rounds.run(nth)]
    print(origin(f"target {args.slo_ttft:g} s", "medians of the rounds and their range"))
    head = ["arrivals / capacity", "goodput / capacity", "TTFT p50, s", "TTFT p99, s", "refused"]
    print(table(head, [_row(load, [point for point in points if point.load == load], args) for load in args.loads]))
    print()
    print(json.dumps({"slo_ttft_s": args.slo_ttft, "points": [asdict(point) for point in points]}))


def _row(load: float, points: Sequence[Point], args: argparse.Namespace) -> list[str]:
    goodput, p50, p99 = ([getattr(point, name) for point in points] for name in ("goodput", "ttft_p50_s", "ttft_p99_s"))
    refused = spread([point.num_refused for point in points], 0)
    return [f"{load:g}", *(spread(values, 2) for values in (goodput, p50, p99)), f"{refused} of {args.requests}"]


if __name__ == "__main__":
    main()
