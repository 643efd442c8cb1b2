"""The HTTP client against sockets that answer with canned bytes: what it sends, when, and what it makes of the answers."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import socket
import ssl
import subprocess
import threading
import time
from dataclasses import replace

import pytest

from penstock.lab import client
from penstock.lab.client import SendOptions, send
from penstock.lab.pacing import Pace, WarmUp
from penstock.lab.records import End
from penstock.lab.target import Endpoint, Questions, ServerTokenizer, Target
from penstock.lab.workload import Job, Workload
from penstock.types.errors import PenstockError
from support.lab.canned import CLOSE, DONE, GOOD, HEAD, CannedServer, answer_of, chunk, event, plain, stream, token, usage
from support.work_time import thread_s

MS = 1_000_000


def job(prompt="Once upon", num_output_tokens=3, arrival_ns=0, **changes):
    return Job(arrival_ns=arrival_ns, num_prompt_tokens=2, num_output_tokens=num_output_tokens, prompt=prompt, **changes)


def workload(*jobs):
    return Workload(name="test", jobs=jobs)


@pytest.fixture
def serve():
    """Starts a server that answers with what `respond(request)` gives, or always with the same bytes."""
    servers = []

    def start(respond, **options):
        given = respond if callable(respond) else lambda _: [respond]
        servers.append(CannedServer(given, **options))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


def target(server, **changes):
    return Target(url=server.url, model="m", **changes)


def only(sent):
    assert len(sent.records) == 1
    return sent.records[0]


def test_a_closed_loop_asks_every_job_once_in_order_over_one_connection(serve):
    server = serve(GOOD)
    sent = send(workload(*(job(f"prompt {k}") for k in range(20))), target(server, api_key="secret"), pace=Pace(concurrency=1))
    assert [request.json["prompt"] for request in server.requests] == [f"prompt {k}" for k in range(20)]
    assert server.num_connections == 1
    first = server.requests[0]
    assert first.line == "POST /v1/completions HTTP/1.1"
    assert first.headers["authorization"] == "Bearer secret"
    assert first.headers["host"] == server.url.removeprefix("http://")
    assert {name: first.json[name] for name in ("model", "max_tokens", "temperature", "ignore_eos", "stream")} == {
        "model": "m",
        "max_tokens": 3,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    assert [record.index for record in sent.records] == list(range(20))
    for record in sent.records:
        assert (record.end, record.http_status, record.num_output_tokens, record.num_prompt_tokens) == (End.OK, 200, 3, 2)
        assert record.intended_ns <= record.sent_ns <= record.first_ns <= record.ended_ns <= sent.duration_ns
        assert record.first_ns + sum(record.gaps_ns) <= record.ended_ns
        assert record.text == ""
    assert sent.client_cpu_s > 0


def test_as_many_streams_as_the_concurrency_and_no_more(serve):
    together = threading.Barrier(4, timeout=30)

    def respond(_):
        together.wait()
        yield GOOD

    server = serve(respond)
    assert len(send(workload(*[job()] * 40), target(server), pace=Pace(concurrency=4)).records) == 40
    assert server.max_running == 4
    assert server.num_connections == 4


def test_an_open_loop_counts_from_the_instant_at_which_a_request_was_due(serve):
    """The second waits for the first, as only one may be under way: its latency has that wait."""
    release = threading.Event()

    def respond(request):
        if request.json["prompt"] == "first":
            release.wait(30)
        yield GOOD

    server = serve(respond)
    threading.Timer(0.2, release.set).start()
    jobs = workload(job("first", arrival_ns=10 * MS), job("second", arrival_ns=20 * MS))
    first, second = send(jobs, target(server), pace=Pace(max_concurrency=1)).records
    assert (first.intended_ns, second.intended_ns) == (10 * MS, 20 * MS)
    assert first.sent_ns >= 10 * MS
    assert second.sent_ns >= first.ended_ns >= 150 * MS


def test_a_large_prompt_is_sent_whole(serve):
    server = serve(GOOD)
    prompt = "word " * 1_000_000
    only(send(workload(job(prompt)), target(server)))
    assert server.requests[0].json["prompt"] == prompt


def test_token_ids_are_sent_as_such(serve):
    server = serve(GOOD)
    only(send(workload(Job(arrival_ns=0, num_prompt_tokens=2, num_output_tokens=3, prompt_token_ids=(5, 6))), target(server)))
    assert server.requests[0].json["prompt"] == [5, 6]


@pytest.mark.parametrize(
    ("answer", "end", "error", "status"),
    [
        (stream(token("a"), usage(1), DONE), End.FAILED, "1 token instead of 3", 200),
        (stream(token("a"), event({"error": {"message": "out of memory"}})), End.FAILED, "out of memory", 200),
        (stream(token("a"), token("b")), End.FAILED, "broke off after 2 events", 200),
        (plain({"error": {"message": "queue full"}}, "429 Too Many Requests"), End.REFUSED, "queue full", 429),
        (plain({"error": {"message": "draining"}}, "503 Unavailable"), End.REFUSED, "draining", 503),
        (plain({"error": {"message": "no such model"}}, "404 Not Found"), End.FAILED, "no such model", 404),
        (plain(b"oops", "500 Internal Server Error"), End.FAILED, "oops", 500),
        (b"SSH-2.0-OpenSSH_9.2\r\n\r\n", End.FAILED, "not HTTP/1.1", 0),
    ],
)
def test_an_answer_that_is_no_good_is_a_record_with_a_reason_and_the_run_goes_on(serve, answer, end, error, status):
    server = serve(lambda request: [answer if request.json["prompt"] == "bad" else GOOD])
    bad, good = send(workload(job("bad"), job("good")), target(server), pace=Pace(concurrency=1)).records
    assert (bad.end, bad.http_status) == (end, status)
    assert error in bad.error
    assert good.end is End.OK


@pytest.mark.parametrize(
    ("pieces", "error"),
    [
        ([CLOSE], "closed the connection"),
        ([HEAD + chunk(token("a")), CLOSE], "closed the connection"),
    ],
)
def test_a_connection_that_breaks_is_a_failure(serve, pieces, error):
    server = serve(lambda _: pieces)
    record = only(send(workload(job()), target(server)))
    assert record.end is End.FAILED
    assert error in record.error
    assert len(server.requests) == 1, "nothing is sent again that a server may have begun"


def test_a_server_that_closes_idle_connections_loses_no_request(serve):
    """Every second request meets a connection that the server has just closed, and is sent again on another."""
    seen = []

    def respond(request):
        seen.append(request.connection_number)
        yield GOOD
        if len(seen) % 2:
            yield CLOSE

    server = serve(respond)
    sent = send(workload(*(job(f"{k}") for k in range(20))), target(server), pace=Pace(concurrency=1))
    assert [record.end for record in sent.records] == [End.OK] * 20
    assert server.num_connections > 5


def test_a_request_that_a_server_worked_on_is_not_sent_again(serve):
    """A kept connection that ends later, without a byte, is an answer that failed."""

    def respond(_):
        if len(server.requests) == 2:
            threading.Event().wait(0.3)
            yield CLOSE
        yield GOOD

    server = serve(respond)
    sent = send(workload(job(), job()), target(server), pace=Pace(concurrency=1))
    assert [record.end for record in sent.records] == [End.OK, End.FAILED]
    assert len(server.requests) == 2


def test_a_return_that_finds_no_server_ends_when_it_failed():
    refusal = plain({"error": {"message": "later"}}, "429 Too Many Requests", "Retry-After: 1\r\nConnection: close\r\n")
    listener = socket.create_server(("127.0.0.1", 0))

    def refuse_once():
        connection, _ = listener.accept()
        listener.close()
        with connection:
            connection.recv(1 << 16)
            connection.sendall(refusal)

    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    thread = threading.Thread(target=refuse_once)
    thread.start()
    record = only(send(workload(job()), Target(url=url, model="m"), options=SendOptions(max_returns=1)))
    thread.join()
    assert record.end is End.FAILED
    assert record.ended_ns >= 1000 * MS, "the wait before the return is a part of it"


@pytest.mark.parametrize("status", ["500 Internal Server Error", "302 Found"])
def test_a_failure_without_words_has_its_status(serve, status):
    server = serve(lambda _: [f"HTTP/1.1 {status}\r\nContent-Length: 0\r\n\r\n".encode()])
    assert only(send(workload(job()), target(server))).error == f"The status is {status[:3]}."


def test_a_connection_that_is_never_made_is_silence():
    with socket.socket() as full, contextlib.ExitStack() as stack:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        for _ in range(4):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(full.getsockname())
        url = f"http://127.0.0.1:{full.getsockname()[1]}"
        record = only(send(workload(job()), Target(url=url, model="m"), options=SendOptions(silence_s=0.2)))
    assert (record.end, record.error) == (End.FAILED, "No connection could be opened within 0.2 s.")


def test_an_early_refusal_is_read_though_the_request_is_not_all_sent(serve):
    """The server answers after the head, and closes."""

    class Early(CannedServer):
        def answer_one(self, connection, number):
            connection.recv(1 << 10)
            connection.sendall(plain({"error": {"message": "too large"}}, "413 Content Too Large", "Connection: close\r\n"))
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(1 << 16):
                pass
            return False

    server = Early(None)
    record = only(send(workload(job("word " * 2_000_000)), target(server)))
    server.close()
    assert (record.end, record.http_status, record.error) == (End.FAILED, 413, "too large")


def test_requests_to_a_server_that_has_gone_fail_one_by_one():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    sent = send(workload(job(), job()), Target(url=url))
    assert [record.end for record in sent.records] == [End.FAILED] * 2
    assert "refused" in sent.records[0].error


def test_silence_is_a_failure_and_a_slow_answer_is_none(serve):
    gone = threading.Event()

    def respond(request):
        if request.json["prompt"] == "silent":
            gone.wait(30)
            return
        yield HEAD
        for word in "abc":
            gone.wait(0.15)
            yield chunk(token(word))
        yield chunk(usage()) + chunk(DONE) + b"0\r\n\r\n"

    server = serve(respond)
    silent, slow = send(workload(job("silent"), job("slow")), target(server), options=SendOptions(silence_s=0.3)).records
    gone.set()
    assert (silent.end, silent.error) == (End.FAILED, "No byte arrived for 0.3 s.")
    assert slow.end is End.OK
    assert slow.ended_ns - slow.sent_ns > 400 * MS


def test_a_client_that_goes_away_after_some_time_closes_its_connection(serve):
    gone = threading.Event()

    def respond(_):
        yield HEAD + chunk(token("a"))
        gone.wait(30)

    server = serve(respond)
    record = only(send(workload(job(arrival_ns=50 * MS, cancelled_ns=200 * MS)), target(server)))
    gone.set()
    assert record.end is End.CANCELLED
    assert 200 * MS <= record.ended_ns < 2000 * MS
    assert record.num_output_tokens == 1
    assert record.error == ""


@pytest.mark.parametrize("endpoint", [Endpoint.COMPLETIONS, Endpoint.CHAT])
def test_a_client_that_goes_away_after_some_tokens_has_seen_those(serve, endpoint):
    gone = threading.Event()
    is_chat = endpoint is Endpoint.CHAT
    role = chunk(event({"choices": [{"delta": {"role": "assistant", "content": ""}}]})) if is_chat else b""
    word = chunk(event({"choices": [{"delta": {"content": "a"}}]})) if is_chat else chunk(token("a"))

    def respond(_):
        yield HEAD + role + word
        yield word
        gone.wait(30)

    server = serve(respond)
    record = only(send(workload(job(cancelled_after_tokens=2)), target(server, endpoint=endpoint)))
    gone.set()
    assert (record.end, record.num_output_tokens) == (End.CANCELLED, 2)


def test_a_client_that_goes_away_leaves_in_time_though_several_tokens_come_at_once(serve):
    gone = threading.Event()

    def several(text, num_tokens):
        return chunk(event({"choices": [{"text": text}], "usage": {"prompt_tokens": 2, "completion_tokens": num_tokens}}))

    def respond(request):
        assert request.json["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}
        yield HEAD + several("abc", 3)
        yield several("def", 6)
        gone.wait(30)
        yield CLOSE

    sent = send(workload(job(num_output_tokens=9, cancelled_after_tokens=5)), target(serve(respond)))
    gone.set()
    assert (only(sent).end, only(sent).num_output_tokens) == (End.CANCELLED, 6)
    assert sent.notes == ()


def test_a_client_that_should_have_left_and_did_not_is_noted(serve):
    """The server sends three tokens at once, and counts them at the end."""
    server = serve(stream(token("abc"), usage(), DONE))
    sent = send(workload(job(cancelled_after_tokens=2), job()), target(server), pace=Pace(concurrency=1))
    assert [record.end for record in sent.records] == [End.OK] * 2
    assert sent.notes[0].startswith("1 client that should have left got the whole answer")
    assert server.requests[1].json["stream_options"] == {"include_usage": True}, "only clients that leave need counts"


def test_a_client_that_went_away_while_it_waited_sends_nothing(serve):
    server = serve(GOOD)
    release = threading.Event()

    def respond(_):
        release.wait(30)
        yield GOOD

    server = serve(respond)
    threading.Timer(0.2, release.set).start()
    jobs = workload(job("first"), job("second", arrival_ns=MS, cancelled_ns=2 * MS))
    _, second = send(jobs, target(server), pace=Pace(max_concurrency=1)).records
    assert second.end is End.CANCELLED
    assert second.first_ns is None
    assert [request.json["prompt"] for request in server.requests] == ["first"]


def test_a_conversation_is_sent_again_with_its_answers(serve):
    server = serve(lambda request: [answer_of(f"<{len(server.requests)}", ">")])
    jobs = workload(job("hi ", 2), job("and ", 2, after=0), job("more ", 2, after=1), job("other ", 2, after=0))
    sent = send(jobs, target(server), pace=Pace(concurrency=1), options=SendOptions(keeps_text=True))
    prompts = {request.json["prompt"] for request in server.requests}
    first, second, third, other = sent.records
    assert prompts == {"hi ", "hi <1>and ", "hi <1>other ", f"hi <1>and {second.text}more "}
    assert (first.text, third.end, other.end) == ("<1>", End.OK, End.OK)


def test_a_conversation_of_a_chat_has_roles(serve):
    def respond(_):
        yield stream(event({"choices": [{"delta": {"content": "yes"}}]}), usage(1), DONE)

    server = serve(respond)
    jobs = workload(job("a", 1), job("b", 1, arrival_ns=30 * MS, after=0))
    before, after = send(jobs, target(server, endpoint=Endpoint.CHAT)).records
    assert server.requests[1].line == "POST /v1/chat/completions HTTP/1.1"
    assert [(said["role"], said["content"]) for said in server.requests[1].json["messages"]] == [
        ("user", "a"),
        ("assistant", "yes"),
        ("user", "b"),
    ]
    assert after.intended_ns == before.ended_ns + 30 * MS
    assert after.sent_ns >= after.intended_ns


def test_turns_after_a_failure_are_failures_that_say_so(serve):
    server = serve(stream(token("a"), event({"error": {"message": "out of memory"}})))
    jobs = workload(job("a"), job("b", after=0), job("c", after=1))
    first, second, third = send(jobs, target(server)).records
    assert first.error == "out of memory"
    assert second.error == third.error == "The turn before it had no answer."
    assert len(server.requests) == 1


def test_what_is_not_streamed_has_an_end_and_no_first_token(serve):
    server = serve(plain({"choices": [{"text": "a b c"}], "usage": {"prompt_tokens": 2, "completion_tokens": 3}}))
    record = only(send(workload(job()), target(server, stream=False)))
    assert (record.end, record.first_ns, record.num_output_tokens) == (End.OK, None, 3)
    assert "stream" not in server.requests[0].json


def test_embeddings_are_asked_with_input_and_nothing_of_answers(serve):
    server = serve(plain({"data": [{"embedding": [0.1]}], "usage": {"prompt_tokens": 2, "total_tokens": 2}}))
    record = only(send(workload(job("hello")), target(server, endpoint=Endpoint.EMBEDDINGS)))
    assert server.requests[0].line == "POST /v1/embeddings HTTP/1.1"
    assert server.requests[0].json == {"model": "m", "input": "hello"}
    assert (record.end, record.num_prompt_tokens, record.num_output_tokens) == (End.OK, 2, 0)


def test_texts_of_one_request_for_embeddings_are_a_list(serve):
    server = serve(plain({"data": [{"embedding": [0.1]}, {"embedding": [0.2]}], "usage": {"prompt_tokens": 4}}))
    record = only(send(workload(replace(job(), texts=("a", "b"))), target(server, endpoint=Endpoint.EMBEDDINGS)))
    assert server.requests[0].json == {"model": "m", "input": ["a", "b"]}
    assert (record.end, record.num_prompt_tokens) == (End.OK, 4)
    with pytest.raises(PenstockError, match="list of texts"):
        send(workload(replace(job(), texts=("a",))), target(server))


def test_fields_are_added_replaced_and_left_out(serve):
    server = serve(stream(token("a"), usage(1), DONE))
    extra = {"top_p": 0.5, "temperature": 0.7, "ignore_eos": None}
    record = only(send(workload(job()), target(server, extra_body=extra)))
    body = server.requests[0].json
    assert (body["top_p"], body["temperature"], "ignore_eos" in body) == (0.5, 0.7, False)
    assert record.end is End.OK, "without ignore_eos an answer may be shorter"


def test_tenants_priorities_and_deadlines_are_headers(serve):
    server = serve(GOOD)
    jobs = workload(job(tenant="a", priority=3, arrival_ns=MS, deadline_ns=5001 * MS), job(arrival_ns=2 * MS))
    first, _ = send(jobs, target(server)).records
    by_tenant = {request.headers.get("x-tenant"): request.headers for request in server.requests}
    assert by_tenant["a"]["x-priority"] == "3"
    assert 4000 < int(by_tenant["a"]["x-deadline-ms"]) <= 5000
    assert "x-deadline-ms" not in by_tenant[None]
    assert first.tenant == "a"


def test_a_tenant_s_name_can_not_break_the_request(serve):
    server = serve(GOOD)
    only(send(workload(job(tenant="a\r\nX-Evil: é")), target(server)))
    headers = server.requests[0].headers
    assert headers["x-tenant"] == "a%0D%0AX-Evil:%20%C3%A9"
    assert "x-evil" not in headers


def test_an_answer_without_end_is_a_failure(serve, monkeypatch):
    monkeypatch.setattr(client, "MAX_ANSWER_BYTES", 1 << 20)

    def respond(_):
        yield HEAD
        while True:
            yield chunk(token("word " * 1000))

    record = only(send(workload(job()), target(serve(respond))))
    assert (record.end, record.error) == (End.FAILED, "The answer has more than 1 MiB.")


@pytest.mark.parametrize(
    "answer",
    [
        stream(token(["a"]), DONE),
        plain({"choices": [{"text": 7}], "usage": {"completion_tokens": 3}}),
        plain({"choices": [{"text": "a"}], "usage": {"completion_tokens": "3"}}),
        plain({"choices": [{"text": "a"}], "usage": {"completion_tokens": 1e30}}),
        b"HTTP/1.1 200 OK\r\nContent-Length: " + b"9" * 5000 + b"\r\n\r\n",
        plain(b"", headers="Server-Timing: queue;dur=1.2.3\r\n"),
        plain(b'{"error":' + b'{"a":' * 1000 + b"1" + b"}" * 1001),
        plain(b"[" * 5000),
    ],
)
def test_no_answer_ends_the_run(serve, answer):
    server = serve(lambda request: [answer if request.json["prompt"] == "bad" else GOOD])
    sent = send(workload(job("bad"), job()), target(server), pace=Pace(concurrency=1))
    assert [record.end for record in sent.records] == [End.FAILED, End.OK]
    assert sent.records[0].error


def test_what_is_no_answer_is_not_asked_for_again(serve):
    server = serve(lambda _: [GOOD if len(server.requests) == 1 else b"SSH-2.0-OpenSSH_9.2\r\n\r\n"])
    sent = send(workload(job(), job()), target(server), pace=Pace(concurrency=1))
    assert [record.end for record in sent.records] == [End.OK, End.FAILED]
    assert len(server.requests) == 2, "the connection was kept, and not closed as idle"


@pytest.mark.parametrize(
    "pieces",
    [
        [b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" + GOOD],
        [b"HTTP/1.0 200 OK\r\n\r\n" + token("a"), token("b") + token("c") + usage() + DONE, CLOSE],
        [HEAD + chunk(token("a") + token("b") + token("c") + usage() + DONE) + b"0;x=y\r\nExpires: never\r\n\r\n"],
    ],
)
def test_answers_end_as_http_says(serve, pieces):
    record = only(send(workload(job()), target(serve(lambda _: pieces))))
    assert (record.end, record.num_output_tokens, record.http_status) == (End.OK, 3, 200)


def test_the_warm_up_is_sent_and_has_no_records(serve):
    server = serve(GOOD)
    sent = send(
        workload(*(job(f"{k}") for k in range(5))), target(server), pace=Pace(concurrency=1), warm_up=WarmUp(num_jobs=2)
    )
    assert len(server.requests) == 5
    assert [record.index for record in sent.records] == [2, 3, 4]
    assert sent.num_warm_up == 2


def test_tokens_that_no_server_counts_are_events_and_it_is_said(serve):
    server = serve(stream(token("a"), token("b"), DONE))
    sent = send(workload(job()), target(server))
    assert (only(sent).num_output_tokens, only(sent).num_prompt_tokens, only(sent).end) == (2, 2, End.OK)
    assert "did not count the tokens of 1 answer" in sent.notes[0]


def test_an_interruption_ends_the_run_with_what_there_is(serve):
    release = threading.Event()

    def respond(request):
        if request.json["prompt"] == "2":
            os.kill(os.getpid(), signal.SIGINT)  # the main thread, which is the client, gets it
            release.wait(30)
        yield GOOD

    server = serve(respond)
    sent = send(workload(*(job(f"{k}") for k in range(9))), target(server), pace=Pace(concurrency=1))
    release.set()
    assert [record.index for record in sent.records] == [0, 1]
    assert [record.index for record in sent.unfinished] == [2]
    assert sent.num_unsent == 6
    assert gc.isenabled()


def test_a_run_ends_when_its_time_is_over(serve):
    gone = threading.Event()

    def respond(_):
        yield HEAD + chunk(token("a"))
        gone.wait(30)

    server = serve(respond)
    jobs = workload(job(), job(arrival_ns=3600 * 10**9))
    sent = send(jobs, target(server), options=SendOptions(max_s=0.2))
    gone.set()
    assert sent.records == []
    (record,) = sent.unfinished
    assert (record.end, record.num_output_tokens, record.http_status) == (End.CANCELLED, 1, 200)
    assert record.ended_ns >= 200 * MS
    assert sent.num_unsent == 1


def test_a_client_that_is_refused_comes_back_as_it_was_told(serve, monkeypatch):
    monkeypatch.setattr(client, "MIN_WAIT_NS", 0)
    refused = plain({"error": {"message": "full"}}, "429 Too Many Requests", "Retry-After: 9\r\nRetry-After-Ms: 150\r\n")
    server = serve(lambda _: [refused if len(server.requests) < 3 else GOOD])
    record = only(send(workload(job()), target(server), options=SendOptions(max_returns=2)))
    assert record.end is End.OK
    assert record.ended_ns - record.sent_ns >= 300 * MS  # it was sent on time; waiting was the server's wish
    assert record.intended_ns == 0
    assert len(server.requests) == 3


def test_a_client_that_is_told_to_come_back_at_once_waits_and_gives_up(serve, monkeypatch):
    assert client.MIN_WAIT_NS == 10**9
    monkeypatch.setattr(client, "MIN_WAIT_NS", 30 * MS)
    server = serve(plain({"error": {"message": "full"}}, "429 Too Many Requests", "Retry-After: 0\r\n"))
    record = only(send(workload(job()), target(server), options=SendOptions(max_returns=3)))
    assert (record.end, record.error) == (End.REFUSED, "full")
    assert record.ended_ns - record.sent_ns >= 90 * MS
    assert len(server.requests) == 4


def test_a_client_that_comes_back_has_less_time_left(serve, monkeypatch):
    monkeypatch.setattr(client, "MIN_WAIT_NS", 300 * MS)
    refused = plain({"error": {}}, "503 Unavailable", "Retry-After: 0\r\n")
    server = serve(lambda _: [refused if len(server.requests) < 2 else GOOD])
    only(send(workload(job(deadline_ns=5000 * MS)), target(server), options=SendOptions(max_returns=2)))
    before, after = server.requests
    assert int(before.headers["x-deadline-ms"]) - int(after.headers["x-deadline-ms"]) >= 299
    assert after.body == before.body


def test_a_host_with_several_addresses_is_asked_at_the_one_that_answers(serve, monkeypatch):
    """The server listens at 127.0.0.1 alone."""
    server = serve(GOOD)
    port = int(server.url.rpartition(":")[2])
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (host, port)) for host in ("127.0.0.2", "127.0.0.1")]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    assert only(send(workload(job()), Target(url=f"http://several:{port}"))).end is End.OK
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found[:1])
    assert only(send(workload(job()), Target(url=f"http://several:{port}"))).end is End.FAILED


def test_a_client_goes_away_while_it_waits_to_come_back(serve):
    server = serve(plain({"error": {}}, "503 Unavailable", "Retry-After: 3600\r\n"))
    record = only(send(workload(job(cancelled_ns=100 * MS)), target(server), options=SendOptions(max_returns=2)))
    assert record.end is End.CANCELLED
    assert len(server.requests) == 1


@pytest.mark.parametrize("told", ["", "Retry-After: 3601\r\n", "Retry-After: 999999999\r\n", "Retry-After: 9999999999\r\n"])
def test_a_refusal_for_longer_than_an_hour_or_nobody_knows_how_long_is_one(serve, told):
    server = serve(plain({"error": {"message": "full"}}, "429 Too Many Requests", told))
    assert only(send(workload(job()), target(server), options=SendOptions(max_returns=2))).end is End.REFUSED


def test_each_end_is_told(serve):
    server = serve(lambda request: [GOOD if request.json["prompt"] == "a" else stream()])
    ends = []
    jobs = workload(job("a"), job("b"), job("c", after=1))
    send(jobs, target(server), on_end=lambda: ends.append(1))
    assert len(ends) == 3


def test_no_prompt_is_an_error_of_the_caller(serve):
    server = serve(GOOD)
    with pytest.raises(PenstockError, match="neither a text nor token ids"):
        send(workload(job(None)), target(server))
    ids = Job(arrival_ns=0, num_prompt_tokens=1, num_output_tokens=1, prompt_token_ids=(1,))
    with pytest.raises(PenstockError, match="not a message of a chat"):
        send(workload(ids), target(server, endpoint=Endpoint.CHAT))


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://x", "http://", "http://x:y"])
def test_what_is_no_address_is_an_error(url):
    with pytest.raises(PenstockError, match="not the address"):
        send(workload(job()), Target(url=url))


def test_a_password_in_the_address_is_refused_and_not_repeated():
    with pytest.raises(PenstockError, match="has a user or a password") as raised:
        send(workload(job()), Target(url="http://me:secret@127.0.0.1:8000"))
    assert "secret" not in str(raised.value)
    assert "--api-key" in raised.value.remedy


def test_a_target_does_not_show_its_key():
    assert "secret" not in repr(Target(url="http://x", api_key="secret"))


def test_the_address_may_end_with_the_version_as_openai_s_clients_have_it(serve):
    server = serve(GOOD)
    send(workload(job()), Target(url=f"{server.url}/proxy/v1/"))
    assert server.requests[0].line == "POST /proxy/v1/completions HTTP/1.1"


# TLS


@pytest.fixture(scope="session")
def certificate(tmp_path_factory):
    """A certificate for this machine that nobody signed, and its key, in one file."""
    path = tmp_path_factory.mktemp("tls") / "both.pem"
    words = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    words += ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(path), "-out", f"{path}.crt"]
    try:
        subprocess.run(words, check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("openssl is not installed")
    path.write_text(path.read_text() + path.with_name("both.pem.crt").read_text())
    return path


@pytest.fixture
def tls(certificate):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    return context


def test_a_server_with_tls_is_asked_over_kept_connections(serve, tls, certificate, monkeypatch):
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    server = serve(GOOD, tls=tls)
    prompt = "word " * 200_000
    sent = send(workload(*[job(prompt)] * 8), target(server), pace=Pace(concurrency=2))
    assert [record.end for record in sent.records] == [End.OK] * 8
    assert server.num_connections == 2
    assert server.requests[0].json["prompt"] == prompt


def test_a_certificate_that_is_not_trusted_is_a_failure(serve, tls):
    server = serve(GOOD, tls=tls)
    record = only(send(workload(job()), target(server)))
    assert record.end is End.FAILED
    assert "ertificate" in record.error or "CERTIFICATE" in record.error


# Questions before a run


def asked(server, respond=None, **changes):
    with Questions(target(server, **changes)) as questions:
        return questions.settle()


def refusing(*names, status="400 Bad Request"):
    """Refuses bodies with one of these fields, one name at a time."""

    def respond(request):
        for name in names:
            if name in request.json:
                return [plain({"error": {"message": f"unknown field: {name}"}}, status)]
        return [GOOD]

    return respond


def test_a_server_that_takes_everything_is_asked_once(serve):
    server = serve(GOOD)
    found, notes = asked(server)
    assert found == target(server)
    assert notes == ()
    assert [request.json["max_tokens"] for request in server.requests] == [1]


def test_fields_that_a_server_refuses_are_left_out_and_it_is_said(serve):
    server = serve(refusing("ignore_eos", "stream_options", status="422 Unprocessable"))
    found, notes = asked(server)
    assert found.extra_body == {"ignore_eos": None, "stream_options": None}
    assert not found.asks_to_ignore_eos
    assert "ignore_eos" in notes[0]
    assert "stream_options" in notes[1]
    record = only(send(workload(job()), found))
    assert record.end is End.OK


@pytest.mark.parametrize("named", ["stream_options", "stream_options.continuous_usage_stats", "continuous_usage_stats", ""])
def test_a_count_in_each_event_that_a_server_refuses_is_not_requested(serve, named):
    def respond(request):
        if "continuous_usage_stats" in request.json["stream_options"]:
            return [plain({"error": {"message": f"unknown field: {named}"}}, "400 Bad Request")]
        return [GOOD]

    server = serve(respond)
    found, notes = asked(server)
    assert (found, notes) == (target(server, takes_continuous_usage=False), ())
    assert only(send(workload(job(cancelled_after_tokens=2)), found)).end is End.CANCELLED


def test_a_field_that_the_user_wants_is_not_left_out(serve):
    with pytest.raises(PenstockError, match="unknown field: ignore_eos"):
        asked(serve(refusing("ignore_eos")), extra_body={"ignore_eos": True})


def test_a_server_with_the_newer_name_of_the_limit_gets_that(serve):
    def respond(request):
        if "max_tokens" in request.json:
            return [plain({"error": {"message": "Use 'max_completion_tokens' instead."}}, "400 Bad Request")]
        return [GOOD]

    found, _ = asked(serve(respond), endpoint=Endpoint.CHAT)
    assert found.limit_field == "max_completion_tokens"
    assert found.takes_continuous_usage, "it was not the reason"


@pytest.mark.parametrize(
    ("status", "remedy"), [("401 Unauthorized", "--api-key"), ("404 Not Found", "--model"), ("400 Bad Request", "route")]
)
def test_a_server_that_refuses_everything_is_an_error_before_the_run(serve, status, remedy):
    server = serve(plain({"error": {"message": "no"}}, status))
    with pytest.raises(PenstockError, match=r"with 4.*: no") as found:
        asked(server)
    assert remedy in found.value.remedy


def test_a_busy_server_is_tried_all_the_same(serve):
    found, notes = asked(serve(plain({"error": {"message": "full"}}, "429 Too Many Requests")))
    assert found.asks_to_ignore_eos
    assert "429" in notes[0]


def test_a_server_that_is_not_there_is_one_clear_error():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    with Questions(Target(url=url)) as questions, pytest.raises(PenstockError, match="can't be reached: Connection refused"):
        questions.settle()


def test_a_question_is_asked_again_if_the_server_had_closed_the_connection(serve):
    server = serve(lambda _: [plain({"data": [{"id": "one"}]}), CLOSE])
    with Questions(target(server)) as questions:
        assert [questions.model() for _ in range(3)] == ["one"] * 3
    assert server.num_connections == 3


def test_the_model_is_the_first_that_is_listed(serve):
    with Questions(target(serve(plain({"data": [{"id": "one"}, {"id": "two"}]})))) as questions:
        assert questions.model() == "one"
    with Questions(target(serve(plain({"data": []})))) as questions, pytest.raises(PenstockError, match="does not list"):
        questions.model()


def vllm(request):
    if request.line.split()[1] == "/tokenize":
        return [plain({"count": 1, "tokens": [len(word) for word in request.json["prompt"].split()]})]
    return [plain({"prompt": " ".join("x" * length for length in request.json["tokens"])})]


def llama_cpp(request):
    if "model" in request.json:
        return [plain({"error": {"message": "unknown field: model"}}, "400 Bad Request")]
    if request.line.split()[1] == "/tokenize":
        return [plain({"tokens": [len(word) for word in request.json["content"].split()]})]
    return [plain({"content": " ".join("x" * length for length in request.json["tokens"])})]


@pytest.mark.parametrize("dialect", [vllm, llama_cpp])
def test_tokens_are_counted_by_the_server_in_either_dialect(serve, dialect, monkeypatch):
    monkeypatch.setattr("penstock.lab.target.MAX_TOKENIZE_S", 1.0)
    server = serve(dialect)
    with Questions(target(server)) as questions:
        tokenizer = ServerTokenizer.of(questions)
        assert tokenizer.encode("a bc", add_special_tokens=False) == [1, 2]
        num_asked = len(server.requests)
        assert tokenizer.encode("a bc", add_special_tokens=False) == [1, 2]
        assert len(server.requests) == num_asked, "a short text is asked for once"
        assert tokenizer.decode([1, 2], skip_special_tokens=False) == "x xx"


@pytest.mark.parametrize(
    ("found", "text", "tokens"),
    [
        (lambda body: [7] if body.get("content") else [], "a", [7]),
        (lambda _: [], "", []),
        (lambda _: [], "a", None),
        (lambda _: [{"id": 7, "piece": "a"}], "a", None),
        (lambda _: ["seven"], "a", None),
        (lambda _: [7.5], "a", None),
        (lambda _: [None], "a", None),
    ],
)
def test_tokens_are_those_of_the_field_that_the_server_reads_and_numbers(serve, found, text, tokens):
    server = serve(lambda request: [plain({"tokens": found(request.json)})])
    with Questions(target(server)) as questions:
        assert questions.tokenize(text) == tokens


def test_a_server_that_does_not_count_or_is_far_away_is_not_asked_to(serve, monkeypatch):
    with Questions(target(serve(plain({}, "404 Not Found")))) as questions:
        assert ServerTokenizer.of(questions) is None
    monkeypatch.setattr("penstock.lab.target.MAX_TOKENIZE_S", 0.0)
    with Questions(target(serve(vllm))) as questions:
        assert ServerTokenizer.of(questions) is None


def test_waiting_costs_no_cpu(serve):
    def respond(_):
        time.sleep(0.2)
        yield GOOD

    server = serve(respond)
    assert thread_s(lambda: only(send(workload(job()), target(server)))) < 0.1
