"""The executor with up to two steps in flight, over a model that is a hash, which any wrong token, slot or block changes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from penstock.backends.batch import NO_USABLE_LOGIT
from penstock.backends.cuda import executor as module
from penstock.backends.cuda.executor import CudaExecutor
from penstock.backends.cuda.stream import HostStream, Mark
from penstock.backends.reference.sampling import sample
from penstock.types.errors import ExecutorFailure
from penstock.types.plan import AdmitRow, RowPlan, StepPlan
from penstock.types.result import StepResult
from penstock.types.sampling import SamplingParams
from support.backends.cuda.executor import BLOCK_SIZE, GREEDY, admit, decodes, opened
from support.backends.cuda.hash_program import hash_logits, mix
from support.interpreted import HAS_DEVICE


@pytest.fixture(params=[1, 2], ids=["depth1", "depth2"])
def depth(request: pytest.FixtureRequest) -> int:
    return request.param


@pytest.fixture
def executor(monkeypatch: pytest.MonkeyPatch, depth: int) -> Iterator[CudaExecutor]:
    with opened(monkeypatch, depth=depth) as made:
        yield made


def answer(prompt: Sequence[int], num_tokens: int, params: SamplingParams = GREEDY) -> list[int]:
    tokens = list(prompt)
    for _ in range(num_tokens):
        value = 1.0
        for token in tokens:
            value = mix(value, token)
        tokens.append(sample(hash_logits(value), params, tokens, len(prompt)).token_id)
    return tokens[len(prompt) :]


class Pipe:
    """Submits steps with as many in flight as the executor takes."""

    def __init__(self, executor: CudaExecutor) -> None:
        self.executor = executor
        self.results: list[StepResult] = []
        self._tickets: list[Any] = []
        self._num_steps = 0

    def step(self, rows: Sequence[RowPlan] = (), admits: Sequence[AdmitRow] = (), releases: Sequence[str] = ()) -> None:
        if len(self._tickets) == self.executor.depth:
            self.collect()
        self._tickets.append(self.executor.submit(StepPlan(self._num_steps, 0, tuple(admits), tuple(rows), tuple(releases))))
        self._num_steps += 1

    def collect(self) -> None:
        self.results.append(self.executor.collect(self._tickets.pop(0)))

    def tokens(self, request_id: str) -> list[int]:
        """All that it sampled."""
        while self._tickets:
            self.collect()
        return [token for result in self.results for token in result.token_ids.get(request_id, ())]


def test_a_step_uses_the_token_that_the_one_in_flight_samples(executor: CudaExecutor) -> None:
    pipe = Pipe(executor)
    pipe.step([RowPlan("a", 0, 3, (), True)], [admit("a", [4, 5, 6], [2, 1])])
    pipe.step(decodes({"a": 3}))
    pipe.step([RowPlan("a", 4, 1, (), True)])
    for context in range(5, 8):
        pipe.step(decodes({"a": context}))
    assert pipe.tokens("a") == answer([4, 5, 6], 6)


def test_prefills_decodes_and_graphs_mix(executor: CudaExecutor) -> None:
    pipe = Pipe(executor)
    prompts = {"a": [1, 2, 3], "b": [9] * 6, "c": [7]}
    blocks = {"a": [1, 2, 3], "b": [4, 5, 6], "c": [7, 8, 9]}
    admits = {name: admit(name, prompts[name], blocks[name]) for name in prompts}
    pipe.step([RowPlan("a", 0, 3, (), True)], [admits["a"]])
    pipe.step([RowPlan("b", 0, 4, (), False), *decodes({"a": 3})], [admits["b"]])
    pipe.step([*decodes({"a": 4}), RowPlan("b", 4, 2, (), True)])
    pipe.step([RowPlan("c", 0, 1, (), True), *decodes({"b": 6, "a": 5})], [admits["c"]])
    for idx in range(3):
        pipe.step(decodes({"b": 7 + idx, "c": 1 + idx, "a": 6 + idx}))
    pipe.step(decodes({"c": 4}))
    for name, num_tokens in {"a": 7, "b": 5, "c": 5}.items():
        assert pipe.tokens(name) == answer(prompts[name], num_tokens), name


def test_blocks_that_come_later_are_appended(executor: CudaExecutor) -> None:
    pipe = Pipe(executor)
    pipe.step([RowPlan("a", 0, 3, (), True)], [admit("a", [4, 5, 6], [9])])
    for context in range(3, 10):
        new_blocks = (12 - context,) if context % BLOCK_SIZE == 0 else ()
        pipe.step([RowPlan("a", context, 1, new_blocks, True)])
    assert pipe.tokens("a") == answer([4, 5, 6], 8)


def test_one_of_another_size_is_as_good_as_new(executor: CudaExecutor) -> None:
    pipe = Pipe(executor)
    pipe.step([RowPlan("a", 0, 3, (), True)], [admit("a", [4, 5, 6], [2, 1])])
    pipe.step(decodes({"a": 3}))
    pipe.step([], releases=["a"])
    assert pipe.tokens("a") == answer([4, 5, 6], 2)
    executor.resize(40, max_model_len=12)
    assert (executor.capacity.num_blocks, executor.capacity.max_model_len) == (40, 12)
    pipe.step([RowPlan("b", 0, 3, (), True)], [admit("b", [6, 5, 4], [39, 20])])
    for context in range(3, 7):
        pipe.step(decodes({"b": context}))
    assert pipe.tokens("b") == answer([6, 5, 4], 5)
    with pytest.raises(ValueError, match="lengths of 13"):
        executor.resize(40, max_model_len=13)


def test_who_gets_a_slot_does_not_get_the_token_of_who_had_it(monkeypatch: pytest.MonkeyPatch, depth: int) -> None:
    with opened(monkeypatch, depth=depth, max_rows=1) as executor:
        pipe = Pipe(executor)
        pipe.step([RowPlan("a", 0, 3, (), True)], [admit("a", [4, 5, 6], [1, 2])])
        # Whatever is sampled by now, the new row has a longer prompt: the old token would fall into it.
        pipe.step([RowPlan("b", 0, 5, (), True)], [admit("b", [1, 2, 3, 4, 5], [3, 4])], ["a"])
        pipe.step(decodes({"b": 5}))
        pipe.step([RowPlan("c", 0, 2, (), True)], [admit("c", [8, 8], [1, 2])], ["b"])
        pipe.step(decodes({"c": 2}))
        assert pipe.tokens("a") == answer([4, 5, 6], 1)
        assert pipe.tokens("b") == answer([1, 2, 3, 4, 5], 2)
        assert pipe.tokens("c") == answer([8, 8], 2)


def test_a_row_that_failed_is_computed_once_more_and_harms_nobody(executor: CudaExecutor) -> None:
    pipe = Pipe(executor)
    never_written = AdmitRow("bad", (1, 2, 3), 3, (2,), 2, GREEDY)
    rows = [RowPlan("good", 0, 3, (), True), RowPlan("bad", 2, 1, (), True)]
    pipe.step(rows, [admit("good", [4, 5, 6], [1, 3]), never_written])
    pipe.step(decodes({"bad": 3, "good": 3}))
    pipe.step(decodes({"good": 4}), releases=["bad"])
    assert pipe.tokens("good") == answer([4, 5, 6], 3)
    assert pipe.tokens("bad") == []
    assert pipe.results[0].failures == {"bad": NO_USABLE_LOGIT}


PARAMS = [
    SamplingParams(seed=5, temperature=1.2),
    SamplingParams(temperature=0.0, repetition_penalty=3.0, frequency_penalty=1.5),
    SamplingParams(seed=9, top_k=5, min_tokens=4, stop_token_ids=tuple(range(0, 20))),
    SamplingParams(temperature=0.0, banned_token_sequences=tuple((i, j) for i in range(60) for j in range(0, 60, 2))),
]


@pytest.mark.parametrize("params", PARAMS)
def test_what_depends_on_earlier_tokens_sees_those_that_the_host_does_not_know(
    executor: CudaExecutor, params: SamplingParams
) -> None:
    pipe = Pipe(executor)
    pipe.step([RowPlan("a", 0, 3, (), True)], [admit("a", [4, 5, 6], [1, 2, 3], params)])
    for context in range(3, 10):
        pipe.step(decodes({"a": context}))
    assert pipe.tokens("a") == answer([4, 5, 6], 8, params)


def test_log_probabilities_are_those_of_their_own_step(executor: CudaExecutor) -> None:
    pipe = Pipe(executor)
    wants, plain = SamplingParams(temperature=0.0, logprobs=2), SamplingParams(seed=1)
    rows = [RowPlan("plain", 0, 2, (), True), RowPlan("wants", 0, 3, (), True)]
    pipe.step(rows, [admit("wants", [4, 5, 6], [1, 2], wants), admit("plain", [1, 2], [3, 4], plain)])
    for idx in range(3):
        pipe.step(decodes({"wants": 3 + idx, "plain": 2 + idx}))
    tokens = pipe.tokens("wants")
    assert tokens == answer([4, 5, 6], 4)
    for result, token in zip(pipe.results, tokens, strict=True):
        assert result.logprobs.keys() == {"wants"}
        (told,) = result.logprobs["wants"]
        assert (told.token_id, told.rank, told.top[0]) == (token, 1, (token, told.logprob))
        assert len(told.top) == 2


def test_a_copied_block_has_what_the_step_in_flight_wrote(executor: CudaExecutor) -> None:
    pipe = Pipe(executor)
    pipe.step([RowPlan("a", 0, 4, (), True)], [admit("a", [4, 5, 6, 7], [1, 2])])
    executor.copy_blocks([(1, 5), (5, 6)])
    copy = AdmitRow("b", (4, 5, 6, 7, 8), 5, (6, 3), 4, GREEDY)
    pipe.step([RowPlan("b", 4, 1, (), True)], [copy])
    assert pipe.tokens("b") == answer([4, 5, 6, 7, 8], 1)


def test_steps_that_compute_nothing_or_sample_nothing(executor: CudaExecutor) -> None:
    pipe = Pipe(executor)
    pipe.step()
    pipe.step([RowPlan("a", 0, 2, (), False)], [admit("a", [4, 5, 6], [1, 2])])
    pipe.step([RowPlan("a", 2, 1, (), True)])
    pipe.step(releases=["a"])
    assert pipe.tokens("a") == answer([4, 5, 6], 1)
    assert [len(result.token_ids) for result in pipe.results] == [0, 0, 1, 0]


def test_as_many_steps_as_the_depth_may_be_in_flight(executor: CudaExecutor, depth: int) -> None:
    tickets = [executor.submit(StepPlan(idx, 0, (), (), ())) for idx in range(depth)]
    with pytest.raises(ValueError, match="before step 0 was collected"):
        executor.submit(StepPlan(depth, 0, (), (), ()))
    if depth > 1:
        with pytest.raises(ValueError, match="not the next"):
            executor.collect(tickets[1])
    for ticket in tickets:
        assert executor.collect(ticket).step_id == ticket.step_id
    with pytest.raises(ValueError, match="not the next"):
        executor.collect(tickets[0])


@pytest.mark.parametrize("error", [RuntimeError("CUDA error: an illegal memory access"), torch.OutOfMemoryError("no memory")])
def test_what_the_device_says_is_a_failure_of_the_executor(executor: CudaExecutor, error: Exception) -> None:
    executor._program.error = error
    with pytest.raises(ExecutorFailure, match=str(error)):
        executor.submit(StepPlan(0, 0, (admit("a", [1], [1]),), (RowPlan("a", 0, 1, (), True),), ()))


def test_a_closed_executor_refuses(executor: CudaExecutor) -> None:
    executor.submit(StepPlan(0, 0, (), (), ()))
    executor.close()
    executor.close()
    with pytest.raises(ExecutorFailure, match="closed"):
        executor.submit(StepPlan(1, 0, (), (), ()))


@pytest.mark.skipif(HAS_DEVICE, reason="plays a device that failed")
def test_an_executor_of_a_device_that_failed_can_be_closed(executor: CudaExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "empty_cache", fail)
    monkeypatch.setattr(executor._stream, "mark", fail)
    executor._device = torch.device("cuda")
    executor.close()


def test_a_step_tells_where_its_time_went(executor: CudaExecutor) -> None:
    pipe = Pipe(executor)
    pipe.step([RowPlan("a", 0, 3, (), True)], [admit("a", [4, 5, 6], [2, 1])])
    pipe.collect()
    timing = pipe.results[0].timing
    assert timing.parts.keys() == {"host", "model", "sampling"}
    assert min(timing.parts.values()) > 0
    assert timing.parts["model"] + timing.parts["sampling"] <= timing.end_ns - timing.start_ns + 1


@pytest.mark.skipif(HAS_DEVICE, reason="the model in this test can't be captured")
def test_a_decode_step_runs_as_a_graph_of_a_listed_size(monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(monkeypatch, depth=2, max_rows=5) as executor:
        pipe = Pipe(executor)
        names = ["a", "b", "c"]
        rows = [RowPlan(name, 0, 2, (), True) for name in names]
        pipe.step(rows, [admit(name, [idx, 2], [1 + idx, 5 + idx]) for idx, name in enumerate(names)])
        assert executor._graphs is not None
        assert executor._graphs.num_captured == 0
        for context in (2, 3, 4):
            pipe.step(decodes(dict.fromkeys(names, context)))
        assert executor._graphs.num_captured == 1
        pipe.step(decodes({"b": 5}))
        assert executor._graphs.num_captured == 2
        for idx, name in enumerate(names):
            assert pipe.tokens(name) == answer([idx, 2], 5 if name == "b" else 4)


@pytest.mark.skipif(HAS_DEVICE, reason="the model in this test can't be captured")
def test_decodes_are_captured_before_the_first_request(monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(monkeypatch, depth=2, max_rows=5) as executor:
        executor.resize(20, max_model_len=16)
        done = executor.capture_graphs()
        assert (done.num_captured, done.num_left, executor.num_graphs_left) == (4, 0, 0), "1, 2, 4 and 5 rows"
        assert executor.capture_graphs().num_captured == 0
        pipe = Pipe(executor)
        names = ["a", "b", "c", "d", "e"]
        prompts = {name: [idx, 2] for idx, name in enumerate(names)}
        rows = [RowPlan(name, 0, 2, (), True) for name in names]
        pipe.step(rows, [admit(name, prompts[name], [1 + idx, 6 + idx]) for idx, name in enumerate(names)])
        for count in range(5, 0, -1):
            pipe.step(decodes(dict.fromkeys(names[:count], 7 - count)))
        assert executor._graphs is not None
        assert executor._graphs.num_captured == 4
        for idx, name in enumerate(names):
            assert pipe.tokens(name) == answer(prompts[name], 6 - idx)


def test_nothing_is_captured_where_graphs_are_not_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(monkeypatch, depth=1, use_graphs=False) as executor:
        assert executor.num_graphs_left == 0
        assert executor.capture_graphs().num_captured == 0


@pytest.mark.skipif(HAS_DEVICE, reason="the model in this test can't be captured")
def test_a_decode_that_has_no_room_before_the_first_request_is_a_lack_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(monkeypatch, depth=2) as executor:
        executor._program.error = torch.OutOfMemoryError("CUDA out of memory")
        with pytest.raises(MemoryError, match="no room for a decode"):
            executor.capture_graphs()


def test_nothing_is_captured_while_a_step_is_in_flight(executor: CudaExecutor) -> None:
    ticket = executor.submit(StepPlan(0, 0, (), (), ()))
    with pytest.raises(ValueError, match="in flight"):
        executor.capture_graphs()
    executor.collect(ticket)


def test_a_depth_of_none_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="depth"), opened(monkeypatch, depth=0):
        pass


class Queue(HostStream):
    """Notes when work is put into it, and what it follows."""

    def __init__(self, name: str, notes: list[str]) -> None:
        self._name, self._notes = name, notes

    @contextmanager
    def entered(self) -> Iterator[None]:
        self._notes.append(self._name)
        yield

    def follow(self, mark: Mark) -> None:
        self._notes.append(f"{self._name} follows")


def test_blocks_are_read_beside_the_steps_and_after_what_was_written(monkeypatch: pytest.MonkeyPatch) -> None:
    notes: list[str] = []
    monkeypatch.setattr(
        module, "open_stream", lambda *_, goes_first=False, **__: Queue("beside" if goes_first else "steps", notes)
    )
    with opened(monkeypatch, depth=2) as executor:
        content = memoryview(bytearray(executor.block_bytes))
        del notes[:]
        ready = executor.read_blocks([1], [content])
        assert notes == ["beside", "steps follows"], "what comes to the block next waits on the device"
        assert ready is not None
        assert executor.read_blocks([], []) is None
        for move in (lambda: executor.write_blocks([3], [content]), lambda: executor.copy_blocks([(2, 3)])):
            del notes[:]
            move()
            executor.read_blocks([1], [content])
            assert notes == ["steps", "beside", "steps follows"], "others may lie behind a step"
            del notes[:]
            executor.read_blocks([3], [content])
            executor.read_blocks([3], [content])
            assert notes == ["beside", "beside follows", "steps follows", "beside", "steps follows"]
