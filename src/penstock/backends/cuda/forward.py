"""Runs a step's forward pass. Tensors have fixed addresses, as CUDA graphs require."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from penstock.backends.cuda.attention import RowLens
from penstock.backends.cuda.step import StepTensors

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.backends.batch import StepBatch
    from penstock.backends.cuda.attention_choice import AttentionChoice
    from penstock.backends.cuda.graphs import DecodeGraphs
    from penstock.backends.cuda.lowering import CompiledProgram
    from penstock.backends.cuda.step import AdaptedRows
    from penstock.backends.cuda.tables import RowTables


def is_decode(batch: StepBatch) -> bool:
    """Return whether every request computes one token and samples, so that a CUDA graph can run the step."""
    return 0 < batch.num_tokens == batch.num_rows == len(batch.sample_rows)


class ForwardPass:
    """Runs a model's program on a step's arrays. `max_tokens` and `max_rows` include padding."""

    def __init__(
        self,
        program: CompiledProgram,
        attention: AttentionChoice,
        tables: RowTables,
        *,
        max_tokens: int,
        max_rows: int,
        device: torch.device,
    ) -> None:
        self._program, self._attention, self._tables = program, attention, tables
        self._token_ids = torch.zeros(max_tokens, dtype=torch.int32, device=device)
        self._block_tables = torch.zeros((max_rows, tables.block_tables.shape[1]), dtype=torch.int32, device=device)

    def run(
        self,
        batch: StepBatch,
        parts: Sequence[torch.Tensor],
        graphs: DecodeGraphs | None,
        *,
        least_seq_len: int = 0,
        adapted: tuple[AdaptedRows | None, AdaptedRows | None] = (None, None),
    ) -> torch.Tensor | None:
        """Return logits [S or more, vocab_size], or None if the step has no tokens. Rows after the S samples are padding.

        - `parts`: device copies of `staging.step_arrays`
        - `graphs`: only for a padded decode
        - `least_seq_len`: use a graph for sequences of at least this length
        - `adapted`: tokens and samples with a LoRA adapter
        """
        if not batch.num_tokens:
            return None
        slot_mapping, sources, positions, row_of_token, query_start_loc, context_lens, row_slots, sample_tokens = parts
        rows = RowLens.padded(batch.query_start_loc, batch.context_lens, len(row_slots))
        step = StepTensors(
            token_ids=self._token_ids[: len(positions)],
            positions=positions,
            row_of_token=row_of_token,
            slot_mapping=slot_mapping,
            query_start_loc=query_start_loc,
            context_lens=context_lens,
            block_tables=self._block_tables[: len(row_slots)],
            sample_tokens=sample_tokens,
            num_tokens=len(positions),
            num_rows=len(row_slots),
            num_samples=len(sample_tokens),
            max_query_len=int(np.diff(batch.query_start_loc).max()),
            max_seq_len=max(least_seq_len, int(rows.seq_lens.max())),
            attention=self._attention.planned(rows, is_captured=graphs is not None),
            adapted_tokens=adapted[0],
            adapted_samples=adapted[1],
        )

        def forward(step: StepTensors) -> torch.Tensor:
            torch.index_select(self._tables.tokens.view(-1), 0, sources, out=step.token_ids)
            torch.index_select(self._tables.block_tables, 0, row_slots, out=step.block_tables)
            return self._program.run(step)

        return forward(step) if graphs is None else graphs.run(step, forward)
