"""Guessers: where guesses are found, whose answers they come from, and what is remembered."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from penstock.sched.policies import guessers
from penstock.sched.policies.guessers import LONGEST_MATCH, MOST_PLACES, Suffix
from penstock.testing import make_request
from penstock.types.request import Request


def asked(prompt: Sequence[int], output: Sequence[int] = (), request_id: str = "r", *, tenant: str = "") -> Request:
    request = make_request(request_id, prompt, max_tokens=10_000)
    request.tenant = tenant
    tell(request, output)
    return request


def tell(request: Request, token_ids: Sequence[int]) -> None:
    request.output_token_ids += token_ids
    request.num_tokens += len(token_ids)


def found(guesser: Suffix, request: Request, most: int = 4) -> tuple[list[int], int]:
    guess = guesser.guess(request, most)
    return ([], 0) if guess is None else ([*guess.token_ids], guess.num_matched)


def test_the_longest_match_goes_before_a_newer_one() -> None:
    request = asked([1, 2, 3, 10, 11, 12, 13, 9, 2, 3, 20, 21], [1, 2, 3])
    assert found(Suffix(), request) == ([10, 11, 12, 13], 3)


def test_of_equal_matches_the_newest_counts() -> None:
    assert found(Suffix(), asked([2, 3, 10, 9, 2, 3, 20, 21, 22, 23], [2, 3]))[0] == [20, 21, 22, 23]


@pytest.mark.parametrize("prompt", [[5], [5, 6], [1, 3, 2, 4], [2, 9, 3]])
def test_two_tokens_must_have_been_seen(prompt: list[int]) -> None:
    assert found(Suffix(), asked(prompt, [2, 3])) == ([], 0)
    assert found(Suffix(), asked([7])) == ([], 0)


def test_a_match_grows_while_its_guesses_are_right() -> None:
    guesser, request = Suffix(), asked([*range(1, 90)], [1, 2])
    assert found(guesser, request) == ([3, 4, 5, 6], 2)
    tell(request, [3, 4, 5])
    assert found(guesser, request) == ([6, 7, 8, 9], 5)
    tell(request, range(6, 60))
    assert found(guesser, request) == ([60, 61, 62, 63], LONGEST_MATCH)
    tell(request, [30, 31])
    assert found(guesser, request) == ([32, 33, 34, 35], 2)


def test_an_answer_that_repeats_itself_is_guessed_beyond_its_end() -> None:
    assert found(Suffix(), asked([9], [1, 2, 3, 1, 2, 3, 1, 2]), most=7)[0] == [3, 1, 2, 3, 1, 2, 3]


def test_recent_answers_tell_of_those_of_the_same_tenant() -> None:
    guesser = Suffix()
    first = asked([7], [1, 2, 3, 4, 5], "first", tenant="a")
    found(guesser, first)
    guesser.ended(first)
    assert found(guesser, asked([8], [1, 2], "second", tenant="a"))[0] == [3, 4, 5], "and no further than that answer"
    assert found(guesser, asked([8], [1, 2], "third", tenant="b")) == ([], 0)
    salted = asked([8], [1, 2], "fourth", tenant="a")
    salted.cache_salt = b"other"
    assert found(guesser, salted) == ([], 0)


def test_its_own_text_goes_before_others_of_the_same_length() -> None:
    guesser = Suffix()
    first = asked([7], [1, 2, 3], "first")
    found(guesser, first)
    guesser.ended(first)
    assert found(guesser, asked([1, 2, 50, 51, 52, 53], [1, 2], "second"))[0] == [50, 51, 52, 53]
    assert found(guesser, asked([5, 6, 7, 9, 1, 2, 60], [3, 1, 2], "third"), most=1)[0] == [60]


def test_memory_is_bounded(monkeypatch) -> None:
    monkeypatch.setattr(guessers, "RECENT_TOKENS", 800)
    guesser = Suffix()
    for number in range(300):
        request = asked([number], range(number, number + 30), f"r{number}", tenant=f"t{number % 50}")
        found(guesser, request)
        guesser.ended(request)
    assert not guesser._readers
    sizes = [len(text.tokens) for _, text in guesser._recent.values()]
    assert sum(sizes) == guesser._num_recent <= 800
    assert max(sizes) <= 100
    assert [*guesser._recent][-1] == "t49", "the tenants that had an answer last are kept"


def test_a_tenant_with_many_salts_takes_no_more_than_others(monkeypatch) -> None:
    monkeypatch.setattr(guessers, "RECENT_TOKENS", 800)
    guesser = Suffix()
    for number in range(40):
        request = asked([number], range(number, number + 30), f"r{number}", tenant="many" if number > 4 else f"t{number}")
        request.cache_salt = bytes([number]) if number > 4 else b""
        found(guesser, request)
        guesser.ended(request)
    assert [*guesser._recent] == ["t0", "t1", "t2", "t3", "t4", "many"]
    assert guesser._num_recent == 6 * 31


def test_a_request_that_was_never_asked_about_leaves_nothing() -> None:
    guesser = Suffix()
    guesser.ended(asked([1], [1, 2, 3]))
    assert not guesser._recent


@pytest.mark.parametrize("seed", range(20))
def test_it_finds_what_a_search_of_all_places_finds(seed: int) -> None:
    draw = random.Random(seed)
    guesser, request = Suffix(), asked([draw.randrange(4) for _ in range(draw.randrange(1, 60))])
    for _ in range(60):
        tell(request, [draw.randrange(4) for _ in range(draw.randrange(1, 3))])
        guess = guesser.guess(request, 5)
        text = [*request.prompt_token_ids, *request.output_token_ids]
        places = [at for at in range(2, len(text)) if text[at - 2 : at] == text[-2:]][::-1]
        lengths = {at: match_length(text, at) for at in places}
        if guess is None:
            assert not places
            continue
        follows = [at for at in places if text[at : at + 5] == [*guess.token_ids][: len(text) - at]]
        assert guess.num_matched <= max(lengths[at] for at in follows), "a match is never said to be longer than it is"
        if guess.num_matched == 2:  # just found
            assert max(lengths[at] for at in places[:MOST_PLACES]) == 2


def match_length(text: Sequence[int], at: int) -> int:
    length = 0
    while length < min(at, LONGEST_MATCH) and text[at - 1 - length] == text[len(text) - 1 - length]:
        length += 1
    return length


def test_answers_of_jobs_push_out_nobodys() -> None:
    guesser = Suffix()
    first = asked([7], [1, 2, 3, 4, 5], "first")
    job = asked([7], [1, 2, 9, 9, 9], "job")
    job.background = True
    for request in (first, job):
        found(guesser, request)
        guesser.ended(request)
    assert found(guesser, asked([8], [6, 1, 2, 3], "second"))[0] == [4, 5]
    assert guesser._num_recent == 6
    assert [*guesser._readers] == ["second"]
