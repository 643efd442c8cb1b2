"""A step in flight: owns what is remembered of it from `submit` to `collect`, and reads its result. Made and asked by the
executor; launches nothing, and keeps no order among several.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.backends.batch import NO_TOKEN, NO_USABLE_LOGIT
from penstock.backends.cuda.sampling import SampledWords, SamplePlan
from penstock.backends.cuda.stream import Mark
from penstock.types.result import StepResult, StepTiming, TokenLogprobs
from penstock.types.sampling import MAX_LOGPROBS


@dataclass(frozen=True, slots=True, eq=False)
class Flight:
    """Of one step that was submitted and not collected."""

    step_id: int
    names: list[str]
    """Request ids of the rows that sample. [S]"""
    plan: SamplePlan
    where: SampledWords
    words: NDArray[np.int32]
    """The results; good once `ended` has been passed."""
    host_ns: int
    """Of `submit`."""
    begun: Mark
    computed: Mark
    ended: Mark

    def result(self) -> StepResult:
        """Waits for the device until it has computed the step."""
        self.ended.wait()
        device_ns = self.ended.ns_since(self.begun)
        parts = {
            "host": self.host_ns,
            "model": self.computed.ns_since(self.begun),
            "sampling": self.ended.ns_since(self.computed),
        }
        end_ns = time.monotonic_ns()
        tokens = self.where.tokens(self.words).tolist()
        sampled = dict(zip(self.names, tokens, strict=True))
        return StepResult(
            self.step_id,
            {name: (token,) for name, token in sampled.items() if token != NO_TOKEN},
            timing=StepTiming(end_ns - device_ns, end_ns, parts),
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
