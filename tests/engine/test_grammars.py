"""Answers that follow a grammar, in the engine: the right mask for each token, whatever else is in flight."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from threading import Event, Thread

import pytest

from penstock.clock import VirtualClock
from penstock.engine.core_lock import Abandoned
from penstock.engine.matchers import BROKEN, Matchers
from penstock.engine.output import OutputStage
from penstock.engine.ports import OutputChunk
from penstock.engine.stepper import Stepper
from penstock.engine.thread import Engine
from penstock.sched.policies.presets import make_policies
from penstock.sched.policies.reserves import Watermark
from penstock.testing import HashExecutor, HashModel, expected_tokens, make_core, make_request
from penstock.testing.driver import STEP_NS
from penstock.text.grammar import Grammar, GrammarKind, Grammars
from penstock.types.errors import ExecutorFailure
from penstock.types.events import Abort, Add
from penstock.types.plan import Capacity, RowPlan, StepPlan
from penstock.types.request import FinishReason, Request
from support.answering import PLAIN
from support.hash_matcher import HashMatcher

SMALL = Capacity(num_blocks=25, block_size=4, max_rows=4, max_step_tokens=16, max_model_len=44)
END_TOKEN_ID = 3
MODEL = HashModel(vocab_size=90)


class Numbers:
    """Token 7 is `7 `."""

    def push(self, token_ids: Sequence[int]) -> str:
        return "".join(f"{token_id} " for token_id in token_ids)

    def flush(self) -> str:
        return ""


class Journal(HashExecutor):
    """Remembers the order of calls."""

    def __init__(self, **fields) -> None:
        super().__init__(SMALL, model=MODEL, **fields)
        self.calls: list[tuple[str, int]] = []
        self.masked: list[set[str]] = []

    def submit(self, plan):
        self.calls.append(("submit", plan.step_id))
        return super().submit(plan)

    def restrict(self, ticket, masks) -> None:
        self.calls.append(("restrict", ticket.step_id))
        self.masked.append(set(masks))
        super().restrict(ticket, masks)

    def collect(self, ticket):
        self.calls.append(("collect", ticket.step_id))
        return super().collect(ticket)


class Rig:
    """An engine without a thread."""

    def __init__(self, depth: int, executor: Journal | None = None, **engine_fields) -> None:
        self.executor = executor or Journal(depth=depth)
        self.chunks: list[OutputChunk] = []
        self.core = make_core(SMALL, make_policies(reserve=Watermark(share=0.0, growth_tokens=0)))
        self.engine = Engine(
            self.core,
            self.executor,
            OutputStage(lambda _shown: Numbers()),
            clock=VirtualClock(),
            sink=self.chunks.extend,
            **engine_fields,
        )

    def run(self, *requests: Request) -> None:
        for request in requests:
            self.engine.submit(request)
        while self.engine.turn():
            pass
        self.core.check()
        assert not self.core.matchers

    def of(self, request_id: str) -> list[OutputChunk]:
        return [chunk for chunk in self.chunks if chunk.request_id == request_id]

    def tokens_of(self, request_id: str) -> tuple[int, ...]:
        return sum((chunk.token_ids for chunk in self.of(request_id)), ())

    def end_of(self, request_id: str) -> OutputChunk:
        (end,) = [chunk for chunk in self.of(request_id) if chunk.finish_reason is not None]
        return end


def grammar(seed: int = 0, **fields) -> HashMatcher:
    return HashMatcher(MODEL.vocab_size, seed=seed, **fields)


def expected(request: Request, matcher: HashMatcher | None = None):
    max_model_len = SMALL.max_model_len
    return expected_tokens(
        request.prompt_token_ids, request.sampling, model=MODEL, max_model_len=max_model_len, matcher=matcher
    )


@pytest.mark.parametrize("depth", [1, 2])
def test_answers_follow_their_grammars_beside_others(depth):
    rig = Rig(depth)
    requests = [
        make_request("free", 9, max_tokens=20),
        make_request("one", [5] * 7, max_tokens=18, matcher=grammar(1)),
        make_request("two", [6] * 30, max_tokens=9, matcher=grammar(2), temperature=1.0, seed=4),
        make_request(
            "ends",
            [7],
            max_tokens=20,
            matcher=grammar(3, max_tokens=6, end_token_id=END_TOKEN_ID),
            stop_token_ids=(END_TOKEN_ID,),
        ),
    ]
    rig.run(*requests)
    answers = [
        expected(requests[0]),
        expected(requests[1], grammar(1)),
        expected(requests[2], grammar(2)),
        expected(requests[3], grammar(3, max_tokens=6, end_token_id=END_TOKEN_ID)),
    ]
    for request, answer in zip(requests, answers, strict=True):
        assert rig.tokens_of(request.request_id) == answer.token_ids
        assert rig.end_of(request.request_id).finish_reason is answer.finish_reason
    assert rig.end_of("ends").finish_reason is FinishReason.STOP
    assert len(rig.tokens_of("ends")) == 7


def test_masks_go_to_a_step_in_flight_as_soon_as_the_one_before_it_was_collected():
    rig = Rig(depth=2)
    rig.run(make_request("a", 3, max_tokens=4, matcher=grammar()), make_request("b", 3, max_tokens=4))
    assert rig.executor.calls[:8] == [
        ("submit", 0),
        ("restrict", 0),
        ("submit", 1),
        ("collect", 0),
        ("restrict", 1),
        ("submit", 2),
        ("collect", 1),
        ("restrict", 2),
    ]


def test_a_step_whose_only_grammar_has_ended_gets_masks_of_nobody():
    """Its row is in flight when the answer ends, and the step waits for masks all the same."""
    rig = Rig(depth=2)
    ends = grammar(max_tokens=2, end_token_id=END_TOKEN_ID)
    rig.run(
        make_request("a", 3, max_tokens=9, matcher=ends, stop_token_ids=(END_TOKEN_ID,)),
        make_request("b", 3, max_tokens=9),
    )
    assert rig.executor.masked == [{"a"}] * 3 + [set()]
    assert rig.tokens_of("b") == expected(make_request("b", 3, max_tokens=9)).token_ids


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("with_other", [False, True])
def test_a_grammar_that_fails_ends_its_own_request_alone(depth, with_other):
    rig = Rig(depth)
    others = [make_request("b", 3, max_tokens=9), make_request("c", 4, max_tokens=7, matcher=grammar(8))] if with_other else []
    rig.run(make_request("a", 3, max_tokens=9, matcher=grammar(fails_after=3)), *others)
    end = rig.end_of("a")
    assert end.finish_reason is FinishReason.ERROR
    assert "can't be followed any further" in end.detail
    assert len(rig.tokens_of("a")) == 3
    if with_other:
        assert rig.tokens_of("b") == expected(others[0]).token_ids
        assert rig.tokens_of("c") == expected(others[1], grammar(8)).token_ids


@pytest.mark.parametrize("depth", [1, 2])
def test_the_end_of_a_grammar_ends_the_answer_before_min_tokens(depth):
    """Nothing else is allowed there: the answer would be end tokens up to `min_tokens`."""
    rig = Rig(depth)
    ends = grammar(max_tokens=2, end_token_id=END_TOKEN_ID)
    rig.run(make_request("a", 3, max_tokens=9, min_tokens=6, matcher=ends, stop_token_ids=(END_TOKEN_ID,)))
    assert rig.end_of("a").finish_reason is FinishReason.STOP
    assert len(rig.tokens_of("a")) == 3


class Panic(BaseException):
    """As pyo3's, which is no Exception."""


