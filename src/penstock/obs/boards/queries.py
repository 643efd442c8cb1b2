"""Checks that a query names series and labels of the table of metrics."""

from __future__ import annotations

import re

from penstock.obs.table import SERIES

_SERIES = re.compile(r"\b(?:(?:penstock|process)_\w+|up)\b(?!\s*\()")
_BRACES = re.compile(r"\{(.*?)\}")
_BY = re.compile(r"\b(?:by|on|ignoring|without) \((.*?)\)")
_MATCHED = re.compile(r"(\w+)\s*(?:=~|!~|!=|=)")
_SCRAPED = {"job", "instance", "le"}
"""Labels that Prometheus adds, and the buckets' `le`."""


def checked(query: str) -> str:
    """Return the query. Raises ValueError if it names no series, or a series or label that does not exist."""
    bare = re.sub(r'"[^"]*"', '""', query)
    names = _SERIES.findall(_BY.sub("", _BRACES.sub("", bare)))
    unknown = sorted(set(names) - SERIES.keys())
    if unknown or not names:
        raise ValueError(f"{query!r} has unknown metrics, or none: {', '.join(unknown) or 'none'}")
    known = _SCRAPED.union(*(SERIES[name].labels for name in names))
    labels = {label.strip() for found in _BY.findall(bare) for label in found.split(",")}
    labels |= {label for found in _BRACES.findall(bare) for label in _MATCHED.findall(found)}
    if labels - known:
        raise ValueError(f"{query!r} has a label that its metrics lack: {', '.join(sorted(labels - known))}")
    return query
