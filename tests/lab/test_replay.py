"""Rung 1: what a real engine did is recorded, and the recorded durations give the same plans again, under every preset."""

from __future__ import annotations

import json
import queue
import random
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from itertools import cycle
from pathlib import Path

import pytest

from engine.test_thread import Numbers
from penstock.clock import Clock, WallClock
from penstock.engine.core import EngineCore
from penstock.engine.output import OutputStage
from penstock.engine.ports import Detokenizer, OutputChunk
from penstock.engine.thread import Engine
from penstock.lab.perfetto import write_trace
from penstock.lab.profiling import recording_lines
from penstock.lab.recording import Arrival, Departure, Recording, RecordingError, Seen, StepDone, open_recording
from penstock.lab.replay import replay
from penstock.lab.steps import steps_of
from penstock.lab.traces import read_workload
from penstock.obs.recording import Recorder
from penstock.sched.policies.base import Policies
from penstock.sched.policies.presets import PRESETS, make_policies
from penstock.sched.scheduler import Scheduler
from penstock.testing.adapters import FakeAdapters, make_adapter
from penstock.testing.builders import make_request
from penstock.testing.hash_executor import HashExecutor, HashMatcher, HashModel
from penstock.types.adapter import AdapterOutlook, AdapterRef, AdapterState
from penstock.types.errors import PenstockError
from penstock.types.plan import Capacity, Ticket
from penstock.types.request import FinishReason, Request
from penstock.types.result import StepResult
from penstock.types.sampling import LineLimits

CAPACITY = Capacity(num_blocks=29, block_size=4, max_rows=8, max_step_tokens=24, max_model_len=80)
MODEL = HashModel(vocab_size=40, eos_token_id=3, eos_period=25)
NUM_ADAPTERS, MAX_ADAPTERS, FAILS, NEVER_FITS = 6, 2, 5, 6
"""Adapters that requests ask for, how many of them run at once, and numbers of two that never do."""
WINDOWS = {"static": 3_000_000, "dynamic": 2_000_000}
"""Short, so that batches start by them, too. Nanoseconds."""


EAGER: Mapping[str, dict[str, dict[str, object]]] = {
    "penstock": {"reserve": {"share": 0.0, "growth_tokens": 0}},
    "sglang": {"reserve": {"unknown_share": 0.05}},
}
"""They admit more than there is memory for, so that some are preempted."""


def policies_of(preset: str) -> Policies:
    settings: dict[str, dict[str, object]] = dict(EAGER.get(preset, {}))
    if preset in WINDOWS:
        settings["gate"] = {"max_queue_delay_ns": WINDOWS[preset], "max_batch_size": 3}
    if preset == "dynamic":
        settings["gate"] |= {"length_buckets": (16, 40), "preferred_batch_sizes": (2,)}
    return make_policies(preset, settings=settings)


