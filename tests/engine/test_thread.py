"""The engine over the hash executor, so that a wrong token anywhere shows: every request ends exactly once."""

from __future__ import annotations

import functools
import threading
import time
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.clock import VirtualClock, WallClock
from penstock.engine import thread as engine_thread
from penstock.engine.core import EngineCore
from penstock.engine.output import OutputStage
from penstock.engine.ports import NullObserver, OutputChunk
from penstock.engine.state import SHUTTING_DOWN, EngineState
from penstock.engine.thread import ENGINE_FAILED, Engine
from penstock.engine.transfers import Transfers
from penstock.kv.tiers import Tier
from penstock.sched.policies.gates import Static
from penstock.sched.policies.presets import make_policies
from penstock.sched.policies.reserves import Watermark
from penstock.storage.host_memory import HostMemory
from penstock.testing import Driver, HashExecutor, expected_tokens, make_core, make_request
from penstock.testing.driver import LateWorker
from penstock.types.errors import Rejected, RejectReason
from penstock.types.events import Add
from penstock.types.plan import AdmitRow, RowPlan, StepPlan
from penstock.types.request import FinishReason, Request
from penstock.types.sampling import SamplingParams
from penstock.types.stats import AdapterCounts, RequestStats
from support.engine.thread import TIMEOUT_S, TINY, GatedExecutor, Numbers, Rig, Sink
from support.failing_executor import FailingExecutor
from support.fake_adapters import FakeAdapters, make_adapter
from support.hash_matcher import HashMatcher
from support.timed_steps import CAPACITY, MODEL, Knowing


@pytest.fixture
def started():
    """Makes started rigs and closes them after the test."""
    rigs: list[Rig] = []

    def start(**fields) -> Rig:
        rig = Rig(**fields)
        rigs.append(rig)
        rig.engine.start()
        return rig

    yield start
    for rig in rigs:
        if isinstance(rig.executor, GatedExecutor):
            rig.executor.open_for_good()
        rig.engine.close(TIMEOUT_S)


def in_threads(*jobs) -> None:
    threads = [threading.Thread(target=job) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
        assert not thread.is_alive()


# Answers


@pytest.mark.parametrize("depth", [1, 2])
def test_answers_of_many_submitters_are_those_of_the_oracle(started, depth):
    rig = started(executor=HashExecutor(TINY, depth=depth))
    requests = [make_request(f"r{idx}", range(idx, idx + 5 + idx % 9), max_tokens=1 + idx % 20) for idx in range(60)]

    def submit(share: list[Request]):
        return lambda: [rig.engine.submit(request) for request in share]

    in_threads(*(submit(requests[start::4]) for start in range(4)))
    rig.sink.wait_for_ends(*(request.request_id for request in requests))
    for request in requests:
        rig.check_against_oracle(request)
    assert len(rig.sink.threads) == 1
    assert rig.engine.close(TIMEOUT_S)
    rig.core.check()


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("order", ["fcfs", "priority"])
def test_so_they_are_above_a_tier_that_a_thread_writes_and_reads_meanwhile(started, depth, order):
    tier, made = Tier(200), []

    def make_transfers(blocks, wake):
        store = HostMemory(200, content_bytes=blocks.block_bytes)
        made.append(Transfers(core.scheduler.kv, blocks, store, clock=WallClock(), wake=wake))
        return made[0]

    core = make_core(TINY, make_policies(order=order, reserve=Watermark(share=0.0, growth_tokens=0)), tier=tier)
    rig = started(core=core, executor=HashExecutor(TINY, depth=depth), make_transfers=make_transfers)
    sessions = [[idx + 1] * 12 for idx in range(6)]
    for turn in range(3):  # they come back, and are in the pool no more
        requests = [
            make_request(f"r{turn}-{idx}", prompt + [9] * 4 * turn, max_tokens=8, priority=idx % 3)
            for idx, prompt in enumerate(sessions)
        ]
        in_threads(*[lambda mine=requests[start::3]: [rig.engine.submit(request) for request in mine] for start in range(3)])
        rig.sink.wait_for_ends(*[request.request_id for request in requests])
        for request in requests:
            rig.check_against_oracle(request)
    stats = made[0].stats
    assert min(stats.num_spilled_blocks, stats.num_loaded_blocks) > 0
    assert not stats.failures
    rig.engine.close(TIMEOUT_S)
    core.check()


@pytest.mark.parametrize("depth", [1, 2])
def test_the_plans_are_those_of_any_other_driver_of_the_core(depth):
    requests = [make_request(f"r{idx}", 3 + idx * 5 % 17, max_tokens=4 + idx) for idx in range(9)]
    driver = Driver(make_core(TINY), HashExecutor(TINY, depth=depth))
    driver.turn(*(Add(request) for request in requests))
    while driver.core.has_work:
        driver.turn()

    plans = []

    class Recorder(HashExecutor):
        def submit(self, plan):
            plans.append(plan)
            return super().submit(plan)

        def collect(self, ticket):
            rig.clock.advance(1_000_000)
            return super().collect(ticket)

    rig = Rig(executor=Recorder(TINY, depth=depth), clock=VirtualClock())
    for idx, request in enumerate(requests):
        rig.engine.submit(make_request(request.request_id, request.prompt_token_ids, max_tokens=4 + idx))
    while rig.engine.turn():
        pass
    assert plans == driver.plans


@given(st.data())
def test_every_request_ends_once_with_the_right_answer_or_a_part_if_it_was_aborted(data):
    executor = HashExecutor(TINY, depth=data.draw(st.integers(1, 2)), seed=data.draw(st.integers(0, 3)))
    rig = Rig(executor=executor, clock=VirtualClock())
    live: dict[str, Request] = {}
    aborted: set[str] = set()
    for turn in range(data.draw(st.integers(1, 25))):
        for idx in range(data.draw(st.integers(0, 2))):
            prompt = data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=20))
            stop = data.draw(st.sampled_from([(), ("1 ",), ("9", "5 4")]))
            request = make_request(f"{turn}.{idx}", prompt, max_tokens=data.draw(st.integers(1, 12)), stop=stop)
            live[request.request_id] = request
            rig.engine.submit(request)
        if live and data.draw(st.booleans()):
            name = data.draw(st.sampled_from(sorted(live)))
            aborted.add(name)
            rig.engine.abort(name)
        rig.engine.turn()
        rig.core.check()
    while rig.engine.turn():
        rig.core.check()
    for request_id, request in live.items():
        expected, tokens = rig.expected(request), rig.sink.tokens_of(request_id)
        end = rig.sink.end_of(request_id)
        assert end.num_generated_tokens == len(tokens)
        if end.finish_reason is FinishReason.ABORT:
            assert request_id in aborted
            assert tokens == expected.token_ids[: len(tokens)]
            continue
        texts = (Numbers().push(expected.token_ids[:num]) for num in range(1, len(expected.token_ids) + 1))
        stopped = next((num for num, text in enumerate(texts, 1) if any(stop in text for stop in request.sampling.stop)), None)
        reason = expected.finish_reason if stopped is None else FinishReason.STOP
        assert (tokens, end.finish_reason) == (expected.token_ids[:stopped], reason)
    assert rig.engine.load().num_waiting == rig.engine.load().num_running == rig.engine.load().num_prompt_tokens == 0


