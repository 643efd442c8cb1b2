"""What are predicted lengths worth? Shortest job first, with lengths from several predictors, against first come, first served.

    python benchmarks/predicted_lengths.py            # a minute and a half

The real scheduler on a virtual clock, as in `policies.py`, whose prompts these are. Outputs are those of
`length_predictions_3class.csv` (--traces), which also has a small model's predicted class. `oracle` knows the lengths; `file`
uses the predicted class's mean in other rows; `online` is the server's own predictor, first with
one tenant for all, then with a tenant per class. Reports mean and longest latency in seconds, and the share of the oracle's
gain over first come, first served. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import csv
import json
import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path

from policies import capacity_of, of, read_azure, simulation
from workloads import DEFAULT_TRACES

from penstock.lab.arrivals import poisson
from penstock.lab.workload import Job

PREDICTIONS_FILE = "length_predictions_3class.csv"
LOADS = (0.9, 1.0, 1.2)
NUM_JOBS = 3000

Predictions = Mapping[int, int] | None
"""Index of a job -> its predicted output; None: the server's own predictor."""


def read_predictions(traces: Path, skip: int, count: int) -> list[tuple[int, int]]:
    """(true output, predicted class) of `count` rows."""
    with (traces / PREDICTIONS_FILE).open(encoding="utf-8", newline="") as file:
        rows = islice(csv.DictReader(file), skip, skip + count)
        return [(max(1, int(row["output_token_length"])), int(row["predicted_length"])) for row in rows]


def compare(jobs: Sequence[Job], capacity: float, ways: Mapping[str, tuple[str, Predictions]]) -> list[dict[str, float]]:
    """A row for each load."""
    rows = []
    for load in LOADS:
        times = poisson(random.Random(8), len(jobs), load * capacity)
        due = of([replace(job, arrival_ns=at_ns) for job, at_ns in zip(jobs, times, strict=True)])
        row: dict[str, float] = {"load": load}
        for name, (order, predictions) in ways.items():
            ended = simulation(order).run(due, predictions=predictions).ended
            seconds = [(stats.ended_ns - stats.arrival_ns) / 1e9 for stats in ended]
            row |= {name: round(statistics.fmean(seconds), 3), f"{name}_max": round(max(seconds), 1)}
        for name in ("file", "online"):
            row[f"{name}_share_of_gain"] = round((row["fcfs"] - row[name]) / (row["fcfs"] - row["oracle"]), 2)
        rows.append(row)
        print(row, flush=True)
    return rows


def run(traces: Path) -> dict[str, object]:
    prompts = random.Random(7).choices(read_azure(traces), k=NUM_JOBS)
    held_out, rows = (read_predictions(traces, skip, NUM_JOBS) for skip in (NUM_JOBS, 0))
    means = {label: round(statistics.fmean(n for n, own in held_out if own == label)) for label in (0, 1, 2)}
    plain = [replace(job, num_output_tokens=output) for job, (output, _) in zip(prompts, rows, strict=True)]
    ways: dict[str, tuple[str, Predictions]] = {
        "fcfs": ("fcfs", None),
        "oracle": ("sjf", {idx: output for idx, (output, _) in enumerate(rows)}),
        "file": ("sjf", {idx: means[label] for idx, (_, label) in enumerate(rows)}),
        "online": ("sjf", None),
    }
    by_class = [replace(job, tenant=f"class{label}") for job, (_, label) in zip(plain, rows, strict=True)]
    capacity = capacity_of(plain)
    return {
        "capacity_per_s": round(capacity, 2),
        "requests": NUM_JOBS,
        "class_means": means,
        "one_tenant": compare(plain, capacity, ways),
        "tenant_per_class": compare(by_class, capacity, ways),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, default=DEFAULT_TRACES)
    print(json.dumps({"benchmark": "predicted_lengths"} | run(parser.parse_args().traces)))


if __name__ == "__main__":
    main()
