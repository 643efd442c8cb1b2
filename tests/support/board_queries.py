"""Which series and labels a query of the boards or alerts may name: those of the table of metrics."""

from __future__ import annotations

import re

from penstock.obs.table import METRICS, PREFIX

_SUMS = ("_sum", "_count")
_SUFFIXES = {"gauge": ("",), "counter": ("_total",), "histogram": ("_bucket", *_SUMS), "summary": _SUMS}
_PROCESS = ("cpu_seconds_total", "resident_memory_bytes", "start_time_seconds")
SERIES: dict[str, tuple[str, ...]] = {
    **{PREFIX + name + suffix: spec.labels for name, spec in METRICS.items() for suffix in _SUFFIXES[spec.kind]},
    **{f"process_{name}": () for name in _PROCESS},
    "up": ("job", "instance"),
}
"""Every series that a query may name -> its labels. `up` comes from Prometheus."""

_SERIES = re.compile(r"\b(?:(?:penstock|process)_\w+|up)\b(?!\s*\()")
_BRACES = re.compile(r"\{(.*?)\}")
_BY = re.compile(r"\b(?:by|on|ignoring|without) \((.*?)\)")
_MATCHED = re.compile(r"(\w+)\s*(?:=~|!~|!=|=)")
_SCRAPED = {"job", "instance", "le"}
"""Labels that Prometheus adds, and the buckets' `le`."""


def check_query(query: str) -> None:
    """Raise ValueError if it names no series, or a series or label that does not exist."""
    bare = re.sub(r'"[^"]*"', '""', query)
    names = _SERIES.findall(_BY.sub("", _BRACES.sub("", bare)))
    unknown = sorted(set(names) - SERIES.keys())
    if unknown or not names:
        raise ValueError(f"{query!r} has unknown metrics, or none: {', '.join(unknown) or 'none'}")
    known = _SCRAPED.union(*(SERIES[name] for name in names))
    labels = {label.strip() for found in _BY.findall(bare) for label in found.split(",")}
    labels |= {label for found in _BRACES.findall(bare) for label in _MATCHED.findall(found)}
    if labels - known:
        raise ValueError(f"{query!r} has a label that its metrics lack: {', '.join(sorted(labels - known))}")
