"""A model that is a hash, in the place of `CompiledProgram`: any wrong token, slot or block changes what comes after it.

It writes a number for each token to the cache, made of the one before it, which it finds through the block table. So all of the
executor but the kernels of a model is tested in milliseconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from penstock.backends.cuda.kv_cache import PagedKvCache
from penstock.backends.cuda.step import StepTensors
from penstock.models.program import KvShape, Program
from penstock.models.weights import LoadedModel
from penstock.types.model_spec import ModelSpec

VOCAB_SIZE = 60
HASH_PROGRAM = Program((), (), kv_shapes=(KvShape(1, 2),), vocab_size=VOCAB_SIZE)
HASH_MODEL = LoadedModel("hash", ModelSpec.__new__(ModelSpec), {}, None, None, None, (), None)  # type: ignore[arg-type]


def mix(value: float, token: int) -> float:
    """A float32 that is an integer, or NaN."""
    return float((int(value) * 31 + (token + 1) * 7919) % 65521) if value == value else value


def hash_logits(value: float) -> np.ndarray:
    """[VOCAB_SIZE]"""
    if value != value:
        return np.full(VOCAB_SIZE, np.nan, np.float32)
    return ((int(value) * (np.arange(VOCAB_SIZE) * 2 + 3) * 40503 % 65521) / 8000.0).astype(np.float32)


class HashProgram:
    """Stands for `CompiledProgram` in the executor."""

    def __init__(self, program: Program, weights: Mapping[str, Any], cache: PagedKvCache, **_: object) -> None:
        self._layer = cache.layer(0)
        self.attention = None
        self.error: Exception | None = None
        self.num_runs = 0

    def run(self, step: StepTensors) -> torch.Tensor:
        if self.error is not None:
            raise self.error
        self.num_runs += 1
        size = self._layer.k.shape[1]
        kept = self._layer.k.view(-1, 2)
        values = []
        tokens, slots, starts, contexts, tables = [
            tensor.tolist()
            for tensor in (step.token_ids, step.slot_mapping, step.query_start_loc, step.context_lens, step.block_tables)
        ]
        for row in range(step.num_rows):
            context = contexts[row]
            last = tables[row][(context - 1) // size] * size + (context - 1) % size
            value = float(kept[last, 0]) if context else 1.0
            for place in range(starts[row], starts[row + 1]):
                assert 0 <= tokens[place] < VOCAB_SIZE
                value = mix(value, tokens[place])
                kept[slots[place], 0] = value
                values.append(value)
        logits = [hash_logits(values[place]) for place in step.sample_tokens.tolist()]
        return torch.from_numpy(np.array(logits, np.float32).reshape(-1, VOCAB_SIZE)).to(kept.device)