class Traffic(HashExecutor):
    """An executor during whose steps requests come and go: sessions over shared beginnings, stop strings, cancels."""

    def __init__(
        self, depth: int, num_adapters: int = 0, *, has_grammars: bool = False, grammar_fails_after: int | None = None
    ) -> None:
        """Requests ask for `num_adapters` in turn, and now and then for none. `has_grammars`: every third follows one."""
        super().__init__(CAPACITY, model=MODEL, depth=depth, seed=5)
        self._num_adapters = num_adapters
        self._has_grammars = has_grammars
        self._grammar_fails_after = grammar_fails_after
        self.engine: Engine | None = None
        self._num_collected = 0
        self.is_over = threading.Event()
        self._num_sent = self._num_open = 0
        self._turns: dict[str, Request] = {}
        self._answers: dict[str, list[int]] = {}

    def collect(self, ticket: Ticket) -> StepResult:
        self._num_collected += 1
        if self._num_collected % 2 and self._num_sent < 40:
            self.send()
        if self._num_collected % 7 == 3:
            self.engine.abort(f"r{self._num_sent - 2}")  # type: ignore[union-attr]
        result = super().collect(ticket)
        result.timing = replace(result.timing, waited_ns=self._num_collected % 5 * 10_000)  # another model had the machine
        return result

    def most_step_ns(self) -> int:
        """How long a step may take: now and then another model wants the machine."""
        return 50_000 if self._num_collected % 3 == 0 else 0

    def send(self, prompt: Sequence[int] = ()) -> None:
        idx = self._num_sent
        self._num_sent += 1
        self._num_open += 1
        shared = [1, 2, 5, 4, 1, 6, 7, 8, 9, 10, 11][: 4 + idx % 8]
        matcher = None
        if self._has_grammars and idx % 3 == 0:
            matcher = BusyMatcher(MODEL.vocab_size, seed=idx, num_forced=4, fails_after=self._grammar_fails_after)
        request = make_request(
            f"r{idx}",
            prompt or [*shared, *(10 + (idx * 7 + pos) % 23 for pos in range(idx * 5 % 30))],
            arrival_ns=WallClock().now_ns(),
            temperature=0.0,
            max_tokens=3 + idx * 11 % 21,
            stop_token_ids=(3,),
            stop=("7 ",) if idx % 3 == 0 else (),
            lines=LineLimits(min_indent=1) if idx % 3 == 1 else None,
            tenant=f"t{idx % 3}",
            cache_salt=b"salt" if idx % 11 == 10 else b"",
            matcher=matcher,
            adapter=make_adapter(number) if (number := idx * 5 % (self._num_adapters + 1)) else None,
        )
        self._turns[request.request_id], self._answers[request.request_id] = request, []
        self.engine.submit(request)  # type: ignore[union-attr]

    def sink(self, chunks: list[OutputChunk]) -> None:
        for chunk in chunks:
            self._answers[chunk.request_id] += chunk.token_ids
            if chunk.finish_reason is None:
                continue
            self._num_open -= 1
            request = self._turns[chunk.request_id]
            history = [*request.prompt_token_ids, *self._answers[chunk.request_id], 30, 31]
            if chunk.finish_reason is not FinishReason.ABORT and len(history) < 50 and self._num_sent < 40:
                self.send(history)
        if not self._num_open and self._num_sent >= 40:
            self.is_over.set()
        elif not self._num_open:
            self.send()


class BusyMatcher(HashMatcher):
    """Takes a millisecond of the thread for each token, while steps take a tenth of it."""

    def accept(self, token_ids: Sequence[int]) -> None:
        end_ns = time.thread_time_ns() + 1_000_000
        while time.thread_time_ns() < end_ns:
            pass
        super().accept(token_ids)


