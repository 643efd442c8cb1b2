"""Steps of a scheduler with made-up durations, and a guesser that knows the answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

from penstock.sched.drafting import Drafter
from penstock.sched.policies.base import Guess, Guesser, Policies
from penstock.sched.policies.presets import make_policies
from penstock.sched.scheduler import Scheduler
from penstock.testing import HashModel, expected_tokens, make_request
from penstock.types.plan import Capacity, StepPlan
from penstock.types.request import Request
from penstock.types.result import StepResult, StepTiming
from penstock.types.stats import StepCounts

MODEL = HashModel(vocab_size=90)
CAPACITY = Capacity(
    num_blocks=200, block_size=4, max_rows=40, max_step_tokens=100, max_model_len=200, max_scored=60, checks_guesses=True
)


class Knowing(Guesser):
    """Knows the answers, and says so as a match of `num_matched` tokens."""

    def __init__(self, num_matched: int = 30) -> None:
        self.num_matched = num_matched
        self.ended_ids: list[str] = []

    def guess(self, request: Request, most: int) -> Guess | None:
        answer = answer_of(request)
        begin = len(request.output_token_ids)
        return Guess(answer[begin : begin + most], self.num_matched)

    def ended(self, request: Request) -> None:
        self.ended_ids.append(request.request_id)


@cache
def answer_of(request: Request) -> tuple[int, ...]:
    sampling = replace(request.sampling, max_tokens=200, stop_token_ids=())
    return expected_tokens(request.prompt_token_ids, sampling, model=MODEL, max_model_len=400).token_ids


class Timed:
    """Commits made-up steps to a scheduler: each takes `fixed_ns` and `each_ns` for each of its positions."""

    def __init__(
        self,
        num_rows: int,
        fixed_ns: int,
        each_ns: int,
        guesser: Guesser | str,
        capacity: Capacity = CAPACITY,
        policies: Policies | None = None,
        drafter: Drafter | None = None,
    ) -> None:
        policies = policies or make_policies(guesser=guesser)
        self.scheduler = Scheduler(capacity, policies, enable_prefix_caching=False, drafter=drafter)
        self.fixed_ns, self.each_ns, self.now_ns = fixed_ns, each_ns, 0
        self.requests = [make_request(f"r{idx}", [idx + 1], max_tokens=150) for idx in range(num_rows)]
        for request in self.requests:
            self.scheduler.add(request, 0)

    def step(self, counts: list[StepCounts] | None = None) -> StepPlan:
        plan = self.scheduler.schedule(self.now_ns)
        assert plan is not None
        by_id = {request.request_id: request for request in self.requests}
        tokens = {
            row.request_id: self.tokens(by_id[row.request_id], plan.guesses.get(row.request_id, ()))
            for row in plan.rows
            if row.samples
        }
        self.now_ns += self.scheduler.drafting_ns or 0
        start_ns, self.now_ns = self.now_ns, self.now_ns + self.fixed_ns + self.each_ns * plan.num_tokens
        result = StepResult(plan.step_id, tokens, StepTiming(start_ns, self.now_ns))
        outcome = self.scheduler.commit(plan, result, self.now_ns)
        if counts is not None:
            counts.append(outcome.counts)
        return plan

    @staticmethod
    def tokens(request: Request, guesses: Sequence[int]) -> tuple[int, ...]:
        """The answer's tokens up to the first that is not the next guess."""
        begin = len(request.output_token_ids)
        tokens = answer_of(request)[begin : begin + 1 + len(guesses)]
        num_right = next(
            (idx for idx, (one, guess) in enumerate(zip(tokens, guesses, strict=False)) if one != guess), len(guesses)
        )
        return tokens[: num_right + 1]

    def guesses(self) -> list[int]:
        """The guesses of each row once times are known."""
        plans = [self.step() for _ in range(8)]
        return [len(plans[-1].guesses.get(request.request_id, ())) for request in self.requests]
