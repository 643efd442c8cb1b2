"""The Markdown that benchmarks print, as it stands in the documentation: tables, and where their figures come from. Measures
nothing.
"""

from __future__ import annotations

import datetime
import shlex
import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from statistics import median

from penstock import machine


def table(head: Sequence[object], rows: Sequence[Sequence[object]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def origin(*about: str) -> str:
    """Return the line above a result's table: command, date and machine, and any further notes."""
    command = shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]])
    told = [datetime.datetime.now(datetime.UTC).date().isoformat(), machine.cpu_name() or "unknown processor", *about]
    return f"`{command}`, {', '.join(told)}:\n"


def spread(values: Collection[float], digits: int) -> str:
    """Median (least to most)."""
    return f"{median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def percent(share: float) -> str:
    return f"{100 * share:.0f} %"
