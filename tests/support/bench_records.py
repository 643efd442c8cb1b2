"""Records of made-up runs for the tests of figures, results, reports and comparisons."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from penstock.lab.figures import Samples
from penstock.lab.records import End, Record
from penstock.lab.results import AskedTarget, Load, Machine, Result, Run

MS, S = 1_000_000, 1_000_000_000


def record(
    index: int = 0,
    *,
    due_ms: float = 0,
    lag_ms: float = 0,
    ttft_ms: float = 100,
    gaps_ms: Sequence[float] = (20, 20, 20, 20),
    prompt: int = 50,
    cached: int | None = 0,
    end: End = End.OK,
    **others: object,
) -> Record:
    """A request with one token at `ttft_ms` and one after each gap; one that was refused or failed has no token."""
    due_ns, gaps_ns = round(due_ms * MS), tuple(round(gap * MS) for gap in gaps_ms)
    has_tokens = end in (End.OK, End.CANCELLED)
    first_ns = due_ns + round(ttft_ms * MS)
    return Record(
        index=index,
        intended_ns=due_ns,
        sent_ns=due_ns + round(lag_ms * MS),
        first_ns=first_ns if has_tokens else None,
        ended_ns=first_ns + sum(gaps_ns) if has_tokens else due_ns + MS,
        num_prompt_tokens=prompt if has_tokens else 0,
        num_cached_tokens=cached,
        num_output_tokens=1 + len(gaps_ns) if has_tokens else 0,
        gaps_ns=gaps_ns if has_tokens else (),
        end=end,
        **others,  # type: ignore[arg-type]
    )


def random_records(seed: int, count: int = 300, *, slower: float = 1.0, tenants: Sequence[str] = ("",)) -> list[Record]:
    """An open loop of independent requests, 20 per second: lognormal TTFT, gaps and lengths, times `slower`."""
    rng = np.random.default_rng(seed)
    due_ms = 0.0
    records = []
    for index in range(count):
        due_ms += rng.exponential(50)
        ttft_ms = 100 * rng.lognormal(0, 0.4) * slower
        gaps_ms = 20 * rng.lognormal(0, 0.2, int(rng.integers(5, 30))) * slower
        tenant = tenants[index % len(tenants)]
        records.append(
            record(
                index, due_ms=due_ms, ttft_ms=ttft_ms, gaps_ms=list(gaps_ms), prompt=int(rng.integers(10, 200)), tenant=tenant
            )
        )
    return records


def run_of(records: Sequence[Record], **changes: object) -> Run:
    values = {"workload": "made up", "load": Load("rate", 20.0), "target": AskedTarget(model="tiny"), "seed": 1}
    return Run(samples=Samples.of(records), **(values | changes))  # type: ignore[arg-type]


def result_of(*runs: Run) -> Result:
    return Result(runs=runs, machine=Machine(cpu="a CPU", num_cpus=2, available_memory_bytes=1 << 30), made_by="penstock 0")


def close(value: float, to: float) -> bool:
    return math.isclose(value, to, rel_tol=1e-9)
