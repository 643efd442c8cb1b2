"""The bytes of answers: every cut of the network, every framing, and what is no answer."""

import json

import pytest

from lab.canned import DONE, GOOD, HEAD, chunk, event, plain, stream, token, usage
from penstock.lab import answers
from penstock.lab.answers import Framing, MalformedAnswer


def fed(pieces):
    """The framing after pieces that came one nanosecond apart, and whether each ended the answer."""
    framing = Framing()
    return framing, [framing.feed(piece, now_ns) for now_ns, piece in enumerate(pieces, 1)]


def cut(data, size):
    return [data[at : at + size] for at in range(0, len(data), size)]


def test_a_stream_is_read_wherever_the_network_cuts_it():
    for size in range(1, len(GOOD) + 1):
        framing, ends = fed(cut(GOOD, size))
        assert ends == [False] * (len(ends) - 1) + [True], size
        found = answers.read(framing)
        assert (found.num_output_tokens, found.num_prompt_tokens, found.num_events) == (3, 2, 3)
        assert found.text == 'a"error"é\r\n\r\n'
        assert found.is_whole
        assert framing.is_kept_alive
        assert len(found.gaps_ns) == 2
        assert all(gap >= 0 for gap in found.gaps_ns)


def test_an_event_has_the_time_of_the_piece_that_completed_it():
    second = chunk(token("b"))
    pieces = [
        HEAD + chunk(token("a")),
        second[:-9],
        second[-9:],
        chunk(token("c")),
        chunk(usage()) + chunk(DONE) + b"0\r\n\r\n",
    ]
    found = answers.read(fed(pieces)[0])
    assert found.first_ns == 1
    assert list(found.gaps_ns) == [2, 1]


def test_events_may_share_a_chunk_and_their_lines_may_end_as_those_of_http():
    text = b": a comment\r\n\r\nevent: x\r\ndata: " + json.dumps({"choices": [{"text": "a"}]}).encode() + b"\r\n\r\n" + DONE
    for size in range(1, len(text) + 1):
        found = answers.read(fed([stream(*cut(text, size))])[0])
        assert (found.text, found.is_whole, found.num_output_tokens) == ("a", True, None)


def test_trailers_and_extensions_of_chunks_are_passed_over():
    answer = HEAD + b"3;name=value\r\n: x\r\n" + b"0\r\nExpires: never\r\n\r\n"
    for size in range(1, len(answer) + 1):
        framing, ends = fed(cut(answer, size))
        assert ends[-1]
        assert b"".join(framing.pieces) == b": x"


@pytest.mark.parametrize(("body", "num_events"), [("content", 2), ("reasoning_content", 2), ("reasoning", 2), ("refusal", 0)])
def test_thoughts_are_tokens_and_the_role_of_a_chat_is_none(body, num_events):
    events = [
        event({"choices": [{"delta": {"role": "assistant", "content": ""}}]}),
        *(event({"choices": [{"delta": {body: word}}]}) for word in "ab"),
        event({"choices": [{"delta": {}, "finish_reason": "length"}]}),
    ]
    pieces = [HEAD, *map(chunk, events), b"0\r\n\r\n"]
    found = answers.read(fed(pieces)[0])
    assert found.num_events == num_events
    assert found.is_whole, "the reason of the end is as good as [DONE]"
    assert found.first_ns == (3 if num_events else 2), "without any text, the first event with a choice counts"


def test_a_whole_answer_has_no_first_token():
    chat = plain({"choices": [{"message": {"content": "hi"}}], "usage": {"prompt_tokens": 4, "completion_tokens": 1}})
    found = answers.read(fed(cut(chat, 7))[0])
    assert (found.text, found.first_ns, found.num_prompt_tokens, found.num_output_tokens) == ("hi", None, 4, 1)
    assert found.is_whole


def test_an_embedding_is_an_answer_without_tokens():
    found = answers.read(fed([plain({"data": [{"embedding": [0.5]}], "usage": {"prompt_tokens": 3, "total_tokens": 3}})])[0])
    assert (found.is_whole, found.num_prompt_tokens, found.num_output_tokens) == (True, 3, 0)


def test_what_was_cached_and_how_long_it_queued_is_told():
    head = HEAD.replace(b"200 OK\r\n", b"200 OK\r\nServer-Timing: queue;dur=12.5, prefill;dur=30\r\n")
    used = {"prompt_tokens": 9, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 8}}
    framing, _ = fed([head + chunk(token("a")) + chunk(event({"choices": [], "usage": used})) + b"0\r\n\r\n"])
    assert answers.queue_ns(framing) == 12_500_000
    assert answers.read(framing).num_cached_tokens == 8
    assert answers.queue_ns(fed([GOOD])[0]) is None
    comments = chunk(b": keepalive\n\n") + chunk(b": server-timing queue;dur=12.5, prefill;dur=30\n\n" + token("a"))
    assert answers.queue_ns(fed([HEAD + comments + b"0\r\n\r\n"])[0]) == 12_500_000
    fake = chunk(event({"choices": [{"text": "\n: server-timing queue;dur=1"}]}))
    assert answers.queue_ns(fed([HEAD + fake + b"0\r\n\r\n"])[0]) is None


