"""Result files of `penstock bench` and `simulate`: options, server, machine, date, and the requests of each run.

The file is one JSON object. Each run has its requests as columns, its gaps between tokens as a histogram, and its figures. The
figures are for other programs; `result_files` reads only the columns and the histogram.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TypeAlias

import numpy as np

from penstock import __version__, fast_json, machine
from penstock.lab.figures import COLUMNS, ENDS, UNKNOWN, Figures, GapHistogram, Samples, Slo, make_figures
from penstock.types.errors import unwritable

VERSION = 1
LOAD_UNITS = {"concurrency": "requests in flight", "rate": "requests/s"}
CAN_BE_UNKNOWN = ("first_ns", "num_cached_tokens", "longest_gap_ns", "queue_ns")

Json: TypeAlias = "bool | int | float | str | Sequence[Json] | Mapping[str, Json] | None"


@dataclass(frozen=True, slots=True)
class Load:
    """The load that a run put on the server: a number of users or a request rate. `kind` is a key of `LOAD_UNITS`."""

    kind: str
    value: float

    def __str__(self) -> str:
        return f"{self.kind} {self.value:g}"


def load_of(rate: float | None, users: int | None) -> Load | None:
    """Return the load of `users`, or else of a rate. Rates that `bench` and `simulate` compute differently are equal here."""
    if users:
        return Load("concurrency", users)
    return None if rate is None else Load("rate", float(f"{rate:.6g}"))


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedTarget:
    """The measured server or engine, as far as known."""

    url: str = ""
    model: str = ""
    server: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The machine that sent the requests. For a run in process or a simulation, also the server's."""

    cpu: str = ""
    num_cpus: int = 0
    available_memory_bytes: int = 0


def this_machine() -> Machine:
    return Machine(
        cpu=machine.cpu_name(), num_cpus=machine.usable_cpus(), available_memory_bytes=machine.available_memory_bytes()
    )


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run of a workload against a target, at one load."""

    name: str = ""
    """The settings in which this run differs from the others of its result."""
    workload: str
    """Name of the workload, with its changes. `bench compare` refuses results of different workloads."""
    options: Mapping[str, Json] = field(default_factory=dict)
    """Option -> value, for all other options given."""
    seed: int | None = None
    load: Load | None = None
    how: str = "http"
    """`http`, `in process` or `simulated`. Reports label a simulated run as an estimate."""
    target: AskedTarget = field(default_factory=AskedTarget)
    begun_at: str = ""
    slos: tuple[Slo, ...] = ()
    price_per_hour: float | None = None
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    """Reasons to doubt the figures. Reports show them also where they show only a table of several runs."""
    samples: Samples

    @cached_property
    def figures(self) -> Figures:
        return make_figures(self.samples, slos=self.slos, price_per_hour=self.price_per_hour)


def has_variants(runs: Sequence[Run]) -> bool:
    """Return whether a load has runs of several names, which are not repeats of each other."""
    return len({(run.name, run.load) for run in runs}) > len({run.load for run in runs})


@dataclass(frozen=True, kw_only=True)
class Result:
    """All runs of one command. Runs with equal names and loads are repeats."""

    runs: Sequence[Run]
    machine: Machine = field(default_factory=this_machine)
    made_by: str = f"penstock {__version__}"


def any_ok(runs: Iterable[Run]) -> bool:
    return any(run.samples.is_ok.any() for run in runs)


def write_result(result: Result, path: Path) -> None:
    """Write the result as a file, atomically. Raises ConfigError if the file can't be written."""
    runs = [_plain_run(run) for run in result.runs]
    top = {"penstock_bench": VERSION, "made_by": result.made_by, "machine": result.machine, "runs": runs}
    # A run may have taken hours, so write an option that JSON can't represent as text.
    content = fast_json.dumps(top, default=str) + b"\n"
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_bytes(content)
        beside.replace(path)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise unwritable(path, error) from error


def _plain_run(run: Run) -> dict[str, object]:
    return {
        "name": run.name,
        "workload": run.workload,
        "options": dict(run.options),
        "seed": run.seed,
        "load": run.load and {"kind": run.load.kind, "value": float(run.load.value)},
        "how": run.how,
        "target": run.target,
        "begun_at": run.begun_at,
        "slos": [str(slo) for slo in run.slos],
        "price_per_hour": None if run.price_per_hour is None else float(run.price_per_hour),
        "notes": run.notes,
        "warnings": run.warnings,
        "figures": run.figures,
        "requests": _plain_samples(run.samples),
    }


def _plain_samples(samples: Samples) -> dict[str, object]:
    columns: dict[str, object] = {}
    for name in COLUMNS:
        values: list[int] = getattr(samples, name).tolist()
        columns[name] = [None if value == UNKNOWN else value for value in values] if name in CAN_BE_UNKNOWN else values
    return {
        "ends": [end.value for end in ENDS],
        "reasons": samples.reasons,
        "tenants": samples.tenants,
        "columns": columns,
        "gaps": _plain_gaps(samples.gaps),
        "tenant_gaps": [{"tenant": tenant, **_plain_gaps(gaps)} for tenant, gaps in samples.tenant_gaps.items()],
    }


def _plain_gaps(gaps: GapHistogram) -> dict[str, object]:
    groups = [
        {"sum_ns": int(total), "at": np.flatnonzero(row).tolist(), "counts": row[row > 0].tolist()}
        for row, total in zip(gaps.counts, gaps.sum_ns, strict=True)
    ]
    return {"buckets": gaps.buckets.tolist(), "groups": groups}
