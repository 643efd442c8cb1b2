"""Steps that are planned while one is in flight, and contents that move meanwhile between the pool and the tier below it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from penstock.clock import VirtualClock
from penstock.engine.transfers import Transfers
from penstock.kv.manager import KVManager
from penstock.kv.tiers import Tier
from penstock.sched.policies.base import Policies
from penstock.sched.policies.presets import make_policies
from penstock.sched.policies.reserves import Watermark
from penstock.testing import Driver, HashExecutor, expected_tokens, make_core, make_request
from penstock.testing.driver import LateWorker
from penstock.types.events import Abort, Add, Command
from penstock.types.plan import Capacity, StepPlan, Ticket
from penstock.types.request import FinishReason, Request, RequestStatus
from support.memory_store import MemoryStore
from support.strategies import EOS_TOKEN_ID, MODEL

CAPACITY = Capacity(num_blocks=21, block_size=4, max_rows=4, max_step_tokens=64, max_model_len=80)
EAGER = Watermark(share=0.0, growth_tokens=0)
SESSION = [token % 37 + 1 for token in range(29)]
OTHERS = [token * 7 % 37 + 1 for token in range(56)]


class Watched(HashExecutor):
    """Counts what it is asked to do while a step is in flight."""

    def __init__(self, capacity: Capacity, seed: int) -> None:
        super().__init__(capacity, model=MODEL, depth=2, seed=seed)
        self.num_ahead: list[int] = []
        """Steps in flight when another was submitted."""
        self.num_read = self.num_written = 0
        """Blocks, beside a step."""

    def submit(self, plan: StepPlan) -> Ticket:
        self.num_ahead.append(len(self._in_flight))
        return super().submit(plan)

    def read_blocks(self, block_ids: Sequence[int], out: Sequence[memoryview]) -> None:
        self.num_read += len(block_ids) * len(self._in_flight)
        super().read_blocks(block_ids, out)

    def write_blocks(self, block_ids: Sequence[int], contents: Sequence[memoryview]) -> None:
        self.num_written += len(block_ids) * len(self._in_flight)
        super().write_blocks(block_ids, contents)


class House:
    """An engine of depth two, a pool of 20 blocks, and a tier below it whose worker does nothing unless it is told."""

    def __init__(self, seed: int = 0, policies: Policies | None = None, *, caching: bool = True) -> None:
        self.executor = Watched(CAPACITY, seed)
        self.core = make_core(CAPACITY, policies or make_policies(reserve=EAGER), enable_prefix_caching=caching, tier=Tier(100))
        self.kv = self.core.scheduler.kv
        clock, self.worker = VirtualClock(), LateWorker(promptness=0.0)
        self.transfers = Transfers(
            self.kv, self.executor, MemoryStore(100), clock=clock, worker=self.worker, num_staged_blocks=60
        )
        self.driver = Driver(self.core, self.executor, clock, transfers=self.transfers, worker=self.worker)

    def turn(self, *commands: Command) -> StepPlan | None:
        plan = self.driver.turn(*commands)
        self.core.check()
        return plan

    def run(self, *requests: Request) -> None:
        """Until they have ended; what is spilled gets to the store."""
        self.turn(*map(Add, requests))
        while any(request.status is not RequestStatus.FINISHED for request in requests):
            self.turn()
            self.worker.run(self.worker.num_jobs)

    def finish(self, *requests: Request) -> None:
        """Until nobody is left. The answers of these are the right ones."""
        while self.core.has_work or self.driver.stepper.has_flights:
            self.turn()
            self.worker.run(self.worker.num_jobs)
        for request in requests:
            expected = expected_tokens(request.prompt_token_ids, request.sampling, model=MODEL, max_model_len=80)
            assert tuple(self.driver.outcomes[request.request_id].token_ids) == expected.token_ids


@pytest.fixture(params=[0, 1, 2])
def house(request: pytest.FixtureRequest) -> House:
    """Computes at once, or late."""
    return House(request.param)


def test_the_next_step_is_planned_while_one_is_in_flight(house: House) -> None:
    request = make_request("a", 5, max_tokens=20)
    house.run(request)
    house.finish(request)
    assert house.executor.num_ahead == [0] + [1] * 19


def test_what_a_plan_made_ahead_evicts_is_saved_beside_the_step_in_flight(house: House) -> None:
    first, runs = make_request("first", SESSION, max_tokens=2), make_request("runs", [9], max_tokens=40)
    house.run(first)
    house.turn(Add(runs))
    house.turn(Add(make_request("others", OTHERS, max_tokens=2)))
    assert house.executor.num_read > 0
    house.run(again := make_request("again", SESSION, max_tokens=2))
    assert again.num_cached_tokens == 28, "it was saved whole, and came back"
    house.finish(first, runs, again)
    assert house.executor.num_ahead.count(0) <= 3, "the beginning, and where nothing was to be computed"


def test_what_arrives_beside_a_step_in_flight_is_used_by_the_next_plan(house: House) -> None:
    house.run(make_request("first", SESSION, max_tokens=2))
    house.run(make_request("others", OTHERS, max_tokens=2))
    runs, again = make_request("runs", [9], max_tokens=60), make_request("again", SESSION, max_tokens=2)
    house.turn(Add(runs))
    house.worker.run(house.worker.num_jobs)
    house.turn(Add(again))
    for _ in range(5):  # the store takes its time
        plan = house.turn()
        assert plan is not None
        assert [row.request_id for row in plan.rows] == ["runs"]
    house.worker.run(house.worker.num_jobs)
    num_ahead = len(house.executor.num_ahead)
    plan = house.turn()
    assert plan is not None
    assert {row.request_id: row.query_len for row in plan.rows} == {"runs": 1, "again": 1}
    assert house.executor.num_written > 0
    assert house.executor.num_ahead[num_ahead:] == [1]
    house.finish(runs, again)


def ends_with_stop(name: str, num_prompt: int) -> Request:
    """A request whose answer has three tokens, which nobody knows beforehand."""
    for token_id in range(4, 40):
        prompt = [token_id, *([5, 6, 7] * num_prompt)[1:num_prompt]]
        request = make_request(name, prompt, max_tokens=20, stop_token_ids=(EOS_TOKEN_ID,))
        if len(expected_tokens(prompt, request.sampling, model=MODEL, max_model_len=80).token_ids) == 3:
            return request
    raise AssertionError("there is none")


def fill_beside_a_void_row(house: House) -> None:
    """Blocks that arrive, and requests that come, find few free blocks but those that a void row has."""
    house.run(make_request("first", SESSION, max_tokens=2))
    house.run(make_request("others", OTHERS, max_tokens=2))
    void = ends_with_stop("void", 35)
    house.turn(Add(void), Add(make_request("runs", [9], max_tokens=20)))
    house.worker.run(house.worker.num_jobs)
    house.turn(Add(make_request("again", SESSION, max_tokens=2)))
    while void.status is not RequestStatus.FINISHED:
        house.turn()
    assert void.finish_reason is FinishReason.STOP
    assert house.driver.stepper.has_flights, "its row is computed for nothing"
    house.worker.run(house.worker.num_jobs)
    num_written = house.executor.num_written
    house.turn(Add(make_request("last", OTHERS[:35][::-1], max_tokens=2)))
    assert house.executor.num_written > num_written


def test_contents_do_not_move_under_a_void_row(house: House) -> None:
    fill_beside_a_void_row(house)
    house.finish()


def test_without_the_fence_they_would_and_the_executor_says_so(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KVManager, "fence", lambda kv, request_id, step_id: kv.free(request_id))
    with pytest.raises(AssertionError, match=r"block .* is (read|written) while step .* is in flight"):
        fill_beside_a_void_row(house)


def test_what_a_request_computed_for_itself_is_not_found_by_the_next_of_its_name() -> None:
    """Without a cache a block is named after its request. It keeps its blocks while a row of it is in flight, but no name."""
    house = House(caching=False)
    first, second = (make_request("a", SESSION, max_tokens=9) for _ in range(2))
    house.turn(Add(first))
    house.turn()
    house.turn(Abort("a"), Add(second))
    assert second.num_cached_tokens == 0
    house.driver.outcomes.clear()
    house.finish(second)
    assert len(house.kv.prefix.index) == house.kv.pool.num_cached == 0
    assert house.kv.tier is not None
    assert not len(house.kv.tier.slots)
