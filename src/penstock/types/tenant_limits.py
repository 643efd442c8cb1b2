"""Limits of one tenant."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantLimits:
    """Most that one tenant may use. None means unlimited."""

    max_concurrent: int | None = None
    """Calls that run or wait at once."""
    tokens_per_minute: int | None = None
    """Tokens of prompts and answers."""
    requests_per_minute: int | None = None


UNLIMITED = TenantLimits()