def test_the_sink_is_called_once_per_step():
    rig = Rig(clock=VirtualClock())
    for idx in range(4):
        rig.engine.submit(make_request(f"r{idx}", [idx], max_tokens=5))
    while rig.engine.turn():
        pass
    assert rig.executor.num_steps == len(rig.sink.calls) == 5
    assert all(len(call) == 4 for call in rig.sink.calls)


def test_a_stop_string_wastes_no_step():
    request = make_request("a", [1, 2], max_tokens=10)
    answer = Rig().expected(request).token_ids
    rig = Rig(clock=VirtualClock())
    rig.engine.submit(make_request("a", [1, 2], max_tokens=10, stop=(f"{answer[2]} ",)))
    while rig.engine.turn():
        pass
    assert rig.executor.num_steps == 3
    assert rig.sink.text_of("a") == f"{answer[0]} {answer[1]} "
    end = rig.sink.end_of("a")
    assert (end.finish_reason, end.stop_reason) == (FinishReason.STOP, f"{answer[2]} ")
    assert not rig.core.has_work
    assert rig.engine.load().num_blocks_free + rig.engine.load().num_blocks_cached == TINY.num_blocks - 1


class NoText(Numbers):
    def flush(self) -> str:
        raise ValueError("no text")


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("has_grammar", [False, True])
@pytest.mark.parametrize(
    ("ends", "reason"),
    [
        ("stop string", FinishReason.STOP),
        ("limit", FinishReason.LENGTH),
        ("no text", FinishReason.ERROR),
        ("no text of a stop token", FinishReason.ERROR),
    ],
)
def test_an_end_counts_as_its_client_is_told(depth, has_grammar, ends, reason):
    """Also if the text of the token that ends the answer decides how."""
    ended: list[RequestStats] = []

    class Listener(NullObserver):
        def on_finish(self, stats: RequestStats) -> None:
            ended.append(stats)

    def answer_to(*requests: Request) -> OutputChunk:
        listener = Listener()
        core = make_core(TINY, observer=listener, journal=listener)
        text = NoText if "no text" in ends else Numbers
        sink = Sink()
        executor = HashExecutor(TINY, depth=depth)
        engine = Engine(core, executor, OutputStage(lambda _: text()), clock=VirtualClock(), sink=sink)
        engine.submit(*requests)
        while engine.turn():
            pass
        return sink.end_of("a")

    def make(**fields) -> Request:
        matcher = HashMatcher(HashExecutor(TINY).model.vocab_size, seed=1) if has_grammar else None
        return make_request("a", [1, 2], max_tokens=4, matcher=matcher, **fields)

    whole = make()
    answer_to(whole)
    ended.clear()
    stop = (f"{whole.output_token_ids[-1]} ",) if ends == "stop string" else ("nothing says this",)
    stop_token_ids = (whole.output_token_ids[-1],) if "stop token" in ends else ()
    told = answer_to(make(stop=stop, stop_token_ids=stop_token_ids), make_request("b", [3], max_tokens=9))
    assert told.finish_reason is reason
    assert [stats.finish_reason for stats in ended if stats.request_id == "a"] == [reason] * 2, "the journal and the observer"
    assert len(whole.output_token_ids) == told.num_generated_tokens == 4


