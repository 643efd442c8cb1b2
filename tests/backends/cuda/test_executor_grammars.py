"""Rows that follow a grammar: their step is queued up to the logits, and sampled when its masks come, with others in flight."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch

from penstock.backends.cuda import executor as module
from penstock.backends.cuda.executor import CudaExecutor
from penstock.backends.cuda.staging import Upload
from penstock.backends.cuda.stream import HostMark, HostStream
from penstock.backends.reference.sampling import sample
from penstock.types.errors import ExecutorFailure
from penstock.types.plan import AdmitRow, RowPlan, StepPlan, Ticket
from penstock.types.result import StepResult, TokenLogprobs
from penstock.types.sampling import SamplingParams
from support.backends.cuda.executor import GREEDY, admit, decodes, opened
from support.backends.cuda.hash_program import VOCAB_SIZE, hash_logits, mix
from support.hash_matcher import HashMatcher
from support.interpreted import HAS_DEVICE

GRAMMAR = replace(GREEDY, follows_grammar=True)
MANY = {"max_rows": 5, "max_step_tokens": 20, "num_blocks": 30}
"""So that decodes of three rows are padded."""


@pytest.fixture(params=[1, 2], ids=["depth1", "depth2"])
def depth(request: pytest.FixtureRequest) -> int:
    return request.param


@pytest.fixture
def executor(monkeypatch: pytest.MonkeyPatch, depth: int) -> Iterator[CudaExecutor]:
    with opened(monkeypatch, depth=depth, **MANY) as made:
        yield made


def expected(
    prompt: Sequence[int], num_tokens: int, params: SamplingParams, matcher: HashMatcher | None = None
) -> list[tuple[int, TokenLogprobs | None]]:
    """The tokens that the specification samples."""
    tokens, found = list(prompt), []
    for _ in range(num_tokens):
        value = 1.0
        for token in tokens:
            value = mix(value, token)
        mask = None if matcher is None else matcher.mask()
        chosen = sample(hash_logits(value), params, tokens, len(prompt), mask=mask)
        tokens.append(chosen.token_id)
        if matcher is not None:
            matcher.accept([chosen.token_id])
        found.append((chosen.token_id, chosen.logprobs))
    return found


class Engine:
    """Submits steps with as many in flight as there may be, and sends masks once all steps before were collected."""

    def __init__(self, executor: CudaExecutor, matchers: dict[str, HashMatcher]) -> None:
        self.executor, self.matchers = executor, matchers
        self.calls: list[str] = []
        self.results: list[StepResult] = []
        self._in_flight: list[tuple[Ticket, list[str]]] = []
        """With the rows whose masks are still to be sent."""
        self._num_steps = 0

    def step(self, rows: Sequence[RowPlan] = (), admits: Sequence[AdmitRow] = (), releases: Sequence[str] = ()) -> None:
        if len(self._in_flight) == self.executor.depth:
            self.collect()
        self._restrict()
        plan = StepPlan(self._num_steps, 0, tuple(admits), tuple(rows), tuple(releases))
        followers = [row.request_id for row in rows if row.samples and row.request_id in self.matchers]
        self._in_flight.append((self.executor.submit(plan), followers))
        self.calls.append(f"submit {self._num_steps}")
        self._num_steps += 1

    def collect(self) -> None:
        if len(self._in_flight) == 1:
            self._restrict()
        ticket, _ = self._in_flight.pop(0)
        self.results.append(self.executor.collect(ticket))
        self.calls.append(f"collect {ticket.step_id}")
        for name, token_ids in self.results[-1].token_ids.items():
            if name in self.matchers:
                self.matchers[name].accept(token_ids)

    def _restrict(self) -> None:
        if self._in_flight and self._in_flight[-1][1]:
            ticket, followers = self._in_flight[-1]
            self.executor.restrict(ticket, {name: self.matchers[name].mask() for name in followers})
            self.calls.append(f"restrict {ticket.step_id}")
            followers.clear()

    def sampled(self, name: str) -> list[tuple[int, TokenLogprobs | None]]:
        while self._in_flight:
            self.collect()
        return [
            (token, result.logprobs[name][0] if name in result.logprobs else None)
            for result in self.results
            for token in result.token_ids.get(name, ())
        ]


def assert_same(found: list[tuple[int, TokenLogprobs | None]], wanted: list[tuple[int, TokenLogprobs | None]]) -> None:
    assert [token for token, _ in found] == [token for token, _ in wanted]
    for (_, one), (_, other) in zip(found, wanted, strict=True):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            assert (one.rank, [i for i, _ in one.top]) == (other.rank, [i for i, _ in other.top])
            assert one.logprob == pytest.approx(other.logprob, abs=1e-6)


def test_masks_of_a_step_come_when_the_one_before_was_collected(monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(monkeypatch, depth=2) as executor:
        engine = Engine(executor, {"a": HashMatcher(VOCAB_SIZE, seed=1)})
        engine.step([RowPlan("a", 0, 3, (), True)], [admit("a", [4, 5, 6], [2, 1], GRAMMAR)])
        for context in range(3, 6):
            engine.step(decodes({"a": context}))
        assert_same(engine.sampled("a"), expected([4, 5, 6], 4, GRAMMAR, HashMatcher(VOCAB_SIZE, seed=1)))
        in_order = ["submit 1", "collect 0", "restrict 1", "submit 2", "collect 1", "restrict 2", "submit 3"]
        assert engine.calls[:9] == ["submit 0", "restrict 0", *in_order]


PARAMS = {
    "greedy": GRAMMAR,
    "drawn": replace(GRAMMAR, temperature=1.3, seed=4, top_k=9, top_p=0.9, logprobs=3),
    "penalties": replace(GRAMMAR, repetition_penalty=2.5, frequency_penalty=1.0, logprobs=0),
    "bans": replace(
        GRAMMAR, min_tokens=5, stop_token_ids=tuple(range(1, 50)), banned_token_sequences=tuple((i, 55) for i in range(60))
    ),
    "biases": replace(GRAMMAR, logit_bias=tuple((i, float(i % 7) - 3.0) for i in range(60))),
}


@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS)
def test_rows_with_and_without_a_grammar_share_steps(executor: CudaExecutor, params: SamplingParams) -> None:
    """Prompts, pieces of prompts, padded decodes; others have penalties, lists of tokens, log-probabilities."""

    def matchers() -> dict[str, HashMatcher]:
        return {name: HashMatcher(VOCAB_SIZE, seed=seed) for seed, name in enumerate("ac")}

    prompts = {"a": [1, 2, 3], "b": [9] * 6, "c": [7, 8], "d": [5, 5]}
    kinds = {
        "a": params,
        "b": replace(GREEDY, frequency_penalty=1.0, logprobs=2),
        "c": GRAMMAR,
        "d": SamplingParams(seed=2, allowed_token_ids=tuple(range(3, 60, 4))),
    }
    admits = {name: admit(name, prompts[name], range(1 + 4 * idx, 5 + 4 * idx), kinds[name]) for idx, name in enumerate("abcd")}
    engine = Engine(executor, matchers())
    engine.step([RowPlan("a", 0, 2, (), False)], [admits["a"]])
    engine.step([RowPlan("b", 0, 4, (), False), RowPlan("a", 2, 1, (), True)], [admits["b"]])
    engine.step([*decodes({"a": 3}), RowPlan("b", 4, 2, (), True)])
    engine.step([RowPlan("c", 0, 1, (), False), *decodes({"b": 6}), RowPlan("d", 0, 2, (), True)], [admits["c"], admits["d"]])
    engine.step([RowPlan("c", 1, 1, (), True), *decodes({"a": 4, "d": 2})])
    for idx in range(3):
        engine.step(decodes({"b": 7 + idx, "c": 2 + idx, "a": 5 + idx}))
    engine.step(decodes({"b": 10, "d": 3}))
    engine.step(decodes({"c": 5, "d": 4, "a": 8}))
    for name, num_tokens in {"a": 7, "b": 6, "c": 5, "d": 4}.items():
        wanted = expected(prompts[name], num_tokens, kinds[name], matchers().get(name))
        assert_same(engine.sampled(name), wanted)
    if not HAS_DEVICE:
        assert executor._graphs is not None
        assert executor._graphs.num_captured == 2, "decodes of two rows, and of three, which are padded to four"


def test_who_is_not_named_is_not_restricted(executor: CudaExecutor) -> None:
    """And a mask is of one step alone."""
    rows = [RowPlan("a", 0, 3, (), True), RowPlan("b", 0, 3, (), True)]
    admits = [admit("a", [4, 5, 6], [1, 2], GRAMMAR), admit("b", [4, 5, 6], [3, 4], GRAMMAR)]
    ticket = executor.submit(StepPlan(0, 0, tuple(admits), tuple(rows), ()))
    (free, _), (after, _) = expected([4, 5, 6], 2, GREEDY)
    only = (free + 1) % VOCAB_SIZE
    executor.restrict(ticket, {"a": (1 << only).to_bytes(8, "little")})
    assert executor.collect(ticket).token_ids == {"a": (only,), "b": (free,)}
    ticket = executor.submit(StepPlan(1, 0, (), tuple(decodes({"a": 3, "b": 3})), ()))
    executor.restrict(ticket, {})
    assert executor.collect(ticket).token_ids == {"a": (expected([4, 5, 6, only], 1, GREEDY)[0][0],), "b": (after,)}


def test_a_row_that_a_mask_leaves_nothing_fails_alone(executor: CudaExecutor) -> None:
    rows = [RowPlan("a", 0, 3, (), True), RowPlan("b", 0, 3, (), True)]
    admits = [admit("a", [4, 5, 6], [1, 2], GRAMMAR), admit("b", [4, 5, 6], [3, 4], GRAMMAR)]
    ticket = executor.submit(StepPlan(0, 0, tuple(admits), tuple(rows), ()))
    executor.restrict(ticket, {"a": bytes(8)})
    result = executor.collect(ticket)
    assert result.failures.keys() == {"a"}
    assert result.token_ids.keys() == {"b"}


def first_step(params: SamplingParams = GRAMMAR) -> StepPlan:
    """A step of a row that follows a grammar, and one that does not."""
    admits = admit("a", [4, 5, 6], [1, 2], params), admit("b", [1, 2], [3, 4])
    return StepPlan(0, 0, admits, (RowPlan("a", 0, 3, (), True), RowPlan("b", 0, 2, (), True)), ())


def test_what_breaks_the_contract_is_refused_and_does_no_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(monkeypatch, depth=2) as executor:
        mask = (1 << 17).to_bytes(executor.mask_bytes, "little")
        assert len(mask) == 8
        with pytest.raises(ValueError, match="step 0 waits for no masks"):
            executor.restrict(Ticket(0), {})
        first = executor.submit(first_step())
        with pytest.raises(ValueError, match="step 1 was submitted before step 0 got its masks"):
            executor.submit(StepPlan(1, 0, (), tuple(decodes({"a": 3})), ()))
        with pytest.raises(ValueError, match="step 0 was collected before it got its masks"):
            executor.collect(first)
        with pytest.raises(ValueError, match="step 0 is in flight"):
            executor.capture_graphs()
        for masks, breach in (
            ({"b": mask}, "'b' does not sample in step 0, or follows no grammar"),
            ({"c": mask}, "'c' does not sample"),
            ({"a": mask[:4]}, "'a' has 4 bytes, not 8"),
            ({"a": mask + bytes(4)}, "'a' has 12 bytes, not 8"),
        ):
            with pytest.raises(ValueError, match=breach):
                executor.restrict(first, masks)
        executor.restrict(first, {"a": mask})
        with pytest.raises(ValueError, match="step 0 waits for no masks"):
            executor.restrict(first, {"a": mask})
        second = executor.submit(StepPlan(1, 0, (), tuple(decodes({"a": 3, "b": 2})), ()))
        with pytest.raises(ValueError, match="step 0 waits for no masks"):
            executor.restrict(first, {"a": mask})
        assert executor.collect(first).token_ids["a"] == (17,)
        executor.restrict(second, {"a": mask})
        third = executor.submit(StepPlan(2, 0, (), tuple(decodes({"b": 3})), ()))
        with pytest.raises(ValueError, match="step 2 waits for no masks"):
            executor.restrict(third, {})
        tokens = [executor.collect(ticket).token_ids["b"][0] for ticket in (second, third)]
        assert tokens == [token for token, _ in expected([1, 2], 3, GREEDY)][1:]


def test_an_executor_with_a_step_that_waits_can_be_closed(executor: CudaExecutor) -> None:
    ticket = executor.submit(first_step())
    executor.close()
    executor.close()
    with pytest.raises(ValueError, match="waits for no masks"):
        executor.restrict(ticket, {})
    with pytest.raises(ExecutorFailure, match="closed"):
        executor.submit(StepPlan(1, 0, (), (), ()))


def test_what_the_device_says_of_masks_is_a_failure_of_the_executor(
    executor: CudaExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access")

    ticket = executor.submit(first_step())
    monkeypatch.setattr(executor._launcher._sampler, "choose", fail)
    with pytest.raises(ExecutorFailure, match="illegal memory access"):
        executor.restrict(ticket, {})


@contextmanager
def messages(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[Upload, int]]]:
    """Sender of each message, and its number of arrays."""
    sent: list[tuple[Upload, int]] = []
    send = Upload.send

    def noted(self: Upload, arrays: Sequence[np.ndarray]) -> list[torch.Tensor]:
        sent.append((self, len(arrays)))
        return send(self, arrays)

    with monkeypatch.context() as patch:
        patch.setattr(Upload, "send", noted)
        yield sent


def test_masks_come_in_a_message_of_their_own_and_none_where_nobody_waits(
    executor: CudaExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two messages of a step through the same pinned memory would write over what the device has not copied yet."""
    with messages(monkeypatch) as sent:
        ticket = executor.submit(first_step())
        executor.restrict(ticket, {"a": b"\xff" * 8})
        executor.collect(ticket)
        (first, _), (second, _) = sent
        assert first is not second
        executor.collect(executor.submit(StepPlan(1, 0, (), tuple(decodes({"b": 2})), ("a",))))
        assert [upload for upload, _ in sent] == [first, second, first]


