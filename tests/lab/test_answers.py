"""The content of answers: every cut of the network, every dialect, and bytes without sense."""

import json

import pytest

from penstock.lab.answers import Answer, error_of
from support.lab.canned import DONE, event, token, usage

GOOD = token("a") + token('"error"') + token("é\r\n\r\n") + usage() + DONE


def answer_of(pieces, status=200, headers=()):
    """The answer after pieces that came one nanosecond apart."""
    answer = Answer()
    answer.status = status
    for name, value in headers:
        answer.header(name, value)
    for now_ns, piece in enumerate(pieces, 1):
        answer.feed(piece, now_ns)
    answer.end()
    return answer


def whole(body, **options):
    return answer_of([body if isinstance(body, bytes) else json.dumps(body).encode()], **options)


def cut(data, size):
    return [data[at : at + size] for at in range(0, len(data), size)]


def test_a_stream_is_read_wherever_the_network_cuts_it():
    for size in range(5, len(GOOD) + 1):
        found = answer_of(cut(GOOD, size))
        assert (found.num_output_tokens, found.num_prompt_tokens, found.num_events) == (3, 2, 3)
        assert "".join(found.texts) == 'a"error"é\r\n\r\n'
        assert found.is_whole
        assert len(found.gaps_ns) == 2
        assert all(gap >= 0 for gap in found.gaps_ns)


def test_an_event_has_the_time_of_the_piece_that_completed_it():
    second = token("b")
    found = answer_of([token("a"), second[:-9], second[-9:], token("c"), usage() + DONE])
    assert found.first_ns == 1
    assert list(found.gaps_ns) == [2, 1]


def test_events_may_share_a_piece_and_their_lines_may_end_as_those_of_http():
    text = b": a comment\r\n\r\nevent: x\r\ndata: " + json.dumps({"choices": [{"text": "a"}]}).encode() + b"\r\n\r\n" + DONE
    for size in range(1, len(text) + 1):
        found = answer_of(cut(text, size), headers=[(b"content-type", b"text/event-stream; charset=utf-8")])
        assert ("".join(found.texts), found.is_whole, found.num_output_tokens) == ("a", True, None)


@pytest.mark.parametrize(("body", "num_events"), [("content", 2), ("reasoning_content", 2), ("reasoning", 2), ("refusal", 0)])
def test_thoughts_are_tokens_and_the_role_of_a_chat_is_none(body, num_events):
    found = answer_of(
        [
            event({"choices": [{"delta": {"role": "assistant", "content": ""}}]}),
            *(event({"choices": [{"delta": {body: word}}]}) for word in "ab"),
            event({"choices": [{"delta": {}, "finish_reason": "length"}]}),
        ]
    )
    assert found.num_events == num_events
    assert found.is_whole, "the reason of the end is as good as [DONE]"
    assert found.first_ns == (2 if num_events else 1), "without any text, the first event with a choice counts"


def test_a_whole_answer_has_no_first_token():
    chat = json.dumps({"choices": [{"message": {"content": "hi"}}], "usage": {"prompt_tokens": 4, "completion_tokens": 1}})
    found = answer_of(cut(chat.encode(), 7))
    assert (found.texts, found.first_ns, found.num_prompt_tokens, found.num_output_tokens) == (["hi"], None, 4, 1)
    assert found.is_whole


def test_an_embedding_is_an_answer_without_tokens():
    found = whole({"data": [{"embedding": [0.5]}], "usage": {"prompt_tokens": 3, "total_tokens": 3}})
    assert (found.is_whole, found.num_prompt_tokens, found.num_output_tokens) == (True, 3, 0)


def test_cached_tokens_and_the_time_in_the_queue_are_taken():
    used = {"prompt_tokens": 9, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 8}}
    timing = (b"server-timing", b"queue;dur=12.5, prefill;dur=30")
    found = answer_of([token("a"), event({"choices": [], "usage": used})], headers=[timing])
    assert found.queue_ns == 12_500_000
    assert found.num_cached_tokens == 8
    assert answer_of([GOOD]).queue_ns is None
    assert answer_of([GOOD]).num_cached_tokens is None
    comments = b": keepalive\n\n: server-timing queue;dur=12.5, prefill;dur=30\n\n"
    assert answer_of([comments + token("a")]).queue_ns == 12_500_000
    assert answer_of([event({"choices": [{"text": "\n: server-timing queue;dur=1"}]})]).queue_ns is None


@pytest.mark.parametrize("duration", [b"1.2.3", b"9" * 400, b".", b"1."])
def test_a_time_in_the_queue_that_is_no_number_is_passed_over(duration):
    assert answer_of([], headers=[(b"server-timing", b"queue;dur=" + duration)]).queue_ns is None


def test_the_server_says_how_long_to_wait():
    assert answer_of([], headers=[(b"retry-after", b"9"), (b"retry-after-ms", b"150")]).wait_ns == 150_000_000
    assert answer_of([], headers=[(b"retry-after-ms", b"150"), (b"retry-after", b"9")]).wait_ns == 150_000_000
    assert answer_of([], headers=[(b"retry-after", b"9")]).wait_ns == 9_000_000_000
    assert answer_of([], headers=[(b"retry-after", b"Tue, 24 Nov 2026 00:00:00 GMT")]).wait_ns is None


@pytest.mark.parametrize(
    ("payloads", "error"),
    [
        ([token("a"), event({"error": {"message": "out of memory"}})], "out of memory"),
        ([token("a"), event({"error": "lost"})], "lost"),
        ([event(b"{")], "is malformed"),
        ([event({"choices": [{}]})], "is malformed"),
        ([event(b"7")], "is malformed"),
    ],
)
def test_an_answer_without_sense_says_why(payloads, error):
    assert error in answer_of(payloads).error


def test_a_stream_that_broke_off_has_what_came():
    found = answer_of([token("a") + token("b")[:-20]])
    assert (found.num_events, found.is_whole, found.error) == (1, False, ""), "of the second a part is missing"


def test_some_servers_leave_out_the_last_blank_line():
    assert answer_of([token("a") + DONE.rstrip()]).is_whole


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"error": {"message": "no such model", "code": 404}}, "no such model"),
        ({"error": "full"}, "full"),
        (b"<html>Bad Gateway", "<html>Bad Gateway"),
        (b"", ""),
        (b"x" * 10_000, "x" * 300),
    ],
)
def test_an_error_is_told_in_the_server_s_words(body, message):
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    assert error_of(data) == message
    assert whole(data, status=500).error == message


@pytest.mark.parametrize("text", [["a"], 7, {"a": 1}, True])
def test_a_text_that_is_none_is_an_error_and_no_crash(text):
    for found in (
        answer_of([token(text), DONE]),
        whole({"choices": [{"message": {"content": text}}]}),
        whole({"choices": [{"text": text}]}),
    ):
        assert "where the text should be" in found.error
        assert found.texts == []


@pytest.mark.parametrize("count", ["5", 1e30, 10**18, -1, True, 2.5, [3]])
def test_a_count_of_tokens_that_is_none_is_an_error(count):
    for used in ({"prompt_tokens": count}, {"completion_tokens": count}, {"prompt_tokens_details": {"cached_tokens": count}}):
        assert "not a number of tokens" in whole({"choices": [{"text": "a"}], "usage": used}).error


def test_an_error_nested_too_deep_to_be_written_is_told_as_it_came():
    assert error_of(b'{"error":' + b'{"a":' * 100_000 + b"1" + b"}" * 100_001).startswith('{"error"')
