"""Logits after every token of a text, for tests and benchmarks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from penstock.backends.cuda.adapters import PlacedAdapters
from penstock.backends.cuda.lowering import CompiledProgram
from penstock.backends.cuda.step import StepTensors
from penstock.types.plan import Capacity


def text_logits(
    program: CompiledProgram,
    capacity: Capacity,
    token_ids: Sequence[int],
    *,
    max_blocks: int,
    device: torch.device,
    adapted: tuple[PlacedAdapters, int] | None = None,
) -> NDArray[np.float32]:
    """Compute logits after each token [len(token_ids), vocab_size]. Overwrites the first KV blocks.

    `max_blocks`: width of block tables. `adapted`: placed adapters, and the number of the text's adapter. Raises ValueError
    if the text does not fit.
    """
    size = capacity.block_size
    num_blocks = -(-len(token_ids) // size)
    if num_blocks >= capacity.num_blocks:
        raise ValueError(f"{len(token_ids)} tokens do not fit into {capacity.num_blocks - 1} blocks of {size}")
    table = np.zeros((1, max_blocks), np.int32)
    table[0, :num_blocks] = np.arange(1, num_blocks + 1)
    chunk = min(capacity.max_rows, capacity.max_step_tokens)
    parts = []
    for begin in range(0, len(token_ids), chunk):
        tokens = np.array(token_ids[begin : begin + chunk], np.int32)
        step = _step(tokens, begin, table, block_size=size, device=device)
        if adapted is not None:
            placed, number = adapted
            numbers = np.full(len(tokens), number, np.int64)
            grouped = placed.grouped(numbers, numbers)
            step.adapted_tokens, step.adapted_samples = grouped.on_device(
                [torch.from_numpy(array).to(device) for array in grouped.arrays]
            )
        parts.append(program.run(step).cpu().numpy().copy())
    return np.concatenate(parts)


def _step(
    token_ids: NDArray[np.int32], begin: int, table: NDArray[np.int32], *, block_size: int, device: torch.device
) -> StepTensors:
    num_tokens = len(token_ids)
    positions = np.arange(begin, begin + num_tokens, dtype=np.int32)

    def put(array: NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(array).to(device)

    return StepTensors(
        token_ids=put(token_ids),
        positions=put(positions),
        row_of_token=put(np.zeros(num_tokens, np.int32)),
        slot_mapping=put(table[0, positions // block_size].astype(np.int64) * block_size + positions % block_size),
        query_start_loc=put(np.array([0, num_tokens], np.int32)),
        context_lens=put(np.array([begin], np.int32)),
        block_tables=put(table),
        sample_tokens=put(np.arange(num_tokens, dtype=np.int32)),
        num_tokens=num_tokens,
        num_rows=1,
        num_samples=num_tokens,
        max_query_len=num_tokens,
        max_seq_len=begin + num_tokens,
    )
