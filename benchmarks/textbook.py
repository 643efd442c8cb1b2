"""How right is the textbook about batching here? Four comparisons, simulated in three minutes.

    python benchmarks/textbook.py                     # on the default cost model; all four
    python benchmarks/textbook.py --cost cost.json    # on this machine's (penstock profile --fit)
    python benchmarks/textbook.py --plots docs/textbook

1. `batching`: static batches, dynamic ones (a window of 50 ms) and continuous batching, at rising load.
2. `buckets`: dynamic batches with and without length buckets: what share of the computed positions is padding?
3. `memory`: KV pages allocated as answers grow, against room for `max_tokens` reserved for each request at admission.
4. `interference`: prompts computed whole beside decodes, and in chunks: how long is the pause that others see?

The real scheduler runs on a virtual clock. Lengths are those of `--workload`; loads are shares of what continuous batching
serves when all requests are there at once. Clients send `MAX_TOKENS`, and answers end by themselves. The last line is one JSON
object.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from penstock.lab import plots
from penstock.lab.cost_files import load_cost
from penstock.lab.cost_model import CostModel
from penstock.lab.figures import Samples, make_figures
from penstock.lab.plots import Axis, Panel, Series
from penstock.lab.simulation import Simulation
from penstock.lab.workload_choice import WorkloadChoice, make_workload
from penstock.sched.policies.presets import make_policies
from penstock.types.plan import Capacity, PaddingId, StepPlan

MAX_TOKENS = 2048
LOADS = (0.3, 0.5, 0.7, 0.9)
BLOCKS, FEW_BLOCKS = 4096, 800
_BATCHES = {"max_batch_size": 16, "max_queue_delay_ns": 50_000_000}
_NO_BUCKETS = {**_BATCHES, "length_buckets": (1,)}
"""All prompts are longer, so each is padded to its batch's longest."""
STATIC = {"preset": "static", "settings": {"gate": {"max_batch_size": 16}}}
DYNAMIC = {"preset": "dynamic", "settings": {"gate": _BATCHES}}

PARTS: Mapping[str, tuple[Mapping[str, Mapping[str, Any]], int, int, tuple[str, str, str]]] = {
    "batching": (
        {"static": STATIC, "dynamic": DYNAMIC, "continuous": {}},
        BLOCKS,
        32,
        ("output_tokens_per_s", "ttft_p50_ms", "e2e_p99_ms"),
    ),
    "buckets": (
        {"buckets": DYNAMIC, "no buckets": {"preset": "dynamic", "settings": {"gate": _NO_BUCKETS}}},
        BLOCKS,
        32,
        ("padding_share", "output_tokens_per_s", "e2e_p99_ms"),
    ),
    "memory": (
        {"paged": {"reserve": "watermark"}, "preallocated": {"reserve": "no-evict"}},
        FEW_BLOCKS,
        64,
        ("running", "output_tokens_per_s", "ttft_p50_ms"),
    ),
    "interference": (
        {"chunks": {"budget": "itl"}, "whole prompts": {"budget": "whole-prompts"}},
        BLOCKS,
        32,
        ("itl_p99_ms", "itl_max_ms", "ttft_p50_ms"),
    ),
}
"""Name -> the policies that are compared, KV blocks, rows, and the columns that are drawn."""


def simulation_of(policies: Mapping[str, Any], cost: CostModel, *, blocks: int, rows: int) -> Simulation:
    return Simulation(
        capacity=Capacity(1 + blocks, 16, rows, 512, min(8192, 16 * blocks)),
        make_policies=partial(make_policies, **policies),
        cost=cost,
        enable_prefix_caching=False,
        max_tokens=MAX_TOKENS,
    )


def run(simulation: Simulation, choice: WorkloadChoice, load: float) -> dict[str, float]:
    """A row of a table: rates per second, latencies in milliseconds, shares."""
    padding = [0, 0]

    def count(plan: StepPlan) -> None:
        for row in plan.rows:
            padding[0] += row.query_len * isinstance(row.request_id, PaddingId)
            padding[1] += row.query_len

    outcome = simulation.run(make_workload(choice), on_plan=count)
    figures = make_figures(Samples.of(outcome.records))
    running, _, held = outcome.timelines["replica 0"].means(outcome.duration_ns)
    row = {"load": load, "output_tokens_per_s": figures.rates.output_tokens_per_s.value}
    for name in ("ttft", "itl", "e2e"):
        quantiles = figures.latency_ms[name].quantiles
        row |= {f"{name}_{quantile}_ms": quantiles[quantile].value for quantile in ("p50", "p99")}
    row["itl_max_ms"] = figures.latency_ms["itl"].max_ms
    row |= {"padding_share": padding[0] / padding[1], "running": running, "kv_held_share": held}
    return {name: round(value, 4) for name, value in row.items()}


def draw(folder: Path, part: str, columns: tuple[str, ...], tables: Mapping[str, list[dict[str, float]]]) -> None:
    panels = []
    for column in columns:
        series = [Series(name, [(row["load"], row[column]) for row in rows]) for name, rows in tables.items()]
        label = column.replace("_per_s", "/s").replace("_ms", " (ms)").replace("_", " ")
        panels.append(Panel(label, Axis("load"), Axis(label, is_log="ms" in column), series))
    folder.mkdir(parents=True, exist_ok=True)
    plots.draw(part, panels).save(folder / f"{part}.png")


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=tuple(PARTS), default=list(PARTS))
    parser.add_argument("--workload", default="chat", help="as of `penstock simulate`")
    parser.add_argument("--requests", type=int, default=600)
    parser.add_argument("--cost", type=Path, help="a fitted cost model")
    parser.add_argument("--plots", type=Path, help="folder for a plot of each comparison")
    args = parser.parse_args(words)
    choice = WorkloadChoice(workload=args.workload, requests=args.requests)
    cost = load_cost(args.cost).cost if args.cost else CostModel()
    capacity = simulation_of({}, cost, blocks=BLOCKS, rows=32).capacity_per_s(make_workload(choice))
    report: dict[str, object] = {"benchmark": "textbook", "capacity_per_s": round(capacity, 3)}
    for part in args.parts:
        ways, blocks, rows, columns = PARTS[part]
        simulations = {name: simulation_of(policies, cost, blocks=blocks, rows=rows) for name, policies in ways.items()}
        report[part] = tables = {
            name: [run(simulation, replace(choice, rate=load * capacity), load) for load in LOADS]
            for name, simulation in simulations.items()
        }
        for name, table in tables.items():
            for row in table:
                print(f"{part:13s} {name:14s} " + "  ".join(f"{key} {value:g}" for key, value in row.items()), flush=True)
        if args.plots:
            draw(args.plots, part, columns, tables)
    print(json.dumps(report))


if __name__ == "__main__":
    main()
