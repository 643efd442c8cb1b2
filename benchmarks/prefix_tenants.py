"""Whose cached prefixes go first? A light tenant's share of blocks found beside a heavy tenant, under each eviction policy.

    python benchmarks/prefix_tenants.py                        # a quarter of a minute

As in `prefix_cache.py`, whose requests are the light tenant's, or of a high class. With each comes a prompt of a heavy tenant,
of a low class, that is never seen again. Arrivals are stretched by 4, so that the queue stays bounded. The last line
is one JSON object.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path

from prefix_cache import Prompt, num_cached_blocks, read_mooncake
from workloads import DEFAULT_TRACES

SIZES = (4096, 16384)
"""Blocks of the pool."""
HEAVY_BLOCKS = 64
"""Blocks of each of the heavy tenant's prompts, twice as many as the mean of the trace; one comes with each of the others."""
STRETCH = 4


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
    for size in SIZES:
        row: dict[str, float] = {
            "blocks": size,
            "alone": round(sum(num_cached_blocks(light, size, "lru")) / num_asked, 4),
        }
        for eviction, order in (("lru", "fcfs"), ("tenant-fair", "fcfs"), ("priority", "priority")):
            found = num_cached_blocks(both, size, eviction, order)[: len(light)]
            row[eviction] = round(sum(found) / num_asked, 4)
        rows.append(row)
        print("tenants", row, flush=True)
    return {"heavy_blocks": HEAVY_BLOCKS, "light_hit_rate": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, default=DEFAULT_TRACES)
    print(json.dumps({"benchmark": "prefix_tenants"} | run_tenants(parser.parse_args().traces)))


if __name__ == "__main__":
    main()
