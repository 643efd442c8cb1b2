"""Budgets: how are a step's tokens split? Called by the scheduler once per step."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.sched.policies.base import UNLIMITED, BudgetView, StepLimits


@dataclass(frozen=True, slots=True)
class DecodeFirst:
    """Every decode gets its token; prefill chunks take what is left (Sarathi-Serve, OSDI 2024).

    The two settings mean what they mean in vLLM.
    """

    long_prefill_token_threshold: int = 0
    """A prefill that is further behind is long, and gets so many tokens in one step at most; 0: none is long."""
    max_long_partial_prefills: int = 0
    """Long prefills at the same time; 0: no limit."""

    def limits(self, view: BudgetView) -> StepLimits:
        threshold = self.long_prefill_token_threshold
        if not threshold:
            return StepLimits(view.max_step_tokens)
        return StepLimits(view.max_step_tokens, threshold, threshold, self.max_long_partial_prefills or UNLIMITED)


@dataclass(frozen=True, slots=True)
class WholePrompts:
    """Every decode gets its token; prompts are computed whole, as many as the rest of the step has room for (Orca, OSDI 2022).

    A prompt for which no step is large enough is computed in chunks all the same.
    """

    def limits(self, view: BudgetView) -> StepLimits:
        return StepLimits(view.max_step_tokens, splits_prompts=False)


BUDGETS = {
    "decode-first": "penstock.sched.policies.budgets:DecodeFirst",
    "itl": "penstock.sched.policies.hold_latency:HoldLatency",
    "whole-prompts": "penstock.sched.policies.budgets:WholePrompts",
}