class Counts(NullObserver):
    """Sums up the tokens that steps and requests report."""

    def __init__(self) -> None:
        self.num_sampled_tokens = self.num_forced_tokens = self.most_at_once = 0
        self.ended: list[RequestStats] = []

    def on_step(self, stats) -> None:
        counts = stats.counts
        self.num_sampled_tokens += counts.num_sampled_tokens
        self.num_forced_tokens += sum(counts.forced.values())
        self.most_at_once = max(self.most_at_once, counts.num_sampled_tokens)

    def on_finish(self, stats: RequestStats) -> None:
        self.ended.append(stats)


class TimedExecutor(HashExecutor):
    """Every step takes 1 ms. Without a duration of steps there are no guesses."""

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__(CAPACITY, model=MODEL)
        self._clock = clock

    def collect(self, ticket):
        self._clock.advance(1_000_000)
        return super().collect(ticket)


@pytest.mark.parametrize("at", range(1, 12))
@pytest.mark.parametrize(
    ("several", "end_token_ids"), [("guessed", ()), ("forced", ()), ("forced", (3,))], ids=["guessed", "forced", "forced end"]
)
def test_tokens_of_a_step_after_a_stop_string_are_not_counted(several, end_token_ids, at):
    def answer(stop: tuple[str, ...] = ()) -> tuple[Rig, Request, Counts]:
        counts, clock, matcher = Counts(), VirtualClock(), None
        if several == "forced":
            end = {"max_tokens": 11, "end_token_id": 3} if end_token_ids else {}
            matcher = HashMatcher(MODEL.vocab_size, seed=1, num_forced=7, **end)
        guesser = Knowing() if several == "guessed" else "off"
        core = make_core(CAPACITY, make_policies(guesser=guesser), observer=counts)
        rig = Rig(core=core, executor=TimedExecutor(clock), clock=clock)
        request = make_request("a", [2], max_tokens=12, matcher=matcher, stop=stop, stop_token_ids=end_token_ids)
        rig.engine.submit(request)
        while rig.engine.turn():
            pass
        core.check()
        return rig, request, counts

    _, request, counts = answer()
    assert len(request.output_token_ids) == 12
    assert counts.most_at_once > 2
    wanted = request.output_token_ids[:at]
    stop = "".join(f"{token_id} " for token_id in wanted)
    rig, request, counts = answer((stop,))
    told = rig.sink.end_of("a")
    assert (told.finish_reason, told.stop_reason, told.num_generated_tokens) == (FinishReason.STOP, stop, at)
    assert list(rig.sink.tokens_of("a")) == request.output_token_ids == wanted
    assert (request.finish_reason, request.stop_reason) == (FinishReason.STOP, stop)
    assert counts.num_sampled_tokens == at
    assert counts.num_forced_tokens < at
    assert [stats.num_generated_tokens for stats in counts.ended] == [at]


class CopyingCore(EngineCore):
    """Wants a block copied in each turn."""

    def __init__(self) -> None:
        super().__init__(make_core(TINY).scheduler)
        self.scheduler.kv.take_block_copies = lambda: [(1, 2)]


class NotingExecutor(HashExecutor):
    """Notes copies, without making them, and steps."""

    def __init__(self) -> None:
        super().__init__(TINY)
        self.calls = []

    def copy_blocks(self, pairs) -> None:
        self.calls.append(("copy", pairs))

    def submit(self, plan):
        self.calls.append(("submit", plan.step_id))
        return super().submit(plan)


def test_block_copies_are_made_before_the_step():
    rig = Rig(core=CopyingCore(), executor=NotingExecutor(), clock=VirtualClock())
    rig.engine.submit(make_request("a", max_tokens=1))
    rig.engine.turn()
    assert rig.executor.calls == [("copy", [(1, 2)]), ("submit", 0)]


def test_who_comes_while_a_turn_begins_is_not_queued_before_it_arrived(monkeypatch):
    rig = Rig(clock=VirtualClock())
    poll = rig.engine._inbox.poll
    request: list[Request] = []

    def come_late():
        rig.clock.advance(2_000_000)
        request.append(make_request("a", max_tokens=1, arrival_ns=rig.clock.now_ns()))
        rig.engine.submit(request[0])
        return poll()

    monkeypatch.setattr(rig.engine._inbox, "poll", come_late)
    rig.engine.turn()
    assert request[0].first_scheduled_ns == request[0].arrival_ns


