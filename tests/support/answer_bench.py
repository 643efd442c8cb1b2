"""Owns runs of requests through the core under limits that the scheduler must keep, for tests that compare the answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from penstock.backends.native.executor import NativeExecutor
from penstock.backends.reference.executor import ReferenceExecutor
from penstock.engine.ports import Executor
from penstock.sched.policies.base import Policies
from penstock.testing import Driver, Outcome, make_core, make_request, run_to_completion
from penstock.types.events import Add
from penstock.types.plan import StepPlan
from penstock.types.request import Request
from penstock.types.result import TokenLogprobs
from penstock.types.sampling import SamplingParams

Answer = tuple[tuple[int, ...], tuple[TokenLogprobs, ...]]


def answer_of(outcome: Outcome) -> Answer:
    logprobs = tuple(entry for event in outcome.events for entry in event.logprobs)
    assert len(logprobs) == len(outcome.token_ids) > 0
    return tuple(outcome.token_ids), logprobs


def spoil_free_blocks(driver: Driver) -> None:
    """Fill the blocks that no request holds with NaN."""
    executor, pool = driver.executor, driver.core.scheduler.kv.pool
    for block_id in pool.free_block_ids():
        if isinstance(executor, NativeExecutor):
            executor._engine.poison_block(block_id)
        else:
            assert isinstance(executor, ReferenceExecutor)
            executor._cache.forget((block_id,), 0)


@dataclass(frozen=True)
class Bench:
    """An executor and the prompts that it is given: even ones with the first sampling parameters, odd ones with the second."""

    executor: Executor
    prompts: Sequence[Sequence[int]]
    sampling: tuple[SamplingParams, SamplingParams]

    def requests(self, picked: Sequence[int], **changes: int) -> list[Request]:
        """Requests by number, each with a seed of its own."""
        return [
            make_request(f"r{i}", self.prompts[i], sampling=self.sampling[i % 2], seed=i, arrival_ns=i, **changes)
            for i in picked
        ]

    def run(
        self, requests: Sequence[Request], *, caching: bool = False, policies: Policies | None = None, **limits: int
    ) -> list[Answer]:
        outcomes = self.outcomes(requests, caching=caching, policies=policies, **limits)
        return [answer_of(outcome) for outcome in outcomes]

    def outcomes(
        self,
        requests: Sequence[Request],
        *,
        caching: bool = False,
        policies: Policies | None = None,
        after_turn: Callable[[Driver], None] | None = None,
        **limits: int,
    ) -> list[Outcome]:
        known: set[str] = set()

        def note(driver: Driver) -> None:
            if driver.plans:
                known.difference_update(driver.plans[-1].releases)
                known.update(row.request_id for row in driver.plans[-1].admits)
            if after_turn is not None:
                after_turn(driver)

        core = make_core(self.executor.capacity, policies, enable_prefix_caching=caching, **limits)
        outcomes = run_to_completion(core, self.executor, *map(Add, requests), after_turn=note)
        core.check()
        # The last releases ride on a plan that this core will never make.
        self.executor.collect(self.executor.submit(StepPlan(2**40, 0, (), (), tuple(sorted(known)))))
        return [outcomes[request.request_id] for request in requests]

    def alone(self, picked: Sequence[int]) -> list[Answer]:
        return [self.run(self.requests([i]))[0] for i in picked]
