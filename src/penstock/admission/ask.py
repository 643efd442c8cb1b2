"""A call at the door: what is known of it before its prompt is tokenised. Made by the server; a plain value."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    num_requests: int = 1
    """Choices that it wants generated."""
    num_chars: int = 0
    """Of its prompts, where they are text."""
    num_token_ids: int = 0
    """Of its prompts, where they are token ids."""
    max_new_tokens: int | None = None
    """Of one choice; None: what the context leaves."""
    min_new_tokens: int = 1
    """One choice has at least so many, as far as that is known beforehand."""
    tenant: str = ""
    priority: int = 0
    """Lower is served first, if the waiting order looks at it."""
    deadline_ns: int | None = None
    """When its answer must be complete."""
    queue_deadline_ns: int | None = None
    """When it must have begun to run."""
    first_token_deadline_ns: int | None = None
    slo_ttft_ns: int | None = None
    """Its own target of the time to first token; None: the server's alone."""
    claim: bytes | None = None
    """Says that two calls are the same one, sent again; None if that is not known."""
    is_retry: bool = False
    """The client says that it sends this again."""
