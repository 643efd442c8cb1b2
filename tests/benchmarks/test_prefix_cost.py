"""The cost of a prefix cache that finds nothing: two schedulers on one executor, which do not disturb each other."""

import gc
import json

import prefix_cost
import pytest
from prefix_cost import Half, Spent, make_requests, summarise

from penstock.testing import HashExecutor, expected_tokens
from penstock.types.plan import Capacity


def test_halves_share_an_executor_and_no_block():
    executor = HashExecutor(Capacity(num_blocks=1 + 2 * 12, block_size=4, max_rows=8, max_step_tokens=32, max_model_len=40))
    halves = [Half(executor, half, enable_prefix_caching=half == 0) for half in (0, 1)]
    for first in (0, 40):
        requests = [
            make_requests(range(first + begin, first + begin + 6), 10, 7, executor.model.vocab_size) for begin in (0, 20)
        ]
        for half, own in zip(halves, requests, strict=True):
            spent = half.serve(own)
            assert 0 < spent.core_ns < spent.total_ns
        for request in (*requests[0], *requests[1]):
            expected = expected_tokens(request.prompt_token_ids, request.sampling, model=executor.model, max_model_len=40)
            assert tuple(request.output_token_ids) == expected.token_ids, "a step read the other half's blocks"
            assert request.num_cached_tokens == 0
    assert [half.core.scheduler.kv.pool.num_cached > 0 for half in halves] == [True, False]


def test_the_cost_is_that_of_the_median_round():
    slow, fast, stray = Spent(1030, 20), Spent(1000, 10), Spent(9000, 10)
    report = summarise([slow] * 25, [*[fast] * 24, stray])
    assert report["cost"] == report["cost_low"] == report["cost_high"] == pytest.approx(0.03), "one round counts for nothing"
    assert report["core"] == pytest.approx(0.01)


@pytest.mark.model
def test_last_line_is_the_result(capsys):
    options = ["--seconds", "0", "--prompt", "16", "--reply", "2", "--rows", "2", "--blocks", "16"]
    gc.freeze()  # it collects garbage before each round, and need not look for it in all that tests have imported
    try:
        prefix_cost.main(options)
    finally:
        gc.unfreeze()
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report["rounds"] == 5
    assert 0 < report["core"] < 0.2
