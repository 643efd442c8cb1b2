"""A small model beside the engine: its guesses, its memory, and its failures."""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from queue import Empty, SimpleQueue

import pytest

from penstock.clock import VirtualClock
from penstock.engine.draft_model import DraftModel
from penstock.sched.policies.presets import make_policies
from penstock.testing import HashExecutor, HashModel, expected_tokens, make_core, make_request, run_to_completion
from penstock.types.errors import ExecutorFailure
from penstock.types.events import Add
from penstock.types.plan import Capacity, StepPlan, Ticket
from penstock.types.request import Request
from penstock.types.result import StepResult
from penstock.types.sampling import SamplingParams
from support.drafts import guesses_from

MODEL = HashModel(vocab_size=90)
OTHER = HashModel(vocab_size=90, first_token_id=3)
CAPACITY = Capacity(
    num_blocks=200, block_size=4, max_rows=12, max_step_tokens=250, max_model_len=200, max_scored=60, checks_guesses=True
)


@contextmanager
def draft_model(executor: HashExecutor | None = None, timeout_s: float = 60.0) -> Iterator[DraftModel]:
    executor = executor or HashExecutor(CAPACITY, model=MODEL)
    draft = DraftModel(executor, VirtualClock(), vocab_size=MODEL.vocab_size, timeout_s=timeout_s)
    yield draft
    draft.close()


def next_tokens(request: Request, num: int, model: HashModel = MODEL) -> list[int]:
    tokens = (*request.prompt_token_ids, *request.output_token_ids)
    sampling = SamplingParams(temperature=0.0, max_tokens=num)
    return list(expected_tokens(tokens, sampling, model=model, max_model_len=1000).token_ids)


def grow(request: Request, token_ids: Sequence[int]) -> None:
    request.output_token_ids += token_ids
    request.num_tokens += len(token_ids)


def guessed(draft: DraftModel, requests: Sequence[Request], num: int) -> list[list[int]]:
    """Up to `num` guesses for each."""
    step = draft.read([(request, draft.num_behind(request)) for request in requests])
    return guesses_from(draft, step, requests, num)


class TestGuesses:
    def test_they_are_what_the_small_model_would_answer(self) -> None:
        """They do not depend on what became of earlier ones, nor on the memory."""
        draw = random.Random(0)
        for num_blocks in (200, 40):
            with draft_model(HashExecutor(replace(CAPACITY, num_blocks=num_blocks), model=MODEL)) as draft:
                requests = [
                    make_request(f"r{idx}", [draw.randrange(90) for _ in range(draw.randint(1, 30))]) for idx in range(8)
                ]
                num_right = 0
                for _ in range(60):
                    some = draw.sample(requests, draw.randint(1, 3))
                    num = draw.randint(1, 6)
                    expected = [next_tokens(request, num) for request in some]
                    found = guessed(draft, some, num)
                    assert [right[: len(own)] for right, own in zip(expected, found, strict=True)] == found
                    num_right += sum(map(len, found))
                    for request, right in zip(some, expected, strict=True):
                        grow(request, [*right[: draw.randint(0, num)], draw.randrange(90)])
                        if request.num_tokens > 100:
                            draft.ended(request.request_id)
                            requests[requests.index(request)] = make_request(f"{request.request_id}+", [1, 2])
                assert num_right > 300

    def test_a_prompt_may_be_read_in_parts(self) -> None:
        with draft_model() as draft:
            request = make_request("r", range(50))
            assert draft.num_behind(request) == 50
            assert not draft.read([(request, 20)]).guesses
            assert draft.num_behind(request) == 30
            grow(request, [7])
            assert draft.num_behind(request) == 31
            assert guessed(draft, [request], 3) == [next_tokens(request, 3)]

    def test_tokens_that_were_guessed_are_not_read_again(self) -> None:
        executor = HashExecutor(CAPACITY, model=MODEL)
        with draft_model(executor) as draft:
            request = make_request("r", range(40))
            (found,) = guessed(draft, [request], 5)
            grow(request, [*found[:3], 89])
            assert draft.num_behind(request) == 1
            before = executor.num_computed_tokens
            guessed(draft, [request], 1)
            assert executor.num_computed_tokens == before + 1

    def test_the_longest_text_has_no_room_for_one(self) -> None:
        with draft_model() as draft:
            request = make_request("r", [1] * 198)
            assert guessed(draft, [request], 5) == [next_tokens(request, 2)]
            grow(request, [1, 2])
            assert draft.num_behind(request) == 0

    def test_a_token_that_the_small_model_lacks_ends_its_guesses_and_not_the_model(self) -> None:
        with draft_model() as draft:
            strange, usual = make_request("s", [1, 90, 2]), make_request("u", [1, 2])
            assert guessed(draft, [strange, usual], 2) == [[], next_tokens(usual, 2)]

    def test_its_probability_comes_with_it(self) -> None:
        with draft_model() as draft:
            step = draft.read([(make_request("r", [1]), 1)])
            assert step.guesses["r"][1] == pytest.approx(0.5), "as the hash model says of each token"


