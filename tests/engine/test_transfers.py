"""Transfers to the tier below and back: blocks that are dropped, that hang, and that are kept at the end."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from penstock.clock import VirtualClock, WallClock
from penstock.engine.core import EngineCore
from penstock.engine.ports import BlockStore, Ready
from penstock.engine.transfers import RETRY_NS, Transfers, WorkerThread
from penstock.kv.tiers import LOAD_TIMEOUT_NS, Tier
from penstock.storage.block_file import PAGE_BYTES, BlockFile
from penstock.testing import HashExecutor, Outcome, expected_tokens, make_core, make_request, run_to_completion
from penstock.testing.driver import LateWorker
from penstock.types.adapter import AdapterRef
from penstock.types.events import Add
from penstock.types.plan import Capacity
from support.fake_adapters import FakeAdapters, make_adapter
from support.memory_store import Faults, MemoryStore
from support.strategies import MODEL

CAPACITY = Capacity(num_blocks=21, block_size=4, max_rows=8, max_step_tokens=32, max_model_len=80)
SESSION = [token % 40 for token in range(1, 50)]
OTHERS = [token % 37 for token in range(100, 175)]


class Recorder(HashExecutor):
    """Remembers the moves of blocks: ("read" or "write", block ids)."""

    def __init__(self) -> None:
        super().__init__(CAPACITY, model=MODEL)
        self.moves: list[tuple[str, list[int]]] = []

    def read_blocks(self, block_ids: Sequence[int], out: Sequence[memoryview]) -> None:
        self.moves.append(("read", list(block_ids)))
        super().read_blocks(block_ids, out)

    def write_blocks(self, block_ids: Sequence[int], contents: Sequence[memoryview]) -> None:
        self.moves.append(("write", list(block_ids)))
        super().write_blocks(block_ids, contents)


class Waiting(Recorder):
    """Blocks that it reads are there when somebody has waited for them, as with a device, and not if it has failed."""

    def __init__(self) -> None:
        super().__init__()
        self.num_waits = 0
        self.fails = False

    def read_blocks(self, block_ids: Sequence[int], out: Sequence[memoryview]) -> Ready:
        contents = [memoryview(bytearray(self.block_bytes)) for _ in out]
        super().read_blocks(block_ids, contents)

        def ready() -> None:
            if self.fails:
                raise RuntimeError("the device failed")
            self.num_waits += 1
            for target, content in zip(out, contents, strict=True):
                target[:] = content

        return ready


class House:
    """A pool of 20 blocks, a store of 100 below it, and a worker that can be told to hang."""

    def __init__(
        self, *, num_staged_blocks: int = 50, store: BlockStore | None = None, executor: Recorder | None = None
    ) -> None:
        self.clock = VirtualClock()
        self.store: Any = store or MemoryStore(100)
        self.executor = executor or Recorder()
        self.tier = Tier(100, entries=self.store.entries())
        adapters = FakeAdapters(num_pages=lambda _: 1)
        self.core: EngineCore = make_core(CAPACITY, tier=self.tier, adapters=adapters)
        self.worker = LateWorker()
        self.hangs = False
        self.transfers = Transfers(
            self.core.scheduler.kv,
            self.executor,
            self.store,
            clock=self.clock,
            worker=self._work,
            num_staged_blocks=num_staged_blocks,
        )
        self.num_asked = 0

    def _work(self, job: Callable[[], None], is_urgent: bool) -> None:
        if not self.hangs:
            self.worker(job, is_urgent)

    def ask(self, prompt: list[int], adapter: AdapterRef | None = None) -> tuple[Outcome, int]:
        """Its answer, which is the right one, and how many of its tokens were found in the cache."""
        self.num_asked += 1
        name, now_ns = f"r{self.num_asked}", self.clock.now_ns()
        request = make_request(name, prompt, max_tokens=3, arrival_ns=now_ns, adapter=adapter)
        outcomes = run_to_completion(
            self.core, self.executor, Add(request), clock=self.clock, transfers=self.transfers, worker=self.worker
        )
        outcome = outcomes[request.request_id]
        limit = CAPACITY.max_model_len
        expected = expected_tokens(prompt, request.sampling, model=MODEL, max_model_len=limit, adapter=adapter)
        assert tuple(outcome.token_ids) == expected.token_ids
        return outcome, request.num_cached_tokens

    def finish(self) -> None:
        while self.worker.num_jobs:
            self.worker.run()
            self.transfers.arrive()


def test_a_store_that_hangs_keeps_nobody_waiting() -> None:
    house = House()
    house.ask(SESSION)
    house.ask(OTHERS)
    house.finish()
    house.hangs = True
    began_ns = house.clock.now_ns()
    _, num_cached = house.ask(SESSION)
    waited_ns = house.clock.now_ns() - began_ns
    assert LOAD_TIMEOUT_NS <= waited_ns < 1.1 * LOAD_TIMEOUT_NS
    assert num_cached < 12
    began_ns = house.clock.now_ns()
    house.ask(OTHERS)
    assert house.clock.now_ns() - began_ns < LOAD_TIMEOUT_NS, "the store is taken for slow"
    house.core.check()


def test_what_a_device_still_reads_is_waited_for_by_the_worker_alone() -> None:
    house = House(executor=(executor := Waiting()))
    first, _ = house.ask(SESSION)
    house.hangs = True
    house.ask(OTHERS)
    assert [name for name, _ in executor.moves] == ["read"] * len(executor.moves) != []
    assert not executor.num_waits, "the engine's thread has waited for none"
    house = House(executor=(executor := Waiting()))
    house.ask(SESSION)
    house.ask(OTHERS)
    house.finish()
    assert executor.num_waits > 0
    again, num_cached = house.ask(SESSION)
    assert again.token_ids == first.token_ids
    assert num_cached == 48, "all full blocks, whose contents are right"


def test_what_a_device_could_not_read_is_forgotten() -> None:
    house = House(executor=(executor := Waiting()))
    executor.fails = True
    house.ask(SESSION)
    house.ask(OTHERS)
    house.finish()
    stats = house.transfers.stats
    assert (stats.num_spilled_blocks, stats.failures.keys()) == (0, {"io"})
    assert house.transfers.num_moving_blocks == 0
    assert house.ask(SESSION)[1] < 12
    house.core.check()


def test_what_has_no_place_in_staging_is_dropped_and_counted() -> None:
    house = House(num_staged_blocks=4)
    house.ask(SESSION)
    house.ask(OTHERS)
    house.finish()
    stats = house.transfers.stats
    assert stats.num_dropped_blocks > 0
    assert 0 < stats.num_spilled_blocks < 12
    assert house.transfers.num_moving_blocks == 0
    house.ask(SESSION)


def test_of_a_prompt_that_has_no_place_in_staging_the_beginning_is_kept() -> None:
    house = House(num_staged_blocks=4)
    house.ask(SESSION)
    kv, other = house.core.scheduler.kv, make_request("other", OTHERS)
    kv.allocate(other, kv.lookup_prefix(other), other.num_tokens)  # nearly all blocks at once
    house.transfers.depart()
    house.finish()
    kv.free("other")
    assert house.transfers.stats.num_dropped_blocks > 0
    assert house.ask(SESSION)[1] >= 12, "three blocks, for which there was a place"


def test_what_arrives_late_is_of_use_to_the_next() -> None:
    house = House()
    house.ask(SESSION)
    house.ask(OTHERS)
    house.finish()
    request = make_request("gone", SESSION)
    kv = house.core.scheduler.kv
    hit = kv.lookup_prefix(request)
    assert kv.swapping.fetch(request, hit, max_blocks=20, compute_ns_per_token=0, now_ns=0)
    kv.free("gone")
    house.transfers.depart()
    house.finish()
    assert kv.lookup_prefix(make_request("next", SESSION)).num_tokens == 48


def test_what_arrives_is_written_at_once_when_what_makes_place_was_read() -> None:
    house = House()
    house.ask(SESSION)
    house.ask(OTHERS)
    house.finish()
    house.executor.moves.clear()
    assert house.ask(SESSION)[1] == 48
    place = next(i for i, (kind, _) in enumerate(house.executor.moves) if kind == "write")
    (before, spilled), (_, written) = house.executor.moves[place - 1 : place + 1]
    assert before == "read"
    assert 1 < len(spilled) <= len(written)
    assert set(spilled) <= set(written), "their content had to make place"
    assert [kind for kind, _ in house.executor.moves].count("write") == 1


def test_an_adapter_is_dropped_before_what_arrives_is_written_to_its_block() -> None:
    house = House()
    house.ask(SESSION)
    house.ask(OTHERS)
    house.ask(OTHERS[:60], make_adapter(1))
    assert house.executor.adapters.keys() == {1}
    assert house.ask(SESSION)[1] == 48
    assert not house.executor.adapters


def test_a_tier_that_was_closed_is_tried_again_and_opens_when_the_store_works() -> None:
    house = House()
    house.store.faults = Faults(write_fails=1.0)
    while house.tier.is_open:
        house.ask(SESSION)
        house.ask(OTHERS)
        house.finish()
    num_failures = sum(house.transfers.stats.failures.values())
    house.ask(SESSION)
    house.ask(OTHERS)
    house.finish()
    assert sum(house.transfers.stats.failures.values()) == num_failures, "it is left alone"
    house.clock.advance(RETRY_NS)
    house.ask(SESSION)
    house.ask(OTHERS)
    house.finish()
    assert sum(house.transfers.stats.failures.values()) == num_failures + 1, "a single block was tried"
    assert not house.transfers.stats.is_open
    house.store.faults = Faults()
    house.clock.advance(RETRY_NS)
    house.ask(SESSION)
    house.ask(OTHERS)
    house.finish()
    house.ask([3, *SESSION])
    house.finish()
    assert house.transfers.stats.is_open
    house.ask(SESSION)
    house.ask(OTHERS)
    house.finish()
    assert house.ask(SESSION)[1] == 48, "it is used again"
    house.core.check()


def test_a_probe_that_hangs_is_the_only_one() -> None:
    house = House(num_staged_blocks=8)
    house.tier.close()
    house.hangs = True
    for _ in range(4):
        house.tier.probe()
        house.ask(SESSION)
        house.ask(OTHERS)
    assert house.transfers.num_moving_blocks == 1


def test_the_end_keeps_what_the_pool_contains(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "penstock.engine.transfers")
    store = MemoryStore(100)
    first = House(store=store)
    first.ask(SESSION)
    num_to_keep = len(first.core.scheduler.kv.swapping.content_to_keep())
    _run_beside(first, lambda: first.transfers.keep(5.0))
    assert f"{num_to_keep} of {num_to_keep} cached KV blocks" in caplog.text
    first.finish()
    second = House(store=store)
    _, num_cached = second.ask(SESSION)
    assert num_cached == 48


def test_what_the_end_keeps_is_overwritten_in_the_order_in_which_the_pool_would_evict_it(tmp_path: Path) -> None:
    executor = Recorder()

    def opened() -> BlockFile:
        size = PAGE_BYTES * 101
        return BlockFile(tmp_path / "f", max_bytes=size, content_bytes=executor.block_bytes, fingerprint=bytes(32))

    house = House(store=opened(), executor=executor)
    house.ask(OTHERS)
    house.worker = LateWorker(promptness=0.0)  # what makes room for the session is still under way at the end
    house.ask(SESSION)
    kv = house.core.scheduler.kv
    names = [kv.prefix.index.hash_of(block_id) for block_id in kv.pool.free_block_ids() if kv.pool.is_kept(block_id)]
    kept = [name for name in names if name is not None]
    num_spilled = house.transfers.num_moving_blocks
    assert num_spilled
    house.transfers.keep(5.0)
    house.finish()
    house.store.close()
    again = opened()
    found = [name for _, name in again.entries()]
    again.close()
    assert (len(found), found[num_spilled:]) == (num_spilled + len(kept), kept)


def test_the_end_keeps_nothing_where_that_ends_too() -> None:
    class Volatile(MemoryStore):
        outlives_process = False  # type: ignore[assignment]

    house = House(store=Volatile(100))
    house.ask(SESSION)
    house.transfers.keep(5.0)
    assert house.transfers.num_moving_blocks == 0


def test_the_end_does_not_wait_for_a_store_that_hangs() -> None:
    house = House(num_staged_blocks=4)
    house.ask(SESSION)
    house.hangs = True
    transfers = Transfers(
        house.core.scheduler.kv,
        house.executor,
        house.store,
        clock=WallClock(),
        worker=lambda *_: None,
        num_staged_blocks=4,
    )
    transfers.keep(0.05)
    assert transfers.num_moving_blocks == 3, "a quarter is for loads"


def test_the_end_misses_no_arrival(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker is ready at the worst moment: when the engine is about to forget that something has arrived."""
    house = House()
    house.ask(SESSION)
    jobs: list[Callable[[], None]] = []

    class Flag(threading.Event):
        def clear(self) -> None:
            while jobs:
                jobs.pop(0)()
            super().clear()

        def wait(self, timeout: float | None = None) -> bool:
            assert self.is_set() or jobs, "it would sleep, and nothing would come"
            while jobs:
                jobs.pop(0)()
            return True

    monkeypatch.setattr("penstock.engine.transfers.threading.Event", Flag)
    transfers = Transfers(
        house.core.scheduler.kv,
        house.executor,
        house.store,
        clock=house.clock,
        worker=lambda job, _: jobs.append(job),
        num_staged_blocks=4,
    )
    num_to_keep = len(house.core.scheduler.kv.swapping.content_to_keep())
    transfers.keep(5.0)
    for job in jobs:
        job()
    transfers.arrive()
    assert transfers.stats.num_spilled_blocks == num_to_keep == 12


