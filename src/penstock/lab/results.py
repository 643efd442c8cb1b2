"""The file of a result: one JSON object with what was asked, of which server, where, when, and what came of it.

A file has one run or several. Each has its requests as columns, its gaps between tokens as a histogram, and its figures. The
figures are for people and other programs; the reader makes them anew from the columns.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TypeAlias, TypeVar

import numpy as np
import orjson

from penstock import __version__, machine
from penstock.lab.figures import (
    COLUMNS,
    ENDS,
    NUM_GAP_GROUPS,
    UNKNOWN,
    Distribution,
    Figures,
    GapHistogram,
    Rates,
    Samples,
    Slo,
    make_figures,
    parse_slos,
)
from penstock.lab.intervals import Estimate, Ints
from penstock.types.errors import ConfigError

VERSION = 1
MAX_FILE_BYTES = 1 << 30
MAX_RUNS = 1000
LOAD_UNITS = {"concurrency": "requests in flight", "rate": "requests/s"}
"""Kind of load -> its unit."""
HOWS = ("http", "in process", "simulated")
_MAX_NS = 1 << 62
_CAN_BE_UNKNOWN = ("first_ns", "longest_gap_ns", "queue_ns")
_FIGURES_DIGITS = 6

Json: TypeAlias = "bool | int | float | str | Sequence[Json] | Mapping[str, Json] | None"
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Load:
    """How much was asked at once: `kind` is one of `LOAD_UNITS`."""

    kind: str
    value: float

    def __str__(self) -> str:
        return f"{self.kind} {self.value:g}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The server, or the engine."""

    url: str = ""
    """Empty without HTTP."""
    model: str = ""
    server: str = ""
    """Name and version, as far as known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The machine of the client; in process and simulated, also of the server."""

    cpu: str = ""
    num_cpus: int = 0
    available_memory_bytes: int = 0
    """When the result was written."""


def this_machine() -> Machine:
    return Machine(
        cpu=machine.cpu_name(), num_cpus=machine.usable_cpus(), available_memory_bytes=machine.available_memory_bytes()
    )


@dataclass(frozen=True, kw_only=True)
class Run:
    """One load on one target."""

    name: str = ""
    """The settings that set it apart from the other runs of its result."""
    workload: str
    """Its name, with how it was changed. Results of other workloads are not compared."""
    options: Mapping[str, Json] = field(default_factory=dict)
    """All else that was asked for, by option."""
    seed: int | None = None
    load: Load | None = None
    how: str = "http"
    """One of `HOWS`. A simulated run is labelled as an estimate."""
    target: Target = field(default_factory=Target)
    begun_at: str = ""
    """ISO 8601 with a zone."""
    slos: tuple[Slo, ...] = ()
    price_per_hour: float | None = None
    notes: tuple[str, ...] = ()
    """Sentences on how it was measured."""
    samples: Samples

    @cached_property
    def figures(self) -> Figures:
        return make_figures(self.samples, slos=self.slos, price_per_hour=self.price_per_hour)


@dataclass(frozen=True, kw_only=True)
class Result:
    """The runs of one call of a command. Runs with equal loads are repeats."""

    runs: Sequence[Run]
    machine: Machine = field(default_factory=this_machine)
    made_by: str = f"penstock {__version__}"


def write_result(result: Result, path: Path) -> None:
    """Write the file whole or not at all. Raises ConfigError."""
    # A run may have taken hours: an option of a kind that JSON has not is written as text.
    content = orjson.dumps(_plain(result), default=str, option=orjson.OPT_APPEND_NEWLINE)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_bytes(content)
        beside.replace(path)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise ConfigError(
            f"{path} can't be written: {error.strerror}.", remedy="Name a file in a folder that exists."
        ) from error


