"""Where every layer has a window: blocks before it are given back while their request runs, and the answers stay the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from penstock.sched.fit import refusal
from penstock.testing import Driver, HashExecutor, expected_tokens, make_core, make_request, run_to_completion
from penstock.types.errors import RejectReason
from penstock.types.events import Add
from penstock.types.plan import Capacity
from penstock.types.request import Request
from penstock.types.sampling import BeamParams

BLOCK, WINDOW, CHUNK = 8, 50, 40
CAPACITY = Capacity(num_blocks=13, block_size=BLOCK, max_rows=8, max_step_tokens=CHUNK, max_model_len=4000, window=WINDOW)
"""Twelve blocks: a window, and what a step computes behind it; 96 positions in all."""


def text(num_tokens: int, seed: int = 1) -> list[int]:
    return [(seed * 7919 + idx * idx) % 997 for idx in range(num_tokens)]


class Served:
    """Runs requests, and looks at the memory after each turn."""

    def __init__(self, capacity: Capacity, *, depth: int = 1, caching: bool = True) -> None:
        self.core = make_core(capacity, enable_prefix_caching=caching)
        self.executor = HashExecutor(capacity, depth=depth)
        self.most_held: dict[str, int] = {}
        """Most blocks that each request held after a step."""
        self.most_running = 0
        """Most requests whose prompts were computed at one time."""

    def run(self, *requests: Request) -> None:
        outcomes = run_to_completion(self.core, self.executor, *map(Add, requests), after_turn=self._look)
        model, longest = self.executor.model, self.executor.capacity.max_model_len
        for request in requests:
            expected = expected_tokens(request.prompt_token_ids, request.sampling, model=model, max_model_len=longest)
            assert tuple(outcomes[request.request_id].token_ids) == expected.token_ids

    def _look(self, driver: Driver) -> None:
        self.core.check()
        running = self.core.scheduler.running
        for name in running:
            held = self.core.scheduler.kv.num_held_blocks(name)
            self.most_held[name] = max(held, self.most_held.get(name, 0))
        self.most_running = max(self.most_running, sum(request.num_behind == 1 for request in running.values()))


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("caching", [True, False])
def test_a_text_far_longer_than_the_pool_runs_to_its_end(depth: int, caching: bool) -> None:
    assert CAPACITY.most_blocks(3900) == CAPACITY.num_blocks - 1
    served = Served(CAPACITY, depth=depth, caching=caching)
    long = make_request("long", text(3000), max_tokens=300)
    served.run(long)
    assert long.num_preemptions == 0
    assert served.most_held["long"] <= 12
    without = Served(replace(CAPACITY, window=0, num_blocks=500), depth=depth, caching=caching)
    without.run(make_request("long", text(3000), max_tokens=300))  # the oracle's answer, too
    assert without.most_held["long"] == -(-3299 // BLOCK)


def test_a_decode_holds_its_window_alone() -> None:
    served = Served(CAPACITY)
    served.run(make_request("r", text(20), max_tokens=400))
    assert served.most_held["r"] == -(-WINDOW // BLOCK) + 1


def test_requests_that_a_window_lets_run_at_once() -> None:
    """36 blocks hold one request of 280 tokens; or three windows of 7 or 8, and the next prompt beside them."""
    capacity = replace(CAPACITY, num_blocks=37)
    requests = [make_request(f"r{idx}", text(240, idx), max_tokens=40) for idx in range(8)]
    served, without = Served(capacity), Served(replace(capacity, window=0))
    served.run(*requests)
    without.run(*(make_request(f"r{idx}", text(240, idx), max_tokens=40) for idx in range(8)))
    assert (without.most_running, served.most_running) == (1, 3)


@pytest.mark.parametrize("window", [2, 3, 8, 9, 50])
@pytest.mark.parametrize("num_rows", [2, 5])
def test_in_the_smallest_pool_requests_preempt_each_other_and_all_end(window: int, num_rows: int) -> None:
    unlimited = replace(CAPACITY, window=window, max_rows=num_rows)
    served = Served(replace(unlimited, num_blocks=1 + unlimited.most_blocks(1000)))
    requests = [make_request(f"r{idx}", text(30 + 40 * idx, idx), max_tokens=90, arrival_ns=idx) for idx in range(6)]
    served.run(*requests)
    assert max(served.most_held.values()) <= unlimited.most_blocks(1000)


def test_what_a_window_does_not_need_is_no_reason_to_refuse() -> None:
    request = make_request("r", 3000, max_tokens=500)
    assert refusal(request, CAPACITY) is None
    for capacity in (replace(CAPACITY, num_blocks=12), replace(CAPACITY, window=0), replace(CAPACITY, max_step_tokens=48)):
        rejected = refusal(request, capacity)
        assert rejected is not None
        assert rejected.reason is RejectReason.NEVER_FITS
    assert refusal(make_request("short", 60, max_tokens=29), replace(CAPACITY, num_blocks=12)) is None


def test_beams_keep_all_blocks_since_another_may_be_forked_from_any() -> None:
    search = make_request("r", 100, max_tokens=20, beams=BeamParams(width=2), logprobs=4)
    assert (rejected := refusal(search, CAPACITY)) is not None
    assert rejected.reason is RejectReason.NEVER_FITS


class TestHits:
    def turns(self, *prompts: Sequence[int]) -> tuple[Served, list[Request]]:
        """Requests one after the other, in a pool that has none of them whole."""
        served = Served(CAPACITY)
        requests = [make_request(f"r{idx}", prompt, max_tokens=5) for idx, prompt in enumerate(prompts)]
        for request in requests:
            served.run(request)
        return served, requests

    def test_a_prompt_that_comes_again_needs_its_last_window_alone(self) -> None:
        served, (_, again) = self.turns(text(600), text(600))
        assert again.num_cached_tokens == 599
        assert served.most_held["r1"] <= -(-WINDOW // BLOCK) + 1

    def test_a_conversation_goes_on_where_it_stood(self) -> None:
        _, (_, longer) = self.turns(text(600), text(700))
        assert longer.num_cached_tokens == 600

    def test_a_prefix_of_which_a_window_is_gone_is_computed_again(self) -> None:
        """Its first blocks were evicted, and its last ones are behind another's."""
        _, (_, _, other) = self.turns(text(600), text(300, 2), [*text(300), 5, *text(100, 3)])
        assert other.num_cached_tokens == 0

    def test_two_that_begin_alike_share_and_release_alike(self) -> None:
        served = Served(replace(CAPACITY, num_blocks=25))
        common = text(300)
        served.run(*(make_request(f"r{idx}", [*common, *text(200, idx)], max_tokens=20) for idx in range(4)))
        kv = served.core.scheduler.kv
        assert kv.pool.num_available == kv.num_total_blocks
