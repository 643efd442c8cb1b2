"""The core lock: another thread reads a consistent core, whatever the engine does, and takes it from a hung engine."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import pytest

from penstock.clock import VirtualClock
from penstock.engine import core_lock as core_lock_module
from penstock.engine.core_lock import Abandoned, CoreLock, WatchedExecutor
from penstock.engine.ports import NullObserver
from penstock.engine.state import EngineState
from penstock.kv.pool_map import BlockState
from penstock.testing.builders import make_core, make_request
from penstock.testing.hash_executor import HashExecutor
from support.engine.thread import TIMEOUT_S, TINY, GatedExecutor, Rig


class Slow(HashExecutor):
    """Calls `meanwhile` while it moves contents."""

    def __init__(self, meanwhile: Callable[[], None]) -> None:
        super().__init__()
        self.meanwhile = meanwhile

    def read_blocks(self, block_ids: Sequence[int], out: Sequence[memoryview]) -> None:
        self.meanwhile()

    def write_blocks(self, block_ids: Sequence[int], contents: Sequence[memoryview]) -> None:
        self.meanwhile()

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        self.meanwhile()


MOVES = {"read_blocks": ([1], []), "write_blocks": ([1], []), "copy_blocks": ([(1, 2)],)}


@pytest.mark.parametrize("name", MOVES)
def test_a_device_that_hangs_while_contents_move_is_noticed_and_can_be_given_up(name: str) -> None:
    calls: list[object] = []

    def look() -> None:
        calls.append(core_lock.executor_call())
        assert calls[-1] is core_lock.executor_call() is not None

    def give_up() -> None:
        with core_lock.abandon() as is_abandoned:
            assert is_abandoned

    executor, core_lock = Slow(look), CoreLock()
    watched = WatchedExecutor(executor, core_lock)
    with core_lock:
        getattr(watched, name)(*MOVES[name])
        assert core_lock.executor_call() is None
        getattr(watched, name)(*MOVES[name])
        assert calls[0] is not calls[1]
        with core_lock.abandon() as is_abandoned:
            assert not is_abandoned, "it is not inside the executor"
        executor.meanwhile = give_up
        with pytest.raises(Abandoned):
            getattr(watched, name)(*MOVES[name])


def test_a_failure_of_an_executor_that_was_given_up_is_none() -> None:
    def fail() -> None:
        with core_lock.abandon():
            pass
        raise OSError("the device is gone")

    core_lock = CoreLock()
    watched = WatchedExecutor(Slow(fail), core_lock)
    with core_lock, pytest.raises(Abandoned):
        watched.copy_blocks([(1, 2)])


def test_a_reader_gets_in_between_steps_that_follow_each_other_at_once() -> None:
    """A thread that takes the lock again and again without a pause lets a reader in at its next turn."""
    core_lock, is_over, num_turns = CoreLock(), threading.Event(), [0]

    def work() -> None:
        while not is_over.is_set():
            with core_lock:
                num_turns[0] += 1

    worker = threading.Thread(target=work)
    worker.start()
    try:
        for _ in range(200):
            seen = core_lock.read(lambda: (num_turns[0], [num_turns[0] for _ in range(50)]))
            assert set(seen[1]) == {seen[0]}, "the worker worked while the core was read"
    finally:
        is_over.set()
        worker.join(TIMEOUT_S)


def test_a_reader_waits_no_longer_than_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core_lock_module, "READ_TIMEOUT_S", 0.01)
    core_lock = CoreLock()
    with core_lock, pytest.raises(TimeoutError, match="engine thread"):
        core_lock.read(lambda: None)
    assert core_lock.read(lambda: 7) == 7, "it can be tried again"


# The engine's lock


@pytest.fixture
def rigs():
    """Makes rigs and closes their engines after the test."""
    made: list[Rig] = []

    def make(executor: HashExecutor | None = None, **fields) -> Rig:
        made.append(Rig(executor=executor, idle_check_s=None, **fields))
        return made[-1]

    yield make
    for rig in made:
        if isinstance(rig.executor, GatedExecutor):
            rig.executor.open_for_good()
        rig.engine.close(TIMEOUT_S)


def num_held(rig: Rig) -> int:
    drawn = rig.engine.pool_map()
    assert sum(drawn.states.values()) == TINY.num_blocks
    return drawn.states[BlockState.HELD]


@pytest.mark.parametrize("depth", [1, 2])
def test_the_pool_is_drawn_whatever_the_engine_does(rigs, depth: int) -> None:
    rig = rigs(GatedExecutor(TINY, depth=depth))
    assert num_held(rig) == 0, "not started"
    rig.engine.start()
    assert num_held(rig) == 0, "idle"
    rig.engine.submit(make_request("a", 5, max_tokens=4))
    rig.executor.wait_until_in_step()
    assert num_held(rig) == 2, "inside the executor, which does not come back"
    assert rig.engine.kv_waste_ratio() == pytest.approx((8 - (5 if depth == 1 else 6)) / 8)
    rig.executor.open_for_good()
    rig.sink.wait_for_ends("a")
    rig.engine.close(TIMEOUT_S)
    assert (rig.engine.state, num_held(rig), rig.engine.kv_waste_ratio()) == (EngineState.STOPPED, 0, 0.0)


def test_the_pool_of_an_engine_that_failed_or_hangs_is_drawn(rigs) -> None:
    class Breaks(HashExecutor):
        def collect(self, ticket):
            raise OSError("the device is gone")

    rig = rigs(Breaks(TINY))
    rig.engine.start()
    rig.engine.submit(make_request("a", 5))
    rig.sink.wait_for_ends("a")
    rig.wait_until_ended()
    assert (rig.engine.state, num_held(rig)) == (EngineState.FAILED, 0)

    hung = rigs(GatedExecutor(TINY))
    hung.engine.start()
    hung.engine.submit(make_request("a", 5))
    hung.executor.wait_until_in_step()
    assert hung.engine.abandon()
    assert (hung.engine.state, num_held(hung)) == (EngineState.FAILED, 0)


def test_while_a_step_is_committed_others_see_the_state_before_it_and_readers_wait(rigs, monkeypatch) -> None:
    """Four requests end in one step. In the midst of it two are counted as ended in the core, and in no reading."""
    seen: list[tuple[int, int, int]] = []

    class Looks(NullObserver):
        def on_finish(self, stats) -> None:
            load = rig.engine.load()
            seen.append((load.num_running, load.num_blocks_held, load.num_blocks_free + load.num_blocks_cached))
            with pytest.raises(TimeoutError):
                rig.engine.pool_map()

    monkeypatch.setattr(core_lock_module, "READ_TIMEOUT_S", 0.01)
    rig = rigs(HashExecutor(TINY), core=make_core(TINY, observer=Looks()), clock=VirtualClock())
    for idx in range(4):
        rig.engine.submit(make_request(f"r{idx}", [idx] * 3, max_tokens=1 + (idx > 1)))
    rig.engine.turn()
    assert rig.engine.load().num_running == 2
    rig.engine.turn()
    assert seen == [(2, 2, 10)] * 2 + [(0, 0, 12)] * 2
    assert rig.engine.load().num_blocks_held == 0


@pytest.mark.parametrize("depth", [1, 2])
def test_every_load_that_another_thread_reads_is_one_that_the_core_was_in(rigs, depth: int) -> None:
    core = make_core(TINY)
    made = {core.snapshot}
    take = core._take_snapshot

    def note():
        snapshot = take()
        pool = core.scheduler.kv.pool
        num_held = sum(pool.ref_count(block_id) > 0 for block_id in range(1, TINY.num_blocks))
        assert snapshot.num_blocks_free + snapshot.num_blocks_cached + num_held == TINY.num_blocks - 1
        assert snapshot.num_running == len(core.scheduler.running)
        made.add(snapshot)
        return snapshot

    core._take_snapshot = note
    rig = rigs(HashExecutor(TINY, depth=depth), core=core)
    rig.engine.start()
    names = [f"r{idx}" for idx in range(60)]
    for idx, name in enumerate(names):
        rig.engine.submit(make_request(name, range(idx, idx + 5 + idx % 9), max_tokens=1 + idx % 20))
    loads = [rig.engine.load()]
    while not all(rig.sink.ends_of(name) for name in names[-5:]):
        loads.append(rig.engine.load())
    rig.sink.wait_for_ends(*names)
    known = {(snapshot.num_running, snapshot.num_blocks_free, snapshot.num_blocks_cached) for snapshot in made}
    assert {(load.num_running, load.num_blocks_free, load.num_blocks_cached) for load in loads} <= known