def read_result(path: Path) -> Result:
    """Read a result. Raises ConfigError with the place of what is wrong."""
    try:
        size_bytes = path.stat().st_size
        if size_bytes > MAX_FILE_BYTES:
            raise ConfigError(f"{path} has {size_bytes} bytes; results are read up to {MAX_FILE_BYTES}.")
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{path} can't be read: {error.strerror}.") from error
    try:
        top = orjson.loads(content)
    except orjson.JSONDecodeError as error:
        raise ConfigError(
            f"{path} is no JSON: line {error.lineno}, column {error.colno}: {error.msg}.",
            remedy="Was it cut off? Run the benchmark again.",
        ) from error
    place = _Place(str(path), "", top)
    if not isinstance(top, dict) or "penstock_bench" not in top:
        raise ConfigError(f"{path} is no result of `penstock bench`: there is no `penstock_bench` in it.")
    version = place.get("penstock_bench", int)
    if version != VERSION:
        older = "a newer Penstock" if version > VERSION else "an older Penstock"
        raise ConfigError(
            f"{path} is of version {version}, from {older}; this one reads version {VERSION}.",
            remedy="Read it with the Penstock that wrote it, or run the benchmark again.",
        )
    runs = place.each("runs")
    if not 1 <= len(runs) <= MAX_RUNS:
        raise place.wrong("runs", f"has {len(runs)} entries; 1 to {MAX_RUNS} are allowed")
    on = place.inside("machine")
    return Result(
        runs=[_read_run(run) for run in runs],
        machine=Machine(
            cpu=on.get("cpu", str),
            num_cpus=on.get("num_cpus", int),
            available_memory_bytes=on.get("available_memory_bytes", int),
        ),
        made_by=place.get("made_by", str),
    )


def _plain(result: Result) -> dict[str, object]:
    on = result.machine
    return {
        "penstock_bench": VERSION,
        "made_by": result.made_by,
        "machine": {"cpu": on.cpu, "num_cpus": on.num_cpus, "available_memory_bytes": on.available_memory_bytes},
        "runs": [_plain_run(run) for run in result.runs],
    }


def _plain_run(run: Run) -> dict[str, object]:
    return {
        "workload": run.workload,
        "options": dict(run.options),
        "seed": run.seed,
        "load": None if run.load is None else {"kind": run.load.kind, "value": float(run.load.value)},
        "how": run.how,
        "target": {"url": run.target.url, "model": run.target.model, "server": run.target.server},
        "begun_at": run.begun_at,
        "slos": [str(slo) for slo in run.slos],
        "price_per_hour": None if run.price_per_hour is None else float(run.price_per_hour),
        "notes": run.notes,
        "figures": plain_figures(run.figures),
        "requests": _plain_samples(run.samples),
    }


def _plain_samples(samples: Samples) -> dict[str, object]:
    columns: dict[str, object] = {}
    for name in COLUMNS:
        values: list[int] = getattr(samples, name).tolist()
        columns[name] = [None if value == UNKNOWN else value for value in values] if name in _CAN_BE_UNKNOWN else values
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


def plain_figures(figures: Figures) -> dict[str, object]:
    """Return the figures as in JSON: times in milliseconds, rates per second, null where unknown."""
    goodput, cost, fairness = figures.goodput, figures.cost, figures.fairness
    return {
        "window": {"begin_ns": figures.window.begin_ns, "end_ns": figures.window.end_ns, "is": figures.window.words},
        "num_requests": figures.num_requests,
        "num_by_end": dict(figures.num_by_end),
        "reasons": dict(figures.reasons),
        "latency_ms": {name: _plain_distribution(found) for name, found in figures.latencies.items()},
        "rates": _plain_rates(figures.rates),
        "num_prompt_tokens": figures.num_prompt_tokens,
        "num_output_tokens": figures.num_output_tokens,
        "prefix_cache_share": figures.prefix_cache_share,
        "goodput": None
        if goodput is None
        else {
            "attainment": _plain_estimate(goodput.attainment),
            "attainment_by_slo": {name: _plain_estimate(one) for name, one in goodput.attainment_by_slo.items()},
            "requests_per_s": _plain_estimate(goodput.requests_per_s),
        },
        "cost": None
        if cost is None
        else {
            "price_per_hour": cost.price_per_hour,
            "per_million_output_tokens": _plain_estimate(cost.per_million_output_tokens),
            "per_million_total_tokens": _plain_estimate(cost.per_million_total_tokens),
        },
        "lag_ms": None if figures.lag is None else _plain_distribution(figures.lag),
        "steady": None
        if figures.steady is None
        else {
            "begin_ns": figures.steady[0].begin_ns,
            "end_ns": figures.steady[0].end_ns,
            "is": figures.steady[0].words,
            **_plain_rates(figures.steady[1]),
        },
        "fairness": None if fairness is None else {"jain_of_speed": fairness.of_speed, "jain_of_tokens": fairness.of_tokens},
        "num_tenants": figures.num_tenants,
        "tenants": {name: plain_figures(one) for name, one in figures.tenants.items()},
        "warnings": figures.warnings,
    }


