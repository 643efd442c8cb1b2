"""An engine that dies or hangs is replaced, nobody waits for ever, and a server that can't be helped says so."""

from __future__ import annotations

import threading
import time

import pytest

from penstock.clock import VirtualClock, WallClock
from penstock.engine import supervisor as supervisor_module
from penstock.engine import thread as thread_module
from penstock.engine.output import OutputStage
from penstock.engine.state import EngineState
from penstock.engine.supervisor import MAX_RESTARTS, Supervisor
from penstock.engine.thread import ENGINE_FAILED, ENGINE_STUCK, Engine
from penstock.testing.builders import make_core, make_request
from penstock.testing.hash_executor import HashExecutor
from penstock.types.errors import ModelChanged, RejectReason
from penstock.types.request import FinishReason
from support.engine.thread import TIMEOUT_S, TINY, GatedExecutor, Numbers, Sink
from support.failing_executor import FailingExecutor


def until(condition) -> None:
    end = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.002)


class Rig:
    """A supervisor whose engines run over the executors of a list, one after another; the last for all that follow."""

    def __init__(self, *executors, step_timeout_s=None, clock=None, **fields) -> None:
        self.clock = clock or WallClock()
        self.sink = Sink()
        self.executors = list(executors)
        self.used: list[object] = []
        self.engines: list[Engine] = []
        self.threads: dict[str, threading.Thread] = {}
        """The threads that `start` began, by name."""
        self.num_restarts = 0
        self.supervisor = Supervisor(
            self.make, clock=self.clock, step_timeout_s=step_timeout_s, on_restart=self._count, first_delay_s=0.001, **fields
        )

    def _count(self) -> None:
        self.num_restarts += 1

    def start(self) -> None:
        before = threading.enumerate()
        self.supervisor.start()
        self.threads = {thread.name: thread for thread in threading.enumerate() if thread not in before}

    def make(self, on_failed):
        executor = self.executors.pop(0)
        if isinstance(executor, Exception):
            raise executor
        self.used.append(executor)
        output = OutputStage(lambda _shown: Numbers())
        self.engines.append(Engine(make_core(TINY), executor, output, clock=self.clock, sink=self.sink, on_failed=on_failed))
        return self.engines[-1]

    def run(self, request_id: str):
        self.supervisor.submit(make_request(request_id, max_tokens=3))
        self.sink.wait_for_ends(request_id)
        return self.sink.end_of(request_id)


@pytest.fixture
def started():
    rigs: list[Rig] = []

    def start(*executors, **fields) -> Rig:
        rigs.append(Rig(*executors, **fields))
        rigs[-1].start()
        return rigs[-1]

    yield start
    for rig in rigs:
        for executor in rig.used:
            if isinstance(executor, GatedExecutor):
                executor.open_for_good()
        rig.supervisor.close(TIMEOUT_S)


def breaking(depth: int = 1) -> FailingExecutor:
    return FailingExecutor(HashExecutor(TINY, depth=depth), fail_at_step=1)


@pytest.mark.parametrize("depth", [1, 2])
def test_an_executor_that_dies_is_replaced_and_its_requests_end_with_an_error(started, depth):
    rig = started(breaking(depth), HashExecutor(TINY))
    for request_id in "abc":
        rig.supervisor.submit(make_request(request_id, max_tokens=9))
    rig.sink.wait_for_ends(*"abc")
    for request_id in "abc":
        assert rig.sink.end_of(request_id).finish_reason in (FinishReason.ERROR, FinishReason.REJECTED)
    assert rig.sink.end_of("a").detail == ENGINE_FAILED
    until(lambda: rig.supervisor.state is EngineState.READY)
    assert rig.run("later").finish_reason is FinishReason.LENGTH
    assert rig.num_restarts == 1