def test_block_copies_are_made_without_a_step_too():
    """The request that needed a copy may have been paused in the same step, for one that waits for a load."""
    rig = Rig(core=CopyingCore(), executor=NotingExecutor(), clock=VirtualClock())
    assert not rig.engine.turn()
    assert rig.executor.calls == [("copy", [(1, 2)])]


def test_with_a_depth_of_two_a_step_is_begun_before_the_one_before_is_finished():
    rig = Rig(executor=HashExecutor(TINY, depth=2), clock=VirtualClock())
    request = make_request("a", max_tokens=3)
    rig.engine.submit(request)
    told = []
    while rig.engine.turn():
        told.append((len(rig.engine._stepper._flights), len(rig.sink.tokens_of("a"))))
    assert told == [(1, 0), (1, 1), (1, 2), (0, 3)]
    rig.check_against_oracle(request)


def test_with_a_depth_of_two_a_stop_string_wastes_one_row():
    request = make_request("a", [1, 2], max_tokens=10)
    answer = Rig().expected(request).token_ids
    rig = Rig(executor=HashExecutor(TINY, depth=2), clock=VirtualClock())
    rig.engine.submit(make_request("a", [1, 2], max_tokens=10, stop=(f"{answer[2]} ",)))
    while rig.engine.turn():
        rig.core.check()
    assert rig.executor.num_steps == 4
    assert rig.sink.text_of("a") == f"{answer[0]} {answer[1]} "
    assert rig.sink.end_of("a").finish_reason is FinishReason.STOP
    assert rig.engine.load().num_blocks_free + rig.engine.load().num_blocks_cached == TINY.num_blocks - 1


def test_an_id_that_comes_again_while_its_last_step_is_in_flight_gets_its_own_answer():
    answer = Rig().expected(make_request("a", [1, 2], max_tokens=10)).token_ids
    rig = Rig(executor=HashExecutor(TINY, depth=2), clock=VirtualClock())
    rig.engine.submit(make_request("a", [1, 2], max_tokens=10, stop=(f"{answer[2]} ",)))
    while not rig.sink.ends_of("a"):
        rig.engine.turn()
    assert len(rig.engine._stepper._flights) == 1, "there is a row of it in flight"
    again = make_request("a", [7, 8, 9], max_tokens=4)
    rig.sink.calls.clear()
    rig.engine.submit(again)
    while rig.engine.turn():
        rig.core.check()
    rig.check_against_oracle(again)


@pytest.mark.parametrize("depth", [0, 3])
def test_an_executor_that_wants_more_steps_in_flight_than_there_can_be_is_refused(depth):
    with pytest.raises(ValueError, match=f"not {depth}"):
        Rig(executor=HashExecutor(TINY, depth=depth))


# Aborts, refusals, deadlines


@pytest.mark.parametrize("depth", [1, 2])
def test_an_abort_during_a_step_comes_before_the_tokens_of_the_step(started, depth):
    executor = GatedExecutor(TINY, depth=depth)
    rig = started(executor=executor)
    rig.engine.submit(make_request("a", max_tokens=10))
    rig.engine.submit(make_request("b", max_tokens=2))
    executor.wait_until_in_step()
    executor.gate.release()
    executor.wait_until_in_step()
    num_shown = len(rig.sink.tokens_of("a"))
    rig.engine.abort("a", "gone")
    executor.open_for_good()
    rig.sink.wait_for_ends("a", "b")
    assert (rig.sink.end_of("a").finish_reason, rig.sink.end_of("a").detail) == (FinishReason.ABORT, "gone")
    assert len(rig.sink.tokens_of("a")) == num_shown
    assert rig.sink.end_of("b").finish_reason is FinishReason.LENGTH


def test_an_abort_right_after_the_submit_is_not_lost():
    rig = Rig(clock=VirtualClock())
    rig.engine.submit(make_request("a", max_tokens=10))
    rig.engine.abort("a")
    assert not rig.engine.turn()
    assert rig.sink.end_of("a").finish_reason is FinishReason.ABORT


def test_aborts_of_unknown_and_ended_requests_are_ignored():
    rig = Rig(clock=VirtualClock())
    rig.engine.submit(make_request("a", max_tokens=1))
    rig.engine.turn()
    rig.engine.abort("a")
    rig.engine.abort("nobody")
    assert not rig.engine.turn()
    assert rig.sink.end_of("a").finish_reason is FinishReason.LENGTH


def test_what_can_never_fit_is_refused_at_once_though_others_run(started):
    executor = GatedExecutor(TINY)
    rig = started(executor=executor)
    rig.engine.submit(make_request("a", max_tokens=5))
    executor.wait_until_in_step()
    rig.engine.submit(make_request("long", TINY.max_model_len + 1))
    executor.gate.release()
    rig.sink.wait_for_ends("long")  # while the second step is held
    assert rig.sink.end_of("long").finish_reason is FinishReason.REJECTED
    assert not rig.sink.ends_of("a")


