"""The executors that must keep the contract. A new backend adds a line to `FACTORIES`, and nothing to the suite."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

from penstock.backends.reference.executor import ReferenceExecutor
from penstock.engine.ports import Executor
from penstock.models import architectures
from penstock.models.gguf import load_gguf
from penstock.models.weights import LoadedModel
from penstock.testing import HashExecutor, HashModel, sizes_of
from penstock.testing.hash_executor import HashAdapter
from penstock.types.adapter import PackedAdapter
from penstock.types.plan import Capacity
from support.interpreted import DEVICE, HAS_DEVICE, MISSING
from support.random_adapters import random_factors
from support.tiny_models import TinyLlama, write_gguf


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
    tests: tuple[str, ...] = ()
    """The names of those that are run; empty: all. Tests of adapters are all run where there is `make_adapted`."""
    make_adapted: Callable[[Capacity], Executor] | None = None
    """As `make`, but rows may have adapters."""
    pack: Callable[[Executor, int], PackedAdapter] = lambda _, number: HashAdapter(number * 7919, num_pages=number)
    """An adapter for such an executor, another for each number from 1 on, and of another size."""


UNTIED = TinyLlama(is_tied=False)
PADDED = TinyLlama(is_tied=False, head_dim=24)
"""Heads that the native kernels have to pad."""
SMALL = TinyLlama(is_tied=False, num_layers=1, num_heads=2, num_kv_heads=1, hidden_size=32, intermediate_size=32)
"""For executors whose kernels are interpreted."""


def make_hash(capacity: Capacity, *, depth: int = 1) -> Executor:
    return HashExecutor(capacity, model=HashModel(vocab_size=200), depth=depth)


@functools.cache
def tiny_model(shape: TinyLlama = UNTIED) -> LoadedModel:
    """Random weights; what every executor that needs a model computes with."""
    with tempfile.TemporaryDirectory() as directory:
        return load_gguf(write_gguf(Path(directory) / "tiny.gguf", shape, matrix_type="Q8_0"))


def pack_random(executor: Executor, number: int, *, shape: TinyLlama = UNTIED) -> PackedAdapter:
    """Ranks are 1, 8, 15 and so on; the first changes v and the MLP's last matrix alone, the second q, others most."""
    program = architectures.describe(tiny_model(shape).spec)
    parts = {1: (".v", ".down"), 2: (".q",)}.get(number, (".q", ".v", ".o", ".up", "output"))
    factors = random_factors(program, 7 * number - 6, seed=number, strength=2.0, wanted=lambda site: site.endswith(parts))
    return cast("ReferenceExecutor", executor).adapter_packer(factors)


def make_reference(capacity: Capacity, **more: Any) -> Executor:
    model = tiny_model()
    return ReferenceExecutor(model, architectures.describe(model.spec), poison=True, **sizes_of(capacity), **more)


def make_native(capacity: Capacity, *, variant: str, shape: TinyLlama = UNTIED, **more: Any) -> Executor:
    from penstock.backends.native.executor import NativeExecutor

    model = tiny_model(shape)
    return NativeExecutor(
        model, architectures.describe(model.spec), poison=True, variant=variant, num_threads=2, **sizes_of(capacity), **more
    )


def make_cuda(capacity: Capacity, *, is_hash: bool = False, depth: int = 2, **more: Any) -> Executor:
    import torch

    from penstock.backends.cuda import executor
    from support.backends.cuda import hash_program

    # A hash that asks the device for its numbers can't be captured; in the interpreter, a graph is only more to compute.
    kind = {
        "device": DEVICE,
        "dtype": torch.float32,
        "deterministic": True,
        "poison": True,
        "use_graphs": is_hash != HAS_DEVICE,
        "depth": depth,
    }
    if is_hash:
        with patch.object(executor, "CompiledProgram", hash_program.HashProgram):
            return executor.CudaExecutor(hash_program.HASH_MODEL, hash_program.HASH_PROGRAM, **kind, **sizes_of(capacity))
    model = tiny_model(SMALL)
    return executor.CudaExecutor(model, architectures.describe(model.spec), **kind, **sizes_of(capacity), **more)


ADAPTED = {"max_adapter_rank": 16}
MAKE_HASH_AHEAD = functools.partial(make_hash, depth=2)
CUDA_TESTS = (
    "test_chunked_is_whole",
    "test_batch_of_one_is_batch_of_many",
    "test_hit_is_miss",
    "test_a_row_without_a_usable_logit_fails_alone",
    "test_what_was_read_can_be_written_elsewhere",
    "test_contents_move_beside_a_step_in_flight",
    "test_padding_changes_no_answer",
    "test_a_mask_leaves_one_token",
    "test_the_best_of_what_is_allowed_is_chosen",
    "test_masks_come_while_the_step_is_in_flight",
    "test_masks_that_break_the_contract_are_refused",
    "test_masks_come_once_and_where_they_are_waited_for",
    "test_no_step_is_collected_without_its_masks",
)
"""Where kernels have a say in the answer. In the interpreter a step takes a quarter of a second; on a device all are run."""


def native_factories() -> list[Factory]:
    """None where the module was not built, as on a machine that is there for its GPU: the GPU's tests need nothing of it."""
    if find_spec("penstock.backends.native._native") is None:
        return []
    from support.native_variants import ONE_OF_EACH, VARIANTS

    # Padding is laid out before any kernel reads it; test_native_heads.py has padded heads in all variants.
    variants = {"": (UNTIED, VARIANTS), "-padded": (PADDED, ONE_OF_EACH)}
    return [
        Factory(
            f"native-{variant}{words}",
            functools.partial(make_native, variant=variant, shape=shape),
            shape.vocab_size,
            block_size=16,
            make_adapted=functools.partial(make_native, variant=variant, shape=shape, **ADAPTED),
            pack=functools.partial(pack_random, shape=shape),
        )
        for words, (shape, names) in variants.items()
        for variant in names
    ]


def cuda_factories() -> list[Factory]:
    if MISSING:
        return []
    return [
        Factory("cuda-hash", functools.partial(make_cuda, is_hash=True, depth=1), vocab_size=60),
        Factory("cuda-hash-ahead", functools.partial(make_cuda, is_hash=True), vocab_size=60),
        Factory(
            "cuda",
            make_cuda,
            SMALL.vocab_size,
            block_size=16,
            tests=() if HAS_DEVICE else CUDA_TESTS,
            make_adapted=functools.partial(make_cuda, **ADAPTED),
            pack=functools.partial(pack_random, shape=SMALL),
        ),
    ]


FACTORIES = [
    Factory("hash", make_hash, vocab_size=200, computes_logits=False, make_adapted=make_hash),
    Factory("hash-ahead", MAKE_HASH_AHEAD, vocab_size=200, computes_logits=False, make_adapted=MAKE_HASH_AHEAD),
    Factory(
        "reference",
        make_reference,
        vocab_size=TinyLlama().vocab_size,
        make_adapted=functools.partial(make_reference, **ADAPTED),
        pack=pack_random,
    ),
    *native_factories(),
    *cuda_factories(),
]
