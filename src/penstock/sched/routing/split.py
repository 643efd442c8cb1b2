"""Whether replicas compute prompts and answers apart, and how many take the answers.

An answer beside a prompt waits for the prompt's tokens in each step. A budget holds the target between tokens by smaller
chunks, until fewer than `MIN_CHUNK_TOKENS` fit beside the answers: then prompts and answers can't share a step within the
target. So as many replicas as the answers need take no prompts, and the others give their answers away with the first token.
"""

from __future__ import annotations

from penstock.sched.policies.base import StepRecord
from penstock.sched.policies.budgets import MIN_CHUNK_TOKENS, StepCost
from penstock.types.stats import StepStats


class Split:
    def __init__(self, slo_itl_ns: int) -> None:
        """`slo_itl_ns`: the target between tokens."""
        self._target_ns = slo_itl_ns
        self._cost = StepCost()

    def learn(self, stats: StepStats) -> None:
        """Learn from a step of any replica. Replicas are alike."""
        counts = stats.counts
        num_prefill_tokens, duration_ns = counts.num_tokens - counts.num_decodes, stats.ended_ns - stats.started_ns
        self._cost.learn(StepRecord(counts.num_decodes, num_prefill_tokens, duration_ns, counts.num_prefill_pairs))

    def num_answering(self, num_replicas: int, num_answers: int) -> int:
        """Return how many replicas should take answers and no prompts. 0: all take both."""
        cost = self._cost
        if num_replicas < 2 or not cost.is_known:
            return 0
        left_ns = self._target_ns - cost.least_ns(num_answers / num_replicas)
        if left_ns >= MIN_CHUNK_TOKENS * cost.token_ns(0):
            return 0
        return min(num_replicas - 1, 1 + num_answers // self.most_answers)

    @property
    def most_answers(self) -> int:
        """The answers of one replica that get their tokens in time, at least 1."""
        left_ns = self._target_ns - self._cost.fixed_ns
        return max(1, int(left_ns / max(1.0, self._cost.decode_ns)))