def test_a_deadline_ends_a_request():
    rig = Rig(clock=VirtualClock())
    rig.engine.submit(make_request("a", max_tokens=20, deadline_ns=100))
    rig.engine.turn()
    rig.clock.advance(100)
    rig.engine.turn()
    end = rig.sink.end_of("a")
    assert (end.finish_reason, end.reject_reason) == (FinishReason.ABORT, RejectReason.DEADLINE)


def test_an_idle_engine_wakes_when_the_window_of_an_incomplete_batch_ends(started):
    window_ns = 20_000_000
    rig = started(core=make_core(TINY, make_policies(gate=Static(2, window_ns))))
    request = make_request("a", max_tokens=3, arrival_ns=rig.clock.now_ns())
    rig.engine.submit(request)
    rig.sink.wait_for_ends("a")
    rig.check_against_oracle(request)
    assert request.first_scheduled_ns is not None
    assert request.first_scheduled_ns >= request.arrival_ns + window_ns


def test_an_id_in_flight_is_refused_and_the_first_goes_on():
    rig = Rig(clock=VirtualClock())
    request = make_request("a", max_tokens=3)
    rig.engine.submit(request)
    rig.engine.turn()
    with pytest.raises(Rejected, match="still running"):
        rig.engine.submit(make_request("a", [9], max_tokens=3))
    while rig.engine.turn():
        pass
    rig.check_against_oracle(request)
    rig.engine.submit(make_request("a", [9], max_tokens=1))  # free again
    rig.engine.turn()
    assert len(rig.sink.ends_of("a")) == 2


# Load


def test_load_counts_the_inbox_as_waiting():
    rig = Rig(clock=VirtualClock())
    for idx in range(6):
        rig.engine.submit(make_request(f"r{idx}", [idx] * 3, max_tokens=3))
    load = rig.engine.load()
    assert (load.num_waiting, load.num_running, load.num_prompt_tokens) == (6, 0, 18)
    rig.engine.turn()
    load = rig.engine.load()
    assert (load.num_waiting, load.num_running) == (2, 4)
    assert load.num_blocks_total == TINY.num_blocks - 1
    assert load.num_blocks_free + load.num_blocks_cached == TINY.num_blocks - 1 - 4
    while rig.engine.turn():
        pass
    assert rig.engine.load().num_waiting == rig.engine.load().num_running == rig.engine.load().num_prompt_tokens == 0


def test_the_host_time_of_each_turn_is_told():
    class Listener:
        def __init__(self) -> None:
            self.parts: list[dict] = []

        def on_turn(self, parts_ns) -> None:
            self.parts.append(parts_ns)

    listener = Listener()
    rig = Rig(clock=VirtualClock(), turn_observer=listener)
    rig.engine.submit(make_request("a", max_tokens=3))
    while rig.engine.turn():
        pass
    assert [set(parts) for parts in listener.parts] == [{"schedule", "commit", "output"}] * 3


# Draining and closing


@pytest.mark.parametrize("depth", [1, 2])
def test_a_drain_finishes_what_runs_and_refuses_what_comes(started, depth):
    executor = GatedExecutor(TINY, depth=depth)
    rig = started(executor=executor)
    early = make_request("early", max_tokens=4)
    rig.engine.submit(early)
    executor.wait_until_in_step()
    rig.engine.drain()
    assert rig.engine.state is EngineState.DRAINING
    rig.engine.submit(make_request("late"))
    executor.open_for_good()
    rig.sink.wait_for_ends("early", "late")
    rig.check_against_oracle(early)
    end = rig.sink.end_of("late")
    assert (end.finish_reason, end.reject_reason) == (FinishReason.REJECTED, RejectReason.DRAINING)
    assert rig.engine.close(TIMEOUT_S)
    assert rig.engine.state is EngineState.STOPPED


def test_who_comes_too_late_is_not_told_that_the_server_ends():
    rig = Rig()
    rig.engine.submit(make_request("late"))
    rig.engine.close(TIMEOUT_S)
    end = rig.sink.end_of("late")
    assert (end.reject_reason, "unloaded" in end.detail) == (RejectReason.DRAINING, True), "its model may have been unloaded"


@pytest.mark.parametrize("depth", [1, 2])
def test_close_waits_for_the_running_and_closes_the_executor(started, depth):
    executor = GatedExecutor(TINY, depth=depth)
    rig = started(executor=executor)
    request = make_request("a", max_tokens=4)
    rig.engine.submit(request)
    executor.open_for_good()
    assert rig.engine.close(TIMEOUT_S)
    assert not executor.num_in_flight
    rig.check_against_oracle(request)
    assert executor.closes == 1
    assert rig.engine.close(TIMEOUT_S)  # again


