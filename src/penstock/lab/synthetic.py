"""Makes workloads of requests with fixed, uniform or lognormal lengths."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from random import Random
from typing import Self

from penstock.lab.workload import Job, Workload
from penstock.types.errors import ConfigError

MAX_TOKENS = 10_000_000
_LENGTHS = re.compile(r"(?P<mean>\d{1,8})(?:-(?P<high>\d{1,8})|~(?P<cv>\d{1,3}(?:\.\d{1,6})?))?")


@dataclass(frozen=True, slots=True)
class Lengths:
    """A distribution of lengths in tokens: uniform from `low` to `high`, or lognormal with mean `low` if `cv` is above 0."""

    text: str
    """As typed: `512`, `100-900` (uniform), or `512~0.8` (lognormal, mean 512, standard deviation 0.8 * 512)."""
    low: int
    high: int
    cv: float

    @classmethod
    def parse(cls, text: str) -> Self:
        found = _LENGTHS.fullmatch(text.strip())
        if found is not None:
            low, high, cv = int(found["mean"]), int(found["high"] or found["mean"]), float(found["cv"] or 0)
            if 1 <= low <= high <= MAX_TOKENS:
                return cls(text.strip(), low, high, cv)
        raise ConfigError(
            f"{text[:40]!r} is not a length in tokens.",
            remedy="Write 512; or 100-900 for any between; or 512~0.8: lognormal, mean 512, standard deviation 0.8 * 512.",
        )

    def draw(self, rng: Random) -> int:
        if self.cv:
            variance = math.log1p(self.cv**2)
            drawn = rng.lognormvariate(math.log(self.low) - variance / 2, math.sqrt(variance))
            return max(1, round(min(drawn, MAX_TOKENS)))
        return rng.randint(self.low, self.high)


NAMED: Mapping[str, tuple[str, str]] = {
    "synthetic": ("512", "128"),
    "short": ("32", "32"),
    "chat": ("300~1.5", "250~0.8"),
    "documents": ("4000~0.5", "200~0.5"),
    "writing": ("200~0.8", "1000~0.5"),
}
"""Name -> lengths of prompts and answers, similar to published chat and document traffic."""


def synthetic(name: str, count: int, *, prompt: Lengths, output: Lengths, seed: int) -> Workload:
    rng = Random(f"lengths {seed}")  # noqa: S311  # repeatable on purpose
    jobs = [Job(arrival_ns=0, num_prompt_tokens=prompt.draw(rng), num_output_tokens=output.draw(rng)) for _ in range(count)]
    return Workload(name=f"{name}, {prompt.text} tokens in, {output.text} out", jobs=jobs)
