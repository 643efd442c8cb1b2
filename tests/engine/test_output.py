"""The output stage: text from tokens, stop strings, exactly one end."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.engine.output import TEXT_FAILED, OutputStage
from penstock.engine.ports import OutputChunk
from penstock.engine.stop_strings import StopTree
from penstock.types.events import Stop, TokenEvent
from penstock.types.request import FinishReason, Request
from penstock.types.result import TokenLogprobs
from penstock.types.sampling import LineLimits, SamplingParams

POISON = 999


class Letters:
    """Token 97 is `a`. Like a real detokenizer it may hold text back: `!` appears with the next token, or at flush."""

    def __init__(self) -> None:
        self._held = ""

    def push(self, token_ids: Sequence[int]) -> str:
        if POISON in token_ids:
            raise KeyError(POISON)
        text = self._held + "".join(map(chr, token_ids))
        self._held = "!" if text.endswith("!") else ""
        return text.removesuffix("!")

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held


class Listener:
    def __init__(self) -> None:
        self.first: list[str] = []
        self.gaps_ns: list[int] = []

    def on_tokens(self, first, gaps_ns) -> None:
        self.first += [request.request_id for request in first]
        self.gaps_ns += gaps_ns


def make_stage(*request_ids: str, observer: Listener | None = None, **sampling) -> OutputStage:
    stage = OutputStage(lambda _shown: Letters(), observer=observer)
    for request_id in request_ids or ("a",):
        stage.add(Request(request_id, (1,), SamplingParams(**sampling), arrival_ns=0))
    return stage


def event(text: str, at_ns: int = 1, request_id: str = "a", **kwargs) -> TokenEvent:
    return TokenEvent(request_id, tuple(map(ord, text)), at_ns, **kwargs)


def push_all(stage: OutputStage, events: Sequence[TokenEvent]) -> tuple[list[OutputChunk], list]:
    chunks, commands = [], []
    for one in events:
        output = stage.push([one])
        chunks += output.chunks
        commands += output.commands
    return chunks, commands


def text_of(chunks: Sequence[OutputChunk]) -> str:
    return "".join(chunk.text for chunk in chunks)


def test_each_event_becomes_a_chunk_that_counts_its_tokens():
    stage = make_stage()
    chunks, commands = push_all(stage, [event("he"), event("y", finish_reason=FinishReason.LENGTH)])
    assert text_of(chunks) == "hey"
    assert [chunk.num_generated_tokens for chunk in chunks] == [2, 3]
    assert [chunk.finish_reason for chunk in chunks] == [None, FinishReason.LENGTH]
    assert commands == []


def test_a_stop_string_is_cut_and_ends_the_request():
    chunks, commands = push_all(make_stage(stop=("END",)), [event(char) for char in "soEND"])
    assert text_of(chunks) == "so"
    assert chunks[-1].finish_reason is FinishReason.STOP
    assert chunks[-1].stop_reason == "END"
    assert commands == [Stop("a", "END")]


def test_a_stop_string_is_shown_when_asked_for():
    chunks, _ = push_all(make_stage(stop=("END",), include_stop_str_in_output=True), [event(char) for char in "soEND"])
    assert text_of(chunks) == "soEND"


def test_what_may_become_a_stop_string_is_held_until_it_is_decided():
    stage = make_stage(stop=("END",))
    assert text_of(stage.push([event("xEN")]).chunks) == "x"
    assert text_of(stage.push([event("E")]).chunks) == "EN"
    assert text_of(stage.push([event("n", finish_reason=FinishReason.LENGTH)]).chunks) == "En"


def test_everything_held_is_flushed_at_the_end():
    stage = make_stage(stop=("END",))
    chunks, commands = push_all(stage, [event("oh!"), event("EN", finish_reason=FinishReason.LENGTH)])
    assert text_of(chunks) == "oh!EN"
    assert chunks[-1].finish_reason is FinishReason.LENGTH
    assert commands == []


def test_an_abort_flushes_what_was_held():
    stage = make_stage(stop=("END",))
    chunks, _ = push_all(stage, [event("oh EN"), TokenEvent("a", (), 2, finish_reason=FinishReason.ABORT, detail="gone")])
    assert text_of(chunks) == "oh EN"
    assert (chunks[-1].finish_reason, chunks[-1].detail) == (FinishReason.ABORT, "gone")


def test_tokens_after_the_stop_string_are_not_shown():
    logprobs = tuple(TokenLogprobs(ord(char), -1.0, 1, ()) for char in "a.bcd")
    (chunk,), commands = push_all(make_stage(stop=(".",)), [event("a.bcd", logprobs=logprobs)])
    assert (chunk.text, chunk.token_ids, chunk.num_generated_tokens) == ("a", (ord("a"), ord(".")), 2)
    assert chunk.logprobs == logprobs[:2]
    assert commands == [Stop("a", ".")]


def test_a_stop_string_completed_by_the_last_token_is_a_stop_and_needs_no_command():
    (chunk,), commands = push_all(make_stage(stop=(".",)), [event("a.", finish_reason=FinishReason.LENGTH)])
    assert (chunk.text, chunk.finish_reason, chunk.stop_reason) == ("a", FinishReason.STOP, ".")
    assert commands == []


def test_a_stop_string_in_the_flushed_text_counts():
    (chunk,), _ = push_all(make_stage(stop=("!",)), [event("a!", finish_reason=FinishReason.LENGTH)])
    assert (chunk.text, chunk.finish_reason, chunk.stop_reason) == ("a", FinishReason.STOP, "!")


def test_the_stop_token_is_reported_but_not_shown():
    (chunk,), _ = push_all(make_stage(), [event("ab", finish_reason=FinishReason.STOP, stop_reason=ord("b"))])
    assert (chunk.text, chunk.token_ids, chunk.stop_reason) == ("a", (ord("a"), ord("b")), ord("b"))
    assert chunk.num_generated_tokens == 2


def test_the_stop_token_is_shown_when_stops_are():
    stage = make_stage(include_stop_str_in_output=True)
    (chunk,), _ = push_all(stage, [event("ab", finish_reason=FinishReason.STOP, stop_reason=ord("b"))])
    assert chunk.text == "ab"


def test_stop_strings_do_not_count_before_min_tokens():
    chunks, commands = push_all(make_stage(stop=(".",), min_tokens=3), [event(char) for char in "a..b."])
    assert text_of(chunks) == "a..b"
    assert commands == [Stop("a", ".")]
    assert chunks[-1].num_generated_tokens == 5


def test_a_stop_string_may_begin_before_min_tokens_and_end_after():
    chunks, _ = push_all(make_stage(stop=("END",), min_tokens=3), [event(char) for char in "xEND"])
    assert text_of(chunks) == "x"


def test_events_after_the_end_are_dropped():
    stage = make_stage(stop=(".",))
    chunks, _ = push_all(stage, [event("a."), event("b"), TokenEvent("a", (), 2, finish_reason=FinishReason.STOP)])
    assert [chunk.finish_reason for chunk in chunks] == [FinishReason.STOP]


def test_an_id_in_flight_is_not_taken_twice():
    stage = make_stage("a")
    with pytest.raises(ValueError, match="in flight"):
        stage.add(Request("a", (1,), SamplingParams(), arrival_ns=0))


def test_a_request_whose_text_cannot_be_made_ends_alone(caplog):
    stage = make_stage("a", "b")
    output = stage.push([TokenEvent("a", (POISON,), 1), event("x", request_id="b")])
    bad, good = output.chunks
    assert (bad.finish_reason, bad.detail) == (FinishReason.ERROR, TEXT_FAILED)
    assert output.commands == [Stop("a", None, FinishReason.ERROR)], "it is counted as its client is told"
    assert (good.text, good.finish_reason) == ("x", None)
    assert "request a" in caplog.text


def test_fail_all_ends_those_still_in_flight_once():
    stage = make_stage("a", "b")
    stage.push([event("x", finish_reason=FinishReason.LENGTH)])
    (chunk,) = stage.fail_all("broken", at_ns=5)
    assert (chunk.request_id, chunk.finish_reason, chunk.detail, chunk.at_ns) == ("b", FinishReason.ERROR, "broken", 5)
    assert stage.fail_all("broken", at_ns=6) == []


def test_the_finish_chunk_tells_the_instants_of_the_request():
    stage = OutputStage(lambda _shown: Letters())
    request = Request("a", (1,), SamplingParams(), arrival_ns=0, num_cached_tokens=7)
    stage.add(request)
    request.first_scheduled_ns, request.first_token_ns = 3, 4
    (chunk,), _ = push_all(stage, [event("x", finish_reason=FinishReason.LENGTH)])
    assert (chunk.first_scheduled_ns, chunk.first_token_ns, chunk.num_cached_tokens) == (3, 4, 7)


def test_observers_hear_of_first_tokens_and_of_gaps():
    listener = Listener()
    stage = make_stage("a", "b", observer=listener)
    stage.push([event("x", at_ns=10), event("x", at_ns=10, request_id="b")])
    stage.push([event("xy", at_ns=25)])
    stage.push([TokenEvent("a", (), 30, finish_reason=FinishReason.ABORT), event("z", at_ns=30, request_id="b")])
    assert listener.first == ["a", "b"]
    assert listener.gaps_ns == [15, 20]


@given(
    st.text(alphabet="ab.!", max_size=20),
    st.lists(st.text(alphabet="ab.", min_size=1, max_size=4), max_size=3),
    st.lists(st.integers(1, 4), min_size=20, max_size=20),
    st.integers(0, 6),
)
def test_tokens_per_step_never_change_the_answer(text, stops, sizes, min_tokens):
    def answer(step_sizes: list[int]) -> tuple:
        stage = make_stage(stop=tuple(stops), min_tokens=min_tokens)
        events, start = [], 0
        for size in step_sizes:
            if start < len(text):
                events.append(event(text[start : start + size]))
                start += size
        events.append(TokenEvent("a", (), 9, finish_reason=FinishReason.LENGTH))
        chunks, _ = push_all(stage, events)
        last = chunks[-1]
        assert [chunk.finish_reason is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
        tokens = sum((chunk.token_ids for chunk in chunks), ())
        assert len(tokens) == last.num_generated_tokens
        return text_of(chunks), tokens, last.finish_reason, last.stop_reason

    assert answer(sizes) == answer([1] * len(text))


def test_requests_with_the_same_stop_strings_share_their_tree(monkeypatch: pytest.MonkeyPatch):
    """128 choices of one call must not build 128 automata on the engine thread."""
    made: list[tuple[str, ...]] = []

    class CountingTree(StopTree):
        def __init__(self, stops) -> None:
            made.append(stops)
            super().__init__(stops)

    monkeypatch.setattr("penstock.engine.output.StopTree", CountingTree)
    stage = make_stage("a", "b", "c", stop=("xy",))
    chunks, _ = push_all(stage, [event("qx", request_id="a"), event("x", request_id="b"), event("yx", request_id="c")])
    more, _ = push_all(stage, [event("y", request_id="a"), event("z", request_id="b"), event("y", request_id="c")])
    assert made == [("xy",)]
    assert [chunk.text for chunk in chunks] == ["q", "", "y"]
    assert [(chunk.text, chunk.stop_reason) for chunk in more] == [("", "xy"), ("xz", None), ("", "xy")]


# Lines


@pytest.mark.parametrize("size", [1, 2, 3, 100])
@pytest.mark.parametrize(
    ("text", "shown", "is_cut"),
    [
        ("f(\n    a,\n    b)\nc = 1", "f(\n    a,\n    b)", True),
        ("x\n\t   y\n \tz", "x\n\t   y", True),
        ("x\n\n    y", "x", True),
        ("x\n    y\n  ", "x\n    y\n  ", False),
        ("no line", "no line", False),
    ],
)
def test_an_answer_ends_before_a_line_that_is_indented_less(size, text, shown, is_cut):
    stage = make_stage(lines=LineLimits(min_indent=4))
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    chunks, commands = push_all(stage, [*map(event, pieces[:-1]), event(pieces[-1], finish_reason=FinishReason.LENGTH)])
    assert text_of(chunks) == shown
    ended = next(chunk for chunk in chunks if chunk.finish_reason is not None)
    assert (ended.finish_reason, ended.stop_reason) == (FinishReason.LENGTH, None)
    assert ended.num_generated_tokens == sum(len(chunk.token_ids) for chunk in chunks)
    if is_cut and size == 1:
        assert commands in ([Stop("a", None, FinishReason.LENGTH)], [])
        assert ended.num_generated_tokens < len(text) or not commands


def test_a_stop_string_comes_before_the_lines():
    stage = make_stage(lines=LineLimits(min_indent=4), stop=("\nEND",), include_stop_str_in_output=True)
    chunks, commands = push_all(stage, [event(char) for char in "a\n    b\nEND"])
    assert text_of(chunks) == "a\n    b\nEND"
    assert commands == [Stop("a", "\nEND")]
    # What the stop string held back is looked at, too, when it never came.
    stage = make_stage(lines=LineLimits(min_indent=4), stop=("\nEND",))
    chunks, commands = push_all(stage, [event(char) for char in "a\nEx"])
    assert text_of(chunks) == "a"
    assert commands == [Stop("a", None, FinishReason.LENGTH)]


def test_late_answers_end_once_they_have_a_line():
    def told(text, stops=()):
        stage = make_stage(lines=LineLimits(max_ns=10), stop=stops)
        chunks, commands = push_all(stage, [event(char, at_ns=100 + 4 * at) for at, char in enumerate(text)])
        return text_of(chunks), commands

    end = [Stop("a", None, FinishReason.LENGTH)]
    assert told("a\nbcde") == ("a\nbc", end)
    assert told("abcde\nfg") == ("abcde\n", end)
    assert told("abcdefgh") == ("abcdefgh", [])
    assert told("a\nbcde", stops=("cx",)) == ("a\nbc", end), "what a stop string held back is shown"


@given(text=st.text("ab!", min_size=1, max_size=12), at=st.integers(0, 12), stop=st.sampled_from([(), ("ab",), ("a!b", "bb")]))
def test_an_answer_that_another_engine_began_goes_on_as_if_it_had_not(text: str, at: int, stop: tuple[str, ...]) -> None:
    whole = make_stage(stop=stop, max_tokens=20)
    told = [chunk for letter in text for chunk in whole.push([event(letter)]).chunks]
    at = min(at, len(told) - 1, len(text) - 1)
    stage = OutputStage(lambda _shown: Letters())
    begun = Request("a", (1,), SamplingParams(stop=stop, max_tokens=20), arrival_ns=0)
    begun.output_token_ids.extend(map(ord, text[:at]))
    stage.add(begun)
    rest = [chunk for letter in text[at:] for chunk in stage.push([event(letter)]).chunks]
    assert rest == told[at:]