@pytest.mark.parametrize("depth", [1, 2])
def test_a_step_that_hangs_ends_its_requests_and_the_next_engine_serves(started, depth):
    hung = GatedExecutor(TINY, depth=depth)
    rig = started(hung, HashExecutor(TINY), step_timeout_s=0.05)
    rig.supervisor.submit(make_request("a"))
    rig.supervisor.submit(make_request("b"))
    rig.sink.wait_for_ends("a", "b")
    assert {rig.sink.end_of(name).detail for name in "ab"} <= {ENGINE_STUCK, "no engine is running that could answer"}
    assert rig.sink.end_of("a").reject_reason == RejectReason.UNAVAILABLE
    until(lambda: rig.supervisor.state is EngineState.READY)
    assert rig.run("later").finish_reason is FinishReason.LENGTH
    # It comes back at last: nobody hears of it, and its memory is freed.
    assert hung.closes == 0
    hung.open_for_good()
    until(lambda: hung.closes == 1)
    assert len(rig.sink.ends_of("a")) == 1


@pytest.mark.parametrize("depth", [1, 2])
def test_slow_steps_and_pauses_of_the_process_are_left_alone(started, depth):
    clock, slow = VirtualClock(), GatedExecutor(TINY, depth=depth)
    rig = started(slow, HashExecutor(TINY), step_timeout_s=4.0, clock=clock)
    rig.supervisor._is_closing = True  # the watch ends; its question is asked here
    rig.supervisor._news.set()
    rig.threads["penstock-watchdog"].join(TIMEOUT_S)
    rig.supervisor.submit(make_request("a", max_tokens=1))
    slow.wait_until_in_step()
    assert not rig.supervisor._is_stuck()
    clock.advance(3_600_000_000_000)  # SIGSTOP, and SIGCONT an hour later
    assert not any(rig.supervisor._is_stuck() for _ in range(9))
    assert rig.supervisor._is_stuck(), "the time limit has passed, in tenths"
    slow.open_for_good()
    rig.sink.wait_for_ends("a")
    until(lambda: rig.engines[0].executor_call() is None)
    assert not rig.supervisor._is_stuck()


def test_the_looks_at_each_step_are_counted_anew(started):
    slow = GatedExecutor(TINY)
    rig = started(slow, step_timeout_s=4000.0)
    rig.supervisor.submit(make_request("a", max_tokens=30))
    for _ in range(20):
        slow.wait_until_in_step()
        assert not rig.supervisor._is_stuck()
        slow.gate.release()
    slow.open_for_good()
    rig.sink.wait_for_ends("a")


def test_an_executor_that_can_not_even_be_closed_is_replaced(started, caplog):
    class Gone(FailingExecutor):
        def close(self):
            raise OSError("the device is gone")

    rig = started(Gone(HashExecutor(TINY), fail_at_step=1), HashExecutor(TINY))
    rig.run("a")
    until(lambda: rig.supervisor.state is EngineState.READY)
    assert rig.run("later").finish_reason is FinishReason.LENGTH
    assert "could not be closed" in caplog.text
    rig.used.clear()


def test_while_it_restarts_requests_are_refused_and_the_process_is_called_alive(started):
    may_make = threading.Event()

    class SlowRig(Rig):
        def make(self, on_failed):
            if self.used:
                assert may_make.wait(TIMEOUT_S)
            return super().make(on_failed)

    rig = SlowRig(breaking(), HashExecutor(TINY))
    rig.supervisor.start()
    rig.run("a")
    until(lambda: rig.supervisor.state is EngineState.RESTARTING)
    assert EngineState.RESTARTING.refuses_with is RejectReason.UNAVAILABLE
    end = rig.run("meanwhile")
    assert (end.finish_reason, end.reject_reason) == (FinishReason.REJECTED, RejectReason.UNAVAILABLE)
    may_make.set()
    until(lambda: rig.supervisor.state is EngineState.READY)
    assert rig.run("later").finish_reason is FinishReason.LENGTH
    assert rig.supervisor.close(TIMEOUT_S)


def test_it_restarts_from_the_moment_in_which_an_engine_failed():
    states = []

    class WatchedRig(Rig):
        def make(self, on_failed):
            def failed():
                states.append(self.supervisor.state)
                on_failed()

            return super().make(failed)

    rig = WatchedRig(breaking(), HashExecutor(TINY))
    rig.supervisor.start()
    rig.run("a")
    until(lambda: rig.supervisor.state is EngineState.READY)
    assert states == [EngineState.RESTARTING]
    assert rig.supervisor.close(TIMEOUT_S)


