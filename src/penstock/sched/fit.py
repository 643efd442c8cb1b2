"""Requests that can never fit: decides, from numbers alone, whether a request could ever be served. Called when it is added;
never looks at the load.
"""

from __future__ import annotations

from penstock.types.errors import Rejected, RejectReason, counted
from penstock.types.plan import Capacity
from penstock.types.request import Request


def max_total_tokens(request: Request, capacity: Capacity) -> int:
    """Tokens, prompt and output, at which the request has reached its limit."""
    return min(request.num_prompt_tokens + request.sampling.max_tokens, capacity.max_model_len)


def refusal(request: Request, capacity: Capacity) -> Rejected | None:
    """Why the request can't be served even if it were the only one, with the numbers; None if it can."""
    num_prompt = request.num_prompt_tokens
    if num_prompt == 0:
        return Rejected(RejectReason.INVALID, "The prompt has no tokens.", param="prompt")
    if num_prompt + 1 > capacity.max_model_len:
        detail = (
            f"The prompt has {counted(num_prompt, 'token')} and needs room for at least one more, but prompt and output "
            f"together may have {capacity.max_model_len} (max_model_len)."
        )
        return Rejected(RejectReason.CONTEXT_LENGTH, detail, param="prompt")
    # The last token is sampled and never computed, so it takes no place.
    num_positions = max_total_tokens(request, capacity) - 1
    num_blocks = -(-num_positions // capacity.block_size)
    if request.sampling.beams is not None and (refused := _refuse_beams(request, num_blocks, capacity)):
        return refused
    if num_blocks > capacity.num_blocks - 1:
        room = (capacity.num_blocks - 1) * capacity.block_size + 1
        detail = (
            f"A prompt of {counted(num_prompt, 'token')} with max_tokens {request.sampling.max_tokens} may grow to "
            f"{num_positions + 1} tokens, but the whole KV cache has room for {room}. Ask for fewer tokens, or give the server "
            "more KV cache."
        )
        return Rejected(RejectReason.NEVER_FITS, detail, param="max_tokens")
    return None


def _refuse_beams(request: Request, num_blocks: int, capacity: Capacity) -> Rejected | None:
    """Beams share the full blocks of their prompt; `num_blocks`: of one."""
    assert request.sampling.beams is not None, "asked for a beam search"
    width, num_shared = request.sampling.beams.width, request.num_prompt_tokens // capacity.block_size
    num_needed = num_shared + width * (num_blocks - num_shared)
    if num_needed < capacity.num_blocks:
        return None
    prompt, block = counted(request.num_prompt_tokens, "token"), counted(capacity.block_size, "token")
    detail = (
        f"{width} beams of a prompt of {prompt} with max_tokens {request.sampling.max_tokens} may need "
        f"{num_needed} blocks of {block}, but the whole KV cache has {capacity.num_blocks - 1}. "
        "Ask for fewer beams (n) or tokens, or give the server more KV cache."
    )
    return Rejected(RejectReason.NEVER_FITS, detail, param="n")
