"""Combinations of settings that `penstock simulate --vary` compares."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

from penstock.types.errors import ConfigError

MAX_VARIANTS = 200


def combinations(varied: Sequence[str]) -> list[dict[str, str]]:
    """Return all combinations of settings: four dicts for `policy=fcfs,sjf` and `rate=2,4`. The last name varies fastest.

    Values with commas are separated by semicolons: `length_buckets=128,512;1024`. Raises ConfigError.
    """
    names: list[str] = []
    values: list[list[str]] = []
    for text in varied:
        name, equals, told = text.partition("=")
        name = name.strip().removeprefix("--").replace("-", "_")
        parts = [part.strip() for part in told.split(";" if ";" in told else ",")]
        if not equals or not name or not all(parts):
            raise ConfigError(
                f"{text!r} does not vary a setting.", remedy="Write a setting and its values: policy=fcfs,sjf,fair."
            )
        if name in names:
            raise ConfigError(f"{name} is varied twice.", remedy="Give all its values at once.")
        names.append(name)
        values.append(parts)
    found = [dict(zip(names, chosen, strict=True)) for chosen in product(*values)]
    if len(found) > MAX_VARIANTS:
        raise ConfigError(f"--vary asks for {len(found)} combinations.", remedy=f"At most {MAX_VARIANTS} run at once.")
    return found


def title(variant: dict[str, str]) -> str:
    """Name a combination in a report: `policy=sjf`, or only the values if there are several settings: `sjf, 4`."""
    if len(variant) == 1:
        return "".join(f"{name}={value}" for name, value in variant.items())
    return ", ".join(variant.values())
