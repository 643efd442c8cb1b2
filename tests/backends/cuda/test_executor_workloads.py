"""Whole workloads through the scheduler and the executor, one and two steps in flight: shared prefixes, memory that runs out,
requests that end early, grammars. The model is a hash, whose answers a wrong token, slot or block would change.
"""

from __future__ import annotations

import random

import pytest
import torch

from penstock.backends.cuda import executor as module
from penstock.backends.reference.sampling import sample
from penstock.sched.policies.presets import make_policies
from penstock.sched.policies.reserves import Watermark
from penstock.testing import Driver, make_core, make_request, run_to_completion
from penstock.types.events import Abort, Add, Command
from penstock.types.plan import Capacity
from penstock.types.request import FinishReason, Request
from penstock.types.stats import RequestStats, StepStats
from support.backends.cuda.hash_program import HASH_MODEL, HASH_PROGRAM, VOCAB_SIZE, HashProgram, hash_logits, mix
from support.hash_matcher import HashMatcher
from support.interpreted import DEVICE, HAS_DEVICE

NUM_REQUESTS = 10
EAGER = Watermark(share=0.0, growth_tokens=0)
"""Keeps no memory back, so that requests are preempted."""


class Preemptions:
    """Counts them."""

    def __init__(self) -> None:
        self.count = 0

    def on_step(self, stats: StepStats) -> None:
        self.count += stats.counts.num_preemptions

    def on_finish(self, stats: RequestStats) -> None:
        pass


def make_workload(rng: random.Random) -> tuple[list[Request], dict[int, list[Command]]]:
    """Requests, and what comes in which turn."""
    requests, later = [], {}
    for idx in range(NUM_REQUESTS):
        shared = (7, 8, 9) * 3
        prompt = [*shared[: rng.choice((0, 4, 9))], *(rng.randrange(10, 60) for _ in range(rng.randrange(1, 12)))]
        max_tokens, temperature = rng.randrange(1, 16), rng.choice((0.0, 0.0, 1.0))
        sampling = {"max_tokens": max_tokens, "temperature": temperature, "seed": idx}
        matcher = HashMatcher(VOCAB_SIZE, seed=idx) if idx % 3 == 1 else None
        requests.append(make_request(f"r{idx}", prompt, matcher=matcher, **sampling))
        requests[-1].priority = idx % 3
        turn = rng.randrange(12)
        later.setdefault(turn, []).append(Add(requests[-1]))
        if rng.random() < 0.2:
            later.setdefault(turn + rng.randrange(1, 9), []).append(Abort(f"r{idx}"))
    return requests, later


def answer(request: Request) -> list[int]:
    tokens = list(request.prompt_token_ids)
    num_prompt = len(tokens)
    matcher = None if request.matcher is None else HashMatcher(VOCAB_SIZE, seed=request.sampling.seed)
    for _ in range(request.sampling.max_tokens):
        value = 1.0
        for token in tokens:
            value = mix(value, token)
        mask = None if matcher is None else matcher.mask()
        tokens.append(sample(hash_logits(value), request.sampling, tokens, num_prompt, mask=mask).token_id)
        if matcher is not None:
            matcher.accept(tokens[-1:])
    return tokens[num_prompt:]


def check(driver: Driver) -> None:
    driver.core.check()


@pytest.mark.parametrize("depth", [1, 2])
def test_every_answer_is_the_one_that_the_request_gets_alone(depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CompiledProgram", HashProgram)
    preemptions = Preemptions()
    for seed in range(6):
        rng = random.Random(seed)
        sizes = {"num_blocks": rng.choice((14, 20)), "max_rows": rng.choice((3, 6, 9)), "max_step_tokens": rng.choice((9, 24))}
        capacity = Capacity(block_size=4, max_model_len=40, **sizes)
        executor = module.CudaExecutor(
            HASH_MODEL,
            HASH_PROGRAM,
            block_size=4,
            max_model_len=40,
            **sizes,
            device=DEVICE,
            dtype=torch.float32,
            poison=True,
            use_graphs=not HAS_DEVICE,  # a model that asks the device for its numbers can't be captured
            depth=depth,
        )
        core = make_core(capacity, make_policies(order=rng.choice(("fcfs", "priority")), reserve=EAGER), observer=preemptions)
        requests, later = make_workload(rng)
        outcomes = run_to_completion(core, executor, later=later, after_turn=check)
        executor.close()
        for request in requests:
            outcome, expected = outcomes[request.request_id], answer(request)
            if outcome.finish_reason is FinishReason.ABORT:
                expected = expected[: len(outcome.token_ids)]
            assert outcome.token_ids == expected, f"seed {seed}, {request.request_id}"
        assert core.scheduler.kv.pool.num_available == core.scheduler.kv.num_total_blocks
        assert not core.scheduler.kv.fenced
    assert preemptions.count > 0
