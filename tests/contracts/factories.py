"""The executors that must keep the contract. A new backend adds a line to `FACTORIES`, and nothing to the suite."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from penstock.backends.native import info
from penstock.backends.native.executor import NativeExecutor
from penstock.backends.reference.executor import ReferenceExecutor
from penstock.engine.ports import Executor
from penstock.models import registry
from penstock.models.gguf import load_gguf
from penstock.models.weights import LoadedModel
from penstock.testing import HashExecutor, HashModel
from penstock.testing.tiny_models import TinyLlama, write_gguf
from penstock.types.plan import Capacity


@dataclass(frozen=True, slots=True)
class Factory:
    """How to make executors that all hold the same model."""

    name: str
    make: Callable[[Capacity], Executor]
    vocab_size: int
    """Prompts use the tokens [10, vocab_size)."""
    computes_logits: bool = True
    """Reading KV that was never written (poisoned, in these factories) spoils them."""
    block_size: int = 4
    """Any that the backend supports; the suite measures everything else in blocks."""


def make_hash(capacity: Capacity) -> Executor:
    return HashExecutor(capacity, model=HashModel(vocab_size=200))


@functools.cache
def tiny_model() -> LoadedModel:
    """Random weights; what every executor that needs a model computes with."""
    with tempfile.TemporaryDirectory() as directory:
        return load_gguf(write_gguf(Path(directory) / "tiny.gguf", TinyLlama(is_tied=False), matrix_type="Q8_0"))


def make_reference(capacity: Capacity) -> Executor:
    model = tiny_model()
    return ReferenceExecutor(model, registry.describe(model.spec), poison=True, **asdict(capacity))


def make_native(capacity: Capacity, *, variant: str) -> Executor:
    model = tiny_model()
    return NativeExecutor(model, registry.describe(model.spec), poison=True, variant=variant, num_threads=2, **asdict(capacity))


FACTORIES = [
    Factory("hash", make_hash, vocab_size=200, computes_logits=False),
    Factory("reference", make_reference, vocab_size=TinyLlama().vocab_size),
    *(
        Factory(f"native-{variant}", functools.partial(make_native, variant=variant), TinyLlama().vocab_size, block_size=16)
        for variant in info()["variants"]
    ),
]
