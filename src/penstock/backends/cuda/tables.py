"""Tables on the device with the tokens, block ids and sampling parameters of admitted requests.

Each step's inputs update the tables. The sampler appends its tokens, so the next step can read them before the host does.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from penstock.types.errors import ConfigError
from penstock.types.plan import Capacity
from penstock.types.sampling import SamplingParams

PARAM_WORDS = 16
"""Words of a row's parameters, in order:

- float64: 1 / temperature (0: greedy), top_p, min_p
- int32: top_k, both halves of the seed, num_prompt_tokens
- float32: repetition, frequency and presence penalty
- int32: penalty window
"""

COMPUTED = frozenset(
    {
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
        "repeat_last_n",
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        "min_tokens",
        "seed",
    }
)
"""The `types.sampling.PARAMETERS` that this backend supports."""

MAX_INVERSE_TEMPERATURE = 1e250
"""A limit, so that a difference of logits times this is finite in float64."""


class RowTables:
    """The device tables of admitted requests. A request has one slot in all of them. Slot `max_rows` is for padding.

    Raises ConfigError if they would have more than 2^31 - 1 words.
    """

    def __init__(self, capacity: Capacity, *, vocab_size: int, device: torch.device) -> None:
        num_slots = capacity.max_rows + 1
        max_tokens = capacity.max_model_len + 1
        widths = (PARAM_WORDS, max_tokens, -(-max_tokens // capacity.block_size), num_mask_words(vocab_size))
        self._bases = [0, *np.cumsum(np.array(widths) * num_slots).tolist()]
        if self._bases[-1] > np.iinfo(np.int32).max:
            raise ConfigError(
                f"{capacity.max_rows} rows of {capacity.max_model_len} tokens are more than the tables can address.",
                remedy="Lower --max-model-len or --max-num-seqs.",
            )
        self._arena = torch.zeros(self._bases[-1], dtype=torch.int32, device=device)
        parts = [
            self._arena[start:end].view(num_slots, width)
            for start, end, width in zip(self._bases, self._bases[1:], widths, strict=False)
        ]
        self.null_slot = capacity.max_rows
        self.params, self.tokens, self.block_tables, self.allowed = parts
        """`allowed` has a bit per allowed token, for rows with a list of them. [slots, vocab / 32]"""
        self.params_f64 = self.params.view(torch.float64)

    @property
    def table_width(self) -> int:
        return int(self.tokens.shape[1])

    def apply(self, idx: torch.Tensor, values: torch.Tensor) -> None:
        """Queue updates of the tables, given device copies of the two `Patches.arrays`."""
        self._arena.index_copy_(0, idx.long(), values)

    def at(self, part: torch.Tensor, slot: int, column: int = 0) -> int:
        return int(part.storage_offset() + slot * part.shape[1] + column)


class Patches:
    """Collects updates of the device tables, to send with the next step. Each int32 entry may be updated once."""

    def __init__(self) -> None:
        self._idx: list[NDArray[np.int32]] = []
        self._values: list[NDArray[np.int32]] = []

    def add(self, start: int, values: NDArray[np.int32]) -> None:
        self._idx.append(np.arange(start, start + len(values), dtype=np.int32))
        self._values.append(values)

    def arrays(self) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        if not self._idx:
            return np.empty(0, np.int32), np.empty(0, np.int32)
        return np.concatenate(self._idx), np.concatenate(self._values)


def param_words(params: SamplingParams, num_prompt_tokens: int) -> NDArray[np.int32]:
    words = np.zeros(PARAM_WORDS, np.int32)
    inverse = 0.0 if params.temperature == 0.0 else min(1.0 / params.temperature, MAX_INVERSE_TEMPERATURE)
    words[:6].view(np.float64)[:] = inverse, params.top_p, params.min_p
    top_k = min(params.top_k, np.iinfo(np.int32).max)
    seed = np.array([params.seed], np.uint64).view(np.int32)
    words[6:10] = top_k, seed[0], seed[1], num_prompt_tokens
    words[10:13].view(np.float32)[:] = params.repetition_penalty, params.frequency_penalty, params.presence_penalty
    words[13] = np.iinfo(np.int32).max if params.penalty_window is None else params.penalty_window
    return words


def num_mask_words(vocab_size: int) -> int:
    return -(-vocab_size // 32)


def allowed_words(token_ids: tuple[int, ...], vocab_size: int) -> NDArray[np.int32]:
    """Return words [vocab / 32] with a bit per allowed token: token i is bit i % 32 of word i / 32."""
    bits = np.zeros(num_mask_words(vocab_size) * 32, np.uint8)
    bits[list(token_ids)] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)
