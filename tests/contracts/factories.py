"""The executors that must keep the contract. A new backend adds a line to `FACTORIES`, and nothing to the suite."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from penstock.engine.ports import Executor
from penstock.testing import HashExecutor, HashModel
from penstock.types.plan import Capacity


@dataclass(frozen=True, slots=True)
class Factory:
    """How to make executors that all hold the same model."""

    name: str
    make: Callable[[Capacity], Executor]
    vocab_size: int
    """Prompts use the tokens [10, vocab_size)."""
    block_size: int = 4
    """Any that the backend supports; the suite measures everything else in blocks."""


def make_hash(capacity: Capacity) -> Executor:
    return HashExecutor(capacity, model=HashModel(vocab_size=200))


FACTORIES = [
    Factory("hash", make_hash, vocab_size=200),
]
