"""Compares FlashInfer's attention with ours at startup: whether answers agree, and the speed of both.

Inputs are random, with lengths around the edges of masks, pages and splits. Trials use the real KV cache and clear it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch

from penstock.backends.batch import NULL_BLOCK
from penstock.backends.cuda.attention import AttentionShape, RowLens, StepKind, in_words
from penstock.backends.cuda.graphs import Capture, DecodeGraphs
from penstock.backends.cuda.kv_cache import PagedKvCache
from penstock.backends.cuda.step import StepAttention, StepTensors
from penstock.backends.cuda.stream import Stream
from penstock.types.plan import Capacity

TOLERANCE = 0.02
"""Largest allowed error, relative to a head's answer. bf16 rounding causes a quarter of it; reading one wrong position among
hundreds exceeds it."""
REPEATS = 5
"""Measurements of each step. The fastest counts."""
SEED = 17
FILLED_BLOCKS = 256
"""Blocks filled at once. The KV cache leaves little memory for more."""
COMPARED_TOKENS = 1024

Clock = Callable[[Callable[[], object]], float]
"""Runs a function and returns the device seconds of the work that it queued."""


class Unfit(Exception):
    """Raised if an attention fails or gives wrong answers. The message is a cause, without a full stop."""


class PlannedAttention(StepAttention, Protocol):
    def plan(self, rows: RowLens, *, is_captured: bool) -> None: ...


@dataclass(frozen=True, slots=True)
class TrialStep:
    name: str
    query_lens: tuple[int, ...]
    context_lens: tuple[int, ...]

    @property
    def kind(self) -> StepKind:
        return StepKind.DECODE if max(self.query_lens) == 1 else StepKind.PREFILL


@dataclass(frozen=True, slots=True)
class Outcome:
    """Seconds of a trial step with our attention and the tried one, over all layers."""

    step: TrialStep
    own_s: float
    tried_s: float
    error: float
    """Largest error of a head's answer, relative to ours."""


def stream_clock(stream: Stream) -> Clock:
    def seconds(run: Callable[[], object]) -> float:
        begun = stream.mark()
        run()
        ended = stream.mark()
        ended.wait()
        return ended.ns_since(begun) / 1e9

    return seconds