class TestMemory:
    def test_rows_drafted_longest_ago_make_room(self) -> None:
        executor = HashExecutor(replace(CAPACITY, num_blocks=11, max_rows=4), model=MODEL)
        with draft_model(executor) as draft:
            requests = [make_request(f"r{idx}", [idx] * 12) for idx in range(6)]
            for request in requests:
                assert guessed(draft, [request], 2) == [next_tokens(request, 2)]
            assert [draft.num_behind(request) for request in requests[:4]] == [12] * 4
            assert draft.num_behind(requests[5]) < 3
            assert executor.num_known_requests <= 4

    def test_one_that_ended_leaves_nothing(self) -> None:
        with draft_model() as draft:
            request = make_request("r", range(40))
            guessed(draft, [request], 4)
            draft.ended("r")
            draft.ended("unknown")
            assert len(draft._free) == CAPACITY.num_blocks - 1
            assert not draft._rows


def run(draft: DraftModel, num: int = 6) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]], int]:
    """Answers with the draft model, the right ones, and how many steps it took."""
    core = make_core(CAPACITY, make_policies(guesser="off"), drafter=draft)
    requests = [
        make_request(f"r{idx}", [idx + 1] * (3 * idx + 1), max_tokens=40, temperature=idx % 2, seed=idx) for idx in range(num)
    ]
    steps: list[int] = []
    outcomes = run_to_completion(
        core,
        HashExecutor(CAPACITY, model=MODEL),
        *map(Add, requests),
        after_turn=lambda driver: steps.append(len(driver.plans)),
    )
    right = [
        expected_tokens(request.prompt_token_ids, request.sampling, model=MODEL, max_model_len=200).token_ids
        for request in requests
    ]
    return [tuple(outcomes[request.request_id].token_ids) for request in requests], right, steps[-1]


class TestBesideAnEngine:
    @pytest.mark.parametrize(("model", "most", "least"), [(MODEL, 30, 0), (OTHER, 60, 38)])
    def test_answers_are_the_same(self, model: HashModel, most: int, least: int) -> None:
        with draft_model(HashExecutor(CAPACITY, model=model)) as draft:
            found, right, num_steps = run(draft, 1 if model is MODEL else 6)
            assert found == right
            assert least <= num_steps <= most
            assert not draft._rows

    def test_one_that_fails_guesses_nothing_more(self, caplog: pytest.LogCaptureFixture) -> None:
        class Failing(HashExecutor):
            def collect(self, ticket: Ticket) -> StepResult:
                if self.num_computed_tokens > 60:
                    raise ExecutorFailure("the disk of the small model is gone")
                return super().collect(ticket)

        executor = Failing(CAPACITY, model=MODEL)
        with draft_model(executor) as draft, caplog.at_level(logging.ERROR):
            found, right, _ = run(draft)
            assert found == right
            assert draft.num_behind(make_request()) == 0
        assert [record.message for record in caplog.records] == [
            "the draft model is off from now on, since it failed; answers go on without it"
        ]
        assert executor._is_closed

    def test_one_that_hangs_guesses_nothing_more(self, caplog: pytest.LogCaptureFixture) -> None:
        comes_back = threading.Event()

        class Hanging(HashExecutor):
            def submit(self, plan: StepPlan) -> Ticket:
                if plan.step_id > 3:
                    assert comes_back.wait(60.0)
                return super().submit(plan)

        with draft_model(Hanging(CAPACITY, model=MODEL), timeout_s=0.2) as draft, caplog.at_level(logging.ERROR):
            found, right, _ = run(draft)
            assert found == right
            assert draft.num_behind(make_request()) == 0
            comes_back.set()
        assert len(caplog.records) == 1

    def test_a_pause_of_the_process_does_not_turn_it_off(self) -> None:
        class Paused(SimpleQueue[StepResult | Exception]):
            """One wait ends empty at once, as after a pause that was longer than the wait."""

            was_paused = False

            def get(self, block: bool = True, timeout: float | None = None) -> StepResult | Exception:
                if not self.was_paused:
                    self.was_paused = True
                    raise Empty
                return super().get(block, timeout)

        with draft_model() as draft:
            draft._results = Paused()
            assert guessed(draft, [make_request()], 2) == [next_tokens(make_request(), 2)]

    def test_a_row_that_fails_is_not_guessed(self) -> None:
        class Failing(HashExecutor):
            def collect(self, ticket: Ticket) -> StepResult:
                result = super().collect(ticket)
                kept = {name: ids for name, ids in result.token_ids.items() if name != "bad"}
                return replace(result, token_ids=kept, failures={name: "NaN" for name in result.token_ids if name == "bad"})

        with draft_model(Failing(CAPACITY, model=MODEL)) as draft:
            bad, good = make_request("bad", [1]), make_request("good", [2])
            assert guessed(draft, [bad, good], 2) == [[], next_tokens(good, 2)]
            assert guessed(draft, [bad, good], 2) == [[], next_tokens(good, 2)]