class Breaking(HashMatcher):
    """Breaks in one of its methods after three tokens."""

    def __init__(self, method: str, error: BaseException) -> None:
        super().__init__(MODEL.vocab_size)
        self._method, self._error = method, error

    def accept(self, token_ids: Sequence[int]) -> None:
        super().accept(token_ids)
        self._break("accept")

    def mask(self) -> bytes:
        self._break("mask")
        return super().mask()

    def _break(self, method: str) -> None:
        if method == self._method and len(self.token_ids) == 3:
            raise self._error


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("method", ["accept", "mask"])
@pytest.mark.parametrize("error", [RuntimeError("of a library"), Panic("of a library")], ids=repr)
def test_a_matcher_that_breaks_ends_its_own_request_alone(depth, method, error, caplog):
    rig = Rig(depth)
    others = [make_request("b", 3, max_tokens=9), make_request("c", 4, max_tokens=7, matcher=grammar(8))]
    rig.run(make_request("a", 3, max_tokens=9, matcher=Breaking(method, error)), *others)
    end = rig.end_of("a")
    assert end.finish_reason is FinishReason.ERROR
    assert end.detail == BROKEN
    assert len(rig.tokens_of("a")) == 3
    assert "of a library" in caplog.text
    assert rig.tokens_of("b") == expected(others[0]).token_ids
    assert rig.tokens_of("c") == expected(others[1], grammar(8)).token_ids


