"""Steps in flight: queued by `submit`, and not yet collected. Their methods read the results."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from penstock.backends.batch import NO_TOKEN, NO_USABLE_LOGIT, NO_USABLE_STATE
from penstock.backends.cuda.sample_plan import SamplePlan
from penstock.backends.cuda.sampling import SampledWords
from penstock.backends.cuda.stream import Mark
from penstock.backends.cuda.tables import num_mask_words
from penstock.types.result import StepResult, StepTiming, TokenLogprobs
from penstock.types.sampling import MAX_LOGPROBS


@dataclass(frozen=True, slots=True, eq=False)
class UnsampledStep:
    """A step that is queued on the GPU. Its sampling waits for grammar masks."""

    step_id: int
    names: list[str]
    """Request ids of the rows that sample. [S]"""
    plan: SamplePlan
    logits: torch.Tensor | None
    """[S, vocab_size], valid until the next step; None if the step computes nothing."""
    host_ns: int
    begun: Mark
    computed: Mark

    def by_sample(self, masks: Mapping[str, bytes]) -> dict[int, bytes]:
        """Return grammar masks by the sample's index in the step instead of request id.

        Raises ValueError for a request that awaits no mask, and for a mask of the wrong size.
        """
        assert self.logits is not None, "somebody samples"
        num_bytes = 4 * num_mask_words(self.logits.shape[1])
        samples = {self.names[sample]: sample for sample in self.plan.followers.tolist()}
        for request_id, mask in masks.items():
            if request_id not in samples:
                raise ValueError(f"request {request_id!r} does not sample in step {self.step_id}, or follows no grammar")
            if len(mask) != num_bytes:
                raise ValueError(f"the mask of request {request_id!r} has {len(mask)} bytes, not {num_bytes}")
        return {samples[request_id]: mask for request_id, mask in masks.items()}


@dataclass(frozen=True, slots=True, eq=False)
class Flight:
    """A step that is queued on the GPU, with sampling, and not yet collected."""

    step_id: int
    names: list[str]
    """Request ids of the rows that sample. [S]"""
    plan: SamplePlan
    where: SampledWords
    words: NDArray[np.int32]
    """Results, valid once the device has passed `ended`."""
    host_ns: int
    begun: Mark
    computed: Mark
    resumed: Mark
    """The start of sampling: `computed`, or a later mark if sampling waited for masks."""
    ended: Mark

    def result(self) -> StepResult:
        """Wait for the device and return the step's result."""
        self.ended.wait()
        # Device time only. It excludes waiting for masks and copying them.
        model_ns, sampling_ns = self.computed.ns_since(self.begun), self.ended.ns_since(self.resumed)
        parts = {"host": self.host_ns, "model": model_ns, "sampling": sampling_ns}
        end_ns = time.monotonic_ns()
        tokens = self.where.tokens(self.words).tolist()
        sampled = dict(zip(self.names, tokens, strict=True))
        return StepResult(
            self.step_id,
            {name: (token,) for name, token in sampled.items() if token != NO_TOKEN},
            timing=StepTiming(end_ns - model_ns - sampling_ns, end_ns, parts),
            logprobs=self._logprobs(tokens),
            failures={name: NO_USABLE_LOGIT for name, token in sampled.items() if token == NO_TOKEN},
        )

    def _logprobs(self, tokens: list[int]) -> dict[str, tuple[TokenLogprobs, ...]]:
        found: dict[str, tuple[TokenLogprobs, ...]] = {}
        numbers, ids = self.where.logprobs(self.words)
        for line, (sample, num_top) in enumerate(
            zip(self.plan.logprob_samples.tolist(), self.plan.num_tops.tolist(), strict=True)
        ):
            if tokens[sample] == NO_TOKEN:
                continue
            top_ids = [token_id for token_id in ids[line, 1 : 1 + min(num_top, MAX_LOGPROBS)].tolist() if token_id != NO_TOKEN]
            top = tuple(zip(top_ids, numbers[line, 1:].tolist(), strict=False))
            found[self.names[sample]] = (TokenLogprobs(tokens[sample], float(numbers[line, 0]), int(ids[line, 0]), top),)
        return found


@dataclass(frozen=True, slots=True, eq=False)
class TextFlight:
    """A step of input texts (to embed or score) that is queued and not yet collected."""

    step_id: int
    rows: Mapping[str, slice]
    """Rows of `states` by request id."""
    states: NDArray[np.float32]
    """[., width], valid once the device has passed `ended`."""
    host_ns: int
    begun: Mark
    computed: Mark
    ended: Mark

    def result(self) -> StepResult:
        """Wait for the device and return the step's result. A text fails if its states are not finite."""
        self.ended.wait()
        model_ns, copy_ns = self.computed.ns_since(self.begun), self.ended.ns_since(self.computed)
        end_ns = time.monotonic_ns()
        usable = {name for name, rows in self.rows.items() if np.isfinite(self.states[rows]).all()}
        return StepResult(
            self.step_id,
            {},
            timing=StepTiming(end_ns - model_ns - copy_ns, end_ns, {"host": self.host_ns, "model": model_ns}),
            failures={name: NO_USABLE_STATE for name in self.rows if name not in usable},
            states={name: self.states[rows].tobytes() for name, rows in self.rows.items() if name in usable},
        )
