"""Reserves: how much free memory must an admission find? Called by the scheduler for the request that is next."""

from __future__ import annotations

import math
from dataclasses import dataclass

from penstock.sched.policies.base import AdmissionView


@dataclass(frozen=True, slots=True)
class Watermark:
    """All the blocks that the request's tokens need, and a share of the pool to stay free.

    A request that was preempted also leaves a block to every running request: else the next one of them that
    grows would preempt it again, within a step or two.
    """

    share: float = 0.01
    """Of the pool, [0, 1)."""
    is_whole_prompt: bool = True
    """False: only the first chunk's blocks."""

    def required_blocks(self, view: AdmissionView) -> int:
        own = view.num_prompt_blocks if self.is_whole_prompt else view.num_chunk_blocks
        growth = view.num_running if view.num_preemptions else 0
        return own + growth + math.ceil(self.share * view.num_total_blocks)


RESERVES = {"watermark": "penstock.sched.policies.reserves:Watermark"}
