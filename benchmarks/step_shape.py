"""Steps that benchmarks compute, as they are written on a command line: `32x1@256`. Knows no executor and no device."""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepShape:
    """A step of `rows` rows that each compute `query_len` tokens after `context_len` positions."""

    rows: int
    query_len: int
    context_len: int

    def __str__(self) -> str:
        return f"{self.rows}x{self.query_len}@{self.context_len}"

    @property
    def is_decode(self) -> bool:
        return self.query_len == 1

    @property
    def num_tokens(self) -> int:
        return self.rows * self.query_len


def parse_step(text: str) -> StepShape:
    """The shape that `str(step)` writes. Raises argparse.ArgumentTypeError for anything else."""
    found = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)@(\d+)", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not ROWSxQUERY_LEN@CONTEXT_LEN")
    return StepShape(*map(int, found.groups()))
