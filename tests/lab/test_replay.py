"""Rung 1: what a real engine did is recorded, and the recorded durations give the same plans again, under every preset."""

from __future__ import annotations

import json
import random
import re
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from itertools import cycle
from pathlib import Path

import pytest

from penstock.clock import Clock, WallClock
from penstock.engine.output import OutputStage
from penstock.engine.ports import Detokenizer, OutputChunk
from penstock.engine.thread import Engine
from penstock.lab.perfetto import write_trace
from penstock.lab.profiling import recording_lines
from penstock.lab.recording import Arrival, Departure, Recording, StepDone, open_recording
from penstock.lab.steps import steps_of
from penstock.lab.traces import read_workload
from penstock.obs.recording import Recorder
from penstock.sched.policies.base import Policies
from penstock.sched.policies.presets import PRESETS, make_policies
from penstock.testing.builders import make_core, make_request
from penstock.testing.hash_executor import HashExecutor, HashModel
from penstock.types.errors import PenstockError
from penstock.types.plan import Capacity, Ticket
from penstock.types.request import FinishReason, Request
from penstock.types.result import StepResult
from penstock.types.sampling import LineLimits
from support.engine.thread import Numbers
from support.replay import replay

CAPACITY = Capacity(num_blocks=29, block_size=4, max_rows=8, max_step_tokens=24, max_model_len=80)
MODEL = HashModel(vocab_size=40, eos_token_id=3, eos_period=25)
WINDOWS = {"static": 3_000_000, "dynamic": 2_000_000}
"""Short, so that batches start by them, too. Nanoseconds."""


EAGER: Mapping[str, dict[str, dict[str, object]]] = {
    "penstock": {"reserve": {"share": 0.0, "growth_tokens": 0}},
    "offline": {"reserve": {"share": 0.0, "growth_tokens": 0}},
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

    def __init__(self, depth: int) -> None:
        super().__init__(CAPACITY, model=MODEL, depth=depth, seed=5)
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

    def send(self, prompt: Sequence[int] = ()) -> None:
        idx = self._num_sent
        self._num_sent += 1
        self._num_open += 1
        shared = [1, 2, 5, 4, 1, 6, 7, 8, 9, 10, 11][: 4 + idx % 8]
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


def make_recorder(path: Path, clock: Clock, *, depth: int = 1) -> Recorder:
    about = {
        "model": "hash",
        "machine": {},
        "config": "",
        "settings": {},
        "capacity": asdict(CAPACITY),
        "depth": depth,
    }
    return Recorder(path, max_bytes=64 << 20, clock=clock, block_size=CAPACITY.block_size, about=about)


def record(
    path: Path,
    make: Callable[[], Policies],
    *,
    depth: int = 1,
    has_prefix_caching: bool = True,
    make_text: Callable[[], Detokenizer] = Numbers,
) -> None:
    """Serve the traffic with an engine's own thread, under the wall clock."""
    clock = WallClock()
    executor = Traffic(depth)
    recorder = make_recorder(path, clock, depth=depth)
    core = make_core(CAPACITY, make(), journal=recorder, enable_prefix_caching=has_prefix_caching)
    output = OutputStage(lambda _shown: make_text())
    engine = Engine(core, executor, output, clock=clock, sink=executor.sink, turn_observer=recorder)
    executor.engine = engine
    executor.send()
    engine.start()
    assert executor.is_over.wait(60)
    engine.close(10)
    recorder.close()
    assert recorder.num_lost == 0


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
    assert reasons_of(recording)[FinishReason.ERROR] > 3
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
    replayed = replay(open_recording(path), make_policies, enable_prefix_caching=False)
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


NUM_MUTANTS = 200
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
    read_workload(path, count_tokens=len)


def test_lines_that_are_nested_too_deeply_are_refused(tmp_path: Path) -> None:
    path, nested = tmp_path / "recording", 100_000 * b"["
    record(path, partial(policies_of, "penstock"))
    path.write_bytes(path.read_bytes().splitlines(keepends=True)[0] + nested + b"\n")
    with pytest.raises(PenstockError, match="line 2 is damaged"):
        list(open_recording(path).events())
    path.write_bytes(nested)
    with pytest.raises(PenstockError, match="is not a recording"):
        open_recording(path)


def test_damaged_recordings_are_refused_with_the_place(tmp_path: Path) -> None:
    """Or read as another recording, where the damage makes a sound one."""
    path, rng = tmp_path / "recording", random.Random(14)
    record(path, partial(policies_of, "penstock"))
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