def test_an_answer_without_a_length_ends_with_the_connection():
    framing, ends = fed([b"HTTP/1.0 200 OK\r\nContent-Type: text/event-stream\r\n\r\n", token("a"), DONE])
    assert not any(ends)
    assert framing.close()
    assert not framing.is_kept_alive
    assert answers.read(framing).is_whole
    assert not fed([GOOD[:-1]])[0].close(), "a chunked one does not"
    assert not Framing().close()


def test_a_provisional_answer_is_passed_over():
    framing, ends = fed(cut(b"HTTP/1.1 100 Continue\r\n\r\n" + GOOD, 11))
    assert ends[-1]
    assert framing.status == 200


@pytest.mark.parametrize(
    ("head", "is_kept"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", True),
        (b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 0\r\n\r\n", False),
        (b"HTTP/1.0 200 OK\r\nContent-Length: 0\r\n\r\n", False),
        (b"HTTP/1.1 204 No Content\r\n\r\n", True),
    ],
)
def test_a_connection_is_kept_if_the_server_keeps_it(head, is_kept):
    framing, ends = fed([head])
    assert ends == [True]
    assert framing.is_kept_alive is is_kept


@pytest.mark.parametrize(
    "answer",
    [
        b"SSH-2.0-OpenSSH_9.2\r\n\r\n",
        HEAD + b"zz\r\n",
        plain(b"abc") + b"d",
        GOOD + b"d",
        b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * 20_000,
    ],
)
def test_what_is_no_answer_is_an_error(answer):
    with pytest.raises(MalformedAnswer):
        fed([answer])


@pytest.mark.parametrize(
    ("payloads", "error"),
    [
        ([token("a"), event({"error": {"message": "out of memory"}})], "out of memory"),
        ([token("a"), event({"error": "lost"})], "lost"),
        ([event(b"{")], "makes no sense"),
        ([event({"choices": [{}]})], "makes no sense"),
        ([event(b"7")], "makes no sense"),
    ],
)
def test_an_answer_without_sense_says_why(payloads, error):
    assert error in answers.read(fed([stream(*payloads)])[0]).error


def test_a_stream_that_broke_off_has_what_came():
    found = answers.read(fed([stream(token("a"), token("b"))[:-20]])[0])
    assert (found.num_events, found.is_whole, found.error) == (1, False, ""), "of the second a part is missing"


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
    assert answers.error_of(body if isinstance(body, bytes) else json.dumps(body).encode()) == message


@pytest.mark.parametrize("text", [["a"], 7, {"a": 1}, True])
def test_a_text_that_is_none_is_an_error_and_no_crash(text):
    for answer in (
        stream(token(text), DONE),
        plain({"choices": [{"message": {"content": text}}]}),
        plain({"choices": [{"text": text}]}),
    ):
        found = answers.read(fed([answer])[0])
        assert "where the text should be" in found.error
        assert found.text == ""


@pytest.mark.parametrize("count", ["5", 1e30, 10**18, -1, True, 2.5, [3]])
def test_a_count_of_tokens_that_is_none_is_an_error(count):
    for used in ({"prompt_tokens": count}, {"completion_tokens": count}, {"prompt_tokens_details": {"cached_tokens": count}}):
        found = answers.read(fed([plain({"choices": [{"text": "a"}], "usage": used})])[0])
        assert "no number of tokens" in found.error


def test_a_length_of_thousands_of_digits_is_malformed():
    with pytest.raises(MalformedAnswer, match="5000 digits"):
        fed([b"HTTP/1.1 200 OK\r\nContent-Length: " + b"9" * 5000 + b"\r\n\r\n"])


@pytest.mark.parametrize("at_once", [True, False])
def test_provisional_answers_are_passed_over_up_to_a_hundred(at_once):
    provisional = b"HTTP/1.1 100 Continue\r\n\r\n"
    framing, ends = fed([provisional * 100 + GOOD] if at_once else [*[provisional] * 100, GOOD])
    assert ends[-1]
    assert framing.status == 200
    with pytest.raises(MalformedAnswer, match="More than 100 provisional"):
        fed([provisional * 101 + GOOD] if at_once else [provisional] * 101)


@pytest.mark.parametrize("duration", [b"1.2.3", b"9" * 400, b".", b"1."])
def test_a_time_in_the_queue_that_is_no_number_is_not_told(duration):
    framing, _ = fed([b"HTTP/1.1 200 OK\r\nServer-Timing: queue;dur=" + duration + b"\r\nContent-Length: 0\r\n\r\n"])
    assert answers.queue_ns(framing) is None


@pytest.mark.parametrize("size", [b"-a", b"+5", b"0x5", b"1_0", b"", b" 5", b"f" * 5000, b"5" * 70_000])
def test_a_chunk_s_size_has_hexadecimal_digits_only(size):
    with pytest.raises(MalformedAnswer):
        fed([HEAD + size + b"\r\n", b"hello\r\n"])


def test_the_first_line_of_a_chunk_has_an_end():
    with pytest.raises(MalformedAnswer, match="does not end"):
        fed([HEAD, b"5;" + b"x" * 70_000])


def test_the_bytes_of_the_body_are_counted_as_they_come():
    framing, _ = fed(cut(GOOD, 5))
    assert framing.num_bytes == sum(map(len, framing.pieces)) > 0


def test_an_error_nested_too_deep_to_be_written_is_told_as_it_came():
    assert answers.error_of(b'{"error":' + b'{"a":' * 1000 + b"1" + b"}" * 1001).startswith('{"error"')
