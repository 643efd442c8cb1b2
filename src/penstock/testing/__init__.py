"""Fakes and builders for tests, ours and users'. Deterministic; no I/O."""

from penstock.testing.builders import make_core, make_request, make_scheduler, make_text, sizes_of, text_capacity
from penstock.testing.driver import Driver, Outcome, run_to_completion
from penstock.testing.hash_executor import (
    DEFAULT_CAPACITY,
    Expected,
    HashExecutor,
    HashModel,
    expected_state,
    expected_tokens,
)

__all__ = [
    "DEFAULT_CAPACITY",
    "Driver",
    "Expected",
    "HashExecutor",
    "HashModel",
    "Outcome",
    "expected_state",
    "expected_tokens",
    "make_core",
    "make_request",
    "make_scheduler",
    "make_text",
    "run_to_completion",
    "sizes_of",
    "text_capacity",
]