def test_a_thread_does_its_jobs_in_order_urgent_ones_first_and_ends() -> None:
    done: list[int] = []
    thread, may_begin = WorkerThread(), threading.Event()

    def begin() -> None:
        may_begin.wait(20)

    thread(begin, False)
    for idx in range(6):
        thread(partial(done.append, idx), idx in (2, 4))
    may_begin.set()
    assert thread.close(10.0)
    assert done == [2, 4, 0, 1, 3, 5]
    assert thread.close(0.0)


def test_a_thread_that_hangs_is_left_alone() -> None:
    thread, is_over = WorkerThread(), threading.Event()

    def hang() -> None:
        is_over.wait(20)

    thread(hang, False)
    assert not thread.close(0.01)
    is_over.set()
    assert thread.close(10.0)


def test_without_a_tier_there_is_nothing_to_carry() -> None:
    core = make_core(CAPACITY)
    with pytest.raises(ValueError, match="a tier"):
        Transfers(core.scheduler.kv, HashExecutor(CAPACITY), MemoryStore(1), clock=VirtualClock())


def _run_beside(house: House, act: Callable[[], None]) -> None:
    """While the worker's jobs are done by this thread."""
    thread = threading.Thread(target=act)
    thread.start()
    while thread.is_alive():
        house.worker.run()
        thread.join(0.001)
