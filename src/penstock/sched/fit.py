"""Refuses requests that could not be served even on an idle server, with a message for the client."""

from __future__ import annotations

from penstock.sched.running import most_blocks_alone
from penstock.types.errors import Rejected, RejectReason, counted
from penstock.types.plan import Capacity
from penstock.types.request import Request


def max_total_tokens(request: Request, capacity: Capacity) -> int:
    return min(request.num_prompt_tokens + request.sampling.max_tokens, capacity.max_model_len)


def refusal(request: Request, capacity: Capacity) -> Rejected | None:
    """Return why the request can't be served even if it runs alone, or None."""
    num_prompt = request.num_prompt_tokens
    if num_prompt == 0:
        return Rejected(RejectReason.INVALID, "The prompt has no tokens.")
    if capacity.is_one_pass:
        return _refuse_text(request, capacity)
    if request.sampling.prompt_logprobs is not None and not capacity.max_scored:
        detail = "This backend returns no log-probabilities of prompts. The server needs --backend native or reference."
        return Rejected(RejectReason.INVALID, detail)
    if num_prompt + 1 > capacity.max_model_len:
        detail = (
            f"The prompt has {counted(num_prompt, 'token')} and needs room for at least one more, but prompt and output "
            f"together may have {capacity.max_model_len} (max_model_len)."
        )
        return Rejected(RejectReason.CONTEXT_LENGTH, detail)
    # The last token is sampled and never computed.
    num_positions = max_total_tokens(request, capacity) - 1
    num_needed = most_blocks_alone(request, num_positions, capacity)
    if num_needed < capacity.num_blocks:
        return None
    prompt = f"prompt of {counted(num_prompt, 'token')} with max_tokens {request.sampling.max_tokens} may"
    if request.sampling.beams is not None:
        detail = (
            f"{request.sampling.beams.width} beams of a {prompt} need {num_needed} blocks of "
            f"{counted(capacity.block_size, 'token')}, but the whole KV cache has {capacity.num_blocks - 1}. "
            "Ask for fewer beams (n) or tokens, or give the server more KV cache."
        )
    else:
        room = max(0, (capacity.num_blocks - 1 - capacity.num_state_blocks) * capacity.block_size + 1)
        detail = (
            f"A {prompt} grow to {num_positions + 1} tokens, but the whole KV cache has room for {room}. "
            "Ask for fewer tokens, or give the server more KV cache."
        )
    return Rejected(RejectReason.NEVER_FITS, detail)


def _refuse_text(request: Request, capacity: Capacity) -> Rejected | None:
    if request.sampling.beams is not None or request.sampling.follows_grammar:
        return Rejected(RejectReason.INVALID, "This model only reads texts, so beam search and grammars are not available.")
    if request.adapter is not None:
        return Rejected(RejectReason.INVALID, "This model only reads texts, so it can't use adapters.")
    if request.num_prompt_tokens <= capacity.max_model_len:
        return None
    detail = (
        f"The text has {counted(request.num_prompt_tokens, 'token')}, but the model reads at most {capacity.max_model_len} "
        "(max_model_len)."
    )
    return Rejected(RejectReason.CONTEXT_LENGTH, detail)
