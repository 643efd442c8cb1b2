"""A draft head beside the engine: whatever it was shown and asked before, it guesses what the head's equations give."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from penstock.backends.reference.executor import ReferenceExecutor
from penstock.clock import VirtualClock
from penstock.engine import draft_model
from penstock.engine.draft_model import HeadDrafter
from penstock.models.catalog import resolve
from penstock.models.eagle import DraftHead, load_head
from penstock.models.load import load_model
from penstock.testing import make_request
from penstock.types.kv_dtype import KvDtype
from penstock.types.request import Request
from support.drafts import guesses_from
from support.tiny_heads import F32, HeadInNumpy, write_head
from support.tiny_models import TinyLlama, write_hf

TARGET = TinyLlama(num_layers=7)
SIZES: dict[str, Any] = {"num_blocks": 60, "block_size": 16, "max_rows": 4, "max_step_tokens": 64, "max_model_len": 200}
FEATURES = np.random.default_rng(2).standard_normal((300, TARGET.hidden_size)).astype(np.float32)
"""Features of the tokens of every request, by position."""


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> DraftHead:
    folder = tmp_path_factory.mktemp("models")
    model = load_model(resolve(str(write_hf(folder / "model", TARGET)), folder))
    return load_head(write_head(folder / "head", TARGET), model)


def drafter(head: DraftHead, **sizes: int) -> HeadDrafter:
    executor = ReferenceExecutor(head.model, head.program, **{**SIZES, **sizes}, kv_dtype=KvDtype.BF16)
    clock = VirtualClock()
    return HeadDrafter(executor, clock, vocab_size=TARGET.vocab_size, num_features=TARGET.hidden_size, timeout_s=60.0)


def show(draft: HeadDrafter, request: Request, begin: int, end: int) -> None:
    """Show the features of some of a request's tokens, beside a step's other tokens."""
    others = np.full((3, TARGET.hidden_size), np.nan, np.float32)
    step: F32 = np.concatenate([others, FEATURES[begin:end], others])
    draft.see([(request.request_id, begin, 3, end - begin)], step.tobytes())


def guessed(draft: HeadDrafter, requests: Sequence[Request], num: int, most: int = 1000) -> list[list[int]]:
    """Up to `num` guesses for each; `most`: tokens to read in one step."""
    for request in requests:
        while draft.num_behind(request) > most:
            draft.read([(request, most)])
    step = draft.read([(request, draft.num_behind(request)) for request in requests])
    return guesses_from(draft, step, requests, num)


def are_right(guesses: Sequence[int], request: Request, num: int, first: int = 0) -> bool:
    """Return whether they are what a head guesses that knows the features from position `first` on."""
    tokens = [*request.prompt_token_ids, *request.output_token_ids]
    judged = HeadInNumpy(TARGET).judged(tokens[first:], FEATURES[first : len(tokens) - 1], guesses)
    return len(guesses) == num and all(chance > 0.9 * best for chance, best in judged)


def grow(draft: HeadDrafter, request: Request, token_ids: Sequence[int]) -> None:
    """The model's step sampled these tokens."""
    known = request.num_tokens - 1
    request.output_token_ids += token_ids
    request.num_tokens += len(token_ids)
    show(draft, request, known, request.num_tokens - 1)


def test_guesses_do_not_depend_on_what_was_guessed_and_accepted_before(head: DraftHead) -> None:
    draw, draft = random.Random(0), drafter(head)
    requests = [make_request(f"r{idx}", [draw.randrange(264) for _ in range(draw.randint(2, 30))]) for idx in range(3)]
    for request in requests:
        show(draft, request, 0, request.num_tokens)
        grow(draft, request, [5])
    for _ in range(40):
        some, num = draw.sample(requests, draw.randint(1, 3)), draw.randint(1, 5)
        found = guessed(draft, some, num, most=draw.choice([3, 1000]))
        for request, guesses in zip(some, found, strict=True):
            assert are_right(guesses, request, num)
            grow(draft, request, [*guesses[: draw.randint(0, num)], draw.randrange(264)])
    draft.close()


def test_it_begins_after_a_prefix_whose_features_are_unknown(head: DraftHead) -> None:
    draft, request = drafter(head), make_request("r", range(50))
    show(draft, request, 32, 50)
    grow(draft, request, [7])
    assert draft.num_behind(request) == 51 - 33
    assert are_right(*guessed(draft, [request], 3), request, 3, first=32)
    grow(draft, request, [8, 9])
    assert are_right(*guessed(draft, [request], 3), request, 3, first=32)
    draft.close()


def test_tokens_that_were_computed_again_change_nothing(head: DraftHead) -> None:
    """A preempted request computes its tokens a second time."""
    draft, request = drafter(head), make_request("r", range(40))
    show(draft, request, 0, 40)
    grow(draft, request, [7])
    before = guessed(draft, [request], 3)
    show(draft, request, 0, 20)
    show(draft, request, 16, 40)
    assert draft.num_behind(request) == 1
    assert guessed(draft, [request], 3) == before
    assert are_right(before[0], request, 3)
    draft.close()


def test_it_begins_anew_after_tokens_that_it_was_not_shown(head: DraftHead) -> None:
    draft, request = drafter(head), make_request("r", range(40))
    show(draft, request, 0, 40)
    grow(draft, request, [7])
    guessed(draft, [request], 2)
    request.output_token_ids += [1, 2, 3]
    request.num_tokens += 3
    assert draft.num_behind(request) == 0
    grow(draft, request, [4])
    assert draft.num_behind(request) == 1
    assert are_right(*guessed(draft, [request], 3), request, 3, first=43)
    draft.close()


def test_features_do_not_pile_up(head: DraftHead, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_model, "MOST_UNREAD", 20)
    draft, request = drafter(head), make_request("r", range(50))
    for begin in range(0, 50, 10):
        show(draft, request, begin, begin + 10)
    grow(draft, request, [7])
    assert draft.num_behind(request) == 20
    assert are_right(*guessed(draft, [request], 3), request, 3, first=30)
    for token_id in range(60, 90):
        grow(draft, request, [token_id])
    assert draft.num_behind(request) == 20
    assert are_right(*guessed(draft, [request], 3), request, 3, first=60)
    draft.close()


def test_requests_that_lost_their_blocks_begin_anew(head: DraftHead) -> None:
    draft = drafter(head, num_blocks=8, max_rows=2)
    requests = [make_request(f"r{idx}", [idx, *range(40)]) for idx in range(3)]
    for request in requests:
        show(draft, request, 0, 41)
        grow(draft, request, [7])
        assert are_right(*guessed(draft, [request], 2), request, 2)
    first = requests[0]
    assert draft.num_behind(first) == 0
    grow(draft, first, [8])
    assert draft.num_behind(first) == 1
    assert are_right(*guessed(draft, [first], 2), first, 2, first=41)
    draft.close()


def test_it_never_guesses_before_it_was_shown_the_request(head: DraftHead) -> None:
    draft = drafter(head)
    assert draft.num_behind(make_request("r", [1, 2])) == 0
    draft.ended("r")
    draft.close()
