"""What the door obeys: the settings of admission, as plain values. Made by the composition root."""

from __future__ import annotations

from dataclasses import dataclass

DEFAULT_KV_HEADROOM = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionLimits:
    max_queue: int = 1024
    """Requests that may wait at the same time, >= 1."""
    slo_ttft_ns: int | None = None
    """Target of the time to first token; None: a long queue is no reason to refuse."""
    kv_headroom: float = DEFAULT_KV_HEADROOM
    """Share of the KV blocks kept free for growth, [0, 1), by refusing requests with a target of the time to first token;
    0: no request is refused for memory."""
    tenant_max_concurrent: int | None = None
    tenant_tokens_per_minute: int | None = None

    def __post_init__(self) -> None:
        if self.max_queue < 1:
            raise ValueError(f"max_queue ({self.max_queue}) must be at least 1")