class SlowAdapters(FakeAdapters):
    """A thread of its own loads adapters, in up to 3 ms each. Nobody knows their sizes beforehand."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        sizes = {NEVER_FITS: CAPACITY.num_blocks}
        super().__init__(
            worker=lambda job, _is_urgent: self._jobs.put(job),
            num_pages=lambda number: sizes.get(number, number),
            max_in_memory=2,
            failing=[FAILS],
        )
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def want(self, ref: AdapterRef, *, is_urgent: bool = False) -> None:
        with self._lock:
            super().want(ref, is_urgent=is_urgent)

    def state(self, number: int) -> AdapterState:
        with self._lock:
            return super().state(number)

    def outlook(self, number: int) -> AdapterOutlook:
        del number
        return AdapterOutlook()

    def close(self) -> None:
        self._jobs.put(None)
        self._thread.join(10)

    def _run(self) -> None:
        rng = random.Random(3)
        while (job := self._jobs.get()) is not None:
            time.sleep(rng.random() * 0.003)
            with self._lock:
                job()


def make_recorder(
    path: Path, clock: Clock, *, depth: int = 1, has_prefix_caching: bool = True, max_adapters: int = 0
) -> Recorder:
    about = {
        "model": "hash",
        "machine": {},
        "config": "",
        "settings": {},
        "capacity": asdict(CAPACITY),
        "depth": depth,
        "has_prefix_caching": has_prefix_caching,
        "has_tier": False,
        **({"max_adapters": max_adapters} if max_adapters else {}),
    }
    return Recorder(path, max_bytes=64 << 20, clock=clock, block_size=CAPACITY.block_size, about=about)


def record(
    path: Path,
    make: Callable[[], Policies],
    *,
    depth: int = 1,
    has_prefix_caching: bool = True,
    has_adapters: bool = False,
    has_grammars: bool = False,
    grammar_fails_after: int | None = None,
    make_text: Callable[[], Detokenizer] = Numbers,
) -> None:
    """Serve the traffic with an engine's own thread, under the wall clock."""
    num_adapters, clock = NUM_ADAPTERS if has_adapters else 0, WallClock()
    executor = Traffic(depth, num_adapters, has_grammars=has_grammars, grammar_fails_after=grammar_fails_after)
    adapters = SlowAdapters() if has_adapters else None
    recorder = make_recorder(
        path, clock, depth=depth, has_prefix_caching=has_prefix_caching, max_adapters=MAX_ADAPTERS if has_adapters else 0
    )
    scheduler = Scheduler(
        CAPACITY,
        make(),
        enable_prefix_caching=has_prefix_caching,
        most_step_ns=executor.most_step_ns,
        adapters=adapters,
        max_adapters=MAX_ADAPTERS,
    )
    core = EngineCore(scheduler, journal=recorder)
    output = OutputStage(lambda skip_special_tokens: make_text())
    engine = Engine(core, executor, output, clock=clock, sink=executor.sink, turn_observer=recorder)
    executor.engine = engine
    executor.send()
    engine.start()
    assert executor.is_over.wait(60)
    engine.close(10)
    recorder.close()
    if adapters is not None:
        adapters.close()
    assert recorder.num_lost == 0


@pytest.mark.parametrize("depth", [1, 2])
def test_those_who_sat_out_sit_out_again(depth: int, tmp_path: Path) -> None:
    path, make = tmp_path / "recording", partial(policies_of, "penstock")
    record(path, make, depth=depth, has_grammars=True)
    recording = open_recording(path)
    assert sum(bool(step.sat_out) for step in recording.steps()) > 10
    replayed = replay(recording, make)
    assert replayed.difference == ""
    assert replayed.num_equal == replayed.num_steps > 40
    prompts = {event.id: event.num_prompt_tokens for event in recording.events() if isinstance(event, Arrival)}
    rows = [row for step in recording.steps() for row in step.rows if row.query_len > 1 and row.samples]
    assert any(row.context_len >= prompts[row.id] for row in rows) or depth == 2, "forced tokens"


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("depth", [1, 2])
def test_recorded_durations_give_the_same_plans(preset: str, depth: int, tmp_path: Path) -> None:
    path, make = tmp_path / "recording", partial(policies_of, preset)
    record(path, make, depth=depth)
    recording = open_recording(path)
    steps = list(recording.steps())
    assert len(steps) > 60
    departures = [event for event in recording.events() if isinstance(event, Departure)]
    reasons = Counter(departure.reason for departure in departures)
    assert reasons[FinishReason.LENGTH] > 5
    assert reasons[FinishReason.STOP] > 2
    assert reasons[FinishReason.ABORT] > 2
    assert any(departure.is_by_text for departure in departures)
    assert sum(departure.num_cached_tokens for departure in departures) > 40, "prefix hits"
    chunks = [row for step in steps for row in step.rows if row.query_len > 1 and not row.samples]
    assert chunks or preset == "orca", "prompts in chunks"
    if make_policies(preset).gate.is_continuous and preset != "orca":
        assert sum(departure.num_preemptions for departure in departures) > 0

    replayed = replay(recording, make)
    assert replayed.difference == ""
    assert replayed.num_equal == replayed.num_steps == len(steps)