def test_what_comes_with_the_masks_is_all_that_sampling_reads(executor: CudaExecutor) -> None:
    """By then there may be something else in the place of the step's own message."""
    params = replace(GRAMMAR, repetition_penalty=2.5, logit_bias=((3, 5.0),), banned_token_sequences=((6, 9),), logprobs=2)
    ticket = executor.submit(first_step(params))
    executor._launcher._upload._device.fill_(-7)
    executor.restrict(ticket, {"a": HashMatcher(VOCAB_SIZE).mask()})
    result = executor.collect(ticket)
    found = [(result.token_ids["a"][0], result.logprobs["a"][0])]
    assert_same(found, expected([4, 5, 6], 1, params, HashMatcher(VOCAB_SIZE)))
    assert result.token_ids["b"][0] == expected([1, 2], 1, GREEDY)[0][0]


class Clock(HostStream):
    """Its marks are a microsecond apart."""

    now_ns = 0

    def mark(self) -> HostMark:
        self.now_ns += 1000
        return HostMark(self.now_ns)


def test_the_time_of_a_step_is_without_the_wait_for_its_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(module, "open_stream", lambda *_, **__: clock)
    with opened(monkeypatch, depth=2) as executor:
        ticket = executor.submit(first_step())
        clock.now_ns += 10**9
        executor.restrict(ticket, {})
        timing = executor.collect(ticket).timing
        assert {name: timing.parts[name] for name in ("model", "sampling")} == {"model": 1000, "sampling": 1000}
        assert timing.end_ns - timing.start_ns == 2000
        assert timing.parts["host"] > 0
