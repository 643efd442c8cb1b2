"""Owns how the comparisons make an executor over a real model. Called by tests and `full.py`; compares nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Protocol

from penstock.engine.ports import Executor
from penstock.models import architectures, catalog
from penstock.models.cache import default_cache_dir
from penstock.models.load import load_model
from penstock.models.program import Program
from penstock.models.weights import LoadedModel
from penstock.types.kv_dtype import KvDtype
from support.parity.compare import HasLogits

BLOCK_SIZE = 16
MAX_ROWS = 64
MAX_STEP_TOKENS = 256


class ParityExecutor(Executor, HasLogits, Protocol):
    """An executor that also gives logits at every position."""


def _make_native(model: LoadedModel, program: Program, num_blocks: int, variant: str, kv_dtype: KvDtype) -> ParityExecutor:
    from penstock.backends.native.executor import NativeExecutor

    return NativeExecutor(
        model,
        program,
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        max_rows=MAX_ROWS,
        max_step_tokens=MAX_STEP_TOKENS,
        max_model_len=model.spec.max_model_len,
        variant=variant,
        kv_dtype=kv_dtype,
    )


def _make_reference(model: LoadedModel, program: Program, num_blocks: int, variant: str, kv_dtype: KvDtype) -> ParityExecutor:
    from penstock.backends.reference.executor import ReferenceExecutor

    if variant:
        raise ValueError("the reference backend has no variants")
    return ReferenceExecutor(
        model,
        program,
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        max_rows=MAX_ROWS,
        max_step_tokens=MAX_STEP_TOKENS,
        max_model_len=model.spec.max_model_len,
        kv_dtype=kv_dtype,
    )


def _make_cuda(model: LoadedModel, program: Program, num_blocks: int, variant: str, kv_dtype: KvDtype) -> ParityExecutor:
    """On a GPU, or on CPU tensors in Triton's interpreter, if that was chosen before triton was imported."""
    import torch

    from penstock.backends.cuda.executor import CudaExecutor

    if variant:
        raise ValueError("the cuda backend has no variants")
    return CudaExecutor(
        model,
        program,
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        max_rows=MAX_ROWS,
        max_step_tokens=MAX_STEP_TOKENS,
        max_model_len=model.spec.max_model_len,
        kv_dtype=kv_dtype,
        device="cuda" if torch.cuda.is_available() else "cpu",
    )


DEFAULT_KV_DTYPES = {"native": KvDtype.INT8, "reference": KvDtype.BF16, "cuda": KvDtype.BF16}
FACTORIES: Mapping[str, Callable[[LoadedModel, Program, int, str, KvDtype], ParityExecutor]] = MappingProxyType(
    {"native": _make_native, "reference": _make_reference, "cuda": _make_cuda}
)


@contextmanager
def open_executor(
    backend: str, source: catalog.ModelSource, *, num_tokens: int, variant: str = "", kv_dtype: KvDtype | None = None
) -> Iterator[ParityExecutor]:
    """An executor with KV for `num_tokens` and one block more per row. `variant` forces an instruction set of `native`.

    KV is of 8 bits by default, as users get it, and of 16 with the others: users of a GPU get it so, and the checkpoints' own
    code has it.
    """
    model = load_model(source)
    num_blocks = 1 + MAX_ROWS + -(-num_tokens // BLOCK_SIZE)
    executor = FACTORIES[backend](
        model, architectures.describe(model.spec), num_blocks, variant, kv_dtype or DEFAULT_KV_DTYPES[backend]
    )
    try:
        yield executor
    finally:
        executor.close()


def find_model(model: str = catalog.DEFAULT_MODEL) -> catalog.ModelSource:
    """The source of a catalogue name or path, in the default cache."""
    return catalog.resolve(model, default_cache_dir())
