"""Reads and checks the result files of `penstock bench` and `simulate`, which `results` writes."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import numpy as np
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from penstock.lab.figures import COLUMNS, ENDS, NUM_GAP_GROUPS, UNKNOWN, GapHistogram, Samples, parse_slos
from penstock.lab.results import CAN_BE_UNKNOWN, LOAD_UNITS, VERSION, AskedTarget, Load, Machine, Result, Run
from penstock.types.errors import ConfigError

MAX_FILE_BYTES = 1 << 30

_Ns = Annotated[int, Field(ge=0, lt=1 << 62)]


class _Shape(BaseModel):
    model_config = ConfigDict(strict=True)


class _Group(_Shape):
    sum_ns: _Ns
    at: list[Annotated[int, Field(ge=0)]]
    counts: list[Annotated[int, Field(ge=0, lt=1 << 40)]]


class _Gaps(_Shape):
    buckets: list[Annotated[int, Field(ge=0, lt=1 << 16)]]
    groups: Annotated[list[_Group], Field(max_length=NUM_GAP_GROUPS)]
    tenant: int = 0

    @model_validator(mode="after")
    def _check(self) -> Self:
        if any(after <= before for before, after in zip(self.buckets, self.buckets[1:], strict=False)):
            raise ValueError("the buckets do not ascend")
        for group in self.groups:
            if len(group.at) != len(group.counts) or not any(group.counts):
                raise ValueError(f"a group has {len(group.counts)} entries for {len(group.at)} buckets, or nothing in them")
            if max(group.at) >= len(self.buckets):
                raise ValueError(f"a group has the bucket {max(group.at)} of {len(self.buckets)}")
        return self

    def histogram(self) -> GapHistogram:
        counts = np.zeros((len(self.groups), len(self.buckets)), np.int64)
        for row, group in zip(counts, self.groups, strict=True):
            row[group.at] = group.counts
        sums = np.array([group.sum_ns for group in self.groups], np.int64)
        return GapHistogram(np.array(self.buckets, np.int64), counts, sums)


class _Requests(_Shape):
    ends: list[str]
    reasons: list[str]
    tenants: list[str]
    columns: dict[str, list[_Ns | None]]
    gaps: _Gaps
    tenant_gaps: list[_Gaps]

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.ends != list(ENDS):
            raise ValueError(f"the ends are {', '.join(self.ends)}; this version knows {', '.join(ENDS)}")
        limits = {"end": len(self.ends), "reason": len(self.reasons), "tenant": len(self.tenants)}
        length = len(self.columns.get("index", ()))
        for name in COLUMNS:
            column = self.columns.get(name, [])
            if len(column) != length or not length:
                raise ValueError(f"the column {name} has {len(column)} entries, and index has {length}")
            if None in column and name not in CAN_BE_UNKNOWN:
                raise ValueError(f"the column {name} has a null")
            if name in limits and (most := max(value or 0 for value in column)) >= limits[name]:
                raise ValueError(f"the column {name} has {most}, and there are {limits[name]}")
        for one in self.tenant_gaps:
            if not 0 <= one.tenant < len(self.tenants):
                raise ValueError(f"there are gaps of tenant {one.tenant}, and there are {len(self.tenants)} tenants")
        return self

    def samples(self) -> Samples:
        columns: dict[str, Any] = {
            name: np.array([UNKNOWN if value is None else value for value in self.columns[name]], np.int64) for name in COLUMNS
        }
        return Samples(
            **columns,
            reasons=tuple(self.reasons),
            tenants=tuple(self.tenants),
            gaps=self.gaps.histogram(),
            tenant_gaps={one.tenant: one.histogram() for one in self.tenant_gaps},
        )


class _Run(_Shape):
    name: str = ""
    workload: str
    options: dict[str, Any]
    seed: int | None
    load: Load | None
    how: Literal["http", "in process", "simulated"]
    target: AskedTarget
    begun_at: str
    slos: list[str]
    price_per_hour: float | None
    notes: tuple[str, ...]
    warnings: tuple[str, ...] = ()
    requests: _Requests

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.load is not None and (self.load.kind not in LOAD_UNITS or not 0 < self.load.value < math.inf):
            raise ValueError(f"the load is {self.load}; it must be one of {', '.join(LOAD_UNITS)}, and above 0")
        try:
            parse_slos(self.slos)
        except ConfigError as error:
            raise ValueError(f"slos can't be used: {error}") from None
        return self

    def run(self) -> Run:
        fields = {name: getattr(self, name) for name in type(self).model_fields if name not in ("slos", "requests")}
        return Run(**fields, slos=parse_slos(self.slos), samples=self.requests.samples())


def _check_version(version: int) -> int:
    if version != VERSION:
        origin = "a newer Penstock" if version > VERSION else "an older Penstock"
        raise ValueError(f"it is of version {version}, from {origin}, and this one reads version {VERSION}")
    return version


class _Result(_Shape):
    penstock_bench: Annotated[int, AfterValidator(_check_version)]
    made_by: str
    machine: Machine
    runs: Annotated[list[_Run], Field(min_length=1, max_length=1000)]


def read_result(path: Path) -> Result:
    """Read a result file. Raises ConfigError, which names the wrong field."""
    try:
        if (size_bytes := path.stat().st_size) > MAX_FILE_BYTES:
            raise ConfigError(f"{path} has {size_bytes} bytes; results are read up to {MAX_FILE_BYTES}.")
        with path.open("rb") as file:
            found = _Result.model_validate_json(file.read(MAX_FILE_BYTES + 1))
    except OSError as error:
        raise ConfigError(f"{path} can't be read: {error.strerror}.") from error
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"]).lstrip(".")
        cause = ": ".join(filter(None, (place, first["msg"].removeprefix("Value error, "))))
        raise ConfigError(f"{path} is not a result of `penstock bench`: {cause}.", remedy="Run the benchmark again.") from None
    return Result(runs=[run.run() for run in found.runs], machine=found.machine, made_by=found.made_by)