def test_tokens_are_told_although_the_device_fails_when_it_gets_the_masks_of_the_next_step():
    class Failing(Journal):
        def restrict(self, ticket, masks) -> None:
            if ticket.step_id == 2:
                raise ExecutorFailure("the device failed, as it was told to")
            super().restrict(ticket, masks)

    rig = Rig(depth=2, executor=Failing(depth=2))
    requests = [make_request("a", 3, max_tokens=9, matcher=grammar()), make_request("b", 3, max_tokens=2)]
    with pytest.raises(ExecutorFailure):
        rig.run(*requests)
    assert rig.tokens_of("a") == expected(requests[0], grammar()).token_ids[:2]
    assert rig.end_of("b").finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("where", ["submit", "restrict"])
def test_tokens_are_told_although_the_engine_is_abandoned_in_the_next_step(where):
    class Hangs(Journal):
        def hang(self, now: str, step_id: int) -> None:
            if (now, step_id) == (where, 1):
                entered.set()
                left.wait(10)

        def submit(self, plan):
            self.hang("submit", plan.step_id)
            return super().submit(plan)

        def restrict(self, ticket, masks) -> None:
            self.hang("restrict", ticket.step_id)
            super().restrict(ticket, masks)

    def turns() -> None:
        with suppress(Abandoned):
            while rig.engine.turn():
                pass

    entered, left = Event(), Event()
    rig = Rig(1, Hangs())
    rig.engine.submit(make_request("a", 3, max_tokens=4, matcher=grammar()), make_request("ends", 3, max_tokens=1))
    thread = Thread(target=turns)
    thread.start()
    assert entered.wait(10)
    assert rig.engine.abandon()
    assert rig.end_of("ends").finish_reason is FinishReason.LENGTH
    assert [chunk.finish_reason for chunk in rig.of("a")] == [None, FinishReason.ERROR]
    left.set()
    thread.join()
    assert len(rig.chunks) == 3


@pytest.mark.parametrize("depth", [1, 2])
def test_stop_strings_and_aborts_end_an_answer_with_a_grammar(depth):
    rig = Rig(depth)
    wanted = expected(make_request("a", 3, max_tokens=30), grammar(1)).token_ids
    rig.engine.submit(make_request("a", 3, max_tokens=30, matcher=grammar(1), stop=(f"{wanted[4]} ",)))
    rig.engine.submit(make_request("b", 3, max_tokens=30, matcher=grammar(2)))
    for _ in range(3):
        rig.engine.turn()
    rig.engine.abort("b")
    rig.run()
    assert rig.tokens_of("a") == wanted[:5]
    assert rig.end_of("a").finish_reason is FinishReason.STOP
    assert rig.end_of("b").finish_reason is FinishReason.ABORT