def trial_steps(capacity: Capacity) -> list[TrialStep]:
    longest, most, tokens = capacity.max_model_len, capacity.max_rows, capacity.max_step_tokens

    def spread(num_rows: int, mean: int) -> tuple[int, ...]:
        return tuple(np.linspace(0, min(2 * mean, longest - 1), num_rows).astype(int).tolist())

    def named(query_lens: Sequence[int], context_lens: Sequence[int]) -> TrialStep:
        words = f"{len(query_lens)} rows of {sum(query_lens)} tokens after {sum(context_lens)} positions"
        return TrialStep(words, tuple(query_lens), tuple(context_lens))

    prompt, chunk = min(tokens, longest), max(1, min(512, tokens, longest // 2))
    beside = min(most, 32, tokens)
    steps = [named((1,), (min(4096, longest - 1),))]
    steps += [named((1,) * count, spread(count, mean)) for count, mean in ((min(29, most), 1024), (most, 512))]
    steps += [
        named((prompt,), (0,)),
        named((chunk,), (min(2048, longest - chunk),)),
        named((*(1,) * (beside - 1), min(chunk, tokens - beside + 1)), (*spread(beside - 1, 1024), 0)),
        named((max(1, min(tokens // most, longest)),) * min(most, tokens), (0,) * min(most, tokens)),
    ]
    return list(dict.fromkeys(steps))


class Trial:
    """Compares an attention with ours on trial steps. With `graphs`, decodes are padded and captured, as in service."""

    def __init__(
        self,
        own: StepAttention,
        tried: PlannedAttention,
        shape: AttentionShape,
        cache: PagedKvCache,
        capacity: Capacity,
        *,
        num_layers: int,
        dtype: torch.dtype,
        device: torch.device,
        graphs: DecodeGraphs | None,
        capture: Capture,
        clock: Clock,
    ) -> None:
        self._own, self._tried, self._shape, self._cache, self._capacity = own, tried, shape, cache, capacity
        self._layers = [cache.layer(index) for index in range(num_layers)]
        self._dtype, self._device, self._graphs, self._capture, self._clock = dtype, device, graphs, capture, clock
        self._random = torch.Generator(device).manual_seed(SEED)

    def run(self, trial_step: TrialStep) -> Outcome:
        """Compute one step with both kinds of attention. Raises `Unfit` for a failure or an error above `TOLERANCE`."""
        is_captured = self._graphs is not None and trial_step.kind is StepKind.DECODE
        num_rows = len(trial_step.query_lens)
        if self._graphs is not None and is_captured:
            num_rows = self._graphs.padded_rows(num_rows)
        starts = np.cumsum([0, *trial_step.query_lens], dtype=np.int32)
        rows = RowLens.padded(starts, np.array(trial_step.context_lens, np.int32), num_rows)
        tables, block_ids = self._blocks(rows, len(trial_step.query_lens))
        step = self._step(rows, tables)
        if self._graphs is not None and is_captured:
            step = replace(step, max_seq_len=self._graphs.seq_limit(num_rows, step.max_seq_len))
        with self._filled(block_ids):
            return self._compare(trial_step, step, rows, is_captured=is_captured)

    def _compare(self, trial_step: TrialStep, step: StepTensors, rows: RowLens, *, is_captured: bool) -> Outcome:
        width = self._shape.num_heads * self._shape.head_dim
        # Strided rows, like those of a q that is part of a larger matrix.
        q = self._normal((step.num_tokens, width + self._shape.head_dim))[:, :width]
        wanted, found = torch.zeros(2, step.num_tokens, width, dtype=self._dtype, device=self._device)
        own = self._launches(self._own, wanted, q, step)
        own()
        with _blamed():
            tried = self._prepared(self._launches(self._tried, found, q, step), rows, is_captured=is_captured)
            tried()
            error = largest_error(found, wanted, self._shape.head_dim, num_tokens=sum(trial_step.query_lens))
        if not error <= TOLERANCE:
            raise Unfit(f"its answers to {trial_step.name} are {error:.2g} off ours, and at most {TOLERANCE:g} is rounding")
        timed = self._captured(own) if is_captured else own
        pairs = [(self._clock(timed), self._clock(tried)) for _ in range(REPEATS)]
        return Outcome(trial_step, min(a for a, _ in pairs), min(b for _, b in pairs), error)

    def _prepared(self, run: Callable[[], None], rows: RowLens, *, is_captured: bool) -> Callable[[], object]:
        """Return a function that runs the step as planned.

        The CUDA graph of a decode is captured under another plan. If it ignored the later plan, its answers would be wrong.
        """
        if not is_captured:
            self._tried.plan(rows, is_captured=False)
            return run
        self._tried.plan(replace(rows, context_lens=np.zeros_like(rows.context_lens)), is_captured=True)
        run()
        replay = self._captured(run)
        self._tried.plan(rows, is_captured=True)
        return replay

    def _captured(self, run: Callable[[], None]) -> Callable[[], object]:
        done = torch.empty(0, device=self._device)

        def run_all() -> torch.Tensor:
            run()
            return done

        return self._capture(run_all).replay

    def _launches(self, attention: StepAttention, out: torch.Tensor, q: torch.Tensor, step: StepTensors) -> Callable[[], None]:
        def launch() -> None:
            attention.begin(step)
            for layer in self._layers:
                attention.attend(out, q, layer, step, self._shape)

        return launch

    def _blocks(self, rows: RowLens, num_real: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return block tables with random block ids, and the ids. Rows share blocks if the cache is small."""
        counts = -(-rows.seq_lens[:num_real] // self._capacity.block_size)
        num_there = self._capacity.num_blocks - 1
        block_ids = np.unique(np.linspace(1, num_there, min(num_there, int(counts.sum()))).astype(np.int32))
        mixed = np.random.default_rng(SEED).permutation(block_ids)
        tables = np.full((rows.num_rows, -(-self._capacity.max_model_len // self._capacity.block_size)), NULL_BLOCK, np.int32)
        for row, (count, end) in enumerate(zip(counts, counts.cumsum(), strict=True)):
            tables[row, :count] = mixed.take(np.arange(end - count, end), mode="wrap")
        return torch.from_numpy(tables).to(self._device), torch.from_numpy(block_ids).to(self._device, torch.int64)

    def _step(self, rows: RowLens, tables: torch.Tensor) -> StepTensors:
        query_lens = np.diff(rows.query_starts)
        starts, contexts = (torch.from_numpy(lens).to(self._device) for lens in (rows.query_starts, rows.context_lens))
        row_of_token = torch.from_numpy(np.repeat(np.arange(rows.num_rows, dtype=np.int32), query_lens)).to(self._device)
        none = torch.zeros(0, dtype=torch.int32, device=self._device)  # attention does not read these arrays
        num_tokens, longest = int(rows.query_starts[-1]), int(rows.seq_lens.max())
        counts = (num_tokens, rows.num_rows, 0, int(query_lens.max()), longest)
        return StepTensors(none, none, row_of_token, none, starts, contexts, tables, none, *counts)

    @contextmanager
    def _filled(self, block_ids: torch.Tensor) -> Iterator[None]:
        try:
            for layer in self._layers:
                for some in block_ids.split(FILLED_BLOCKS):
                    shape = (len(some), *layer.k.shape[1:])
                    layer.k[some], layer.v[some] = self._normal(shape), self._normal(shape)
            yield
        finally:
            # On a broken GPU clearing fails, too. Report the first error.
            with nullcontext() if sys.exception() is None else suppress(RuntimeError):
                for layer in self._layers:
                    layer.k[block_ids] = layer.v[block_ids] = torch.zeros((), dtype=self._dtype, device=self._device)
                self._cache.forget(block_ids.tolist(), 0)

    def _normal(self, shape: Sequence[int]) -> torch.Tensor:
        return torch.randn(tuple(shape), generator=self._random, dtype=self._dtype, device=self._device)


@contextmanager
def _blamed() -> Iterator[None]:
    """Turn any exception inside the block into `Unfit`."""
    try:
        yield
    except Exception as error:
        raise Unfit(f"it fails: {in_words(error)}") from error


def largest_error(found: torch.Tensor, wanted: torch.Tensor, head_dim: int, *, num_tokens: int) -> float:
    """Return the largest error of a head's output in the first `num_tokens`, relative to `wanted`. Infinity for NaN.

    found, wanted [tokens, num_heads * head_dim]
    """
    largest = 0.0
    for pair in zip(found[:num_tokens].split(COMPARED_TOKENS), wanted[:num_tokens].split(COMPARED_TOKENS), strict=True):
        got, want = (part.float().unflatten(-1, (-1, head_dim)) for part in pair)
        errors = (got - want).norm(dim=-1) / want.norm(dim=-1)
        largest = max(largest, float(torch.nan_to_num(errors, nan=torch.inf).max()))
    return largest
