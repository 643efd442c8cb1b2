"""How much computing does the prefix cache save, by its size and by whose blocks go first? Real prefixes, modelled steps.

    python benchmarks/prefix_cache.py                          # both parts, half a minute
    python benchmarks/prefix_cache.py --parts sizes --draw docs/memory

The real scheduler and KV manager over a modelled executor, under a virtual clock: the numbers are exact and do not depend on
the machine. Requests are those of `mooncake_synthetic.jsonl` (--traces), in which a prompt is a list of names of chained
blocks of 512 tokens. Scaled by 32: each such block becomes one block of 16 tokens, so that what is shared stays shared, and
answers are 1/32 as long; arrivals are as they are. Each prompt has one token more, since no cache saves the last one.

`sizes`: share of the prompts' blocks that were found, by the size of the pool, beside what caches could find if requests came
one after another (`ideal_caches.py`): infinite, least recently used, and Belady's optimum. `tenants`: the same requests are
a light tenant's, or of a high class; with each comes a prompt of a heavy tenant, of a low class, that is never seen again.
Time is then stretched by 4, so that the queue does not grow for ever. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ideal_caches import belady, infinite, least_recently_used
from workloads import DEFAULT_TRACES

from penstock.lab import plots
from penstock.lab.simulation import Simulation
from penstock.lab.traces import read_workload
from penstock.lab.workload import Job, Workload
from penstock.sched.policies.presets import make_policies
from penstock.types.plan import Capacity

TRACE_FILE = "mooncake_synthetic.jsonl"
BLOCK_SIZE, SCALE = 16, 32
"""Tokens of a block, and by how much that is shorter than in the trace."""
MAX_ROWS, MAX_STEP_TOKENS = 32, 512
SIZES = (512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
"""Blocks of the pool; the trace has 43,924 different ones, and its longest prompt 374."""
NUM_REQUESTS: int | None = None
"""Requests of the trace; None: all."""
TENANT_SIZES = (4096, 16384)
HEAVY_BLOCKS = 64
"""Blocks of each of the heavy tenant's prompts, twice as many as the mean of the trace; one comes with each of the others."""
STRETCH = 4
PLOT = "prefix-cache-sizes.svg"


@dataclass(frozen=True, slots=True)
class Prompt:
    arrival_ns: int
    blocks: tuple[int, ...]
    """Equal names mean equal prefixes."""
    num_output_tokens: int

    def job(self, tenant: str = "", priority: int = 0) -> Job:
        """A block's tokens are its name; what is before it is part of the prefix anyway."""
        token_ids = (*(name for name in self.blocks for _ in range(BLOCK_SIZE)), 1)
        return Job(
            arrival_ns=self.arrival_ns,
            num_prompt_tokens=len(token_ids),
            num_output_tokens=self.num_output_tokens,
            tenant=tenant,
            priority=priority,
            prompt_token_ids=token_ids,
        )