def _plain_distribution(found: Distribution) -> dict[str, object]:
    return {
        "count": found.count,
        "mean": _plain_estimate(found.mean),
        **{name: _plain_estimate(estimate) for name, estimate in found.quantiles.items()},
        "max": _short(found.max_ms),
    }


def _plain_rates(rates: Rates) -> dict[str, object]:
    return {name: _plain_estimate(getattr(rates, name)) for name in Rates.__slots__}


def _plain_estimate(estimate: Estimate) -> dict[str, float | None]:
    return {"value": _short(estimate.value), "low": _short(estimate.low), "high": _short(estimate.high)}


def _short(value: float | None) -> float | None:
    """Return six digits, and None for infinity, which JSON lacks."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.{_FIGURES_DIGITS}g}")


@dataclass(frozen=True, slots=True)
class _Place:
    """A value in a file, and where it is."""

    file: str
    path: str
    value: object

    def wrong(self, key: str, words: str) -> ConfigError:
        return ConfigError(f"{self.file} is broken: {self._path_of(key)} {words}.", remedy="Run the benchmark again.")

    def _path_of(self, key: str) -> str:
        return f"{self.path}.{key}" if self.path else key

    def get(self, key: str, kind: type[T]) -> T:
        """Return the value below `key`; an integer may stand for a float."""
        found = self._found(key)
        if kind is float and isinstance(found, int) and not isinstance(found, bool):
            found = float(found)
        if not isinstance(found, kind) or (isinstance(found, bool) and kind is not bool):
            raise self.wrong(key, f"is {type(found).__name__}, not {kind.__name__}")
        return found

    def maybe(self, key: str, kind: type[T]) -> T | None:
        return None if self._found(key) is None else self.get(key, kind)

    def _found(self, key: str) -> object:
        if not isinstance(self.value, dict):
            raise ConfigError(f"{self.file} is broken: {self.path} is no object.", remedy="Run the benchmark again.")
        if key not in self.value:
            raise self.wrong(key, "is missing")
        found: object = self.value[key]
        return found

    def inside(self, key: str) -> _Place:
        return _Place(self.file, self._path_of(key), self.get(key, dict))

    def each(self, key: str) -> list[_Place]:
        return [_Place(self.file, f"{self._path_of(key)}[{i}]", value) for i, value in enumerate(self.get(key, list))]

    def texts(self, key: str) -> tuple[str, ...]:
        found = self.get(key, list)
        if not all(isinstance(value, str) for value in found):
            raise self.wrong(key, "has an entry that is no text")
        return tuple(found)

    def ints(self, key: str, *, below: int = _MAX_NS, can_be_unknown: bool = False) -> Ints:
        """Return whole numbers from 0 to below `below`, with null as unknown if allowed."""
        found = self.get(key, list)
        for i, value in enumerate(found):
            if value is None and can_be_unknown:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < below:
                raise self.wrong(f"{key}[{i}]", f"is {str(value)[:40]!r}, not a whole number from 0 to {below - 1}")
        return np.array([UNKNOWN if value is None else value for value in found], np.int64)

    def checked(self, key: str, make: Callable[[], T]) -> T:
        """Return the result of `make`, which reads the value below `key`; its errors name this place."""
        try:
            return make()
        except (ConfigError, ValueError) as error:
            raise self.wrong(key, f"can't be used: {error}") from error


def _read_run(place: _Place) -> Run:
    target = place.inside("target")
    how = place.get("how", str)
    if how not in HOWS:
        raise place.wrong("how", f"is {how!r}, not one of {', '.join(HOWS)}")
    return Run(
        workload=place.get("workload", str),
        options=place.get("options", dict),
        seed=place.maybe("seed", int),
        load=_read_load(place),
        how=how,
        target=Target(url=target.get("url", str), model=target.get("model", str), server=target.get("server", str)),
        begun_at=place.get("begun_at", str),
        slos=place.checked("slos", lambda: parse_slos(place.texts("slos"))),
        price_per_hour=place.maybe("price_per_hour", float),
        notes=place.texts("notes"),
        samples=_read_samples(place.inside("requests")),
    )


def _read_load(place: _Place) -> Load | None:
    if place.maybe("load", dict) is None:
        return None
    load = place.inside("load")
    kind = load.get("kind", str)
    if kind not in LOAD_UNITS:
        raise load.wrong("kind", f"is {kind!r}, not one of {', '.join(LOAD_UNITS)}")
    if not 0 < (value := load.get("value", float)) < math.inf:
        raise load.wrong("value", f"is {value:g}, and no load is that")
    return Load(kind, value)


def _read_samples(place: _Place) -> Samples:
    table = place.inside("columns")
    ends, reasons, tenants = place.texts("ends"), place.texts("reasons"), place.texts("tenants")
    if ends != tuple(end.value for end in ENDS):
        raise place.wrong("ends", f"is {', '.join(ends)}; this version knows {', '.join(ENDS)}")
    limits = {"end": len(ENDS), "reason": len(reasons), "tenant": len(tenants)}
    columns = {
        name: table.ints(name, below=limits.get(name, _MAX_NS), can_be_unknown=name in _CAN_BE_UNKNOWN) for name in COLUMNS
    }
    length = len(columns["index"])
    for name, column in columns.items():
        if len(column) != length:
            raise table.wrong(name, f"has {len(column)} entries, and index has {length}")
    if not length:
        raise table.wrong("index", "is empty")
    tenant_gaps: dict[int, GapHistogram] = {}
    for one in place.each("tenant_gaps"):
        tenant = one.get("tenant", int)
        if not 0 <= tenant < len(tenants):
            raise one.wrong("tenant", f"is {tenant}, and there are {len(tenants)} tenants")
        tenant_gaps[tenant] = _read_gaps(one)
    gaps = _read_gaps(place.inside("gaps"))
    return Samples(**columns, reasons=reasons, tenants=tenants, gaps=gaps, tenant_gaps=tenant_gaps)


def _read_gaps(place: _Place) -> GapHistogram:
    buckets = place.ints("buckets", below=1 << 16)
    if (np.diff(buckets) <= 0).any():
        raise place.wrong("buckets", "do not ascend")
    groups = place.each("groups")
    if len(groups) > NUM_GAP_GROUPS:
        raise place.wrong("groups", f"has {len(groups)} entries; {NUM_GAP_GROUPS} are allowed")
    counts = np.zeros((len(groups), len(buckets)), np.int64)
    sums = np.zeros(len(groups), np.int64)
    for row, group in enumerate(groups):
        at, some = group.ints("at", below=max(1, len(buckets))), group.ints("counts", below=1 << 40)
        if len(at) != len(some) or not some.any():
            raise group.wrong("counts", f"has {len(some)} entries for {len(at)} buckets, or nothing in them")
        counts[row, at] = some
        total_ns = group.get("sum_ns", int)
        if not 0 <= total_ns < _MAX_NS:
            raise group.wrong("sum_ns", f"is {total_ns}")
        sums[row] = total_ns
    return GapHistogram(buckets, counts, sums)
