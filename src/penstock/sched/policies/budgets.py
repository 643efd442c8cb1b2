"""Budgets: how are a step's tokens split? Called by the scheduler once per step."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.sched.policies.base import BudgetView, StepLimits


@dataclass(frozen=True, slots=True)
class DecodeFirst:
    """Every decode gets its token; prefill chunks take what is left (Sarathi-Serve, OSDI 2024)."""

    long_prefill_token_threshold: int = 0
    """Tokens of one prefill in one step, at most; 0: no limit but the step's."""

    def limits(self, view: BudgetView) -> StepLimits:
        chunk = self.long_prefill_token_threshold or view.max_step_tokens
        return StepLimits(max_tokens=view.max_step_tokens, max_chunk_tokens=min(chunk, view.max_step_tokens))


BUDGETS = {"decode-first": "penstock.sched.policies.budgets:DecodeFirst"}