def read_mooncake(traces: Path) -> list[Prompt]:
    path = traces / TRACE_FILE
    if not path.is_file():
        raise SystemExit(
            f"{path} is missing: synthetic_trace.jsonl of github.com/kvcache-ai/Mooncake. Name its folder with --traces."
        )
    trace = read_workload(path, max_requests=NUM_REQUESTS)
    return [Prompt(job.arrival_ns, job.prefix, max(1, job.num_output_tokens // SCALE)) for job in trace.jobs]


def num_cached_blocks(jobs: Sequence[Job], num_blocks: int, eviction: str, order: str = "fcfs") -> list[int]:
    """The prompt's blocks that each job found when it was first admitted."""
    longest = max(job.num_prompt_tokens + job.num_output_tokens for job in jobs)
    capacity = Capacity(1 + num_blocks, BLOCK_SIZE, MAX_ROWS, MAX_STEP_TOKENS, max_model_len=longest)
    simulation = Simulation(
        capacity=capacity,
        make_policies=lambda: make_policies(order=order, eviction=eviction),
        max_tokens=longest,
        enable_prefix_caching=True,
    )
    return [stats.num_cached_tokens // BLOCK_SIZE for stats in simulation.run(Workload(name=TRACE_FILE, jobs=jobs)).ended]


def run_sizes(traces: Path) -> dict[str, object]:
    prompts = read_mooncake(traces)
    requests = [prompt.blocks for prompt in prompts]
    num_asked = sum(map(len, requests))
    ceiling = infinite(requests) / num_asked
    rows = []
    for size in SIZES:
        found = sum(num_cached_blocks([prompt.job() for prompt in prompts], size, "lru"))
        row = {
            "blocks": size,
            "penstock": round(found / num_asked, 4),
            "lru": round(least_recently_used(requests, size) / num_asked, 4),
            "belady": round(belady(requests, size) / num_asked, 4),
        }
        row["of_infinite"] = round(row["penstock"] / ceiling, 4)
        rows.append(row)
        print("sizes", row, flush=True)
    return {"requests": len(prompts), "blocks_asked": num_asked, "infinite": round(ceiling, 4), "hit_rate": rows}


def run_tenants(traces: Path) -> dict[str, object]:
    prompts = read_mooncake(traces)
    num_asked = sum(len(prompt.blocks) for prompt in prompts)
    names = range(1 << 24, 1 << 30, HEAVY_BLOCKS)  # of no prefix of the trace
    heavy = [
        Prompt(prompt.arrival_ns, tuple(range(first, first + HEAVY_BLOCKS)), 1)
        for prompt, first in zip(prompts, names, strict=False)
    ]
    light = [prompt.job("light", 0) for prompt in prompts]
    both = [*light, *(prompt.job("heavy", 1) for prompt in heavy)]
    light, both = ([replace(job, arrival_ns=STRETCH * job.arrival_ns) for job in jobs] for jobs in (light, both))
    rows = []
    for size in TENANT_SIZES:
        row: dict[str, float] = {"blocks": size, "alone": round(sum(num_cached_blocks(light, size, "lru")) / num_asked, 4)}
        for eviction, order in (("lru", "fcfs"), ("tenant-fair", "fcfs"), ("priority", "priority")):
            found = num_cached_blocks(both, size, eviction, order)[: len(light)]
            row[eviction] = round(sum(found) / num_asked, 4)
        rows.append(row)
        print("tenants", row, flush=True)
    return {"heavy_blocks": HEAVY_BLOCKS, "light_hit_rate": rows}


def draw(report: dict[str, object]) -> str:
    """The plot of `sizes`."""
    rows = report["hit_rate"]
    assert isinstance(rows, list)
    titles = {"belady": "Belady", "lru": "LRU in sequence", "penstock": "Penstock"}
    shares = {title: [(float(row["blocks"]), float(row[key])) for row in rows] for key, title in titles.items()}
    shares["infinite"] = [(float(row["blocks"]), float(str(report["infinite"]))) for row in rows]
    series = [plots.Series(title, [(x, 100 * y) for x, y in points]) for title, points in shares.items()]
    sizes = plots.Axis("blocks in the pool", is_log=True, ticks={size: str(size) for size in SIZES})
    panel = plots.Panel("", sizes, plots.Axis("prompt blocks found (%)", low=0.0), series)
    return plots.draw("Prefix cache, Mooncake's synthetic trace", [panel]).svg().decode()


PARTS: dict[str, Callable[[Path], dict[str, object]]] = {"sizes": run_sizes, "tenants": run_tenants}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, default=DEFAULT_TRACES)
    parser.add_argument("--parts", nargs="+", choices=tuple(PARTS), default=list(PARTS))
    parser.add_argument("--draw", type=Path, help=f"folder for {PLOT}")
    arguments = parser.parse_args()
    report: dict[str, object] = {"benchmark": "prefix_cache"}
    for part in arguments.parts:
        found = report[part] = PARTS[part](arguments.traces)
        if part == "sizes" and arguments.draw is not None:
            arguments.draw.mkdir(parents=True, exist_ok=True)
            (arguments.draw / PLOT).write_text(draw(found), encoding="utf-8")
    print(json.dumps(report))


if __name__ == "__main__":
    main()
