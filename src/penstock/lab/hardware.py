"""Descriptions of machines: memory, bandwidth, peak multiply-adds, price.

They come from Penstock's table (`hardware.csv`, which explains its columns), a user's table, or a probe of this machine.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from penstock.lab.cost_files import read_text
from penstock.types.errors import ConfigError, counted

TABLE = "hardware.csv"
MAX_TABLE_BYTES = 1 << 20
THIS_READ_SHARE, THIS_COMPUTE_SHARE = 0.8, 0.4
"""Shares of the peaks that steps reached with two AVX-512 cores (docs/performance.md, "One step"): 81 to 86 % of the bandwidth
for one row on an EPYC (2026-11-21), 32 to 39 % of the multiply-adds for 32 rows and prompts on a Xeon (2026-11-22)."""
THIS_STEP_NS = 200_000
_COLUMNS = (
    "name",
    "kind",
    "description",
    "memory_gb",
    "read_gb_s",
    "int8_tops",
    "bf16_tops",
    "read_share",
    "compute_share",
    "step_us",
    "basis",
    "price_per_hour_usd",
    "price_source",
    "price_date",
    "spec_source",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    name: str
    description: str
    is_gpu: bool
    memory_bytes: int
    read_bytes_per_s: float
    int8_ops_per_s: float
    """Peak of int8 operations; a multiply-add is two. 0 if products with quantised weights run in bf16."""
    bf16_ops_per_s: float
    read_share: float
    """Share of `read_bytes_per_s` that a step reaches, estimated. `basis` names the source of the estimate."""
    compute_share: float
    step_ns: int
    basis: str
    price_per_hour: float | None = None
    price_source: str = ""
    price_date: str = ""
    spec_source: str = ""
    tables: str = ""
    """Projects with published kernel times for this machine."""

    def __post_init__(self) -> None:
        for name in ("memory_bytes", "read_bytes_per_s", "bf16_ops_per_s"):
            if not (value := getattr(self, name)) > 0 or not math.isfinite(value):
                raise ValueError(f"{name} is {value:g}, and must be more than 0")
        for name in ("read_share", "compute_share"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name} is {getattr(self, name):g}, outside of (0, 1]")
        for name in ("int8_ops_per_s", "step_ns", "price_per_hour"):
            if (value := getattr(self, name)) is not None and not 0 <= value < math.inf:
                raise ValueError(f"{name} is {value:g}, and must be at least 0")

    def ops_per_s(self, *, is_quantised: bool) -> float:
        return self.int8_ops_per_s if is_quantised and self.int8_ops_per_s else self.bf16_ops_per_s


def this_machine(
    *, name: str, memory_bytes: int, read_bytes_per_s: float, int8_ops_per_s: float, bf16_ops_per_s: float
) -> Hardware:
    """Return this machine's description, with its probed peaks. `name` is the processor's name."""
    return Hardware(
        name="this",
        description=name,
        is_gpu=False,
        memory_bytes=memory_bytes,
        read_bytes_per_s=read_bytes_per_s,
        int8_ops_per_s=int8_ops_per_s,
        bf16_ops_per_s=bf16_ops_per_s,
        read_share=THIS_READ_SHARE,
        compute_share=THIS_COMPUTE_SHARE,
        step_ns=THIS_STEP_NS,
        basis="peaks probed now; shares of them assumed, as measured on two AVX-512 cores (docs/performance.md)",
        spec_source="probed now",
    )


def find(name: str, table: Mapping[str, Hardware]) -> Hardware:
    """Return a machine by name, ignoring case. Raises ConfigError, which lists the known names."""
    for known, hardware in table.items():
        if known.lower() == name.lower():
            return hardware
    raise ConfigError(
        f"There is no hardware called {name!r}.",
        remedy=f"Valid: this, {', '.join(table)}; or add a line to a table of your own: --hardware-table FILE.csv.",
    )


def known_hardware() -> dict[str, Hardware]:
    text = files("penstock.lab").joinpath(TABLE).read_text(encoding="utf-8")
    return _parse(text.splitlines(), TABLE)


def read_table(path: Path) -> dict[str, Hardware]:
    try:
        text = read_text(path, MAX_TABLE_BYTES)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: can't be read as a table of hardware: {error}.", remedy="Check --hardware-table.") from None
    return _parse(text.splitlines(), str(path))


def _parse(lines: Iterable[str], name: str) -> dict[str, Hardware]:
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip() and not line.startswith("#")]
    found: dict[str, Hardware] = {}
    header: list[str] | None = None
    for number, line in numbered:
        try:
            cells = next(csv.reader([line], strict=True))
            if header is None:
                header = cells
                if missing := [column for column in _COLUMNS if column not in header]:
                    raise ValueError(f"the header lacks {', '.join(missing)}")
                continue
            if len(cells) != len(header):
                raise ValueError(f"there are {counted(len(cells), 'value')} for {counted(len(header), 'column')}")
            hardware = _hardware(dict(zip(header, cells, strict=True)))
            if hardware.name.lower() in {"this", *map(str.lower, found)}:
                raise ValueError(f"the name {hardware.name!r} is taken already")
        except (ValueError, csv.Error) as error:
            remedy = f"Write it as Penstock's own table: {', '.join(_COLUMNS)}."
            raise ConfigError(f"{name}, line {number}: {error}.", remedy=remedy) from None
        found[hardware.name] = hardware
    if not found:
        raise ConfigError(f"{name}: there is no hardware in it.", remedy=f"Give it a header: {', '.join(_COLUMNS)}.")
    return found


def _hardware(row: Mapping[str, str]) -> Hardware:

    def number(column: str, factor: float = 1.0) -> float:
        try:
            value = float(row[column]) * factor
        except ValueError:
            value = math.nan
        if not math.isfinite(value):
            raise ValueError(f"{column} is {row[column]!r}, which is not a number")
        return value

    if row["kind"] not in ("cpu", "gpu"):
        raise ValueError(f"kind is {row['kind']!r}, and must be cpu or gpu")
    if not row["name"] or "," in row["name"]:
        raise ValueError("a name must have no comma and not be empty")
    return Hardware(
        name=row["name"],
        description=row["description"],
        is_gpu=row["kind"] == "gpu",
        memory_bytes=round(number("memory_gb", 1e9)),
        read_bytes_per_s=number("read_gb_s", 1e9),
        int8_ops_per_s=number("int8_tops", 1e12),
        bf16_ops_per_s=number("bf16_tops", 1e12),
        read_share=number("read_share"),
        compute_share=number("compute_share"),
        step_ns=round(number("step_us", 1e3)),
        basis=row["basis"],
        price_per_hour=number("price_per_hour_usd") if row["price_per_hour_usd"] else None,
        price_source=row["price_source"],
        price_date=row["price_date"],
        spec_source=row["spec_source"],
        tables=row.get("tables", ""),
    )