def test_an_engine_that_can_not_be_made_is_tried_again(started):
    rig = started(breaking(), MemoryError("no memory yet"), HashExecutor(TINY))
    rig.run("a")
    until(lambda: rig.supervisor.state is EngineState.READY)
    assert rig.run("later").finish_reason is FinishReason.LENGTH


def test_an_engine_whose_models_files_have_changed_is_given_up_at_once(started, caplog):
    rig = started(breaking(), ModelChanged("the file has changed"), HashExecutor(TINY))
    rig.run("a")
    rig.threads["penstock-watchdog"].join(TIMEOUT_S)
    assert (rig.supervisor.state, len(rig.executors)) == (EngineState.FAILED, 1)
    assert "could not be restarted: the file has changed" in caplog.text


def test_what_never_works_is_given_up_and_said(started, caplog):
    broken = [FailingExecutor(HashExecutor(TINY), fail_at_step=0) for _ in range(MAX_RESTARTS + 1)]
    rig = started(*broken)
    for attempt in range(MAX_RESTARTS + 1):
        until(lambda: rig.supervisor.state is EngineState.READY)
        assert rig.run(f"r{attempt}").finish_reason is FinishReason.ERROR
    until(lambda: rig.supervisor.state is EngineState.FAILED)
    rig.threads["penstock-watchdog"].join(TIMEOUT_S)
    assert not rig.threads["penstock-watchdog"].is_alive()
    assert caplog.text.count("the server needs one itself") == 1
    assert rig.num_restarts == MAX_RESTARTS


def test_restarts_long_ago_do_not_count(started, monkeypatch):
    monkeypatch.setattr(supervisor_module, "WINDOW_S", 0.0)
    broken = [FailingExecutor(HashExecutor(TINY), fail_at_step=0) for _ in range(MAX_RESTARTS + 2)]
    rig = started(*broken, HashExecutor(TINY))
    for attempt in range(MAX_RESTARTS + 2):
        until(lambda: rig.supervisor.state is EngineState.READY)
        rig.run(f"r{attempt}")
    until(lambda: rig.supervisor.state is EngineState.READY)
    assert rig.run("later").finish_reason is FinishReason.LENGTH


def test_an_engine_that_fails_while_draining_gets_no_successor(started):
    executor = GatedExecutor(TINY)
    failing = FailingExecutor(executor, fail_at_step=1)
    rig = started(failing)
    rig.supervisor.submit(make_request("a", max_tokens=9))
    executor.wait_until_in_step()
    rig.supervisor.drain()
    executor.open_for_good()
    rig.sink.wait_for_ends("a")
    assert not rig.supervisor.close(TIMEOUT_S)
    assert rig.supervisor.state is EngineState.FAILED
    assert rig.num_restarts == 0


def test_closing_during_a_restart_leaves_no_engine_behind(started, monkeypatch):
    rig = started(breaking(), HashExecutor(TINY))
    monkeypatch.setattr(rig.supervisor, "_delay_s", lambda: 60.0)
    rig.run("a")
    assert rig.supervisor.close(TIMEOUT_S), "the request ended before"
    rig.threads["penstock-watchdog"].join(TIMEOUT_S)
    assert not rig.threads["penstock-watchdog"].is_alive()
    assert rig.num_restarts == 0


@pytest.mark.parametrize("depth", [1, 2])
def test_closing_tells_those_who_wait_for_a_step_that_never_ends(started, monkeypatch, depth):
    monkeypatch.setattr(thread_module, "ABORT_GRACE_S", 0.0)
    hung = GatedExecutor(TINY, depth=depth)
    rig = started(hung)
    rig.supervisor.submit(make_request("a"))
    hung.wait_until_in_step()
    assert not rig.supervisor.close(0.0)
    assert rig.sink.end_of("a").finish_reason is FinishReason.ERROR
    hung.open_for_good()
    until(lambda: hung.closes)  # the watchdog may close it, too: `close` is idempotent