class Failing(Numbers):
    """The text of a fifth token can't be made."""

    def __init__(self) -> None:
        self._num_tokens = 0

    def push(self, token_ids: Sequence[int]) -> str:
        self._num_tokens += len(token_ids)
        if self._num_tokens >= 5:
            raise ValueError("no text")
        return super().push(token_ids)


class Lines(Numbers):
    """One token in four ends a line. No line is indented."""

    def push(self, token_ids: Sequence[int]) -> str:
        return "".join("x" if token_id % 4 else "\n" for token_id in token_ids)


class Third(Numbers):
    """Every third token completes the stop string of `Traffic`."""

    def __init__(self) -> None:
        self._num_tokens = 0

    def push(self, token_ids: Sequence[int]) -> str:
        self._num_tokens += len(token_ids)
        return "7 " if self._num_tokens % 3 == 0 else "x "


def reasons_of(recording: Recording) -> Counter[FinishReason]:
    return Counter(event.reason for event in recording.events() if isinstance(event, Departure))


@pytest.mark.parametrize("preset", ["penstock", "vllm", "sglang"])
@pytest.mark.parametrize("depth", [1, 2])
def test_answers_whose_text_can_not_be_made_end_again(preset: str, depth: int, tmp_path: Path) -> None:
    path, make, texts = tmp_path / "recording", partial(policies_of, preset), cycle((Numbers, Failing))
    record(path, make, depth=depth, make_text=lambda: next(texts)())
    recording = open_recording(path)
    assert reasons_of(recording)[FinishReason.ERROR] > 5
    replayed = replay(recording, make)
    assert (replayed.difference, replayed.num_equal) == ("", replayed.num_steps)


@pytest.mark.parametrize("depth", [1, 2])
def test_answers_that_end_with_a_line_end_again(depth: int, tmp_path: Path) -> None:
    path, make = tmp_path / "recording", partial(policies_of, "penstock")
    record(path, make, depth=depth, make_text=Lines)
    recording = open_recording(path)
    lengths = [
        (request.departure.num_output_tokens, request.arrival.max_tokens)
        for request in recording.requests()
        if request.departure is not None and request.departure.reason is FinishReason.LENGTH
    ]
    assert sum(num_tokens < max_tokens for num_tokens, max_tokens in lengths) > 2
    replayed = replay(recording, make)
    assert (replayed.difference, replayed.num_equal) == ("", replayed.num_steps)


@pytest.mark.parametrize("depth", [1, 2])
def test_answers_whose_grammars_fail_end_again(depth: int, tmp_path: Path) -> None:
    path, make = tmp_path / "recording", partial(policies_of, "penstock")
    record(path, make, depth=depth, has_grammars=True, grammar_fails_after=2)
    recording = open_recording(path)
    assert reasons_of(recording)[FinishReason.ERROR] > 5
    replayed = replay(recording, make)
    assert (replayed.difference, replayed.num_equal) == ("", replayed.num_steps)


