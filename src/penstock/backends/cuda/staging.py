"""Pinned host memory for a step's inputs (its message to the device) and its results: one copy each way.

A host buffer is reused `depth` calls later, when its step has been collected. The device needs only one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from penstock.backends.batch import StepBatch
from penstock.backends.cuda.stream import Stream
from penstock.backends.cuda.tables import RowTables, num_mask_words
from penstock.types.plan import Capacity

_DTYPES: dict[np.dtype[Any], torch.dtype] = {
    np.dtype(np.int32): torch.int32,
    np.dtype(np.int64): torch.int64,
    np.dtype(np.float32): torch.float32,
    np.dtype(np.float64): torch.float64,
}
ALIGN_WORDS = 4
"""Arrays begin at multiples of 16 bytes. Triton recompiles kernels for other alignments."""


def aligned(num_words: int) -> int:
    return -(-num_words // ALIGN_WORDS) * ALIGN_WORDS


class Upload:
    """Sends several host arrays to the device in one copy."""

    def __init__(self, num_words: int, *, depth: int, stream: Stream, device: torch.device) -> None:
        self._stream = stream
        self._hosts = [stream.pinned(num_words) for _ in range(depth)]
        self._device = torch.zeros(num_words, dtype=torch.int32, device=device)
        self._num_sent = 0

    def send(self, arrays: Sequence[NDArray[Any]]) -> list[torch.Tensor]:
        """Queue the copy and return the arrays on the device, valid until the next call.

        An array that does not fit is copied alone. An array's address depends only on the sizes of arrays before it, as
        captured graphs require.
        """
        host = self._hosts[self._num_sent % len(self._hosts)]
        self._num_sent += 1
        words = host.numpy()
        tensors: list[torch.Tensor] = []
        end = 0
        for array in arrays:
            begin = aligned(end)
            stop = begin + array.nbytes // 4
            if stop > len(words):
                tensors.append(self._sent_alone(array))
                continue
            words[begin:stop].view(array.dtype)[:] = array.reshape(-1)
            tensors.append(self._device[begin:stop].view(_DTYPES[array.dtype]).view(array.shape))
            end = stop
        self._device[:end].copy_(host[:end], non_blocking=True)
        return tensors

    def _sent_alone(self, array: NDArray[Any]) -> torch.Tensor:
        """Copy an array to the device. PyTorch does not reuse its pinned memory before that is done."""
        host = self._stream.pinned(array.nbytes // 4)
        host.numpy().view(array.dtype)[:] = array.reshape(-1)
        return host.to(self._device.device, non_blocking=True).view(_DTYPES[array.dtype]).view(array.shape)


class Download:
    """Copies a step's results, int32 words, to the host."""

    def __init__(self, words: torch.Tensor, *, depth: int, stream: Stream) -> None:
        self._hosts = [stream.pinned(len(words)) for _ in range(depth)]
        self.words = words
        """Results on the device. int32"""
        self._num_fetched = 0

    def fetch(self, num_words: int) -> NDArray[np.int32]:
        """Queue a copy of the first results to the host. They are valid once the device has copied them, for `depth` calls."""
        host = self._hosts[self._num_fetched % len(self._hosts)]
        self._num_fetched += 1
        host[:num_words].copy_(self.words[:num_words], non_blocking=True)
        words: NDArray[np.int32] = host.numpy()[:num_words]
        return words


def step_arrays(batch: StepBatch, tables: RowTables, *, num_rows: int) -> list[NDArray[Any]]:
    """Return a step's input arrays in the order that `ForwardPass.run` expects. A decode is padded to `num_rows`."""
    row_of_token = np.repeat(np.arange(batch.num_rows, dtype=np.int32), np.diff(batch.query_start_loc))
    sources = batch.row_slots[row_of_token] * np.int32(tables.table_width) + batch.positions
    arrays: list[NDArray[Any]] = [
        batch.slot_mapping,
        sources,
        batch.positions,
        row_of_token,
        batch.query_start_loc,
        batch.context_lens,
        batch.row_slots,
        batch.query_start_loc[1:][batch.sample_rows] - 1,
    ]
    num_padding = num_rows - batch.num_rows
    if not num_padding:
        return arrays
    null_source = tables.null_slot * tables.table_width
    fills = (0, null_source, 0, None, None, 0, tables.null_slot, None)
    return [_padded(array, fill, num_padding) for array, fill in zip(arrays, fills, strict=True)]


def padding(tables: RowTables) -> StepBatch:
    """Return a batch of one padding row, to run a step without requests."""
    zero = np.zeros(1, np.int32)
    return StepBatch(
        step_id=0,
        request_ids=("padding",),
        row_slots=np.array([tables.null_slot], np.int32),
        query_start_loc=np.array([0, 1], np.int32),
        context_lens=zero,
        token_ids=zero,
        positions=zero,
        slot_mapping=np.zeros(1, np.int64),
        sample_rows=zero,
        num_guesses=zero,
        admitted=(),
        released=(),
    )


def _padded(array: NDArray[Any], fill: int | None, num_padding: int) -> NDArray[Any]:
    if fill is None:
        more = array[-1] + np.arange(1, num_padding + 1, dtype=array.dtype)
    else:
        more = np.full(num_padding, fill, array.dtype)
    return np.concatenate([array, more])


def message_words(capacity: Capacity, *, has_adapters: bool = False) -> int:
    num_tokens = max(capacity.max_step_tokens, capacity.max_rows)
    step_words = 5 * num_tokens + 6 * capacity.max_rows + 64 * ALIGN_WORDS
    if has_adapters:  # order and groups of tokens and of samples
        step_words += 2 * num_tokens + 14 * capacity.max_rows
    # An admitted row sends its tokens and blocks. Each word needs a second one, its index in the tables.
    patch_words = 2 * (4 * capacity.max_step_tokens + capacity.max_model_len + 64 * capacity.max_rows)
    return step_words + patch_words


def mask_message_words(capacity: Capacity, vocab_size: int) -> int:
    return capacity.max_rows * (num_mask_words(vocab_size) + 64) + 64 * ALIGN_WORDS
