"""Queues an encoder's steps. Each input text is computed whole in one step."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np
import torch

from penstock.backends.cuda.flight import TextFlight
from penstock.backends.cuda.staging import ALIGN_WORDS, Download, Upload
from penstock.backends.cuda.step import StepTensors

if TYPE_CHECKING:
    from penstock.backends.batch import BatchBuilder, StepBatch
    from penstock.backends.cuda.lowering import CompiledProgram
    from penstock.backends.cuda.stream import Stream
    from penstock.types.plan import Capacity


class TextLauncher:
    """Queues steps that embed or score input texts. The caller must have entered the stream."""

    def __init__(
        self, capacity: Capacity, program: CompiledProgram, *, depth: int, stream: Stream, device: torch.device
    ) -> None:
        self._program, self._stream = program, stream
        num_words = 4 * capacity.max_step_tokens + 2 * capacity.max_rows + 8 * ALIGN_WORDS
        self._upload = Upload(num_words, depth=depth, stream=stream, device=device)
        self._download = Download(program.result.view(-1).view(torch.int32), depth=depth, stream=stream)
        self._none = torch.empty(0, dtype=torch.int32, device=device)

    def launch(self, batch: StepBatch, host: BatchBuilder, began_ns: int) -> TextFlight:
        """Queue a step of input texts. `host`: the builder of `batch`. `began_ns`: when the host began to work on the step."""
        starts = batch.query_start_loc
        row_of_token = np.repeat(np.arange(batch.num_rows, dtype=np.int32), np.diff(starts))
        second_at = host.second_at[batch.row_slots][row_of_token]
        types = ((second_at > 0) & (batch.positions >= second_at)).astype(np.int32)
        sample_tokens = starts[1:][batch.sample_rows] - 1
        sent = self._upload.send([batch.token_ids, batch.positions, row_of_token, starts, sample_tokens, types])
        begun = self._stream.mark()  # after the message, as in `StepLauncher.launch`
        num_states = self._run(batch, sent) if batch.num_tokens else 0
        computed = self._stream.mark()
        width = self._program.result.shape[1]
        words = self._download.fetch(num_states * width)
        ended = self._stream.mark()
        sample_rows = batch.sample_rows.tolist()
        slices = [slice(i, i + 1) for i in range(len(sample_rows))]
        if self._program.has_state_of_each_token:
            slices = [slice(int(starts[row]), int(starts[row + 1])) for row in sample_rows]
        return TextFlight(
            batch.step_id,
            {batch.request_ids[row]: each for row, each in zip(sample_rows, slices, strict=True)},
            words.view(np.float32).reshape(num_states, width),
            time.monotonic_ns() - began_ns,
            begun,
            computed,
            ended,
        )

    def _run(self, batch: StepBatch, sent: list[torch.Tensor]) -> int:
        token_ids, positions, row_of_token, query_start_loc, sample_tokens, types = sent
        longest = int(np.diff(batch.query_start_loc).max())
        step = StepTensors(
            token_ids=token_ids,
            positions=positions,
            row_of_token=row_of_token,
            slot_mapping=self._none,
            query_start_loc=query_start_loc,
            context_lens=self._none,
            block_tables=self._none,
            sample_tokens=sample_tokens,
            num_tokens=batch.num_tokens,
            num_rows=batch.num_rows,
            num_samples=len(sample_tokens),
            max_query_len=longest,
            max_seq_len=longest,
            types=types,
        )
        return len(self._program.run(step))