@pytest.mark.parametrize("comes", ["a cancel", "a cancel of nobody", "a request that is refused"])
def test_a_stop_string_whose_text_waits_for_masks_ends_its_answer_where_it_did(comes: str, tmp_path: Path) -> None:
    """Something else comes in the turn in which it is found."""
    clock = WallClock()
    told: list[OutputChunk] = []

    def make_engine(recorder: Recorder | None = None) -> Engine:
        core = EngineCore(Scheduler(CAPACITY, make_policies()), journal=recorder)
        output = OutputStage(lambda skip_special_tokens: Numbers())
        executor = HashExecutor(CAPACITY, model=MODEL, seed=5)
        return Engine(core, executor, output, clock=clock, sink=told.extend, turn_observer=recorder)

    def follows(**fields: object) -> Request:
        matcher = HashMatcher(MODEL.vocab_size, seed=1)
        return make_request("a", 5, arrival_ns=clock.now_ns(), temperature=0.0, max_tokens=12, matcher=matcher, **fields)

    engine, whole = make_engine(), follows()
    engine.submit(whole)
    while engine.turn():
        pass
    stop_id = whole.output_token_ids[4]
    told.clear()

    path = tmp_path / "recording"
    recorder = make_recorder(path, clock)
    engine, request = make_engine(recorder), follows(stop=(f"{stop_id} ",))
    engine.submit(request, make_request("b", 4, arrival_ns=clock.now_ns(), temperature=0.0, max_tokens=20))
    while request.output_token_ids[-1:] != [stop_id]:
        engine.turn()
    assert sum(len(chunk.token_ids) for chunk in told if chunk.request_id == "a") == 4, "the fifth is not told yet"
    if comes == "a request that is refused":
        engine.submit(make_request("c", 1 + CAPACITY.max_model_len, arrival_ns=clock.now_ns()))
    else:
        engine.abort("a" if comes == "a cancel" else "nobody")
    while engine.turn():
        pass
    recorder.close()
    assert [chunk.finish_reason for chunk in told if chunk.request_id == "a"][-1] is FinishReason.STOP
    replayed = replay(open_recording(path), make_policies)
    assert (replayed.difference, replayed.num_equal) == ("", replayed.num_steps)


def test_conversations_that_clients_named_outlast_others_again(tmp_path: Path) -> None:
    path, clock = tmp_path / "recording", WallClock()
    recorder = make_recorder(path, clock)
    core = EngineCore(Scheduler(CAPACITY, make_policies()), journal=recorder)
    output = OutputStage(lambda skip_special_tokens: Numbers())
    executor = HashExecutor(CAPACITY, model=MODEL, seed=5)
    engine = Engine(core, executor, output, clock=clock, sink=lambda chunks: None, turn_observer=recorder)

    def ask(name: str, first: int, conversation: bytes = b"") -> Request:
        prompt = [first, *range(4, 23)]
        request = make_request(
            name, prompt, arrival_ns=clock.now_ns(), temperature=0.0, max_tokens=2, conversation=conversation
        )
        engine.submit(request)
        while engine.turn():
            pass
        return request

    ask("a", 30, b"mine")
    for nth in range(8):
        ask(f"b{nth}", nth)
    assert ask("c", 30, b"mine").num_cached_tokens == 19
    recorder.close()
    recording = open_recording(path)
    assert [request.arrival.conversation for request in recording.requests()] == [1, *[0] * 8, 1]
    replayed = replay(recording, make_policies)
    assert (replayed.difference, replayed.num_equal) == ("", replayed.num_steps)


@pytest.mark.parametrize("preset", ["penstock", "vllm", "sglang"])
@pytest.mark.parametrize("depth", [1, 2])
def test_stop_strings_in_last_tokens_are_recorded_and_end_again(preset: str, depth: int, tmp_path: Path) -> None:
    """The third token completes the stop string, where the `max_tokens` of some requests end the answer, too."""
    path, make = tmp_path / "recording", partial(policies_of, preset)
    record(path, make, depth=depth, make_text=Third)
    recording = open_recording(path)
    ends = [
        request.departure
        for request in recording.requests()
        if request.departure is not None and request.departure.num_output_tokens == request.arrival.max_tokens
    ]
    assert any(end.is_by_text and end.reason is FinishReason.STOP for end in ends)
    replayed = replay(recording, make)
    assert (replayed.difference, replayed.num_equal) == ("", replayed.num_steps)


def test_other_policies_make_other_plans(tmp_path: Path) -> None:
    """Or the test above could not fail."""
    path = tmp_path / "recording"
    record(path, partial(policies_of, "vllm"))
    replayed = replay(open_recording(path), partial(policies_of, "static"))
    assert replayed.num_equal < replayed.num_steps
    assert replayed.difference


def test_without_a_prefix_cache(tmp_path: Path) -> None:
    path = tmp_path / "recording"
    record(path, make_policies, has_prefix_caching=False)
    replayed = replay(open_recording(path), make_policies)
    assert (replayed.difference, replayed.num_equal) == ("", replayed.num_steps)


