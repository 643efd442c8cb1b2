"""Notations of numbers that people write: counts, sizes, durations, shares.

A count is `512`, `4k` (4,000) or `2Mi` (2,097,152). A size is in bytes: `4GiB`, `512MB`. A duration is in seconds:
`250ms`, `30s`, `2m`, `1h`, or a bare number of seconds. A share is `1%` or `0.01`. Counts are a list such as `128,512,1k`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

MAX_PORT = 65535

_NUMBER = re.compile(r"\s*([0-9]+(?:_[0-9]+)*(?:\.[0-9]+)?)\s*([A-Za-z%]*)\s*")

_COUNT_FACTORS = {"": 1, "k": 10**3, "K": 10**3, "M": 10**6, "G": 10**9, "Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30}
_BINARY_SIZES = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_SIZE_FACTORS = {"": 1, "B": 1, "kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, **_BINARY_SIZES}
_DURATION_FACTORS = {"": 1.0, "us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}
_SHARE_FACTORS = {"": 1.0, "%": 0.01}


def parse_count(text: str) -> int:
    """Return 4000 for `4k`, 2097152 for `2Mi`. Raises ValueError."""
    return _whole(text, _COUNT_FACTORS, "a count such as 512, 4k or 2Mi")


def parse_counts(text: str) -> tuple[int, ...]:
    """Return (128, 1000) for `128,1k`. Raises ValueError."""
    return tuple(parse_count(entry) for entry in text.split(","))


def parse_port(text: str) -> int:
    """Return 8080 for `8080`. Raises ValueError for anything but a port number or 0."""
    if not re.fullmatch(r"[0-9]{1,9}", text.strip()) or int(text) > MAX_PORT:
        raise ValueError(f"{text!r} is not a port number (0 to {MAX_PORT})")
    return int(text)


def parse_size(text: str) -> int:
    """Return a number of bytes: 4294967296 for `4GiB`. Raises ValueError."""
    return _whole(text, _SIZE_FACTORS, "a size such as 512MiB or 4GiB")


def parse_duration(text: str) -> float:
    """Return seconds: 0.25 for `250ms`. Raises ValueError."""
    return _scaled(text, _DURATION_FACTORS, "a duration such as 250ms, 30s or 2m")


def parse_share(text: str) -> float:
    """Return 0.01 for `1%`. Raises ValueError."""
    number, factor = _split(text, _SHARE_FACTORS, "a share such as 1% or 0.01")
    return float(number) if factor == 1 else float(f"{number}e-2")  # 99.9% is 0.999, which 99.9 * 0.01 is not


def nanoseconds(seconds: float | None) -> int | None:
    return None if seconds is None else round(seconds * 1e9)


def format_size(num_bytes: int) -> str:
    """Return `4 GiB` for 4294967296, with at most two decimals."""
    for unit, factor in reversed(_BINARY_SIZES.items()):
        if num_bytes >= factor:
            return f"{round(num_bytes / factor, 2):g} {unit}"
    return f"{num_bytes} B"


def figure(value: float, *, digits: int = 3) -> str:
    """Return `0.0123`, `1.23` or `1234`: so many significant digits, and more rather than an exponent as in 1.23e+03."""
    return f"{value:.{digits}g}" if abs(value) < 10**digits - 0.5 else f"{value:.0f}"


def _split(text: str, factors: Mapping[str, float], expected: str) -> tuple[str, float]:
    match = _NUMBER.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not {expected}")
    if match[2] not in factors:
        raise ValueError(f"{text!r} is not {expected}: the unit {match[2]!r} is unknown")
    return match[1], factors[match[2]]


def _whole(text: str, factors: Mapping[str, int], expected: str) -> int:
    number, factor = _split(text, factors, expected)
    if "." not in number:
        return int(number) * int(factor)
    value = float(number) * factor
    if not value.is_integer():
        raise ValueError(f"{text!r} is not a whole number")
    return int(value)


def _scaled(text: str, factors: Mapping[str, float], expected: str) -> float:
    number, factor = _split(text, factors, expected)
    return float(number) * factor
