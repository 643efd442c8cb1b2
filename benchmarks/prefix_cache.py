"""How much computing does the prefix cache save, by its size? Real prefixes, modelled steps.

    python benchmarks/prefix_cache.py                          # a quarter of a minute
    python benchmarks/prefix_cache.py --draw docs/memory

The real scheduler and KV manager over a modelled executor, under a virtual clock: the numbers are exact and do not depend on
the machine. Requests are those of `mooncake_synthetic.jsonl` (--traces), in which a prompt is a list of names of chained
blocks of 512 tokens. Scaled by 32: each such block becomes one block of 16 tokens, so that what is shared stays shared, and
answers are 1/32 as long; arrivals are as they are. Each prompt has one token more, since no cache saves the last one.

`--kv-rest 0s` makes eviction plain LRU; `resting.py` measures resting blocks. Reports the share of the
prompts' blocks that were found, by the size of the pool, beside what ideal caches would find if requests came one after
another (`ideal_caches.py`): infinite, LRU, and Belady's optimum. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
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
"""Tokens of a block, and the factor from the trace's blocks."""
MAX_ROWS, MAX_STEP_TOKENS = 32, 512
SIZES = (512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
"""Blocks of the pool; the trace has 43,924 different ones, and its longest prompt 374."""
NUM_REQUESTS: int | None = None
"""Requests of the trace; None: all."""
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


def num_cached_blocks(
    jobs: Sequence[Job], num_blocks: int, eviction: str, order: str = "fcfs", rest_s: float = 0.0
) -> list[int]:
    """The prompt's blocks that each job found when it was first admitted."""
    longest = max(job.num_prompt_tokens + job.num_output_tokens for job in jobs)
    capacity = Capacity(1 + num_blocks, BLOCK_SIZE, MAX_ROWS, MAX_STEP_TOKENS, max_model_len=longest)
    settings = {"eviction": {"rest_ns": round(rest_s * 1e9)}}
    simulation = Simulation(
        capacity=capacity,
        make_policies=lambda: make_policies(order=order, eviction=eviction, settings=settings),
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, default=DEFAULT_TRACES)
    parser.add_argument("--draw", type=Path, help=f"folder for {PLOT}")
    args = parser.parse_args()
    report = run_sizes(args.traces)
    if args.draw is not None:
        args.draw.mkdir(parents=True, exist_ok=True)
        (args.draw / PLOT).write_text(draw(report), encoding="utf-8")
    print(json.dumps({"benchmark": "prefix_cache"} | report))


if __name__ == "__main__":
    main()