def test_a_duration_that_is_changed_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "recording"
    record(path, make_policies)
    lines = path.read_text().splitlines(keepends=True)
    idx = next(idx for idx, line in enumerate(lines) if '"kind":"step"' in line and '"rows"' in line and idx > 30)
    step = json.loads(lines[idx])
    step["rows"][0][1] += 1
    lines[idx] = json.dumps(step) + "\n"
    path.write_text("".join(lines))
    replayed = replay(open_recording(path), make_policies)
    assert f"step {step['id']} has the rows" in replayed.difference


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"has_tier": True}, "a tier below the KV cache"),
        ({"part": 1}, "The first part of the recording is lost"),
    ],
)
def test_what_can_not_be_replayed_is_refused(change: dict[str, object], says: str, tmp_path: Path) -> None:
    path = tmp_path / "recording"
    record(path, make_policies)
    head, _, rest = path.read_text().partition("\n")
    path.write_text(json.dumps(json.loads(head) | change, separators=(",", ":")) + "\n" + rest)
    with pytest.raises(RecordingError, match=says):
        replay(open_recording(path), make_policies)


@pytest.mark.parametrize("preset", ["penstock", "vllm", "static", "sglang"])
@pytest.mark.parametrize("depth", [1, 2])
def test_adapters_come_and_go_as_they_did(preset: str, depth: int, tmp_path: Path) -> None:
    """A thread of their own brings them: some are late, one fails, one never fits, and memory has room for two."""
    path, make = tmp_path / "recording", partial(policies_of, preset)
    record(path, make, depth=depth, has_adapters=True)
    recording = open_recording(path)
    assert recording.header.max_adapters == MAX_ADAPTERS
    events = list(recording.events())
    seen = [event for event in events if isinstance(event, Seen)]
    assert {event.number for event in seen} == set(range(1, NUM_ADAPTERS + 1))
    assert {event.number for event in seen if event.has_failed} == {FAILS}
    assert sum(bool(event.num_pages) for event in seen) >= NUM_ADAPTERS - 1
    whys = Counter(event.reject_reason for event in events if isinstance(event, Departure))
    assert whys["never_fits"] > 0
    assert whys["invalid"] > 0
    replayed = replay(recording, make)
    assert replayed.difference == ""
    assert replayed.num_equal == replayed.num_steps > 30


def test_adapters_that_came_otherwise_make_other_plans(tmp_path: Path) -> None:
    """Or the test above could not fail."""
    path = tmp_path / "recording"
    record(path, make_policies, has_adapters=True)
    lines = [line for line in path.read_text().splitlines(keepends=True) if '"kind":"adapter"' not in line]
    path.write_text("".join(lines))
    assert replay(open_recording(path), make_policies).difference


def test_an_adapter_that_is_loaded_again_shares_its_prefixes(tmp_path: Path) -> None:
    path = tmp_path / "recording"
    recorder = make_recorder(path, WallClock(), max_adapters=2)
    one = make_adapter(7)
    for name, adapter in (("a", one), ("b", AdapterRef(9, one.fingerprint)), ("c", make_adapter(8))):
        recorder.on_queued(make_request(name, 4, adapter=adapter), 1)
    recorder.close()
    arrivals = [event for event in open_recording(path).events() if isinstance(event, Arrival)]
    assert [(arrival.adapter, arrival.adapter_content) for arrival in arrivals] == [(7, 7), (9, 7), (8, 8)]
    assert arrivals[0].blocks == arrivals[1].blocks != arrivals[2].blocks


