"""What an endpoint asks of the door: a call's size and urgency, from its checked body. Never tokenises."""

from __future__ import annotations

import hashlib

from penstock.admission import Ask
from penstock.serve.call import CallTerms
from penstock.serve.openai.schemas import CompletionBody, GenerationBody
from penstock.serve.openai.validation import DEFAULT_COMPLETION_TOKENS, requested_max_tokens

_CLAIM_BYTES = 16
_HASHED_BYTES = 1 << 16
"""Of a body, from its end; of two long conversations that begin alike, the end differs."""


def make_ask(
    body: GenerationBody, terms: CallTerms, *, num_requests: int, num_chars: int, num_token_ids: int = 0, data: bytes
) -> Ask:
    """`num_chars`, `num_token_ids`: of the prompts that are text, and of those that are ids. `data`: the body as sent."""
    max_tokens = requested_max_tokens(body)
    if max_tokens is None and isinstance(body, CompletionBody):
        max_tokens = DEFAULT_COMPLETION_TOKENS
    return Ask(
        num_requests=num_requests,
        num_chars=num_chars,
        num_token_ids=num_token_ids,
        max_new_tokens=max_tokens,
        min_new_tokens=_min_tokens(body, max_tokens),
        tenant=terms.owner.tenant,
        priority=terms.priority,
        deadline_ns=terms.deadline_ns,
        queue_deadline_ns=terms.queue_deadline_ns,
        first_token_deadline_ns=terms.first_token_deadline_ns,
        slo_ttft_ns=terms.slo_ttft_ns,
        claim=_claim(terms.owner.tenant, data),
        is_retry=terms.is_retry,
    )


def _min_tokens(body: GenerationBody, max_tokens: int | None) -> int:
    """With `ignore_eos` and nothing else to stop it, an answer is as long as it may be."""
    if body.ignore_eos and max_tokens is not None and not body.stop and not body.stop_token_ids:
        return max_tokens
    return max(1, body.min_tokens or 1)


def _claim(tenant: str, data: bytes) -> bytes:
    """The same for a call that is sent again: clients repeat the body byte for byte."""
    length = len(data).to_bytes(8, "little")
    return hashlib.blake2b(tenant.encode() + b"\0" + length + data[-_HASHED_BYTES:], digest_size=_CLAIM_BYTES).digest()
