"""Reserves: how much free memory must an admission find? Called by the scheduler for the request that is next."""

from __future__ import annotations

import math
from dataclasses import dataclass

from penstock.sched.policies.base import AdmissionView, Reserve
from penstock.types.request import Request


class FirstChunk(Reserve):
    """The blocks that the next step needs. A request that is admitted so may be preempted before its prompt is computed."""

    def required_blocks(self, view: AdmissionView) -> int:
        return view.num_chunk_blocks


class WholePrompt(Reserve):
    """The blocks of the tokens that the request has (vLLM's `scheduler_reserve_full_isl`)."""

    def required_blocks(self, view: AdmissionView) -> int:
        return view.num_prompt_blocks


class NoEvict(Reserve):
    """The blocks with which the request and all running ones reach their limits: none is ever preempted, and memory lies idle
    (Orca's reservation of `max_tokens`)."""

    def required_blocks(self, view: AdmissionView) -> int:
        return view.num_final_blocks + view.num_growth_blocks


@dataclass(frozen=True, slots=True)
class PredictedOutput(Reserve):
    """The blocks of the answers that the request and all running ones are expected to give. O(running)."""

    unknown_share: float = 0.3
    """Share of the tokens that are left to its limit, for a request whose length was not predicted. (SGLang's `new_token_ratio`
    begins at 0.7 and falls to a seventh of that while no request is preempted.)"""
    growth_tokens: int = 32
    """Expected at least: a reply that is longer than predicted is not about to end."""

    def required_blocks(self, view: AdmissionView) -> int:
        size = view.block_size
        growth = sum(self._growth_blocks(request, size) for request in view.running)
        own = view.num_prompt_blocks + self._growth_blocks(view.request, size)
        return min(own, view.num_final_blocks) + min(growth, view.num_growth_blocks)

    def _growth_blocks(self, request: Request, block_size: int) -> int:
        num_tokens, num_left = request.num_tokens, request.max_total_tokens - request.num_tokens
        if request.predicted_new_tokens is None:
            expected = math.ceil(num_left * self.unknown_share)
        else:
            expected = request.predicted_new_tokens - len(request.output_token_ids)
        expected = min(max(expected, self.growth_tokens), num_left)
        # The last token is sampled and never computed.
        return -(-(num_tokens + expected - 1) // block_size) - -(-num_tokens // block_size)


@dataclass(frozen=True, slots=True)
class Watermark(Reserve):
    """All the blocks that the request's tokens need, room for the running to grow, and a share of the pool.

    Without the room to grow, a full pool admits a request only to preempt it a few steps later, and computes it
    again. With half of the memory, without room 1.19 positions are computed for each one needed, with 32 tokens 1.02,
    in 3 % more steps (`benchmarks/memory_pressure.py` of commit f52e6e6, 2026-11-20; independent of the machine).
    """

    share: float = 0.01
    """Share of the pool, [0, 1)."""
    growth_tokens: int = 32
    """For each running request, or less if all of them together can't grow by as much."""
    swap_growth_tokens: int = 16
    """The same, where a preempted request is brought back and not computed again: then an idle block costs more."""
    is_whole_prompt: bool = True
    """False: only the first chunk's blocks."""

    def required_blocks(self, view: AdmissionView) -> int:
        own = view.num_prompt_blocks if self.is_whole_prompt else view.num_chunk_blocks
        growth_tokens = min(self.growth_tokens, self.swap_growth_tokens) if view.swaps else self.growth_tokens
        num_wanted = view.num_running * math.ceil(growth_tokens / view.block_size)
        growth = min(num_wanted, view.num_growth_blocks, view.num_peak_blocks)
        return own + growth + math.ceil(self.share * view.num_total_blocks)


RESERVES = {
    "chunk": "penstock.sched.policies.reserves:FirstChunk",
    "prompt": "penstock.sched.policies.reserves:WholePrompt",
    "predicted": "penstock.sched.policies.reserves:PredictedOutput",
    "no-evict": "penstock.sched.policies.reserves:NoEvict",
    "watermark": "penstock.sched.policies.reserves:Watermark",
}