@pytest.mark.parametrize("depth", [1, 2])
def test_close_aborts_what_is_left_after_the_timeout(started, depth):
    rig = started(executor=GatedExecutor(TINY, depth=depth))
    rig.engine.submit(make_request("a", max_tokens=30))
    rig.executor.wait_until_in_step()
    opener = threading.Thread(target=lambda: (aborted.wait(TIMEOUT_S), rig.executor.open_for_good()))
    aborted = threading.Event()
    abort, rig.engine.abort = rig.engine.abort, lambda *args: (abort(*args), aborted.set())
    opener.start()
    assert not rig.engine.close(timeout_s=0)
    opener.join()
    end = rig.sink.end_of("a")
    assert (end.finish_reason, end.detail) == (FinishReason.ABORT, SHUTTING_DOWN)
    assert end.reject_reason == RejectReason.DRAINING
    assert rig.executor.closes == 1
    assert not rig.executor.num_in_flight
    assert rig.engine.state is EngineState.STOPPED
    assert not rig.engine.close(TIMEOUT_S)


def test_a_drain_waits_for_who_holds_it_and_takes_what_comes(started):
    rig = started()
    with rig.engine.held():
        with rig.engine.held():
            rig.engine.drain()
        late = make_request("late", max_tokens=4)
        rig.engine.submit(late)
        rig.sink.wait_for_ends("late")
        assert rig.engine.state is EngineState.DRAINING
    rig.check_against_oracle(late)
    assert rig.engine.close(TIMEOUT_S)
    assert rig.engine.state is EngineState.STOPPED


def test_close_waits_for_who_holds_it_no_longer_than_its_timeout(started):
    rig = started()
    with rig.engine.held():
        assert not rig.engine.close(timeout_s=0)
        assert rig.engine.state is EngineState.STOPPED
        rig.engine.submit(make_request("late"))
        assert rig.sink.end_of("late").finish_reason is FinishReason.REJECTED
    assert not rig.engine.close(TIMEOUT_S)


def test_closing_an_idle_engine_without_patience_cuts_nothing_short(started):
    assert started().engine.close(timeout_s=0)


def test_an_executor_that_hangs_is_left_open(started, monkeypatch, caplog):
    monkeypatch.setattr(engine_thread, "ABORT_GRACE_S", 0)
    rig = started(executor=GatedExecutor(TINY))
    rig.engine.submit(make_request("a"))
    rig.executor.wait_until_in_step()
    assert not rig.engine.close(timeout_s=0)
    assert rig.executor.closes == 0
    assert "did not come back" in caplog.text


def test_a_closed_engine_refuses_on_the_callers_thread(started):
    rig = started()
    rig.engine.close(TIMEOUT_S)
    rig.engine.submit(make_request("a"))
    end = rig.sink.end_of("a")
    assert (end.finish_reason, end.reject_reason) == (FinishReason.REJECTED, RejectReason.UNAVAILABLE)
    assert rig.engine.load().num_waiting == 0
    rig.engine.abort("a")
    with pytest.raises(RuntimeError):
        rig.engine.start()


def test_an_engine_that_never_started_refuses_what_it_was_given():
    rig = Rig()
    rig.engine.submit(make_request("a"))
    assert rig.engine.state is EngineState.STARTING
    assert rig.engine.close(TIMEOUT_S)
    assert rig.sink.end_of("a").finish_reason is FinishReason.REJECTED
    with pytest.raises(RuntimeError):
        rig.engine.start()


def test_observers_hear_of_requests_that_the_core_never_saw(started):
    heard = []

    class Listener:
        def on_step(self, stats) -> None: ...

        def on_finish(self, stats) -> None:
            heard.append((stats.request_id, stats.finish_reason, stats.reject_reason))

    rig = started(observer=Listener())
    rig.engine.close(TIMEOUT_S)
    rig.engine.submit(make_request("a"))
    assert heard == [("a", FinishReason.REJECTED, "unavailable")]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("close_timeout_s", [0, TIMEOUT_S])
def test_requests_that_race_with_the_close_end_exactly_once(close_timeout_s, depth):
    for _ in range(10):
        rig = Rig(executor=HashExecutor(TINY, depth=depth))
        rig.engine.start()
        ids: list[str] = []
        barrier = threading.Barrier(4)

        def submit(worker: int, rig=rig, ids=ids, barrier=barrier) -> None:
            barrier.wait(TIMEOUT_S)
            for idx in range(15):
                ids.append(f"{worker}.{idx}")
                rig.engine.submit(make_request(f"{worker}.{idx}", [worker, idx], max_tokens=2))

        def close(rig=rig, barrier=barrier) -> None:
            barrier.wait(TIMEOUT_S)
            rig.engine.close(close_timeout_s)

        in_threads(lambda: submit(0), lambda: submit(1), lambda: submit(2), close)
        for request_id in ids:
            assert rig.sink.end_of(request_id).finish_reason in (
                FinishReason.LENGTH,
                FinishReason.REJECTED,
                FinishReason.ABORT,
            )
        assert rig.engine.load().num_waiting == 0


# Failures


