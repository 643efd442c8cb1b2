"""Decides whether to disaggregate prefill and decode, and how many replicas only decode.

A decode that shares a step with a prefill chunk waits for the chunk. The budget meets the inter-token target with smaller
chunks, until fewer than `MIN_CHUNK_TOKENS` fit beside the decodes. Then as many replicas as the decodes need take no prompts,
and the others hand each answer over after its first token.
"""

from __future__ import annotations

import math

from penstock.sched.policies.base import StepRecord
from penstock.sched.policies.budgets import MIN_CHUNK_TOKENS, StepCost
from penstock.types.stats import StepStats

MEMORY_NS = 120_000_000_000
"""Time over which the work of prompts is averaged."""


class Split:
    def __init__(self, slo_itl_ns: int) -> None:
        """`slo_itl_ns`: the target between tokens."""
        self._target_ns = slo_itl_ns
        self._cost = StepCost()
        self._prompts_ns = 0.0
        """Prefill time of all replicas, decaying: work done `MEMORY_NS` ago counts about a third."""
        self._last_ns = 0

    def learn(self, stats: StepStats) -> None:
        """Learn from a step of any replica. Replicas are alike, and their times are of one clock."""
        counts, duration_ns, cost = stats.counts, stats.ended_ns - stats.started_ns - stats.waited_ns, self._cost
        num_prefill_tokens = counts.num_tokens - counts.num_decodes
        cost.learn(StepRecord(counts.num_decodes, num_prefill_tokens, duration_ns, counts.num_prefill_pairs))
        past_ns, self._last_ns = max(0, stats.ended_ns - self._last_ns), max(stats.ended_ns, self._last_ns)
        self._prompts_ns *= math.exp(-past_ns / MEMORY_NS)
        self._prompts_ns += cost.prefill_ns * num_prefill_tokens + cost.attention_ns * counts.num_prefill_pairs

    def num_answering(self, num_replicas: int, num_answers: int) -> int:
        """Return how many replicas should only decode. 0: all take prompts too, since the target allows it or the prompts
        need every replica."""
        cost, most = self._cost, self.most_answers
        if not most or self._target_ns - cost.least_ns(num_answers / num_replicas) >= MIN_CHUNK_TOKENS * cost.token_ns(0):
            return 0
        num_needed = 1 + num_answers // most  # with room for one more
        num_others = num_replicas - num_needed
        return num_needed if num_others > 0 and self._prompts_ns <= num_others * MEMORY_NS else 0

    @property
    def most_answers(self) -> int:
        """Most answers that one replica can generate within the target. 0: not known yet, or none."""
        cost = self._cost
        return max(0, int((self._target_ns - cost.fixed_ns) / cost.decode_ns)) if cost.decode_ns > 0 else 0
