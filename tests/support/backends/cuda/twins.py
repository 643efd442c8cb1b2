"""The same rows in the reference interpreter and in a program on the device, each with a cache of its own, step by step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from penstock.backends.cuda.kv_cache import PagedKvCache
from penstock.backends.cuda.lowering import CompiledProgram
from penstock.backends.cuda.step import StepTensors
from penstock.backends.reference.interpreter import Interpreter, RowRun
from penstock.backends.reference.kv_cache import KvCache
from penstock.models.program import Program
from penstock.models.weights import WeightTensor
from penstock.types.kv_dtype import KvDtype
from support.interpreted import DEVICE

F32 = NDArray[np.float32]
BLOCK_SIZE = 16
BLOCKS_PER_ROW = 4


def compile_program(
    program: Program,
    weights: Mapping[str, WeightTensor],
    *,
    num_rows: int = 4,
    max_tokens: int = 40,
    kv_dtype: KvDtype = KvDtype.BF16,
    dtype: torch.dtype = torch.float32,
    deterministic: bool = False,
    round_to_fp8: bool = False,
) -> CompiledProgram:
    """With a poisoned cache."""
    cache = PagedKvCache(
        num_layers=len(program.kv_shapes),
        num_blocks=1 + num_rows * BLOCKS_PER_ROW,
        block_size=BLOCK_SIZE,
        num_kv_heads=program.kv_shapes[0].num_kv_heads,
        head_dim=program.kv_shapes[0].head_dim,
        kv_dtype=kv_dtype,
        dtype=dtype,
        device=DEVICE,
        poison=True,
    )
    return CompiledProgram(
        program,
        weights,
        cache,
        dtype=dtype,
        device=DEVICE,
        max_tokens=max_tokens,
        max_samples=num_rows,
        num_positions=BLOCK_SIZE * BLOCKS_PER_ROW,
        deterministic=deterministic,
        round_to_fp8=round_to_fp8,
    )


@dataclass
class Row:
    """Tokens of a request, and how many of them are computed."""

    index: int
    tokens: list[int]
    num_computed: int = 0

    @property
    def block_table(self) -> NDArray[np.int32]:
        """Not in order, so that a table that is not read is noticed."""
        return 1 + self.index * BLOCKS_PER_ROW + np.arange(BLOCKS_PER_ROW, dtype=np.int32)[::-1]


@dataclass
class Twins:
    """Both computations of one program."""

    program: Program
    weights: Mapping[str, WeightTensor]
    kv_dtype: KvDtype = KvDtype.BF16
    num_rows: int = 4
    max_tokens: int = 40
    deterministic: bool = False
    dtype: torch.dtype = torch.float32
    round_to_fp8: bool = False
    """By the device; the reference computes with what it is given as `reference_weights`."""
    reference_weights: Mapping[str, WeightTensor] | None = None
    rows: list[Row] = field(init=False)

    def __post_init__(self) -> None:
        sizes: dict[str, Any] = {
            "shapes": self.program.kv_shapes,
            "num_blocks": 1 + self.num_rows * BLOCKS_PER_ROW,
            "block_size": BLOCK_SIZE,
        }
        num_positions = BLOCK_SIZE * BLOCKS_PER_ROW
        self._reference = Interpreter(self.program, self.reference_weights or self.weights, num_positions=num_positions)
        self._reference_cache = KvCache(**sizes, dtype=self.kv_dtype, poison=True)
        self.compiled = compile_program(
            self.program,
            self.weights,
            num_rows=self.num_rows,
            max_tokens=self.max_tokens,
            kv_dtype=self.kv_dtype,
            dtype=self.dtype,
            deterministic=self.deterministic,
            round_to_fp8=self.round_to_fp8,
        )
        rng = np.random.default_rng(3)
        self.rows = [Row(i, rng.integers(3, self.program.vocab_size, num_positions).tolist()) for i in range(self.num_rows)]

    def step(self, *lengths: tuple[int, int], samples: Sequence[int] | None = None) -> tuple[F32, F32]:
        """Compute so many tokens of (row, tokens); `samples` are those rows, of these, that sample (all).

        The logits [S, vocab_size], by the reference and by the device.
        """
        chosen = [row for row, _ in lengths] if samples is None else list(samples)
        wanted = [self._run_reference(self.rows[row], count, row in chosen) for row, count in lengths]
        found = self.compiled.run(self.step_tensors(lengths, chosen)).float().cpu().numpy().copy()
        for row, count in lengths:
            self.rows[row].num_computed += count
        return np.concatenate(wanted), found

    def _run_reference(self, row: Row, count: int, samples: bool) -> F32:
        positions = np.arange(row.num_computed, row.num_computed + count)
        return self._reference.run(
            RowRun(
                cache=self._reference_cache,
                token_ids=np.array(row.tokens, np.int32)[positions],
                context_len=row.num_computed,
                slots=row.block_table[positions // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE + positions % BLOCK_SIZE,
                block_table=row.block_table,
                gathered=np.array([count - 1] if samples else [], np.int64),
            )
        )

    def step_tensors(self, lengths: Sequence[tuple[int, int]], chosen: Sequence[int]) -> StepTensors:
        rows = [self.rows[row] for row, _ in lengths]
        counts = np.array([count for _, count in lengths], np.int32)
        contexts = np.array([row.num_computed for row in rows], np.int32)
        positions = np.concatenate([np.arange(c, c + n, dtype=np.int32) for c, n in zip(contexts, counts, strict=True)])
        row_of_token = np.repeat(np.arange(len(rows), dtype=np.int32), counts)
        tables = np.stack([row.block_table for row in rows])
        starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        tokens = [rows[i].tokens[position] for i, position in zip(row_of_token, positions, strict=True)]
        slots = tables[row_of_token, positions // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE + positions % BLOCK_SIZE
        sampling = [starts[i + 1] - 1 for i, (row, _) in enumerate(lengths) if row in chosen]
        arrays = [
            np.array(tokens, np.int32),
            positions,
            row_of_token,
            slots,
            starts,
            contexts,
            tables,
            np.array(sampling, np.int32),
        ]
        tensors = [torch.from_numpy(np.ascontiguousarray(array)).to(DEVICE) for array in arrays]
        longest = int((contexts + counts).max())
        return StepTensors(*tensors, len(tokens), len(rows), len(sampling), int(counts.max()), longest)