def test_an_early_recording_with_adapters_is_not_replayed(tmp_path: Path) -> None:
    """Prompts of different adapters are different contents, and when adapters were in memory is not told."""
    path = tmp_path / "recording"
    recorder = make_recorder(path, WallClock())
    for name, adapter in (("a", None), ("b", make_adapter(7)), ("c", make_adapter(7))):
        recorder.on_queued(make_request(name, 4, adapter=adapter), 1)
    recorder.close()
    recording = open_recording(path)
    arrivals = [event for event in recording.events() if isinstance(event, Arrival)]
    assert [arrival.adapter for arrival in arrivals] == [0, 7, 7]
    base, one, other = (arrival.blocks for arrival in arrivals)
    assert base != one == other
    with pytest.raises(RecordingError, match="The recording has adapters"):
        replay(recording, make_policies)


def test_the_recording_is_what_the_executor_saw(tmp_path: Path) -> None:
    path = tmp_path / "recording"
    record(path, make_policies)
    recording = open_recording(path)
    arrivals = [event for event in recording.events() if isinstance(event, Arrival)]
    assert [arrival.id for arrival in arrivals] == list(range(1, 41))
    assert {arrival.tenant for arrival in arrivals} == {"0", "1", "2"}
    requests = recording.requests()
    assert all(request.departure is not None for request in requests)
    steps = list(recording.steps())
    assert [step.step_id for step in steps] == list(range(len(steps)))
    for step in steps:
        assert {"execute", "schedule", "commit", "output"} <= step.parts_ns.keys()
        assert 0 <= step.planned_ns < step.ended_ns
    sampled = Counter(row.id for step in steps for row in step.rows if row.samples)
    for request in requests:
        assert request.departure is not None
        assert sampled[request.arrival.id] >= request.departure.num_output_tokens
    assert isinstance(steps[0], StepDone)


NUM_MUTANTS = 400
NUM_LINES = 40
"""Lines of the recording that is damaged. They are enough for requests to come, run and end."""
_NUMBERS = (b"-1", b"0", b"1", b"99999999999999999999", b"1e300", b"NaN", b"null", b'""', b"[]", b"{}", b"true", b"1.5")


def mutant_of(data: bytes, rng: random.Random) -> bytes:
    """The file cut short, with bytes or a number changed, or with a line doubled, moved or left out."""
    lines, kind = data.splitlines(keepends=True), rng.randrange(6)
    at = rng.randrange(len(data))
    if kind == 0:
        return data[:at]
    if kind == 1:
        return data[:at] + bytes([rng.randrange(256)]) + data[at + 1 :]
    if kind == 2:
        found = rng.choice(list(re.finditer(rb"-?\d+", data)))
        return data[: found.start()] + rng.choice(_NUMBERS) + data[found.end() :]
    first, second = rng.randrange(len(lines)), rng.randrange(len(lines))
    if kind == 3:
        lines.insert(first, lines[second])
    elif kind == 4:
        lines[first], lines[second] = lines[second], lines[first]
    else:
        del lines[first]
    return b"".join(lines)


def use(path: Path, trace: Path) -> None:
    """All that `penstock profile` and `penstock simulate` make of a recording."""
    recording = open_recording(path)
    assert list(recording_lines(recording))
    write_trace(recording, trace)
    steps_of(recording)
    replay(recording, partial(policies_of, "penstock"))
    read_workload(path, count_tokens=len)


def test_damaged_recordings_are_refused_with_the_place(tmp_path: Path) -> None:
    """Or read as another recording, where the damage makes a sound one."""
    path, rng = tmp_path / "recording", random.Random(14)
    record(path, partial(policies_of, "penstock"), has_grammars=True)
    data, refusals = b"".join(path.read_bytes().splitlines(keepends=True)[:NUM_LINES]), list[str]()
    path.write_bytes(data)
    use(path, tmp_path / "trace")
    for _ in range(NUM_MUTANTS):
        path.write_bytes(mutant_of(data, rng))
        try:
            use(path, tmp_path / "trace")
        except PenstockError as error:
            refusals.append(error.message)
    assert len(refusals) > NUM_MUTANTS / 3
    unplaced = [refusal for refusal in refusals if str(path) not in refusal]
    assert set(unplaced) <= {"The recording has no steps."}
