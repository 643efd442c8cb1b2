"""Helpers that `backends/cuda/test_executor.py` shares with other tests."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from penstock.backends.cuda import executor as module
from penstock.backends.cuda.executor import CudaExecutor
from penstock.types.plan import AdmitRow, RowPlan
from penstock.types.sampling import SamplingParams
from support.backends.cuda.hash_program import HASH_MODEL, HASH_PROGRAM, HashProgram
from support.interpreted import DEVICE, HAS_DEVICE

BLOCK_SIZE = 4

GREEDY = SamplingParams(temperature=0.0)


@contextmanager
def opened(monkeypatch: pytest.MonkeyPatch, *, depth: int, **changes: Any) -> Iterator[CudaExecutor]:
    monkeypatch.setattr(module, "CompiledProgram", HashProgram)
    settings = {
        "num_blocks": 20,
        "block_size": BLOCK_SIZE,
        "max_rows": 3,
        "max_step_tokens": 16,
        "max_model_len": 16,
        "device": DEVICE,
        "dtype": torch.float32,
        "poison": True,
        "use_graphs": not HAS_DEVICE,  # a model that asks the device for its numbers can't be captured
    }
    executor = CudaExecutor(HASH_MODEL, HASH_PROGRAM, depth=depth, **(settings | changes))
    yield executor
    executor.close()


def admit(request_id: str, tokens: Sequence[int], blocks: Sequence[int], params: SamplingParams = GREEDY) -> AdmitRow:
    return AdmitRow(request_id, tuple(tokens), len(tokens), tuple(blocks), 0, params)


def decodes(contexts: Mapping[str, int]) -> list[RowPlan]:
    return [RowPlan(name, context, 1, (), True) for name, context in contexts.items()]
