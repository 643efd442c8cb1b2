"""Reserves: how much free memory must an admission find? Called by the scheduler for the request that is next."""

from __future__ import annotations

import math
from dataclasses import dataclass

from penstock.sched.policies.base import AdmissionView


@dataclass(frozen=True, slots=True)
class Watermark:
    """All the blocks that the request's tokens need, room for the running to grow, and a share of the pool.

    Without the room to grow, a full pool admits a request only to preempt it a few steps later, and computes it
    again. `benchmarks/memory_pressure.py`, half of the memory: without room 1.32 positions are computed for each one
    needed, with 32 tokens 1.02, in 7 % more steps (2026-11-20; independent of the machine).
    """

    share: float = 0.01
    """Of the pool, [0, 1)."""
    growth_tokens: int = 32
    """For each running request, or less if all of them together can't grow by as much."""
    is_whole_prompt: bool = True
    """False: only the first chunk's blocks."""

    def required_blocks(self, view: AdmissionView) -> int:
        own = view.num_prompt_blocks if self.is_whole_prompt else view.num_chunk_blocks
        growth = min(view.num_growth_blocks, view.num_running * math.ceil(self.growth_tokens / view.block_size))
        return own + growth + math.ceil(self.share * view.num_total_blocks)


RESERVES = {"watermark": "penstock.sched.policies.reserves:Watermark"}
