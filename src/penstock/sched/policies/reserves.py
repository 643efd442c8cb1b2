"""Reserve policies: how many free blocks must be available to admit a request."""

from __future__ import annotations

import math
from dataclasses import dataclass

from penstock.sched.policies.base import AdmissionView, Reserve
from penstock.types.request import Request


class FirstChunk(Reserve):
    """Requires the blocks of the request's next step only. It may be preempted before its prompt is computed."""

    def required_blocks(self, view: AdmissionView) -> int:
        return view.num_chunk_blocks


class WholePrompt(Reserve):
    """Requires the blocks of the request's tokens so far (vLLM's `scheduler_reserve_full_isl`)."""

    def required_blocks(self, view: AdmissionView) -> int:
        return view.num_prompt_blocks


class NoEvict(Reserve):
    """Requires the blocks for all requests to reach their limits, so nothing is ever preempted (Orca's reservation of
    `max_tokens`)."""

    def required_blocks(self, view: AdmissionView) -> int:
        return view.num_final_blocks + view.num_growth_blocks


@dataclass(frozen=True, slots=True)
class PredictedOutput(Reserve):
    """Requires the blocks of the predicted answers of this request and all running ones. O(running)."""

    unknown_share: float = 0.3
    """Expected share of the remaining tokens for a request without a prediction (SGLang's `new_token_ratio`)."""
    growth_tokens: int = 32
    """Least expected growth: a reply longer than predicted is not about to end."""

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
    """Requires the blocks of the request's tokens, room for running requests to grow, and a share of the pool.

    Without room to grow, a full pool preempts requests just admitted.
    """

    share: float = 0.01
    """Share of the pool, [0, 1)."""
    growth_tokens: int = 32
    """Per running request, or less if all of them together can't grow by as much."""
    swap_growth_tokens: int = 16
    """The same if a preempted request is loaded back instead of computed again."""

    def required_blocks(self, view: AdmissionView) -> int:
        growth_tokens = min(self.growth_tokens, self.swap_growth_tokens) if view.swaps else self.growth_tokens
        num_wanted = view.num_running * math.ceil(growth_tokens / view.block_size)
        growth = min(num_wanted, view.num_growth_blocks, view.num_peak_blocks)
        return view.num_prompt_blocks + growth + math.ceil(self.share * view.num_total_blocks)


RESERVES = {
    "chunk": "penstock.sched.policies.reserves:FirstChunk",
    "prompt": "penstock.sched.policies.reserves:WholePrompt",
    "predicted": "penstock.sched.policies.reserves:PredictedOutput",
    "no-evict": "penstock.sched.policies.reserves:NoEvict",
    "watermark": "penstock.sched.policies.reserves:Watermark",
}
