"""What does batching of whole texts cost and gain? The textbook's strategies, each by the same server under the same loads.

Every strategy serves the mixed texts of `encoder_texts.py`, one a request, in an open loop (Poisson) at shares of what the
default serves to 64 clients: its throughput, the latency from the instant at which a text was due, and the positions that are
computed for padding, of all that are computed. `none` is a text at a time; `static` waits until a batch is full; `dynamic` too,
but at most for its window; with `buckets` only texts of about one length share a batch; `continuous` begins a step with all
that wait. Strategies come in turn, in every second round backwards; figures are medians of the rounds and their range.

    python benchmarks/encoder_batching.py
    python benchmarks/encoder_batching.py --repeat 5 --plot docs/batching-texts.svg
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from collections.abc import Mapping, Sequence
from itertools import cycle, islice
from pathlib import Path

from encoder_contenders import Server, Setting, embed, penstock, running
from encoder_texts import TextSet, read_sets
from peer_setup import Environments, make_minilm
from peers import ENVIRONMENTS
from printed import origin, percent, spread, table
from usage import metric
from workloads import DEFAULT_TRACES

from penstock.lab import plots
from penstock.lab.arrivals import poisson
from penstock.lab.figures import Samples, make_figures
from penstock.lab.pacing import Pace
from penstock.lab.plots import Axis, Panel, Series
from penstock.lab.workload import Job

LOADS = (0.3, 0.6, 0.9)
BATCH = 16
CLIENTS = 64
GRACE_S = 5.0
PADDING = "penstock_padding_tokens_total"
COLUMNS = ("texts/s", "p50, ms", "p99, ms", "late")
_DYNAMIC = ("--batching", "dynamic", "--max-batch-size", str(BATCH))
_NO_BUCKETS = ("--length-buckets", "1")
"""All texts are longer, so each is padded to its batch's longest."""
STRATEGIES: Mapping[str, Sequence[str]] = {
    "none": ("--batching", "static", "--max-batch-size", "1"),
    "static": ("--batching", "static", "--max-batch-size", str(BATCH)),
    **{f"dynamic {ms} ms": (*_DYNAMIC, *_NO_BUCKETS, "--batch-window", f"{ms}ms") for ms in (5, 10, 20, 50)},
    "buckets 10 ms": (*_DYNAMIC, "--length-buckets", "32,64,128,256,512", "--batch-window", "10ms"),
    "continuous": (),
}
Figures = Mapping[str, float]


def jobs_of(texts: Sequence[str], arrivals_ns: Sequence[int]) -> list[Job]:
    """One text each, from the first on, then over again."""
    due = zip(arrivals_ns, islice(cycle(texts), len(arrivals_ns)), strict=True)
    return [Job(arrival_ns=at_ns, num_prompt_tokens=0, num_output_tokens=1, prompt=text) for at_ns, text in due]


def capacity_per_s(server: Server, texts: Sequence[str]) -> float:
    sent = embed(server.url, jobs_of(texts, [0] * len(texts)), Pace(concurrency=CLIENTS))
    return 1e9 * len(sent.records) / sent.duration_ns


def measured(server: Server, texts: Sequence[str], rate: float, seconds: float, seed: int) -> Figures:
    """An open loop for so many seconds; texts without an answer `GRACE_S` later are late, and in no latency."""
    before = metric(server.url, PADDING)
    arrivals_ns = poisson(random.Random(seed), round(rate * seconds), rate)
    sent = embed(server.url, jobs_of(texts, arrivals_ns), Pace(), max_s=seconds + GRACE_S)
    padding = metric(server.url, PADDING) - before
    quantiles = make_figures(Samples.of(sent.records)).latency_ms["e2e"].quantiles
    return {
        "texts/s": 1e9 * len(sent.records) / sent.duration_ns,
        "p50, ms": quantiles["p50"].value,
        "p99, ms": quantiles["p99"].value,
        "padding": padding / (padding + sum(record.num_prompt_tokens for record in sent.records)),
        "late": len(sent.unfinished) + sent.num_unsent,
    }


def middle(rounds: Sequence[Figures], name: str) -> float:
    return statistics.median(one[name] for one in rounds)


def plot(found: Mapping[tuple[str, float], Sequence[Figures]], path: Path) -> None:
    """Latency, and padding, against the load."""
    panels = []
    for name, is_log in (("p50, ms", True), ("p99, ms", True), ("padding", False)):
        series = [Series(way, [(load, middle(found[way, load], name)) for load in LOADS]) for way in STRATEGIES]
        panels.append(Panel(name, Axis("load, of the default's capacity"), Axis(name, is_log=is_log), series))
    plots.draw("Batching of whole texts", panels).save(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="minilm", help="MODEL of Penstock (default: %(default)s)")
    parser.add_argument("--traces", type=Path, default=DEFAULT_TRACES, help="folder of the traces (default: ../shared/traces)")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each load (default: %(default)s)")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--plot", type=Path, metavar="FILE.svg")
    args = parser.parse_args()
    environments = Environments(ENVIRONMENTS)
    texts: TextSet = read_sets(make_minilm(environments) / "tokenizer.json", args.traces)["mixed"]
    setting = Setting(environments, args.model, ())
    log, rate = environments.log("batching"), 0.0
    found: dict[tuple[str, float], list[Figures]] = {(way, load): [] for way in STRATEGIES for load in LOADS}
    with running(penstock(setting, ()), log) as server:
        assert isinstance(server, Server)
        capacity_per_s(server, texts.texts[:CLIENTS])
        rate = capacity_per_s(server, texts.texts)
    for turn in range(args.repeat):
        for way in list(STRATEGIES)[:: -1 if turn % 2 else 1]:
            with running(penstock(setting, STRATEGIES[way]), log) as server:
                assert isinstance(server, Server)
                capacity_per_s(server, texts.texts[:CLIENTS])
                for load in LOADS:
                    found[way, load].append(measured(server, texts.texts, load * rate, args.seconds, turn))
                    print(way, load, found[way, load][-1], file=sys.stderr, flush=True)
    print(origin(str(texts), f"capacity {rate:.0f} texts/s", "medians of the rounds and their range"))
    lines = [
        [way, load, *(spread([one[name] for one in of], 0) for name in COLUMNS), percent(middle(of, "padding"))]
        for (way, load), of in found.items()
    ]
    print(table(["batching", "load", *COLUMNS, "padding"], lines))
    if args.plot:
        plot(found, args.plot)


if __name__ == "__main__":
    main()
