"""Chooses attention kernels for decodes and for prefills: ours, or FlashInfer's if they give the same answers faster.

Our Triton kernels run until `choose` is called. FlashInfer is opened before, so that the memory profile counts it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import torch

from penstock.backends.cuda.attention import RowLens, StepKind, in_words
from penstock.backends.cuda.attention_trial import Clock, Outcome, Trial, Unfit, stream_clock, trial_steps
from penstock.backends.cuda.flashinfer_attention import FlashInferAttention, import_package, is_installed, why_unfit
from penstock.backends.cuda.graphs import Captured, CudaCapture, DecodeGraphs
from penstock.types.errors import ConfigError

if TYPE_CHECKING:
    from penstock.backends.cuda.kv_cache import PagedKvCache
    from penstock.backends.cuda.lowering import CompiledProgram
    from penstock.backends.cuda.step import StepAttention
    from penstock.backends.cuda.stream import Stream
    from penstock.types.plan import Capacity

_logger = logging.getLogger(__name__)

LEAST_SPEEDUP = 1.05
"""FlashInfer is used from this mean speedup on. Less may be noise."""


class Wanted(StrEnum):
    """The values of the setting `attention`: which kernels the user wants."""

    AUTO = "auto"
    TRITON = "triton"
    FLASHINFER = "flashinfer"


class AttentionChoice:
    """Chooses Triton or FlashInfer for each kind of step. Raises ConfigError if FlashInfer is required but unusable."""

    def __init__(
        self,
        wanted: Wanted,
        program: CompiledProgram,
        cache: PagedKvCache,
        *,
        num_layers: int,
        dtype: torch.dtype,
        is_int8_kv: bool,
        deterministic: bool,
        stream: Stream,
        device: torch.device,
    ) -> None:
        self._wanted, self._program, self._cache = wanted, program, cache
        self._num_layers, self._dtype, self._stream, self._device = num_layers, dtype, stream, device
        self._chosen: dict[StepKind, FlashInferAttention] = {}
        self._is_int8_kv, self._deterministic = is_int8_kv, deterministic
        self._opened: FlashInferAttention | None = None
        self._version = ""

    def open(self, capacity: Capacity, graphs: DecodeGraphs | None) -> None:
        """Load FlashInfer and run one trial step of each kind. Takes minutes if FlashInfer compiles kernels."""
        if self._wanted is Wanted.TRITON:
            return
        if not is_installed():
            self._refuse("the package flashinfer-python is not installed", level=logging.DEBUG)
            return
        cause = why_unfit(
            self._program.attention_shapes, self._dtype, is_int8_kv=self._is_int8_kv, deterministic=self._deterministic
        )
        package = import_package() if cause is None else cause
        if isinstance(package, str):
            self._refuse(package, level=logging.INFO)
            return
        self._version = package.__version__
        _logger.info("FlashInfer %s can compute attention; compiling its kernels may take minutes once", self._version)
        try:
            self._opened = self._make(package, capacity, graphs)
            trial = self._trial(self._opened, capacity, graphs, stream_clock(self._stream))
            for kind in StepKind:
                for step in [step for step in trial_steps(capacity) if step.kind is kind][:1]:
                    trial.run(step)
        except Exception as error:  # compilers and libraries raise anything; `_give_up` logs it and our kernels remain
            self._opened = None
            self._give_up(error)

    def choose(self, capacity: Capacity, graphs: DecodeGraphs | None, clock: Clock | None = None) -> None:
        """Choose kernels by timing trial steps on the empty KV cache. Call it once, while no step is in flight."""
        if self._opened is None:
            return
        opened, self._opened = self._opened, None
        try:
            trial = self._trial(opened, capacity, graphs, clock or stream_clock(self._stream))
            outcomes = [trial.run(step) for step in trial_steps(capacity)]
        except (Unfit, torch.OutOfMemoryError) as error:
            self._give_up(error)
            return
        finally:
            if self._device.type == "cuda":
                torch.cuda.empty_cache()  # the profile run did not count the trials' memory
        for kind in StepKind:
            self._decide(kind, opened, [outcome for outcome in outcomes if outcome.step.kind is kind])

    @property
    def names(self) -> dict[str, str]:
        return {kind.value: "FlashInfer" if kind in self._chosen else "Triton" for kind in StepKind}

    def decode_programs(self, num_rows: int, max_seq_len: int) -> int:
        """Return how many GPU programs compute a decode's attention, per row and KV head; 1 for FlashInfer."""
        own = self._program.attention
        if own is None or StepKind.DECODE in self._chosen:
            return 1
        return own.decode_programs(num_rows, max_seq_len, self._program.attention_shapes[0])

    def planned(self, rows: RowLens, *, is_captured: bool) -> StepAttention | None:
        """Prepare the chosen attention for the next step and return it, or None for our kernels.

        `is_captured`: the step is replayed from a CUDA graph, or will be captured.
        """
        attention = self._chosen.get(rows.kind)
        if attention is not None:
            attention.plan(rows, is_captured=is_captured)
        return attention

    def _make(self, package: Any, capacity: Capacity, graphs: DecodeGraphs | None) -> FlashInferAttention:
        return FlashInferAttention(
            package,
            self._program.attention_shapes[0],
            dtype=self._dtype,
            block_size=capacity.block_size,
            max_rows=capacity.max_rows,
            max_blocks=-(-(capacity.max_model_len + 1) // capacity.block_size),
            graph_rows=[] if graphs is None else graphs.sizes,
            stream=self._stream,
            device=self._device,
        )

    def _trial(self, opened: FlashInferAttention, capacity: Capacity, graphs: DecodeGraphs | None, clock: Clock) -> Trial:
        own = self._program.attention
        assert own is not None, "programs with attention shapes have attention"
        return Trial(
            own,
            opened,
            self._program.attention_shapes[0],
            self._cache,
            capacity,
            num_layers=self._num_layers,
            dtype=self._dtype,
            device=self._device,
            graphs=graphs,
            capture=CudaCapture() if self._device.type == "cuda" else Captured.without_device,
            clock=clock,
        )

    def _decide(self, kind: StepKind, opened: FlashInferAttention, outcomes: Sequence[Outcome]) -> None:
        for outcome in outcomes:
            _logger.debug(
                "attention of %s (%s): Triton %.1f us a layer, FlashInfer %.1f us, apart by %.2g",
                outcome.step.name,
                kind,
                outcome.own_s / self._num_layers * 1e6,
                outcome.tried_s / self._num_layers * 1e6,
                outcome.error,
            )
        speedup = math.exp(sum(math.log(o.own_s / o.tried_s) for o in outcomes) / len(outcomes)) if outcomes else 0.0
        is_used = self._wanted is Wanted.FLASHINFER or speedup >= LEAST_SPEEDUP
        if is_used:
            self._chosen[kind] = opened
        _logger.info(
            "attention of %s steps: %s (FlashInfer %s is %.2f times as fast as Triton; %s)",
            kind,
            "FlashInfer" if is_used else "Triton",
            self._version,
            speedup,
            "as requested" if self._wanted is Wanted.FLASHINFER else f"from {LEAST_SPEEDUP:g} on it is used",
        )

    def _give_up(self, error: Exception) -> None:
        """Continue without FlashInfer. Raises ConfigError if it is required, or if the error broke the GPU's context."""
        cause = str(error) if isinstance(error, Unfit) else f"it fails: {in_words(error)}"
        try:
            self._stream.mark().wait()
        except RuntimeError as broken:
            raise ConfigError(
                f"FlashInfer's attention broke the GPU's context: {cause}.", remedy="Start again with --attention triton."
            ) from broken
        self._refuse(cause)

    def _refuse(self, cause: str, *, level: int = logging.WARNING) -> None:
        if self._wanted is Wanted.FLASHINFER:
            raise ConfigError(
                f"FlashInfer can't compute the attention: {cause}.", remedy="Leave out --attention, or set it to triton."
            )
        _logger.log(level, "attention is computed by Triton's kernels; FlashInfer is not used: %s", cause)