@pytest.mark.parametrize("depth", [1, 2])
def test_a_grammar_follows_its_answer_through_preemptions(depth):
    rig = Rig(depth)
    requests = [make_request(f"r{seed}", [seed + 1] * 9, max_tokens=34, matcher=grammar(seed)) for seed in range(4)]
    rig.run(*requests)
    assert sum(request.num_preemptions for request in requests) > 0
    for seed, request in enumerate(requests):
        assert rig.tokens_of(request.request_id) == expected(request, grammar(seed)).token_ids


def forcing(seed: int = 0, **fields) -> HashMatcher:
    """Seven of eight tokens are forced."""
    return grammar(seed, num_forced=7, **fields)


@pytest.mark.parametrize("depth", [1, 2])
def test_forced_tokens_take_no_steps_of_their_own(depth):
    """With two steps in flight the next one samples them already: its masks leave it no choice."""
    rig = Rig(depth)
    requests = [make_request(f"r{seed}", [seed + 1] * 9, max_tokens=24, matcher=forcing(seed)) for seed in range(2)]
    rig.run(*requests)
    for seed, request in enumerate(requests):
        assert rig.tokens_of(request.request_id) == expected(request, forcing(seed)).token_ids
        chunks = rig.of(request.request_id)
        assert [chunk.num_generated_tokens for chunk in chunks] == [
            sum(len(chunk.token_ids) for chunk in chunks[: idx + 1]) for idx in range(len(chunks))
        ]
    if depth == 1:
        assert rig.executor.num_steps < 24 / 2
    else:
        assert rig.executor.num_steps >= 24


@pytest.mark.parametrize("max_tokens", range(1, 20))
def test_forced_tokens_end_at_max_tokens(max_tokens):
    rig = Rig(1)
    request = make_request("a", 3, max_tokens=max_tokens, matcher=forcing(1))
    rig.run(request)
    assert rig.tokens_of("a") == expected(request, forcing(1)).token_ids
    assert rig.end_of("a").finish_reason is FinishReason.LENGTH
    assert request.num_tokens == 3 + max_tokens


def test_a_forced_end_ends_the_answer_in_the_step_before():
    rig = Rig(1)
    ends = forcing(3, max_tokens=6, end_token_id=END_TOKEN_ID)
    rig.run(make_request("a", 3, max_tokens=20, min_tokens=10, matcher=ends, stop_token_ids=(END_TOKEN_ID,)))
    end = rig.of("a")[-1]
    assert (end.finish_reason, end.stop_reason) == (FinishReason.STOP, END_TOKEN_ID)
    assert len(end.token_ids) > 1
    assert len(rig.tokens_of("a")) == 7


def test_tokens_behind_a_stop_string_are_not_the_answer_s():
    rig = Rig(1)
    wanted = expected(make_request("a", 3, max_tokens=24), forcing(1)).token_ids
    rig.run(make_request("whole", 3, max_tokens=24, matcher=forcing(1)))
    several = next(chunk for chunk in rig.of("whole") if len(chunk.token_ids) > 2)
    num_shown = several.num_generated_tokens - 1  # the last of them comes behind the stop string
    rig.run(make_request("a", 3, max_tokens=24, matcher=forcing(1), stop=("".join(f"{one} " for one in wanted[:num_shown]),)))
    assert rig.tokens_of("a") == wanted[:num_shown]
    assert rig.end_of("a").num_generated_tokens == num_shown
    assert rig.end_of("a").finish_reason is FinishReason.STOP


def test_tokens_whose_log_probabilities_are_asked_for_are_sampled_one_by_one():
    rig = Rig(1)
    requests = [make_request(name, 3, max_tokens=20, logprobs=logprobs, matcher=forcing(1)) for name, logprobs in NAMED]
    rig.run(*requests)
    assert rig.tokens_of("asks") == rig.tokens_of("asks_not") == expected(requests[0], forcing(1)).token_ids
    assert [len(chunk.logprobs) for chunk in rig.of("asks")] == [1] * 20
    assert max(len(chunk.token_ids) for chunk in rig.of("asks_not")) > 1