def assert_failed(rig: Rig, *request_ids: str) -> None:
    for request_id in request_ids:
        end = rig.sink.end_of(request_id)
        assert (end.finish_reason, end.detail) == (FinishReason.ERROR, ENGINE_FAILED)
        assert end.reject_reason == RejectReason.UNAVAILABLE
    assert rig.engine.state is EngineState.FAILED
    rig.engine.submit(make_request("later"))
    end = rig.sink.end_of("later")
    assert (end.finish_reason, end.reject_reason) == (FinishReason.REJECTED, RejectReason.UNAVAILABLE)
    assert rig.engine.close(TIMEOUT_S), "all ended before"
    assert rig.engine.state is EngineState.FAILED


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("is_in_submit", [False, True])
def test_a_failing_executor_ends_every_request_and_the_plan_is_logged(started, caplog, is_in_submit, depth):
    executor = FailingExecutor(HashExecutor(TINY, depth=depth), fail_at_step=2, is_in_submit=is_in_submit)
    rig = Rig(executor=executor)
    ids = [f"r{idx}" for idx in range(7)]  # four run, three wait
    for idx, request_id in enumerate(ids):
        rig.engine.submit(make_request(request_id, [idx], max_tokens=30))
    rig.engine.start()
    rig.sink.wait_for_ends(*ids)
    assert "StepPlan(step_id=2" in caplog.text
    assert ("StepPlan(step_id=3" in caplog.text) == (depth == 2 and not is_in_submit)
    assert "as it was told to" in caplog.text
    assert len(rig.sink.tokens_of("r0")) == (1 if depth == 2 and is_in_submit else 2)
    assert_failed(rig, *ids)
    rig.core.check()
    kv = rig.core.scheduler.kv
    assert kv.pool.num_available == kv.num_total_blocks


def test_a_plan_in_the_log_has_nothing_of_prompts_and_answers():
    sampling = SamplingParams(stop=("7777",), banned_token_sequences=((7777,),), allowed_token_ids=(7777,))
    admit = AdmitRow("r", (7777, 7777), 1, (1,), 0, sampling)
    plan = StepPlan(3, 0, (admit,), (RowPlan("r", 0, 2, (1,), 2),), (), guesses={"r": (7777,)}, features=b"7777")
    assert "7777" not in repr(plan)
    assert "AdmitRow(request_id='r', num_prompt_tokens=1, block_ids=(1,)" in repr(plan)


def test_closing_an_engine_that_has_failed_cuts_nothing_short(monkeypatch):
    """A supervisor closes it at once: its thread may still be alive, and the failed call may still hold it."""
    monkeypatch.setattr(engine_thread, "ABORT_GRACE_S", 0)
    is_told = threading.Event()
    rig = Rig(
        executor=FailingExecutor(HashExecutor(TINY), fail_at_step=0), on_failed=functools.partial(is_told.wait, TIMEOUT_S)
    )
    rig.engine.submit(make_request("a"))
    rig.engine.start()
    rig.sink.wait_for_ends("a")
    with rig.engine.held():
        assert rig.engine.close(timeout_s=0)
    is_told.set()
    rig.wait_until_ended()
    assert rig.engine.close(TIMEOUT_S)


def test_a_request_that_comes_during_the_failing_step_is_refused():
    class FailsWhenLetIn(GatedExecutor):
        def collect(self, ticket):
            super().collect(ticket)
            raise OSError("the device is gone")

    rig = Rig(executor=FailsWhenLetIn(TINY))
    rig.engine.start()
    rig.engine.submit(make_request("a"))
    rig.executor.wait_until_in_step()
    rig.engine.submit(make_request("late"))
    rig.executor.gate.release()
    rig.sink.wait_for_ends("a", "late")
    end = rig.sink.end_of("late")
    assert (end.finish_reason, end.reject_reason) == (FinishReason.REJECTED, RejectReason.UNAVAILABLE)
    assert_failed(rig, "a")


class BrokenCore(EngineCore):
    """Raises in the methods that a test names, each from its `after`-th call on."""

    def __init__(self, *methods: str, after: int = 0) -> None:
        super().__init__(make_core(TINY).scheduler)
        for name in methods:
            owner = self if hasattr(self, name) else self.scheduler.kv
            setattr(owner, name, self._break(getattr(owner, name), after))

    @staticmethod
    def _break(method, after: int):
        calls_left = after

        def broken(*args):
            nonlocal calls_left
            calls_left -= 1
            if calls_left < 0:
                raise RuntimeError("a bug in the core")
            return method(*args)

        return broken


@pytest.mark.parametrize(
    "methods",
    [("begin",), ("finish",), ("apply",), ("take_block_copies",), ("begin", "fail_all"), ("finish", "fail_all", "apply")],
)
@pytest.mark.parametrize("after", [0, 3])
@pytest.mark.parametrize("depth", [1, 2])
def test_a_bug_in_the_core_is_never_a_silent_death(caplog, methods, after, depth):
    core = BrokenCore(*methods, after=0 if "fail_all" in methods else after)
    rig = Rig(core=core, executor=HashExecutor(TINY, depth=depth))
    ids = [f"r{idx}" for idx in range(6)]
    for idx, request_id in enumerate(ids):
        rig.engine.submit(make_request(request_id, [idx], max_tokens=30))
    rig.engine.start()
    rig.sink.wait_for_ends(*ids)
    assert "a bug in the core" in caplog.text
    assert_failed(rig, *ids)


