"""What a preemption frees and costs, and what must be free to undo it, in numbers. Called by the scheduler; preempts nobody."""

from __future__ import annotations

from collections.abc import Collection

from penstock.kv.manager import KVManager
from penstock.sched.policies.base import AdmissionView, VictimView
from penstock.types.request import Request

RESUME_GROWTH_TOKENS = 32
"""Of each running request, when one that was preempted for the first time is admitted again."""
RESUME_SWAP_GROWTH_TOKENS = 16
"""The same, where blocks come back from a tier below the pool."""
MAX_DOUBLINGS = 20


def victim_view(
    candidates: Collection[Request], kv: KVManager, num_needed_blocks: int, prefill_ns_per_token: float
) -> VictimView:
    return VictimView(
        candidates=tuple(candidates),
        num_needed_blocks=num_needed_blocks,
        num_freed_blocks=lambda request: kv.num_own_blocks(request.request_id),
        num_lost_tokens=lambda request: _num_lost_tokens(request, kv),
        prefill_ns_per_token=prefill_ns_per_token,
        load_ns_per_token=kv.load_ns_per_token,
        block_size=kv.block_size,
    )


def _num_lost_tokens(request: Request, kv: KVManager) -> int:
    """Tokens to compute again if the request were preempted now: others keep the blocks that it shares with them."""
    num_shared = len(kv.block_table(request.request_id)) - kv.num_own_blocks(request.request_id)
    return max(0, request.num_computed_tokens - num_shared * kv.block_size)


def blocks_to_resume(view: AdmissionView) -> int:
    """What a preempted request must find, whatever the reserve says: blocks for all its tokens, and room for everybody to grow.

    The room doubles with each preemption, up to all that they can ever need: who was preempted often waits until it can end.
    `tests/sched/test_preemption.py` counts what that saves: with a quarter of the memory, and admissions that look for the
    first chunk only, 0.5 positions are computed again for each one needed instead of 3.4, and nobody is preempted more than
    4 times instead of 42.
    """
    first_tokens = RESUME_SWAP_GROWTH_TOKENS if view.swaps else RESUME_GROWTH_TOKENS
    growth_tokens = first_tokens << min(view.request.num_preemptions - 1, MAX_DOUBLINGS)
    num_growth = (view.num_running + 1) * -(-growth_tokens // view.block_size)
    own_growth = view.num_final_blocks - view.num_prompt_blocks
    return view.num_prompt_blocks + min(num_growth, view.num_growth_blocks + own_growth)


def peak_growth_tokens(requests: Collection[Request]) -> int:
    """By how many tokens requests grow at most at one time, if each gets one a step and none goes beyond its limit: what one
    held when it ends is free for the others. O(n log n)."""
    ends = sorted([(request.max_total_tokens - request.num_tokens, request.num_tokens) for request in requests])
    num_left, num_freed, peak = len(ends), 0, 0
    for num_steps, num_tokens in ends:
        peak = max(peak, num_left * num_steps - num_freed)
        num_left -= 1
        num_freed += num_tokens
    return peak