NAMED = [("asks", 0), ("asks_not", None)]


@pytest.mark.parametrize("fails_after", range(1, 9))
def test_a_grammar_that_fails_among_forced_tokens_ends_the_answer_there(fails_after):
    rig = Rig(1)
    request = make_request("a", 3, max_tokens=20, matcher=forcing(1, fails_after=fails_after))
    rig.run(request)
    assert rig.end_of("a").finish_reason is FinishReason.ERROR
    assert rig.tokens_of("a") == expected(request, forcing(1)).token_ids[:fails_after]


def test_a_failure_among_the_last_tokens_is_not_another_s():
    """The answer has reached its limit all the same, and with it no grammar is left. Its id comes again."""
    rig = Rig(1)
    forced_at = next(idx for idx, chunk in enumerate(_chunks_of(forcing(1))) if len(chunk.token_ids) > 1)
    num_tokens = _chunks_of(forcing(1))[forced_at].num_generated_tokens
    rig.run(make_request("a", 3, max_tokens=num_tokens, matcher=forcing(1, fails_after=num_tokens)))
    assert rig.end_of("a").finish_reason is FinishReason.LENGTH
    rig.chunks.clear()
    rig.run(make_request("a", 3, max_tokens=20, matcher=forcing(1)))
    assert rig.end_of("a").finish_reason is FinishReason.LENGTH


def _chunks_of(matcher: HashMatcher) -> list[OutputChunk]:
    rig = Rig(1)
    rig.run(make_request("a", 3, max_tokens=20, matcher=matcher))
    return rig.of("a")


def test_what_grammars_take_of_the_host_is_told():
    told: list[set[str]] = []

    class Listener:
        def on_turn(self, parts_ns) -> None:
            told.append(set(parts_ns))

    rig = Rig(1, turn_observer=Listener())
    rig.run(make_request("a", 3, max_tokens=2, matcher=grammar()))
    rig.run(make_request("b", 3, max_tokens=1))
    assert told == [
        {"schedule", "commit", "grammar", "output"},
        {"schedule", "commit", "grammar", "output"},
        {"schedule", "commit", "output"},
    ]


def test_time_that_tells_events_is_counted_once():
    """Events that waited for masks, and the end of a cancelled request, are told before the plan."""
    parts: list[dict[str, int]] = []

    class Listener:
        def on_turn(self, parts_ns) -> None:
            parts.append(dict(parts_ns))

    clock, core = VirtualClock(), make_core(SMALL)
    executor = HashExecutor(SMALL, model=MODEL)
    stepper = Stepper(core, executor, clock, report=lambda *_: clock.advance(STEP_NS), turn_observer=Listener())
    stepper.turn([Add(make_request("a", 3, max_tokens=9, matcher=grammar())), Add(make_request("b", 3, max_tokens=9))])
    stepper.turn([Abort("b")])
    assert parts[1]["schedule"] == 0
    assert sum(one["output"] for one in parts) == clock.now_ns()


def test_a_guess_that_the_grammar_forbids_is_no_failure_of_the_grammar():
    """It would be compiled again for the next request."""
    grammars, wanted = Grammars(PLAIN, vocab_size=PLAIN.vocab_size), Grammar(GrammarKind.REGEX, "[ab]+c")
    matcher, matchers = grammars.matcher(wanted), Matchers()
    matchers.add(make_request("a", 3, matcher=matcher))
    guesses = tuple(PLAIN.encode("abxa", add_special_tokens=False))
    plan = StepPlan(0, 0, (), (RowPlan("a", 3, 5, (), 5),), (), guesses={"a": guesses})
    mask = matchers.masks(plan, VirtualClock())["a"]
    size = len(matcher.mask())
    masks = [mask[at : at + size] for at in range(0, len(mask), size)]
    assert len(masks) == 5
    assert masks[0] != masks[1] == masks[2] == masks[3] == masks[4]
    assert grammars.known(wanted) is not None