@pytest.mark.parametrize("ends_by", ["length", "stop string", "abort"])
def test_who_is_told_an_end_finds_it_in_the_books(ends_by):
    class Auditor(Sink):
        def __call__(self, chunks) -> None:
            super().__call__(chunks)
            if any(chunk.finish_reason is not None for chunk in chunks):
                audits.append((observer.ended, rig.core.has_work, rig.engine.load().num_blocks_free))

    class Ends(NullObserver):
        ended = 0

        def on_finish(self, stats) -> None:
            self.ended += 1

    audits: list[tuple[int, bool, int]] = []
    observer = Ends()
    rig = Rig(core=make_core(TINY, observer=observer, enable_prefix_caching=False), sink=Auditor())
    request = make_request("a", max_tokens=6)
    stop = (f"{rig.expected(request).token_ids[2]} ",) if ends_by == "stop string" else ()
    rig.engine.submit(make_request("a", max_tokens=6, stop=stop))
    rig.engine.turn()
    if ends_by == "abort":
        rig.engine.abort("a")
    while rig.engine.turn():
        pass
    assert audits == [(1, False, TINY.num_blocks - 1)]


def test_a_broken_invariant_is_found_when_the_engine_is_idle(started, caplog):
    core = BrokenCore("check")
    rig = started(core=core, idle_check_s=0)
    request = make_request("a", max_tokens=2)
    rig.engine.submit(request)
    rig.sink.wait_for_ends("a")
    rig.wait_until_ended()
    assert rig.engine.state is EngineState.FAILED
    assert "a bug in the core" in caplog.text
    rig.check_against_oracle(request)


def test_an_idle_engine_checks_its_books_once(started):
    core, checked = make_core(TINY), threading.Semaphore(0)
    check = core.check
    core.check = lambda: (check(), checked.release())
    rig = started(core=core, idle_check_s=0)
    for name in ("a", "b"):
        rig.engine.submit(make_request(name, max_tokens=2))
        rig.sink.wait_for_ends(name)
        assert checked.acquire(timeout=TIMEOUT_S)
    rig.engine.close(TIMEOUT_S)
    assert not checked.acquire(blocking=False)


def test_a_sink_that_breaks_fails_the_engine(caplog):
    class BrokenSink(Sink):
        def __call__(self, chunks) -> None:
            if len(self.calls) == 2:
                raise OSError("nobody listens")
            super().__call__(chunks)

    rig = Rig(sink=BrokenSink())
    rig.engine.submit(make_request("a", max_tokens=30))
    rig.engine.start()
    rig.wait_until_ended()
    assert rig.engine.state is EngineState.FAILED
    assert "nobody listens" in caplog.text
    assert rig.engine.close(TIMEOUT_S)


def test_a_commit_that_breaks_halfway_tells_everybody_and_the_observer(started):
    class Loses(HashExecutor):
        def collect(self, ticket):
            result = super().collect(ticket)
            kept = {request_id: tokens for request_id, tokens in result.token_ids.items() if request_id != "b"}
            return replace(result, token_ids=kept)

    class Listener(NullObserver):
        def __init__(self):
            self.ended = []

        def on_finish(self, stats):
            self.ended.append(stats.request_id)

    listener = Listener()
    rig = Rig(core=make_core(TINY, observer=listener), executor=Loses(TINY), observer=listener)
    for request_id in "abc":
        rig.engine.submit(make_request(request_id, [ord(request_id)], max_tokens=1 if request_id == "a" else 5))
    rig.engine.start()
    rig.sink.wait_for_ends(*"abc")
    assert {rig.sink.end_of(request_id).finish_reason for request_id in "abc"} == {FinishReason.ERROR}
    assert sorted(listener.ended) == ["a", "b", "c"]


def test_an_adapter_that_has_come_wakes_an_engine_that_sleeps(started) -> None:
    """Nothing else would, for ten seconds."""
    worker = LateWorker()
    rig = started(core=make_core(TINY, adapters=FakeAdapters(worker=worker)))
    request = make_request("r", 4, max_tokens=3, adapter=make_adapter(1))
    rig.engine.submit(request)
    while worker.num_jobs < 2:  # the engine has asked for it, and then urgently
        time.sleep(0.001)
    worker.run(2)
    rig.sink.wait_for_ends("r")
    model, max_model_len = HashExecutor(TINY).model, TINY.max_model_len
    expected = expected_tokens(
        request.prompt_token_ids, request.sampling, model=model, max_model_len=max_model_len, adapter=request.adapter
    )
    assert rig.sink.tokens_of("r") == expected.token_ids
    assert rig.engine.load().adapters == AdapterCounts(num_resident=1, num_blocks=2, num_placements=1, numbers={1})
